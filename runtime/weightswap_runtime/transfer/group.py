"""Weights over a process group of torch.distributed: from its rank 0, a trainer, to all others, which serve them.

All ranks do the same steps, as what a group does is paired by its order:

    Turn      all tell all what is next: nothing yet, weights, or the end
    header    rank 0 sends the begin of a packed weight file, by which the others know whether the weights can be theirs
    Vote      all tell all whether they go on
    buckets   rank 0 sends the rest; each receiver verifies it as a file that arrives
    Vote      whether all have staged and verified them; then each commits
    Outcome   all tell all what became of that

Whoever refuses says so in a vote, and all go on to the next turn, with the weights from before. Whoever is gone or late
is noticed by the group's timeout; a group is of no use after that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from weightswap_runtime.errors import TransferFailed, Unsupported, join_seconds
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.given import MEMORY, as_arriving
from weightswap_runtime.threads import Background

from .messages import MOST_ANSWER, VERSION, Outcome, Parcel, Refusal
from .receiver import Target

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

BUCKET = 16 << 20  # bytes
TICK = 1.0  # seconds between two turns without weights
_SHORT_NAP, _LONG_NAP = 1e-4, 5e-3  # seconds between two looks whether something has ended
T = TypeVar("T", bound=msgspec.Struct)
_log = logging.getLogger("weightswap.transfer")


def process_group(address: str, rank: int, size: int, *, timeout: float = 60.0) -> ProcessGroup:
    """Return a new gloo group for weights, beside whatever groups the process has. It waits until all ranks are there.

    address: `tcp://HOST:PORT` of a free port on the machine of rank 0, the sender; give the same to all. size: of the
    group. timeout: seconds to wait for the others, here and in each step of a transfer, such as the staging of all.

    Raises Unsupported, and TransferFailed if the others do not come in time.
    """
    distributed: Any = import_module("torch.distributed")  # whose hints leave out what follows
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise Unsupported(f"{address}: expected tcp://HOST:PORT")
    if not 0 <= rank < size or size < 2:
        raise Unsupported(f"rank {rank} of {size}: expected two ranks or more, of which 0 sends")
    try:
        limit = timedelta(seconds=timeout)
        store = distributed.TCPStore(parts.hostname, parts.port, size, rank == 0, limit)
        store = distributed.PrefixStore("weightswap", store)
        group: ProcessGroup = distributed.ProcessGroupGloo(store, rank, size, limit)
    except RuntimeError as error:
        raise TransferFailed(f"{address}: the group of {size} did not come together ({_brief(error)})") from error
    return group


class Turn(msgspec.Struct, frozen=True):
    """What a rank does next. All but `leaves` is of rank 0; without a size there is nothing to do yet."""

    version: int = VERSION
    bucket: int = 0  # bytes of all buckets but the last
    header: int = 0  # bytes of the file that come before the first vote
    size: int = 0  # bytes of the file
    weights_id: str = ""
    leaves: bool = False


class Vote(msgspec.Struct, frozen=True):
    """Whether a rank goes on."""

    refusal: Refusal | None = None


class Members:
    """The members of a group, one of which is this process. Used by one thread at a time."""

    def __init__(self, group: ProcessGroup, sends: bool | None = None) -> None:
        """sends: whether this must be the rank that sends weights to all others; None: it may be any.

        Raises Unsupported for another rank, a group of one or in use, and for what is none.
        """
        if not all(hasattr(group, name) for name in ("rank", "size", "broadcast", "allgather")):
            raise Unsupported(f"{group!r:.200}: expected a text such as unix:PATH, or a process group")
        self._group: Any = group
        self.rank, self.size = int(group.rank()), int(group.size())
        self.where = f"process group, rank {self.rank} of {self.size}"
        if self.size < 2:
            raise Unsupported(f"{self.where}: has no other rank; make one of the sender and all receivers")
        if sends is not None and sends != (self.rank == 0):
            raise Unsupported(f"{self.where}: rank 0 sends, all others receive")
        if id(group) in _used:
            raise Unsupported(f"{self.where}: is in use already, by a sender or a receiver; make another group")
        _used.add(id(group))
        self._forget = weakref.finalize(self, _used.discard, id(group))
        self.device = _device_of(group)
        self.failure: TransferFailed | None = None  # after which the group is of no use
        self.check: Check | None = None  # called while others are waited for; what it raises ends the group
        # gloo's threads let go of what has ended a moment later; the last reference to tensors must not be theirs, as
        # they need the interpreter to drop it, and end the process if that is ending
        self._recent: deque[Any] = deque(maxlen=8)

    def tell(self, document: T) -> list[T]:
        """Tell the others a document, and return those of all, by rank. Raises TransferFailed."""
        raw = msgspec.json.encode(document)
        try:
            most = max(int.from_bytes(length, "little") for length in self._gather(len(raw).to_bytes(8, "little")))
            if most > MOST_ANSWER:
                raise ValueError(f"a message of {most} bytes")
            return [msgspec.json.decode(each, type=type(document)) for each in self._gather(raw.ljust(most))]
        except Exception as error:
            raise self.fail(error) from error

    def vote(self) -> Refusal | None:
        """Tell the others that this rank goes on. Return the refusal of the first that does not. Raises as `tell`."""
        return next((vote.refusal for vote in self.tell(Vote()) if vote.refusal is not None), None)

    def _gather(self, raw: bytes) -> list[bytes]:
        import torch

        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(self._begin(lambda: self._group.allgather([all_ranks], [mine])), self.check)
        return [bytes(each.cpu().numpy()) for each in all_ranks]

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send rank 0's tensor of bytes to the same of all others; return what to wait for."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        return self._begin(lambda: self._group.broadcast([tensor], options))

    def empty(self, size: int) -> torch.Tensor:
        """Return memory for bytes that come."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, content: memoryview) -> None:
        """Send bytes to rank 0. Raises TransferFailed."""
        import torch

        tensor = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        self.wait(self._begin(lambda: self._group.send([tensor], 0, 0)))

    def take(self, buffer: torch.Tensor, rank: int) -> Any:
        """Begin to fill memory with what a rank gives; return what to wait for."""
        return self._begin(lambda: self._group.recv([buffer], rank, 0))

    def _begin(self, work: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            begun = work()
        except RuntimeError as error:
            raise self.fail(error) from error
        self._recent.append(begun)
        return begun

    def wait(self, work: Any, check: Check | None = None) -> None:
        """Wait until something that was begun has ended. Raises TransferFailed, and what `check` raises meanwhile."""
        nap = _SHORT_NAP
        while check is not None and not work.is_completed():
            check()
            time.sleep(nap)
            nap = min(2 * nap, _LONG_NAP)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> TransferFailed:
        """End the group, whose members are no longer at the same step, and return the error that says so."""
        if self.failure is None:
            text = f"{self.where}: another rank is gone, or late ({_brief(error)}); make a new group"
            self.failure = TransferFailed(text)
            with suppress(Exception):
                self._group.abort()  # else its threads may end this process with it
        return self.failure

    def close(self) -> None:
        """Let go of the group, whose threads end with its last reference."""
        self.failure = self.failure or TransferFailed(f"{self.where}: was left; make a new group")
        self._group = None
        self._forget()


_used: set[int] = set()  # ids of groups that a member refers to


def _device_of(group: Any) -> torch.device:
    """Return a device whose tensors a group takes."""
    import torch

    devices = getattr(group, "_device_types", None)  # a single backend has a name only
    kinds = (
        {device.type for device in devices} if devices is not None else {"cpu" if group.name() == "gloo" else "cuda"}
    )
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rpartition("] ")[2].partition(". ")[0][:200]


class GroupLink:
    """The way of a sender, rank 0, to all other ranks."""

    tick: float | None = TICK

    def __init__(self, group: ProcessGroup) -> None:
        """Raises Unsupported."""
        self._members = Members(group, sends=True)

    def deliver(self, weights_id: str, parcel: Parcel, deadline: float) -> SwapReceipt:
        """Let weights be served by all others, and return the receipt of rank 1.

        Raises the reason of the first that refuses; none then serves them, but for a commit that fails alone.
        """
        header, *buckets = parcel.pieces(BUCKET)
        try:
            self._turn(Turn(bucket=BUCKET, header=len(header), size=parcel.size, weights_id=weights_id))
            self._send(header)
            refusal = self._members.vote()
            if refusal is None:
                for bucket in buckets:
                    self._send(bucket)
                refusal = self._members.vote()
            outcomes = self._members.tell(Outcome())[1:] if refusal is None else []
        except BaseException as error:
            self._members.fail(error)  # for the others it is at another step now
            raise
        refusal = refusal or next((each.refusal for each in outcomes if each.refusal is not None), None)
        if refusal is not None:
            raise refusal.as_error()
        return msgspec.convert(outcomes[0].receipt, SwapReceipt)

    def idle(self) -> None:
        """Tell the others that there is nothing to send."""
        self._turn(Turn())

    def _turn(self, turn: Turn) -> None:
        members = self._members
        if any(each.leaves for each in members.tell(turn)):
            members.failure = TransferFailed(f"{members.where}: a receiver was stopped; make a new group")
            raise members.failure

    def _send(self, content: memoryview) -> None:
        import torch

        members = self._members
        members.wait(members.broadcast(torch.frombuffer(content, dtype=torch.uint8).to(members.device)))

    def reset(self) -> None:
        """Do nothing: after a refusal the group is as it was."""

    def close(self) -> None:
        if self._members.failure is None:
            with suppress(TransferFailed):
                self._members.tell(Turn(leaves=True))
        self._members.close()


class GroupReceiver(AbstractContextManager["GroupReceiver"]):
    """A member of a process group that receives weights, until `stop()`, the end of the sender, or that of the model.
    Made by `Model.receive()`."""

    def __init__(self, group: ProcessGroup, target: Target, rate_limit: float | None = None) -> None:
        """Begin to receive. Raises Unsupported."""
        self._members = Members(group, sends=False)
        self.at = self._members.where
        self.last_error: BaseException | None = None  # None again once weights were taken
        self._target, self._rate_limit = target, rate_limit
        self._is_stopping = False
        self._patience = math.inf  # the time until which a turn is waited for, to leave at it
        self._members.check = self._check
        self._job = Job()
        self._thread = Background(self._run, "weightswap-receiver", self._end)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while it receives."""
        return self._thread.is_alive()

    def interrupt(self) -> None:
        """Cancel what is being staged; the sender is told."""
        self._job.cancel()

    def stop(self, timeout: float | None = None) -> bool:
        """Cancel what is being staged, and leave the group at its next turn, which ends it for all; if none comes soon,
        without it.

        Wait for at most `timeout` seconds until the thread has ended, and return whether it has.
        """
        seconds = join_seconds(timeout)
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"GroupReceiver({self.at!r}, {'alive' if self.alive else 'stopped'})"

    def _end(self) -> None:
        if not self._is_stopping:
            self._patience = time.monotonic() + 2 * TICK
        self._is_stopping = True
        self._job.cancel()

    def _check(self) -> None:
        if time.monotonic() > self._patience:
            raise TransferFailed(f"{self.at}: was stopped")

    def _run(self) -> None:
        try:
            while True:
                turns = self._members.tell(Turn(leaves=self._is_stopping))
                if any(turn.leaves for turn in turns):
                    if any(turn.leaves for turn in turns[1:]) and not self._is_stopping:
                        raise TransferFailed(f"{self.at}: another receiver was stopped; make a new group")
                    return
                if turns[0].size:
                    self._take(turns[0])
        except TransferFailed as error:
            self.last_error = error.with_traceback(None)
            _log.warning("%s", error)
        except BaseException as error:
            self._members.fail(error)
            _log.exception("%s: failed", self.at)
        finally:
            self._members.close()

    def _take(self, turn: Turn) -> None:
        """Serve what is offered, if all can. Raises TransferFailed if the group has failed."""
        arrival, self._job = _Arrival(self._members, turn), Job(self._rate_limit)
        try:
            if self._is_stopping:
                self._job.cancel()
            if turn.version != VERSION:
                raise TransferFailed(
                    f"{self.at}: the sender speaks version {turn.version}, the receiver {VERSION}; install one release"
                )
            given = as_arriving(f"{MEMORY}:{self.at}", turn.size, arrival.receive)
            receipt = self._target.swap(given, turn.weights_id, self._job, arrival.agree)
        except Exception as error:
            self.last_error = error.with_traceback(None)
            arrival.refuse(error)
        else:
            self.last_error = None
            self._members.tell(Outcome(receipt.as_dict()))


class _Arrival:
    """Weights that arrive by a group: what its members still have to do for them together."""

    def __init__(self, members: Members, turn: Turn) -> None:
        self._members, self._turn = members, turn
        self._left = turn.size
        self._next: Literal["header", "vote", "buckets", "outcome", "nothing"] = "header"
        self._buffers: list[torch.Tensor] = []
        self._coming: tuple[torch.Tensor, Any] | None = None  # a bucket, and what to wait for

    def receive(self, check: Check) -> memoryview:
        """Return the next bytes, while those after them are on their way."""
        check()
        if self._next == "header":
            return self._take_header()
        if self._next == "vote":
            self._vote("buckets")
        self._begin()
        assert self._coming is not None
        bucket, work = self._coming
        self._members.wait(work, check)  # what it raises leaves the bucket coming
        self._coming = None
        self._begin()
        return bucket.cpu().numpy().data

    def _take_header(self) -> memoryview:
        header = self._members.empty(self._turn.header)
        self._members.wait(self._members.broadcast(header))
        self._left -= self._turn.header
        self._next = "vote"
        return header.cpu().numpy().data

    def _begin(self) -> None:
        """Let the next bucket come, into the memory of the one before the last, which was read by now."""
        if self._coming is None and self._left:
            if len(self._buffers) < 2:
                self._buffers.append(self._members.empty(self._turn.bucket))
            self._buffers.reverse()
            bucket = self._buffers[0][: self._left]
            self._coming = bucket, self._members.broadcast(bucket)
            self._left -= len(bucket)

    def agree(self) -> None:
        """Raise the reason if another rank cannot serve the weights, which have come whole."""
        if self._next == "vote":  # they are a header alone
            self._vote("buckets")
        self._vote("outcome")

    def _vote(self, then: Literal["buckets", "outcome"]) -> None:
        refusal = self._members.vote()
        self._next = then if refusal is None else "nothing"
        if refusal is not None:
            raise refusal.as_error()

    def refuse(self, error: Exception) -> None:
        """Tell the others why this rank does not serve the weights, when they ask. Raises TransferFailed."""
        members, refusal = self._members, Refusal.of(error)
        if members.failure is not None:
            raise members.failure
        if self._next == "header":
            self._take_header()
        while self._next == "buckets" and (self._left or self._coming):
            self._begin()
            assert self._coming is not None
            members.wait(self._coming[1], members.check)
            self._coming = None
        if self._next == "outcome":
            members.tell(Outcome(refusal=refusal))
        elif self._next != "nothing":
            members.tell(Vote(refusal))
