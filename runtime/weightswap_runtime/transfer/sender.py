"""Sending weights from a trainer's memory to a process that serves them, without a file between.

What is sent is a packed weight file in memory that has no name: the sender copies and hashes the tensors into it, as a
swap stages into an arena, and passes its descriptor or its bytes; the receiver swaps it as a file, and so verifies
every byte. All versions have one layout, so the memory is written over and over, in turn with a second one while the
first is read.

Row updates are laid over the memory that was sent last, so that it always is a full set, and travel as a delta; whoever
serves other weights than those gets the full set after all.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from weightswap_runtime.errors import BaseMismatch, NotPromoted, TransferFailed, Unsupported, check_timeout
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.canonical import canonical_order, pack_ranges, render_header
from weightswap_runtime.format.delta import DeltaStamp, encode_delta
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.names import Keys
from weightswap_runtime.format.safetensors import METADATA_KEY, MOST_LABEL_BYTES, Stamp
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import Job
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.memory.arena import ArenaLayout, ByteRange, HostArena
from weightswap_runtime.process_groups import Members
from weightswap_runtime.staging.given import GivenRows, GivenWeights, check_constants, is_module
from weightswap_runtime.staging.given_rows import check_tables, stage_rows
from weightswap_runtime.staging.request import PathLike, Patterns, Staging, SwapRequest
from weightswap_runtime.staging.sets import plan, stage_full
from weightswap_runtime.tensors import TensorType, tensor_digest
from weightswap_runtime.threads import Background, WorkerThreads

from .gathering import send_together
from .links import link_to
from .messages import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from weightswap_runtime.staging.given import Given, Rows
    from weightswap_runtime.staging.transforms import Transforms

_log = logging.getLogger("weightswap.transfer")


class Sending:
    """Weights on their way to a receiver. Made by `Sender.send(wait=False)`."""

    def __init__(self, memory: _FileInMemory, weights_id: str, delta: _DeltaInMemory | None, given: object) -> None:
        self.weights_id = weights_id
        self._memory, self._delta = memory, delta  # a delta that leads to the same weights
        self._given = given
        self._receipt: SwapReceipt | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """True once there is a receipt or an error."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> SwapReceipt:
        """Return the receipt of the commit, once there is one.

        Raises the receiver's reason for a refusal; TransferFailed, also after `timeout` seconds; and NotPromoted if
        later weights were sent before these had left.
        """
        check_timeout(timeout)
        if not self._ended.wait(timeout):
            raise TransferFailed(f"no receipt after {timeout} s; wait again")
        if self._receipt is None:
            assert self._error is not None
            raise self._error
        return self._receipt

    def _close(self) -> None:
        """Free what is not needed once it was delivered."""
        if self._delta is not None:
            self._delta.close()
        self._delta = self._given = None

    def _end(self, receipt: SwapReceipt | None, error: BaseException | None = None) -> None:
        self._receipt, self._error = receipt, error
        self._ended.set()


class Sender(AbstractContextManager["Sender"]):
    """The way of a trainer's weights to one process that serves them: `Model.receive`, `weightswap serve`.

    It may be used from any thread, by one at a time, and not in a forked child. `close()` ends it.
    """

    def __init__(
        self,
        to: str | ProcessGroup,
        artifact: PathLike | Artifact,
        *,
        timeout: float | None = 60.0,
        token: str | None = None,
        model: str | None = None,
        trainers: ProcessGroup | None = None,
    ) -> None:
        """to: `unix:PATH`, the receiver's socket on this machine; the server's admin plane, `http://HOST:PORT` or
        `https://HOST:PORT`; or a process group of this rank 0 and all receivers, which nothing else uses. artifact:
        that of the receivers. timeout: seconds for each connection, and from the hand-over of weights to the outcome;
        None: no limit; a group has its own.

        Of an admin plane: token: one of the server's; None: that in WEIGHTSWAP_ADMIN_TOKEN. model: its name; None: the
        only one.

        trainers: the group of a trainer's ranks, each of which has some rows of the weights (FSDP2). Each makes a
        sender with the same arguments, and they all call `send` at the same step; rank 0 sends. Nothing else uses it.

        Raises ArtifactError and Unsupported.
        """
        check_timeout(timeout)
        self.to = str(to)
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        if self.artifact.manifest.ranks is not None:
            raise Unsupported(f"{self.artifact.path}: is for several ranks, which receive nothing; give them files")
        self._trainers = None if trainers is None else Members(trainers)
        is_first = self._trainers is None or self._trainers.rank == 0
        self._link = link_to(to, self.artifact.graph_id, token, model) if is_first else Link()
        self._timeout = math.inf if timeout is None else timeout
        self._composed = tuple(self.artifact.kinds)
        self._layout = _FileLayout(self.artifact.manifest)
        self._workers = WorkerThreads()
        self._transforms: Transforms | None = None
        self._process = os.getpid()
        self._staging = threading.RLock()
        self._changed = threading.Condition()  # of all below
        self._free: list[_FileInMemory] = []
        self._waiting: Sending | None = None
        self._latest: Sending | None = None  # under `_staging`, too
        self._trees = HashTrees(None)
        self._closed = False
        self._thread = Background(self._run, "weightswap-sender", self._stop)
        self._thread.start()

    def send(
        self,
        weights: Given,
        *,
        labels: Mapping[str, str] | None = None,
        keys: Keys | None = None,
        ignore: Patterns = (),
        wait: bool = True,
        rows: Rows | None = None,
    ) -> SwapReceipt | Sending:
        """Copy weights, send them, and return the receipt of their commit.

        weights, labels, keys, ignore: as in `Model.stage`. When this returns or raises, the tensors may change.
        wait: False: return as soon as they are copied and hashed, with a handle. While others are on their way they
        wait for these; of several that wait only the latest is sent.
        rows: as in `Model.stage`, but those that have changed since the weights that this sender has sent last. They
        travel as a delta, with whatever else has changed. All weights travel if they are this sender's first, if the
        send before has failed or is still under way, and if the receiver serves other weights than that has sent, as
        after a rollback: the copy that this sender keeps has them. `wait` must be True.

        With `trainers` the weights are a mapping or a module, whose tensors may be DTensors that are cut into rows, and
        all ranks get the receipt or the same error; `wait` must be True.

        Raises what `Model.stage` raises for the weights, here or at the receiver, and TransferFailed.
        """
        options: dict[str, Any] = {"labels": labels, "keys": keys, "ignore": ignore}
        if rows is not None:
            if not wait or self._trainers is not None:
                other = "trainers=" if wait else "wait=False"
                raise Unsupported(f"rows: cannot be sent with {other}; leave one of both out")
            options["rows"] = rows
        if self._process != os.getpid():
            raise TransferFailed(f"{self.to}: this sender was made before a fork; make one in the child")
        if self._staging._is_owned():  # type: ignore[attr-defined]
            raise TransferFailed(f"{self.to}: a send within an iterator that is being sent; send after it has ended")
        if self._trainers is not None:
            if not wait:
                raise Unsupported("wait=False: several ranks of a trainer wait, so that they send the same step")
            with self._staging:
                module: Any = weights if is_module(weights) else None
                return send_together(
                    self._trainers,
                    weights,
                    labels or {},
                    lambda given: self._send(given._replace(module=module), options).wait(),
                )
        sending = self._send(weights, options)
        return sending.wait() if wait else sending

    def _send(self, weights: Given, options: Mapping[str, Any]) -> Sending:
        request = SwapRequest.of(weights, options, self.artifact.manifest, self._composed)
        check_constants(request.source, self.artifact)
        with self._staging:
            return self._stage(request)

    def _stage(self, request: SwapRequest) -> Sending:
        is_by_rows = isinstance(request.source, GivenWeights) and request.source.has_rows
        latest = self._take_latest() if is_by_rows else None
        memory = latest or self._take()
        mine: _FileInMemory | None = memory  # until the sender's thread has it, whatever interrupt comes
        before: Sending | None = None
        try:
            trees, workers = self._trees, self._workers
            staging = Staging(request, self._layout.manifest, None, self._open_transforms, trees, workers, Job())
            delta = memory.fill(request, staging)
            assert memory.identity is not None
            if is_by_rows and delta is None:
                self._log_full(
                    "the tracker's rows do not start from the weights that were sent last; others may have taken rows"
                    if latest
                    else "none were sent before, or their sending has failed or not ended"
                )
            self._latest = sending = Sending(memory, memory.identity.weights_id, delta, request.source)
            with self._changed:
                self._check_open()
                self._changed.notify_all()
                before, self._waiting, mine = self._waiting, sending, None
        finally:
            if mine is not None:
                self._give_back(mine)
            if before is not None:
                before._close()
                self._give_back(before._memory)
                before._end(None, NotPromoted("later weights were sent before these had left", reason="superseded"))
        return sending

    def _open_transforms(self) -> Transforms:
        if self._transforms is None:
            from weightswap_runtime.staging.transforms import Transforms  # needs torch

            self._transforms = Transforms(self.artifact)
        return self._transforms

    def _take(self) -> _FileInMemory:
        """Return memory that nobody reads. There are three at most: one is read, weights wait in another."""
        with self._changed:
            self._check_open()
            memory = self._free.pop() if self._free else _FileInMemory(self._layout)
        memory.identity = None
        return memory

    def _take_latest(self) -> _FileInMemory | None:
        """Return the memory of the last weights that were sent, if they were served; else None."""
        with self._changed:
            self._check_open()
            latest = self._latest
            if latest is None or latest._receipt is None or latest._memory not in self._free:
                return None
            if latest._memory.identity is None or latest._memory.identity.weights_id != latest.weights_id:
                return None
            self._free.remove(latest._memory)
            return latest._memory

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed(f"{self.to}: the sender was closed")

    def _give_back(self, memory: _FileInMemory) -> None:
        with self._changed:
            if not self._closed:
                self._free.append(memory)
                return
        memory.close()

    def _run(self) -> None:
        while (sending := self._next()) is not None:
            outcome = self._outcome_of(sending)
            sending._close()
            self._give_back(sending._memory)  # first, as the next rows are laid over it
            sending._end(*outcome)
        self._link.close()

    def _outcome_of(self, sending: Sending) -> tuple[SwapReceipt | None, BaseException | None]:
        try:
            receipt = self._deliver(sending)
            if isinstance(sending._given, GivenWeights):
                sending._given.led_to(receipt.weights_id)
            return receipt, None
        except BaseException as error:
            self._link.reset()
            return None, error

    def _deliver(self, sending: Sending) -> SwapReceipt:
        deadline = time.monotonic() + self._timeout
        if sending._delta is not None:
            with suppress(BaseMismatch):  # others are served: they need all weights
                return self._link.deliver(sending.weights_id, sending._delta, deadline)
            self._log_full("the receiver does not serve the weights that were sent last")
        return self._link.deliver(sending.weights_id, sending._memory, deadline)

    def _log_full(self, why: str) -> None:
        _log.info("%s: all weights are sent, not only rows: %s", self.to, why)

    def _next(self) -> Sending | None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None or self._closed, self._link.tick):
                    sending, self._waiting = self._waiting, None
                    return sending
            with suppress(Exception):  # which the next delivery says
                self._link.idle()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the sender: what is on its way is awaited, what waits is sent. A second call does nothing."""
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._trainers is not None:
            self._trainers.close()
        with self._changed:
            free, self._free = self._free, []
        for memory in free:
            memory.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Sender({self.to!r}, {str(self.artifact.path)!r})"


class _FileLayout(ArenaLayout):
    """The layout of the tensors in a packed file, which are row-major and end to end."""

    def __init__(self, manifest: Manifest) -> None:
        weights = tuple(msgspec.structs.replace(weight, stride=None) for weight in manifest.weights)
        self.manifest = msgspec.structs.replace(manifest, weights=weights)
        self.weights = {weight.name: weight for weight in weights}
        self.ranges = pack_ranges(canonical_order(weight.row for weight in weights))
        self.slots = {name: ByteRange(place.begin, place.nbytes) for name, place in self.ranges.items()}
        self.nbytes = sum(place.nbytes for place in self.ranges.values())
        self.whole = ByteRange(0, self.nbytes)
        blank = Stamp(graph_id="0" * 64, weights_id="0" * 64, digests=dict.fromkeys(self.ranges, "0" * 64))
        # labels are text in JSON in JSON: at most two characters for each
        self.header_size = len(self.header(blank, 2 * MOST_LABEL_BYTES))

    def header(self, stamp: Stamp, reserve: int = 0) -> bytes:
        metadata = {"format": "pt", METADATA_KEY: msgspec.json.encode(stamp).decode()}
        return render_header(self.ranges, metadata, reserve)


class _FileInMemory:
    """A packed weight file without a name, written over and over."""

    def __init__(self, layout: _FileLayout) -> None:
        """Raises Unsupported where the system has no such files."""
        if not hasattr(os, "memfd_create"):
            raise Unsupported("a Sender needs memfd_create, which this system does not have")
        self._layout = layout
        self.size = layout.header_size + layout.nbytes
        self.descriptor = os.memfd_create("weightswap", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size)
        memory = mmap.mmap(self.descriptor, layout.nbytes, offset=layout.header_size) if layout.nbytes else None
        if memory is not None:
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._arena = HostArena(layout, memory)
        self.identity: Identity | None = None  # of the weights in it; None while it has none

    def fill(self, request: SwapRequest, staging: Staging) -> _DeltaInMemory | None:
        """Write weights and their header; return a delta from what was there to them, where rows say what has changed.

        Raises what a staging of them raises; of wrong rows before anything is written.
        """
        before, delta = self.identity, None
        with request.open(staging.job.check, staging.manifest.most_header) as weights:
            if before and isinstance(weights, GivenRows) and weights.start_from(before.weights_id):
                identity, delta = self._lay_rows(weights, before, staging._replace(replaces=before))
            else:
                planned = plan(weights, staging.manifest, request)
                check_tables(planned, staging)
                self.identity = None
                identity, _ = stage_full(planned, self._arena, staging)
        self._write_header(identity, staging.manifest.graph_id)
        self.identity = identity
        return delta

    def _lay_rows(self, weights: GivenRows, before: Identity, staging: Staging) -> tuple[Identity, _DeltaInMemory]:
        manifest = staging.manifest
        identity, _, patch, contents = stage_rows(weights, self._arena, before, staging)
        types = {weight.name: TensorType.of(weight) for weight in manifest.weights}
        blank = DeltaStamp(
            graph_id=manifest.graph_id,
            base=before.weights_id,
            weights_id=identity.weights_id,
            changes={name: types[name] for name in contents},
            digests={},
            labels=dict(identity.labels),
        )
        delta = _DeltaInMemory(encode_delta(contents, blank))
        self.identity = None
        patch.write_to(self._arena, staging.workers, staging.job)
        return identity, delta

    def _write_header(self, identity: Identity, graph_id: str) -> None:
        stamp = Stamp(
            graph_id=graph_id,
            weights_id=identity.weights_id,
            digests={name: tensor_digest(blocks) for name, blocks in identity.digests.items()},
            labels=dict(identity.labels),
        )
        header = self._layout.header(stamp)
        os.pwrite(self.descriptor, _padded(header, self._layout.header_size), 0)

    def pieces(self, most: int) -> Iterator[memoryview]:
        """Yield the header, and then the rest in pieces of at most so many bytes."""
        yield memoryview(bytearray(os.pread(self.descriptor, self._layout.header_size, 0)))
        for part in self._layout.whole.split(most):
            yield self._arena.fetch(part.offset, part.nbytes)

    def close(self) -> None:
        os.close(self.descriptor)


class _DeltaInMemory:
    """A delta file without a name, written once."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        """pieces: its header, and then the rest."""
        self.size, self._header_size = sum(map(len, pieces)), len(pieces[0])
        self.descriptor = os.memfd_create("weightswap-delta", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size)
        self._memory = memoryview(mmap.mmap(self.descriptor, self.size))
        place = 0
        for piece in pieces:
            self._memory[place : place + len(piece)] = piece
            place += len(piece)

    def pieces(self, most: int) -> Iterator[memoryview]:
        """Yield the header, and then the rest in pieces of at most so many bytes."""
        yield self._memory[: self._header_size]
        for start in range(self._header_size, self.size, most):
            yield self._memory[start : start + most]

    def close(self) -> None:
        os.close(self.descriptor)


def _padded(header: bytes, size: int) -> bytes:
    """Return a header of a safetensors file with spaces up to a size."""
    length = size - 8
    return length.to_bytes(8, "little") + header[8:].ljust(length)
