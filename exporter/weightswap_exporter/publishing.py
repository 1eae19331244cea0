"""`publish()`: from a model in training to a weight file, in the background.

The model's values are copied before the call returns, so that the training may go on; a thread writes the copy.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from weightswap_exporter.checkpoints.nested_state_dicts import flat_levels
from weightswap_exporter.checkpoints.reading import Checkpoint, from_module
from weightswap_exporter.checkpoints.tensor import requested, values_of
from weightswap_exporter.modules.libraries import peft_base
from weightswap_exporter.modules.tensors import TieKey, tie_key, unwrapped
from weightswap_runtime import Artifact, DesiredStore, load
from weightswap_runtime.errors import CheckpointError, WaitTimeout, WeightswapError, join_seconds, text_of
from weightswap_runtime.following.desired_store import Known, stamp_of, unchanging
from weightswap_runtime.following.directory import in_use, remove, stamps_in, unused
from weightswap_runtime.following.watching import Policy, check_promotion_policy, check_proven
from weightswap_runtime.format.delta import DeltaStamp
from weightswap_runtime.format.safetensors import Stamp
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_runtime.sources.location import check_writable, fixed
from weightswap_runtime.sources.writing import companion, remove_abandoned
from weightswap_runtime.tensors import Blocks, Tolerance
from weightswap_runtime.threads import forget_frames

from .goldens import Recording, Requested
from .packing import MatchedWeights, Packed, check_constants, checked_labels, pack_checkpoint, recorder
from .row_tracker import Lent, RowTracker
from .row_updates import Expected, Last, Places, RowUpdate

if TYPE_CHECKING:
    from weightswap_fleet import Fleet

STEP_DIGITS = 9  # of the step in a file's name
ID_LETTERS = 12  # of the weights id in a file's name
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d{{{STEP_DIGITS}}})-([0-9a-f]{{{ID_LETTERS}}})(\.delta)?\.safetensors")
# copy of a model's values, or of those that have changed, with no reference to the model; and what is beside the file
_Snapshot = tuple[Checkpoint | RowUpdate | WeightswapError, Recording | None]
_log = logging.getLogger("weightswap")


class Publication:
    """Weight file that is being written. If `wait()` is never called, an error is logged."""

    def __init__(self, step: int, outcome: futures.Future[Packed]) -> None:
        self.step = step
        self._outcome = outcome
        # once this handle is gone, or the interpreter ends, nobody can wait any more
        self._error_log = weakref.finalize(self, outcome.add_done_callback, partial(_log_error, step))

    def __repr__(self) -> str:
        return f"Publication(step={self.step}, {'done' if self.done else 'being written'})"

    @property
    def done(self) -> bool:
        """True once the file is there or the writing has failed."""
        return self._outcome.done()

    def wait(self, timeout: float | None = None) -> Packed:
        """Wait, for at most `timeout` seconds, until the file is there.

        Raises WaitTimeout, or the error of the writing: CheckpointError, or WeightsMismatch with every problem.
        """
        if not futures.wait([self._outcome], join_seconds(timeout)).done:
            raise WaitTimeout(f"step {self.step} is still being written after {timeout} s; wait again")
        self._error_log.detach()
        return self._outcome.result()


def _log_error(step: int, outcome: futures.Future[Packed]) -> None:
    if error := outcome.exception():
        _log.error("step %d was not published: %s: %s", step, type(error).__name__, text_of(error))


def publish(
    model: nn.Module,
    directory: str | os.PathLike[str],
    artifact: Artifact | str | os.PathLike[str],
    *,
    step: int,
    labels: Mapping[str, str] | None = None,
    dtype: torch.dtype | str | None = None,
    goldens: Requested | None = None,
    tolerance: Tolerance | None = None,
    promote: str | os.PathLike[str] | Fleet | None = None,
    policy: Policy = "newest",
    by: str = "publish",
    keep: int | None = None,
    rows: RowTracker | None = None,
    full: bool = False,
    full_every: int = 100,
    check: bool = False,
) -> Publication:
    """Write a live model's weights into a directory, in the background; the training may go on at once.

    The parameters and persistent buffers are copied to the CPU before this returns: later changes of the model do not
    reach the file. Memory: one copy, tied tensors once. Nothing else may change the model during the copying. The file
    appears whole, as `step-000001000-0123456789ab.safetensors`: the step and the beginning of the weights id. Names
    sort by step. If there are two files of one step, because the training went back, the one with the later
    modification time is the newer.

    step: 0 to 999,999,999; it becomes the label `step`, beside `labels`. dtype: as in `pack()`. goldens, tolerance: as
    in `pack()`, recorded with this model, in its present mode, before this returns: it must be on the CPU, and as it
    was exported (`model.eval()`). Their file is in place before the weight file is.

    promote: a desired store (`DesiredStore`) that shall then name the file as what a service should serve; or a fleet
    (`weightswap_fleet.connect`), of which all nodes then serve it or none does (`Packed.receipt`). policy: "newest"
    promotes the file as soon as it is there, as servers verify weights before they take them; "proven" first loads it
    as a server would, and requires that recorded outputs are reproduced and that all values are finite. by: author of
    the change, for the document. Weights that are served already, or were before, as when a training is repeated from
    one seed, are promoted like others; only those that an operator has withdrawn are not. A refusal (a hold, withdrawn
    weights, unproven ones, a desired store that cannot be reached) is logged and stored in `Packed.refusal`; the file
    stays.

    keep: once the file is promoted to a desired store, remove older files that publish() has written into the
    directory. Those that the desired store wants stay, the last `keep` of its history and of those it has withdrawn,
    the bases of every delta that stays, and the newest `keep` beside this one, by step and by time, which another
    trainer may be about to promote; so no other desired store may name files of this directory. If the desired store or
    a weight file there cannot be read, nothing is removed, and the reason is logged. By default nothing ever is.

    rows: a tracker of the model's tables: the file is a delta from the one that was published with it before, of the
    changed rows and of what else has changed, as `step-000001000-0123456789ab.delta.safetensors`. Only these are copied
    before this returns, and hashed with 1 KiB around each row; call it between steps. The file is full if it is the
    first in the directory, if a table may have changed otherwise than by steps and `RowTracker.mark`, which is logged,
    after a promotion that was refused, after `full_every` deltas, and on request: `full=True`. A publication that fails
    leaves its rows to the next. Each full file shows whether the tracker has missed rows, which is logged as an error;
    with `check=True` a delta, too, is compared with the tables, which are hashed whole: `wait()` then raises
    CheckpointError, nothing is written, and the next file is full. docs/rows.md.

    A process has at most one copy that waits or is being written: a further call, from any thread, waits until that one
    is written. Files therefore appear in the order in which their weights were copied. The interpreter waits for a
    running write before it ends; a killed process leaves only a hidden temporary file, which a later call for the same
    directory removes. A relative directory is resolved at the call.

    Raises CheckpointError and ArtifactError at once for invalid arguments, ParityError for goldens that cannot be
    recorded, and CheckpointError in a signal handler whose thread is within publish() already. Other errors are raised
    by `Publication.wait()`.
    """
    if type(step) is not int or not 0 <= step < 10**STEP_DIGITS:
        raise CheckpointError(f"step: expected a whole number from 0 to {10**STEP_DIGITS - 1}, got {step!r}")
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"expected a module, got a {type(model).__qualname__}")
    labels = dict(labels or {})
    if str(labels.get("step", step)) != str(step):
        raise CheckpointError(
            f"labels: step={labels['step']!r} contradicts step={step}; leave the label out, it is set from `step`"
        )
    labels = checked_labels({**labels, "step": step})
    check_writable(directory)
    check_promotion_policy(policy)
    desired_store = DesiredStore(promote) if isinstance(promote, (str, os.PathLike)) else promote
    _check_keep(keep, desired_store)
    promotion = None if desired_store is None else _Promotion(desired_store, policy, by, keep)
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    requested(dtype, opened.manifest)
    if opened.manifest.variants:
        model = peft_base(model)
    check_constants(unwrapped(model), opened)
    record_from = recorder(model, opened, goldens, tolerance)
    _check_rows(rows, full, full_every, check)
    update = None
    if rows is not None:
        update = _RowPublishing(rows, fixed(Path(directory)), step, opened, dtype, full, full_every, check)
    outcome: futures.Future[Packed] = futures.Future()
    publication = Publication(step, outcome)
    _writer.begin(
        outcome,
        lambda: (update.prepare(model) if update is not None else _copied(model), record_from()),
        partial(
            _write,
            update=update,
            directory=fixed(Path(directory)),
            given_directory=Path(directory),
            artifact=opened,
            step=step,
            labels=labels,
            dtype=dtype,
            promotion=promotion,
        ),
    )
    return publication


def _check_keep(keep: int | None, desired_store: DesiredStore | Fleet | None) -> None:
    """Raise CheckpointError for a number of files to keep that is none, or without a desired store that says which."""
    if keep is None:
        return
    if type(keep) is not int or keep < 1:
        raise CheckpointError(
            f"keep: expected None, or 1 or more weights to which the desired store can go back, got {keep!r}"
        )
    if not isinstance(desired_store, DesiredStore):
        raise CheckpointError(
            f"keep={keep}: only a desired store says which files are still needed; pass its path or URL as promote=, "
            "or leave keep out and remove files yourself"
        )


class _Promotion(NamedTuple):
    """Who shall serve a file."""

    desired_store: DesiredStore | Fleet
    policy: Policy
    by: str  # author of the change
    keep: int | None  # weights of the desired store's history whose files stay; None: all

    def promote(self, packed: Packed, artifact: Artifact, onto: Places) -> Packed:
        """Promote a file, and return it with the revision that names it, or with the reason for the refusal.

        onto: for a delta, the files that lead to its base.
        """
        try:
            if self.policy == "proven":
                # as a server loads it
                with load(artifact, residency="single") as model:
                    with model.stage(packed.path, onto=onto, allow_nonfinite=False) as staged:
                        receipt = staged.commit()
                    check_proven(str(packed.path), receipt.verified, list(receipt.nonfinite))
            return self._promoted(packed)
        except WeightswapError as error:
            _log.warning("%s was not promoted: %s: %s", packed.path, type(error).__name__, text_of(error))
            return replace(packed, refusal=f"{type(error).__name__}: {error}")

    def _promoted(self, packed: Packed) -> Packed:
        if isinstance(self.desired_store, DesiredStore):
            known = Known(packed.weights_id, packed.graph_id, packed.labels, packed.base)
            desired = self.desired_store.promote(packed.path, known=known, by=self.by, why=self.policy)
            if self.keep is not None:
                _remove_older(packed.path.parent, self.desired_store, self.keep)
            return replace(packed, promoted=desired.revision)
        receipt = self.desired_store.publish(packed.path, by=self.by, why=self.policy)
        return replace(packed, promoted=receipt.revision, receipt=receipt)


def _remove_older(directory: Path, desired_store: DesiredStore, keep: int) -> None:
    """Remove files that `publish` has written and nobody needs; none, and log why, if that cannot be decided."""
    try:
        written = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
        by_time = sorted(written, key=lambda path: path.stat().st_mtime_ns)
        # by step, too, as clocks are set back; what appears from now on is in neither, as it may be promoted at once
        older = set(by_time[: -keep - 1]) & set(sorted(written)[: -keep - 1])
        stamps = stamps_in(directory)
        with unchanging(desired_store) as state:  # a rollback during the decision would find its file gone
            removed = unused(
                stamps, in_use(state, keep), lambda path, stamp: path in older and _is_published(path, stamp)
            )
            for path in removed:
                remove(path)
    except (WeightswapError, OSError) as error:
        _log.warning("%s: older files were not removed: %s: %s", directory, type(error).__name__, text_of(error))
    else:
        _log.info("%s: removed %s", directory, ", ".join(path.name for path in removed) or "no older files")


def _is_published(path: Path, stamp: Stamp | DeltaStamp) -> bool:
    """Return whether a file has the name that `publish` gives to its content."""
    match = _NAME.fullmatch(path.name)
    return (
        match is not None
        and isinstance(stamp, DeltaStamp) == bool(match[3])
        and stamp.weights_id.startswith(match[2])
        and stamp.labels.get("step") == str(int(match[1]))
    )


def _copied(model: nn.Module) -> Checkpoint:
    """Return a checkpoint of copies, tied tensors once."""
    live = from_module(model)
    copies: dict[TieKey, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = tie_key(tensor)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    level = live.levels[0]
    if level.problems:  # packing refuses it by these
        return live
    tensors = {
        name: values_of(copy(values.load()))._replace(part_of=values.part_of) for name, values in level.tensors.items()
    }
    return Checkpoint(live.where, *flat_levels(tensors, live.where), names=True)


def _check_rows(rows: RowTracker | None, full: bool, full_every: int, check: bool) -> None:
    """Raise CheckpointError for options that cannot be meant."""
    if rows is not None and not isinstance(rows, RowTracker):
        raise CheckpointError(f"rows: expected a RowTracker of the model, got a {type(rows).__qualname__}")
    if rows is None and (full or check):
        raise CheckpointError("full= and check= are about row updates; pass rows=RowTracker(model), too")
    if type(full_every) is not int or full_every < 1:
        raise CheckpointError(f"full_every: expected 1 or more deltas between full files, got {full_every!r}")


@dataclass
class _RowPublishing:
    """One publication of the rows that a tracker knows."""

    tracker: RowTracker
    directory: Path
    step: int
    artifact: Artifact
    # as in `publish`
    dtype: torch.dtype | str | None
    full: bool
    full_every: int
    check: bool

    lent: Lent = field(init=False)  # unless the file is there, and promoted, its rows are lent to the next one, too
    expected: Expected = field(init=False)  # of a full file
    onto: Places = ()  # the files that lead to the weights since which rows were taken

    def prepare(self, model: nn.Module) -> Checkpoint | RowUpdate | WeightswapError:
        """Return the update, or a copy of the model if a full file is due; or the error that `wait` shall raise."""
        self.lent = self.tracker.lend()
        rows, last = self.lent.rows, self.tracker.updates.last
        if last is not None and last.weights_id == self.lent.base:
            self.onto = last.files
        try:
            weights = MatchedWeights.find(from_module(model), self.artifact, self.dtype)
            if not self._is_full_due():
                update = self.tracker.updates.prepare(weights, rows, check=self.check)
                if not self._would_replace(update):
                    return update
            self.expected = self.tracker.updates.expect(weights, rows, is_known=bool(self.onto))
        except WeightswapError as error:
            return error
        return _copied(model)

    def _is_full_due(self) -> bool:
        last = self.tracker.updates.last
        return (
            self.full
            or last is None
            or not self.onto
            or last.graph_id != self.artifact.manifest.packed_for
            or len(last.files) > self.full_every
            or not all(path.parent == self.directory and path.is_file() for path, _ in last.files)
        )

    def _would_replace(self, update: RowUpdate) -> bool:
        """Return whether the delta has the name of one from other weights, as of a step that is published twice."""
        path = self.directory / _name(self.step, update.weights_id, is_delta=True)
        if not path.exists():
            return False
        try:
            stamp = stamp_of(path)
        except WeightswapError:
            return True
        return not isinstance(stamp, DeltaStamp) or stamp.base != update.last.weights_id

    def published(self, content: Checkpoint | RowUpdate, packed: Packed, blocks: Mapping[str, Blocks]) -> None:
        """Take a file as the base of the next."""
        self.tracker.updates.last = None
        if isinstance(content, RowUpdate):
            files, blocks = (*self.onto, (packed.path, packed.weights_id)), content.blocks
        else:
            files = ((packed.path, packed.weights_id),)
            if missed := self.tracker.updates.learn(self.expected, content, blocks):
                _log.error(
                    "%s: rows of %s changed that the tracker has missed, so that the deltas before this full file lack "
                    "them; RowTracker.mark() says which rows change otherwise than by an optimizer's step",
                    packed.path,
                    ", ".join(missed),
                )
        # deltas from weights that nobody serves would be refused
        if not packed.refusal:
            self.lent.led_to(packed.weights_id)
            self.tracker.updates.last = Last(files, packed.graph_id, blocks)


def _name(step: int, weights_id: str, *, is_delta: bool) -> str:
    return f"{_PREFIX}{step:0{STEP_DIGITS}d}-{weights_id[:ID_LETTERS]}{'.delta' if is_delta else ''}.safetensors"


def _write(
    snapshot: _Snapshot,
    *,
    directory: Path,
    given_directory: Path,
    artifact: Artifact,
    step: int,
    labels: Mapping[str, str],
    dtype: torch.dtype | str | None,
    promotion: _Promotion | None,
    update: _RowPublishing | None,
) -> Packed:
    content, recording = snapshot
    if isinstance(content, WeightswapError):
        raise content
    remove_abandoned(directory, _PREFIX)
    out = directory / f"{_PREFIX}{step:0{STEP_DIGITS}d}.safetensors"
    if isinstance(content, RowUpdate):
        packing = content.pack(out, labels)
    else:
        packing = pack_checkpoint(content, artifact, out, labels=labels, dtype=dtype)
    with packing as (file, packed):
        path = directory / _name(step, packed.weights_id, is_delta=bool(packed.base))
        # without a recording, goldens of this name stay: they are of the same weights id
        with companion(goldens_path(path), recording.encode(packed.weights_id)) if recording else nullcontext():
            file.rename(path)
    packed = replace(packed, path=path)
    if promotion is not None:
        packed = promotion.promote(packed, artifact, update.onto if update and packed.base else ())
    if update is not None:
        update.published(content, packed, file.blocks)
    return replace(packed, path=given_directory / packed.path.name, goldens=len(recording.cases) if recording else 0)


class _Writer:
    """Writer of one snapshot at a time, each in a thread that the interpreter waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: object = None  # of the publication that takes its snapshot, or is written
        self._threads: set[int] = set()  # ids of threads within begin()

    def begin(
        self,
        outcome: futures.Future[Packed],
        snapshot: Callable[[], _Snapshot],
        write: Callable[[_Snapshot], Packed],
    ) -> None:
        """Wait for the previous write, take the snapshot, and start to write it."""
        if (thread := threading.get_ident()) in self._threads:
            raise CheckpointError(
                "this thread is already in publish(): a signal handler, or the model itself, called it again. Set a "
                "flag there, and publish when the first call has returned."
            )
        turn = object()
        owned = [turn]  # by this call, until the thread takes it: an interrupt may hide that it has started
        try:
            self._threads.add(thread)  # first: a signal handler may run after any step
            with self._changed:
                self._changed.wait_for(lambda: self._turn is None)
                self._turn = turn
            snapshots = [snapshot()]  # a list, so that the thread can drop it
            threading.Thread(
                target=self._run, args=(owned, outcome, snapshots, write), name="weightswap-publish"
            ).start()
        except BaseException:
            with suppress(IndexError):  # the thread has it
                self._end(owned.pop())
            raise
        finally:
            self._threads.discard(thread)

    def _run(
        self,
        owned: list[object],
        outcome: futures.Future[Packed],
        snapshots: list[_Snapshot],
        write: Callable[[_Snapshot], Packed],
    ) -> None:
        try:
            turn = owned.pop()
        except IndexError:  # who began was interrupted, and has given it up
            return
        try:
            finish = partial(
                outcome.set_result, write(snapshots.pop())
            )  # popped: the copy is gone when the next is made
        except BaseException as error:
            forget_frames(error)
            finish = partial(outcome.set_exception, error)
        self._end(turn)
        finish()

    def _end(self, turn: object) -> None:
        """Let the next one begin."""
        with self._changed:
            if self._turn is turn:
                self._turn = None
                self._changed.notify_all()


_writer = _Writer()
# a forked child has none of the parent's threads, so that nobody would release the lock
os.register_at_fork(after_in_child=_writer.__init__)  # type: ignore[misc]
