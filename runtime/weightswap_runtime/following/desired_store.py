"""The store of a desired state: a folder whose document changes atomically, by revision, as a file or an object.

Everyone who changes it reads, decides, and replaces what was read; whoever finds another document then decides again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from weightswap_runtime.errors import (
    DesiredError,
    GraphMismatch,
    RevisionConflict,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    check_said,
)
from weightswap_runtime.format.delta import DeltaStamp, delta_stamp
from weightswap_runtime.format.merging import merged_delta, merged_set
from weightswap_runtime.format.safetensors import Stamp, label_problem
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import (
    Location,
    Url,
    as_location,
    check_writable,
    fixed,
    fixed_text,
    printable,
)

from .desired_state import (
    SHOWN,
    DesiredBase,
    DesiredState,
    DesiredWeights,
    Hold,
    bases_of,
    check_promotable,
    decode,
    encode,
    find_good,
    ids_of,
    rolled_back,
    trimmed,
    with_weights,
)
from .document_storage import MOST_BYTES, NAME, LocalStorage, Source, Stored, open_storage

_MOST_SOURCE = 4096  # bytes of a path or URL
_MOST_TRIES = 50  # of a promotion, against other writers


class DesiredStore:
    """A local directory, or a folder behind a URL, with the document `desired.json`: docs/desired.md.

    Every write of an operator names the revision that it is based on, so that nobody overwrites an unseen change. It
    returns the new desired state. It raises RevisionConflict, and DesiredError if the desired store cannot be read or
    written; then nothing has changed. `by` and `why` have at most 4,096 characters.

    desired_store: the path or URL. A local directory must exist. A URL can be written to where writes can be
    conditional: s3://. Others can only be read (writing raises Unsupported).
    """

    def __init__(self, desired_store: Source) -> None:
        self._storage = open_storage(desired_store)
        self.where = str(self._storage.folder)
        self.is_local = isinstance(self._storage.folder, Path)

    def __repr__(self) -> str:
        return f"DesiredStore({self.where!r})"

    def read(self, check: Check | None = None) -> DesiredState:
        """Return the desired state; revision 0 if nothing was written yet.

        check: called every few milliseconds during the wait for a remote response; it may raise to end the wait. Raises
        DesiredError if the document cannot be read, or is invalid.
        """
        return self._read(check)[1]

    def locate(self, weights: DesiredWeights | DesiredBase) -> Path | str:
        """Return the path or URL of weights that the document names, for a swap."""
        if "://" in weights.source or weights.source.startswith("/"):
            return weights.source
        location = self._storage.folder / weights.source
        return location.raw if isinstance(location, Url) else location

    def located(self, weights: DesiredWeights) -> DesiredWeights:
        """Return the weights with absolute sources of their bases."""
        if not weights.bases:
            return weights
        return replace(weights, bases=tuple(replace(each, source=str(self.locate(each))) for each in weights.bases))

    def set(
        self,
        source: Source,
        *,
        revision: int,
        by: str = "",
        why: str = "",
        allow_other_graph: bool = False,
        known: Known | None = None,
    ) -> DesiredState:
        """Set the desired weights by hand: a packed file, its URL, an index of shards, or a delta from those desired.

        A hold does not forbid this, and stays. Withdrawn weights that are set are no longer withdrawn. known: as for
        `promote`. allow_other_graph: accept weights that were packed for another graph than the desired ones.

        Raises WeightFileError for a file that cannot be opened, GraphMismatch, BaseMismatch for a delta from other
        weights, and Unsupported for a file that weightswap has not packed, which does not say which weights it holds.
        """
        facts = known or known_weights(source)

        def change(state: DesiredState) -> DesiredState:
            before = state.weights.graph_id if state.weights else ""
            if before and facts.graph_id and before != facts.graph_id and not allow_other_graph:
                raise GraphMismatch(
                    f"{printable(source)}: packed for another graph, {facts.graph_id[:SHOWN]}; the desired weights are "
                    f"for {before[:SHOWN]}. Pack its checkpoint for that one, or pass allow_other_graph=True if all "
                    "followers have the graph of this file"
                )
            return self._with_weights(state, source, facts, by, why)

        return self._write(revision, change, are_files_there=known is not None)

    def rollback(
        self,
        *,
        revision: int,
        to: str | None = None,
        by: str = "",
        why: str = "",
        hold: bool = True,
        known_there: bool = False,
    ) -> DesiredState:
        """Make earlier weights the desired ones again, and withdraw those after them.

        to: the beginning of a weights id in the history or among the withdrawn ones; None: the weights before. hold:
        promote nothing until `release`. known_there: do not check the files of the weights, as the followers have them
        in memory.

        Raises NothingToRollBack, and WeightFileError or UnexpectedWeights if the file has been removed or replaced.
        """
        check_said(by, why)

        def change(state: DesiredState) -> DesiredState:
            target = find_good(state, to, self.where)
            if not known_there:
                self._check_files(target)
            now = time.time()
            new_hold = (
                Hold(since=now, by=by, why=why or f"rolled back to {target.weights_id[:SHOWN]}") if hold else None
            )
            return rolled_back(state, replace(target, since=now, by=by, why=why), new_hold)

        return self._write(revision, change, are_files_there=known_there)

    def rollback_target(self, to: str | None, *, revision: int) -> DesiredWeights:
        """Return the weights that `rollback` would make the desired ones. Raises what `rollback` raises."""
        target = find_good(self._read_for(revision)[1], to, self.where)
        self._check_files(target)
        return target

    def _check_files(self, weights: DesiredWeights) -> None:
        for file in files_of(weights):
            where = self.locate(file)
            stamp = check_file(where, file.weights_id)
            if isinstance(stamp, DeltaStamp) and file is weights and not weights.bases:
                raise UnexpectedWeights(
                    f"{printable(where)}: a delta, and the document no longer says from which files; set a full file"
                )

    def hold(self, *, revision: int, by: str = "", why: str = "") -> DesiredState:
        """Forbid promotions until `release`. This replaces an earlier hold."""
        check_said(by, why)
        return self._write(revision, lambda state: replace(state, hold=Hold(since=time.time(), by=by, why=why)))

    def release(self, *, revision: int) -> DesiredState:
        """Allow promotions again. Withdrawn weights stay withdrawn."""
        return self._write(revision, lambda state: replace(state, hold=None))

    def promote(
        self,
        source: Source,
        *,
        known: Known | None = None,
        by: str = "",
        why: str = "",
        may: Callable[[DesiredState], None] = lambda _: None,
    ) -> DesiredState:
        """Make weights the desired ones, unless that would undo an operator's change: for trainers and watchers.

        known: the facts about the file, if the caller has staged it; None: read its header. may: called with the
        present state; raises to forbid the promotion. A promotion names no revision: after a concurrent write it is
        tried again on the new state.

        Weights that were desired before, and later replaced, are desired again. If they are desired already, as when a
        training was repeated, nothing changes for those who serve them; a full file with other labels, or at another
        desired store, and a delta from an earlier one of the files that lead to them, are recorded in a new revision,
        except during a hold.

        Raises NotPromoted during a hold and for weights that were withdrawn, DesiredError, and what `set` raises.
        """
        facts = known or known_weights(source)
        for _ in range(_MOST_TRIES):
            stored, state = self._read(None)
            check_promotable(state, facts.weights_id, printable(source))
            is_desired = state.weights_id == facts.weights_id
            if is_desired and (state.hold or not _is_shorter(state, facts)):
                return state
            after = self._with_weights(state, source, facts, by, why)
            if is_desired and _facts(state.weights) == _facts(after.weights):
                return state
            may(state)
            if written := self._replace(stored, state, after, None if known else partial(self._check_there, after)):
                return written
        raise RevisionConflict(f"{self.where}: lost to other writers {_MOST_TRIES} times in a row; try again later")

    def compact(self, out: Source, *, revision: int, full: bool = False) -> DesiredState:
        """Replace the chain of files that leads to the desired weights by a shorter one of the same weights.

        out: the file to write, in a desired store that new processes can read: one delta, merged from all of the chain;
        a new process then reads the full set with which the chain begins, and this. full: write a full set instead,
        which needs no other file. The goldens and the signature beside the last delta are copied. Nothing else in the
        document changes, and nothing for processes that serve the weights. If another revision was written meanwhile,
        that stays, and `out` is as it was. What a killed compaction has left of the same `out` is removed.

        Raises Unsupported if there is nothing to make shorter, if `out` is a link, or if the document names `out`
        already, by whatever path; and what `merge_deltas` raises.
        """
        stored, state = self._read_for(revision)
        weights = state.weights
        if weights is None or not weights.bases or (len(weights.bases) == 1 and not full):
            what = "one delta after a full set" if weights and weights.bases else "no delta"
            raise Unsupported(f"{self.where}: {what} is desired, so there is nothing to make shorter")
        name = _checked_source(self._as_stored(as_location(out)))
        check_writable(out)
        self._check_unnamed(state, Path(out))
        self._check_files(weights)
        first, *deltas = (self.locate(file) for file in files_of(weights))
        after = replace(state, weights=replace(weights, source=name, bases=UNSET if full else weights.bases[:1]))
        with merged_set(first, deltas, out) if full else merged_delta(deltas, out) as (merged, put):
            if merged.weights_id != weights.weights_id:
                raise UnexpectedWeights(
                    f"{printable(out)}: would have the weights {merged.weights_id[:SHOWN]}, not "
                    f"{weights.weights_id[:SHOWN]}: a file of the chain was replaced meanwhile"
                )
            if (written := self._replace(stored, state, after, put)) is None:
                raise self._conflict(revision)
        return written

    def _check_unnamed(self, state: DesiredState, out: Path) -> None:
        """Raise Unsupported for a link, and for a file that the document names, under this path or another."""
        if out.is_symlink():
            raise Unsupported(f"{out}: is a link; name the file to write")
        named = {self._local(file) for entry in state.known for file in files_of(entry)} - {None}
        if self.is_local:
            named.add(Path(self.where) / NAME)
        if any(_is_same(path, out) for path in named if path):
            raise Unsupported(f"{out}: the desired store names this file; name another")

    def _local(self, file: DesiredWeights | DesiredBase) -> Path | None:
        """Return the path of a file that the document names; None for a URL."""
        location = as_location(self.locate(file))
        return location if isinstance(location, Path) else None

    def _with_weights(self, state: DesiredState, source: Source, known: Known, by: str, why: str) -> DesiredState:
        through = tuple(replace(each, source=self._as_stored(as_location(each.source))) for each in known.through)
        stored, facts = self._as_stored(as_location(source)), known._replace(through=through)
        return with_weights(state, described(stored, facts, by, why, state))

    def _as_stored(self, location: Location) -> str:
        """Return a path relative to the desired store, if it is below it, so that both may be mounted elsewhere."""
        folder = self._storage.folder
        if isinstance(location, Url) or isinstance(folder, Url):
            text = fixed_text(location)
            below = f"{folder.raw.rstrip('/')}/" if isinstance(folder, Url) else ""
            plain = below and "?" not in below
            return text.removeprefix(below) if plain and text.startswith(below) else text
        path = fixed(location)
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path)

    def _read(self, check: Check | None) -> tuple[Stored, DesiredState]:
        stored = self._storage.read(check)
        return stored, decode(stored.content, f"{self.where}: {NAME}")

    def _write(
        self, revision: int, change: Callable[[DesiredState], DesiredState], *, are_files_there: bool = True
    ) -> DesiredState:
        """Write a change. are_files_there: False if the files of the weights may be removed until it is written."""
        stored, state = self._read_for(revision)
        after = change(state)
        first = None if are_files_there else partial(self._check_there, after)
        if (written := self._replace(stored, state, after, first)) is None:
            raise self._conflict(revision)
        return written

    def _check_there(self, state: DesiredState) -> None:
        """Raise WeightFileError if a local file of the desired weights is gone: `publish(keep=)` removes files."""
        for file in files_of(state.weights) if state.weights else ():
            path = self._local(file)
            if path is not None and not path.exists():
                raise WeightFileError(f"{path}: was removed meanwhile; choose other weights")

    def _read_for(self, revision: int) -> tuple[Stored, DesiredState]:
        """Read the state for a change. Raises RevisionConflict if it is not at this revision."""
        if type(revision) is not int:
            raise Unsupported(f"revision={revision!r}: expected the number that read() gives")
        stored, state = self._read(None)
        if state.revision != revision:
            raise self._conflict(revision)
        return stored, state

    def _conflict(self, revision: int) -> RevisionConflict:
        now = self.read()
        whose = f", by {now.weights.by}" if now.weights and now.weights.by else ""
        return RevisionConflict(
            f"{self.where}: is at revision {now.revision}{whose}, but this change is based on {revision}. Read "
            "it again, and decide again."
        )

    def _replace(
        self,
        stored: Stored,
        before: DesiredState,
        after: DesiredState,
        first: Callable[[], None] | None = None,
    ) -> DesiredState | None:
        """Write the next revision, and return it; None if another writer was faster.

        first: called once no other can be faster, before the document is replaced; of a remote one, just before.
        """
        written = replace(after, revision=before.revision + 1)
        try:
            written = trimmed(written)
            content = encode(written)
            decode(content, self.where)  # a document that no reader would accept must not be written
        except (UnicodeEncodeError, TypeError, DesiredError) as error:
            raise Unsupported(
                f"{self.where}: by, why, a path or a label is not text that JSON can hold ({error})"
            ) from error
        if len(content) > MOST_BYTES:
            raise Unsupported(
                f"{self.where}: would have {len(content)} bytes, but readers accept at most {MOST_BYTES}: use shorter "
                "paths or URLs; a full weight file needs no others"
            )
        return written if self._storage.replace(stored, content, first) else None


@contextmanager
def unchanging(desired_store: DesiredStore, patience: float | None = None) -> Iterator[DesiredState]:
    """Yield the state, which nobody changes in the block: for who removes files that it does not name.

    Writers wait meanwhile. A remote document has no lock, and may change. patience: seconds for a writer before; None:
    as long as writers wait. Raises DesiredError.
    """
    storage = desired_store._storage
    with storage.locked(patience) if isinstance(storage, LocalStorage) else nullcontext():
        yield desired_store.read()


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one file, which may not be there yet."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False


def files_of(weights: DesiredWeights) -> tuple[DesiredWeights | DesiredBase, ...]:
    """Return the files that a new process reads, in order."""
    return (*(weights.bases or ()), weights)


def _is_shorter(state: DesiredState, known: Known) -> bool:
    """Return whether a new process would read fewer files than now if the desired weights came from this file."""
    return not known.base or (state.weights is not None and known.base in ids_of(state.weights)[:-1])


def _facts(weights: DesiredWeights | None) -> tuple[object, ...]:
    """Return what a promotion of the same weights would change, apart from who has promoted them, when and why."""
    return (weights.source, weights.labels, weights.bases) if weights else ()


class Known(NamedTuple):
    """The facts known about a set of weights, from its header or its staging."""

    weights_id: str
    graph_id: str = ""
    labels: dict[str, str] = {}  # noqa: RUF012
    base: str = ""  # the base weights id of a delta; of the first of several that are used together
    through: tuple[DesiredBase, ...] = ()  # the others of several, but the last


def known_weights(source: Source) -> Known:
    """Read the facts in the header of a packed file or a delta. Raises WeightFileError, and Unsupported for others."""
    if (stamp := stamp_of(source)) is None:
        raise Unsupported(f"{printable(source)}: does not say which weights it holds; pack it (weightswap pack)")
    base = stamp.base if isinstance(stamp, DeltaStamp) else ""
    return Known(stamp.weights_id, stamp.graph_id, dict(stamp.labels), base)


def check_file(source: Source, weights_id: str) -> Stamp | DeltaStamp | None:
    """Return the stamp of a file. Raises WeightFileError or UnexpectedWeights if it is gone or has other weights."""
    stamp = stamp_of(source)
    if stamp is not None and stamp.weights_id != weights_id:
        raise UnexpectedWeights(
            f"{printable(source)}: now has the weights {stamp.weights_id[:SHOWN]}, not {weights_id[:SHOWN]}"
        )
    return stamp


def stamp_of(source: Source) -> Stamp | DeltaStamp | None:
    """Read the stamp of a file; None if weightswap has not written it."""
    with open_weights(source) as weights:
        return delta_stamp(weights) or weights.stamp


def described(source: str, known: Known, by: str, why: str, state: DesiredState) -> DesiredWeights:
    """Return the entry for new desired weights. Raises BaseMismatch; Unsupported if a text or the chain is too long."""
    check_said(by, why)
    if problem := label_problem(known.labels):
        raise Unsupported(f"{printable(source)}: {problem}")
    return DesiredWeights(
        source=_checked_source(source),
        weights_id=known.weights_id,
        graph_id=known.graph_id,
        labels=dict(known.labels),
        since=time.time(),
        by=by,
        why=why,
        bases=bases_of(state, known.base, known.weights_id, printable(source), known.through),
    )


def _checked_source(source: str) -> str:
    if (size := len(json.dumps(source, ensure_ascii=False).encode(errors="replace"))) > _MOST_SOURCE:
        raise Unsupported(f"{printable(source):.200}: a path or URL of {size} bytes, but at most {_MOST_SOURCE}")
    return source
