"""Weights over a process group of torch.distributed: from its rank 0, a trainer, to all others, which serve them.

All ranks do the same steps, as what a group does is paired by its order:

    Turn      all tell all what is next: nothing yet, weights, or the end
    header    rank 0 sends the begin of a packed weight file, by which the others know whether the weights can be theirs
    Outcome   all tell all whether they go on: a refusal, or nothing yet
    buckets   rank 0 sends the rest; each receiver verifies it as a file that arrives
    Outcome   whether all have staged and verified them; then each commits
    Outcome   all tell all what became of that

Whoever refuses says so, and all go on to the next turn, with the weights from before.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weightswap_runtime.decoding import converted
from weightswap_runtime.errors import TransferFailed
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.process_groups import Members
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.staging.given import MEMORY, as_arriving
from weightswap_runtime.threads import Background, UntilStopped

from .messages import VERSION, Link, Outcome, Parcel, Refusal
from .receiver import Target

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

BUCKET = 16 << 20  # bytes
TICK = 1.0  # seconds between two turns without weights
_log = logging.getLogger("weightswap.transfer")


class Turn(msgspec.Struct, frozen=True):
    """What a rank does next. All but `leaves` is of rank 0; without a size there is nothing to do yet."""

    version: int = VERSION
    bucket: int = 0  # bytes of all buckets but the last
    header: int = 0  # bytes of the file that come before the first vote
    size: int = 0  # bytes of the file
    weights_id: str = ""
    leaves: bool = False


def vote(members: Members) -> Refusal | None:
    """Tell the others that this rank goes on. Return the refusal of the first that does not. Raises
    TransferFailed."""
    return next((each.refusal for each in members.gather_documents(Outcome()) if each.refusal is not None), None)


class GroupLink(Link):
    """The way of a sender, rank 0, to all other ranks."""

    tick = TICK

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
            refusal = vote(self._members)
            if refusal is None:
                for bucket in buckets:
                    self._send(bucket)
                refusal = vote(self._members)
            outcomes = self._members.gather_documents(Outcome())[1:] if refusal is None else []
        except BaseException as error:
            self._members.fail(error)  # for the others it is at another step now
            raise
        refusal = refusal or next((each.refusal for each in outcomes if each.refusal is not None), None)
        if refusal is not None:
            raise refusal.as_error()
        return converted(outcomes[0].receipt, SwapReceipt)

    def idle(self) -> None:
        """Tell the others that there is nothing to send."""
        self._turn(Turn())

    def _turn(self, turn: Turn) -> None:
        members = self._members
        if any(each.leaves for each in members.gather_documents(turn)):
            members.failure = TransferFailed(f"{members.where}: a receiver was stopped; make a new group")
            raise members.failure

    def _send(self, content: memoryview) -> None:
        import torch

        members = self._members
        members.wait(members.broadcast(torch.frombuffer(content, dtype=torch.uint8).to(members.device)))

    def close(self) -> None:
        if self._members.failure is None:
            with suppress(TransferFailed):
                self._members.gather_documents(Turn(leaves=True))
        self._members.close()


class GroupReceiver(UntilStopped):
    """A member of a process group that receives weights, until `stop()`, the end of the sender, or that of the model.
    Made by `Model.receive()`.

    `stop()` cancels what is being staged, and leaves the group at its next turn, which ends it for all; if none comes
    soon, without it.
    """

    def __init__(self, group: ProcessGroup, target: Target, rate_limit: float | None = None) -> None:
        """Begin to receive. Raises Unsupported."""
        self._members = Members(group, sends=False)
        self.at = self._where = self._members.where
        self.last_error: BaseException | None = None  # None again once weights were taken
        self._target, self._rate_limit = target, rate_limit
        self._is_stopping = False
        self._patience = math.inf  # the time until which a turn is waited for, to leave at it
        self._members.check = self._check
        self._job = Job()
        self._thread = Background(self._run, "weightswap-receiver", self._end)
        self._thread.start()

    def interrupt(self) -> None:
        """Cancel what is being staged; the sender is told."""
        self._job.cancel()

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
                turns = self._members.gather_documents(Turn(leaves=self._is_stopping))
                if any(turn.leaves for turn in turns):
                    if any(turn.leaves for turn in turns[1:]) and not self._is_stopping:
                        raise TransferFailed(f"{self.at}: another receiver was stopped; make a new group")
                    return
                if turns[0].size:
                    self._receive(turns[0])
        except TransferFailed as error:
            self.last_error = error.with_traceback(None)
            _log.warning("%s", error)
        except BaseException as error:
            self._members.fail(error)
            _log.exception("%s: failed", self.at)
        finally:
            self._members.close()

    def _receive(self, turn: Turn) -> None:
        """Serve what is offered, if all can. Raises TransferFailed if the group has failed."""
        arrival, self._job = _Arrival(self._members, turn), Job(self._rate_limit, yields=True)
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
            self._members.gather_documents(Outcome(receipt.as_dict()))


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
            return self._receive_header()
        if self._next == "vote":
            self._vote("buckets")
        self._begin()
        assert self._coming is not None
        bucket, work = self._coming
        self._members.wait(work, check)  # what it raises leaves the bucket coming
        self._coming = None
        self._begin()
        return bucket.cpu().numpy().data

    def _receive_header(self) -> memoryview:
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
        refusal = vote(self._members)
        self._next = then if refusal is None else "nothing"
        if refusal is not None:
            raise refusal.as_error()

    def refuse(self, error: Exception) -> None:
        """Tell the others why this rank does not serve the weights, when they ask. Raises TransferFailed."""
        members, refusal = self._members, Refusal.of(error)
        if members.failure is not None:
            raise members.failure
        if self._next == "header":
            self._receive_header()
        while self._next == "buckets" and (self._left or self._coming):
            self._begin()
            assert self._coming is not None
            members.wait(self._coming[1], members.check)
            self._coming = None
        if self._next != "nothing":
            members.gather_documents(Outcome(refusal=refusal))
