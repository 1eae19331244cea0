"""How a sender reaches its receiver: by a Unix socket of this machine, or by the admin plane of a server."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightswap_runtime.decoding import converted
from weightswap_runtime.errors import GraphMismatch, StagingBusy, TransferFailed, Unsupported, seconds_left
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.location import printable

from .admin_client import ENVIRONMENT, AdminClient, AdminRefused, AdminUnreachable
from .group import GroupLink
from .messages import (
    MOST_ANSWER,
    VERSION,
    Channel,
    Link,
    Offer,
    Outcome,
    Parcel,
    Refusal,
    peer,
    socket_path,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PIECE = 1 << 20  # bytes that are sent at once
_BUSY = 0.25  # seconds until weights are sent again to a server that was staging others


def link_to(to: str | ProcessGroup, graph_id: str, token: str | None, model: str | None) -> Link:
    """Return the way to an address, or to the other ranks of a process group.

    Raises Unsupported for what is neither, and without a token where one is needed.
    """
    if not isinstance(to, str):
        return GroupLink(to)
    if to.startswith(("http://", "https://")):
        return HttpLink(to, graph_id, token, model)
    if token is not None or model is not None:
        raise Unsupported(f"{to}: token and model are for the admin plane of a server, http://HOST:PORT")
    return UnixLink(to, graph_id)


class UnixLink(Link):
    """A socket on which a receiver listens."""

    def __init__(self, to: str, graph_id: str) -> None:
        self._to, self._graph_id = to, graph_id
        self._path = str(Path(socket_path(to)).absolute())  # the working directory may change
        self._channel: Channel | None = None

    def deliver(self, weights_id: str, parcel: Parcel, deadline: float) -> SwapReceipt:
        """Offer weights; over a new connection if the one from before is dead."""
        was_open = self._channel is not None
        try:
            outcome = self._offer(weights_id, parcel, deadline)
        except TransferFailed:
            if not was_open or time.monotonic() >= deadline:
                raise
            self.reset()
            outcome = self._offer(weights_id, parcel, deadline)
        if outcome.refusal is not None:
            raise outcome.refusal.as_error()
        return converted(outcome.receipt, SwapReceipt)

    def _offer(self, weights_id: str, parcel: Parcel, deadline: float) -> Outcome:
        channel = self._connected(deadline)
        with suppress(TransferFailed):  # who is turned away at once finds out why below
            channel.send(Offer(VERSION, self._graph_id, weights_id), deadline, parcel.descriptor)
        outcome = channel.receive(Outcome, deadline)
        if outcome is None:
            raise TransferFailed(f"{self._to}: the receiver ended before it had answered")
        return outcome

    def _connected(self, deadline: float) -> Channel:
        if self._channel is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            channel = Channel(connection, MOST_ANSWER)
            try:
                connection.settimeout(max(0.0, min(deadline - time.monotonic(), 1e6)))
                connection.connect(self._path)
                if peer(connection) != os.getuid():
                    raise TransferFailed(f"{self._to}: the receiver is a process of another user")
            except OSError as error:
                channel.close()
                raise TransferFailed(
                    f"{self._to}: nobody receives there ({error.strerror or error}). Start the receiver first: "
                    "weightswap serve --receive, or Model.receive"
                ) from error
            except BaseException:
                channel.close()
                raise
            self._channel = channel
        return self._channel

    def reset(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    close = reset


class HttpLink(Link):
    """The admin plane of a server, which stages weights while they arrive."""

    def __init__(self, to: str, graph_id: str, token: str | None, model: str | None) -> None:
        token = token or os.environ.get(ENVIRONMENT, "").strip()
        if not token:
            raise Unsupported(f"{printable(to)}: needs a token of the server: Sender(token=), or {ENVIRONMENT}")
        self._client = AdminClient(to, token)
        self._graph_id, self._model = graph_id, model
        self._name: str | None = None  # of a model that has the graph

    def deliver(self, weights_id: str, parcel: Parcel, deadline: float) -> SwapReceipt:
        """Send weights, once no others are being staged."""
        while True:
            try:
                return self._send(weights_id, parcel, deadline)
            except StagingBusy:
                if time.monotonic() + _BUSY >= deadline:
                    raise
                time.sleep(_BUSY)

    def _send(self, weights_id: str, parcel: Parcel, deadline: float) -> SwapReceipt:
        try:
            if self._name is None:
                self._name = self._greet(seconds_left(deadline))
            answer = self._client.send(
                self._name, "swap", parcel.pieces(_PIECE), parcel.size, {"expect": weights_id}, seconds_left(deadline)
            )
        except AdminRefused as error:
            raise _reason(error) from error
        except (AdminUnreachable, TimeoutError) as error:
            raise TransferFailed(*error.args) from error
        return converted(answer["receipt"], SwapReceipt)

    def _greet(self, timeout: float) -> str:
        """Return the name of the model to send to. Raises GraphMismatch and Unsupported."""
        where, models = self._client.where, self._client.get("/admin/status", timeout)["models"]
        named: list[dict[str, Any]] = [each for each in models if self._model in (None, each["name"])]
        if len(named) != 1:
            names = ", ".join(each["name"] for each in models)
            raise Unsupported(f"{where}: serves {names}; give one of them: Sender(model=)")
        if (served := named[0]["graph_id"]) != self._graph_id:
            raise GraphMismatch(
                f"{where}: the sender has the graph {self._graph_id[:12]}, {named[0]['name']} has {served[:12]}; give "
                "the sender the artifact that is served"
            )
        return str(named[0]["name"])

    def reset(self) -> None:
        self._name = None  # another server may be there by then


def _reason(error: AdminRefused) -> Exception:
    """Return the error of the server, or a TransferFailed for one that is not about weights."""
    kind = Refusal(error.kind, tuple(map(str, error.args)), reason=error.reason).as_error()
    return kind if type(kind).__name__ == error.kind else TransferFailed(*error.args)
