"""What a sender and a receiver tell each other over a Unix socket: documents of JSON, one on a line.

    sender                        receiver
    Offer, with a descriptor ->
                             <-   Outcome: the receipt, or a refusal
    Offer ...

The descriptor is that of a packed weight file in memory, which the sender does not write to until it has the outcome.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from weightswap_runtime import errors
from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import SwapError, TransferFailed, Unsupported, WeightswapError, reason_of, seconds_left
from weightswap_runtime.live.receipt import SwapReceipt

VERSION = 1  # of this protocol
_MOST_LINE = 1 << 20  # bytes
MOST_ANSWER = 64 << 20  # bytes: a receipt names each weight that is not finite, and labels have up to 64 KB
_PART = 64 << 10  # bytes that are received at once
_LONGEST_PATH = 107  # bytes of a socket's path: Linux takes 108, with a zero at the end
_CREDENTIALS = struct.Struct("3i")  # ucred: process, user, group
T = TypeVar("T", bound=msgspec.Struct)


SCHEME = "unix:"


def socket_path(address: str) -> str:
    """Return the path of a socket's address, `unix:PATH`. Raises Unsupported."""
    path = address.removeprefix(SCHEME) if isinstance(address, str) and address.startswith(SCHEME) else ""
    if not path or "\0" in path:
        raise Unsupported(
            f"{address!r}: expected {SCHEME}PATH, a socket on this machine; a Sender also takes http://HOST:PORT, and "
            "both take a process group"
        )
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise Unsupported(
            f"{address}: a path of more than {_LONGEST_PATH} bytes, which no socket has; give a shorter one"
        )
    return path


def peer(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class Refusal(msgspec.Struct, frozen=True):
    """An error: the name of its class, its reason, the lines of its text, and its problems if it lists some."""

    error: str
    lines: tuple[str, ...]
    problems: tuple[str, ...] = ()
    reason: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        problems = tuple(getattr(error, "problems", ()))
        return cls(type(error).__name__, tuple(map(str, error.args)), problems, reason_of(error))

    def as_error(self) -> WeightswapError:
        """Return the receiver's error; a TransferFailed for one that is none of weightswap's."""
        kind = getattr(errors, self.error, None) if self.error in errors.__all__ else None
        if kind is None or not issubclass(kind, SwapError):
            return TransferFailed(f"the other side failed: {self.error}: {' '.join(self.lines)}")
        error: WeightswapError = kind.__new__(kind)
        Exception.__init__(error, *self.lines)  # which are safe to print already, and have line breaks
        error.reason = self.reason
        if self.problems:
            error.problems = self.problems  # type: ignore[attr-defined]
        return error


class Offer(msgspec.Struct, frozen=True):
    """Weights in the file behind the descriptor that comes with this."""

    version: int  # of these messages
    graph_id: str
    weights_id: str


class Outcome(msgspec.Struct, frozen=True):
    """What became of an offer: the fields of a receipt, or a refusal. Among ranks without both: so far all is well."""

    receipt: dict[str, Any] | None = None
    refusal: Refusal | None = None


class Parcel(Protocol):
    """A packed weight file in memory. Nobody writes to it while it is delivered."""

    descriptor: int
    size: int  # bytes

    def pieces(self, most: int) -> Iterable[memoryview]:
        """Yield the header, and then the rest in pieces of at most so many bytes."""
        ...


class Link:
    """The way to a receiver, used by one thread. This one, to nobody, is that of a trainer's rank which sends by rank
    0."""

    tick: float | None = None  # seconds between two calls of `idle`; None: no call

    def deliver(self, weights_id: str, parcel: Parcel, deadline: float) -> SwapReceipt:
        """Let weights be served, and return the receipt. Raises the receiver's reason, and TransferFailed."""
        raise NotImplementedError

    def idle(self) -> None:
        """Called while there is nothing to deliver. Raises TransferFailed."""

    def reset(self) -> None:
        """Called after a delivery that has failed: begin anew."""

    def close(self) -> None:
        """Called at the end."""


class Channel:
    """A connected socket that carries lines, and descriptors with them."""

    def __init__(self, connection: socket.socket, most: int = _MOST_LINE) -> None:
        """most: bytes of a line that is received."""
        self._socket, self._most = connection, most
        self._received = bytearray()
        self._descriptor: int | None = None  # that was received last, and not taken yet

    def send(self, document: msgspec.Struct, deadline: float, descriptor: int | None = None) -> None:
        """Send a document, and a descriptor with its first bytes. Raises TransferFailed."""
        line = msgspec.json.encode(document) + b"\n"
        try:
            self._socket.settimeout(seconds_left(deadline))
            sent = socket.send_fds(self._socket, [line], [] if descriptor is None else [descriptor])
            self._socket.sendall(line[sent:])
        except OSError as error:
            raise TransferFailed(f"the other side is gone or does not read ({error})") from error

    def receive(self, kind: type[T], deadline: float, patience: float = math.inf) -> T | None:
        """Return the next document; None if the other side has closed. Raises TransferFailed.

        patience: seconds in which the rest of a message must come.
        """
        while b"\n" not in self._received:
            begins = not self._received
            if not self._receive_part(deadline):
                if self._received:
                    raise TransferFailed("the other side ended in the middle of a message")
                return None
            if begins:
                deadline = min(deadline, time.monotonic() + patience)
            if len(self._received) > self._most:
                raise TransferFailed(f"a message of more than {self._most} bytes")
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        try:
            return from_json(line, kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise TransferFailed(f"a message that is not understood ({error})") from error

    def _receive_part(self, deadline: float) -> bool:
        """Wait for more bytes; return whether some came. Raises TransferFailed."""
        try:
            self._socket.settimeout(seconds_left(deadline))
            data, descriptors, _, _ = socket.recv_fds(self._socket, _PART, 1)
        except TimeoutError as error:
            raise TransferFailed("the other side did not answer in time") from error
        except OSError as error:
            raise TransferFailed(f"the other side is gone ({error})") from error
        for descriptor in descriptors:
            self.drop_descriptor()
            self._descriptor = descriptor
        self._received += data
        return bool(data)

    def receive_descriptor(self) -> int:
        """Return the descriptor that came last; the caller closes it. Raises TransferFailed if none came."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            raise TransferFailed("no descriptor came with the offer")
        return descriptor

    def drop_descriptor(self) -> None:
        """Close a descriptor that came and was not taken."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        self.drop_descriptor()
        self._socket.close()
