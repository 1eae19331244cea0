"""A place where processes read which weights they should serve, and where operators and trainers write it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from weightswap_runtime.errors import DesiredDamaged, GraphMismatch, RevisionConflict, UnexpectedWeights, Unsupported
from weightswap_runtime.format.delta_file import DeltaStamp, delta_stamp
from weightswap_runtime.format.weight_file import Stamp
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.options import check_said
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Location, Url, as_location, fixed, fixed_text, printable

from .document import (
    SHOWN,
    DesiredBase,
    DesiredState,
    DesiredWeights,
    Hold,
    bases_of,
    changed,
    check_promotable,
    decode,
    encode,
    find_good,
    rolled_back,
)
from .storage import MOST_BYTES, NAME, Stored, open_storage

MOST_TRIES = 50  # of a promotion, against other writers
Source = str | os.PathLike[str]


class Known(NamedTuple):
    """What whoever has staged a set of weights knows of it. base: of a delta, the weights that it starts from."""

    weights_id: str
    graph_id: str = ""
    labels: dict[str, str] = {}  # noqa: RUF012
    base: str = ""


class DesiredPlace:
    """A local directory, or a folder behind a URL, with the document `desired.json`: docs/desired.md.

    Every operator's write names the revision that it follows on, so that nobody overwrites what he has not seen. Each
    returns what is desired then. They raise RevisionConflict, and DesiredError where the place cannot be read or
    written; then nothing has changed. `by` and `why` have 4,096 characters at most.

    place: the path or URL. A local directory has to be there. URLs are written to where the store replaces an object
    only if it is still the one that was read: s3://. Others are read alone (Unsupported).
    """

    def __init__(self, place: Source) -> None:
        self._storage = open_storage(place)
        self.where = str(self._storage.folder)
        self.is_local = isinstance(self._storage.folder, Path)

    def __repr__(self) -> str:
        return f"DesiredPlace({self.where!r})"

    def read(self, check: Check | None = None) -> DesiredState:
        """What is desired; revision 0 where nothing was written yet.

        check: called every few milliseconds while a remote answer is waited for; what it raises ends the wait. Raises
        DesiredError where it cannot be read, DesiredDamaged where it is none.
        """
        return self._read(check)[1]

    def locate(self, weights: DesiredWeights | DesiredBase) -> Path | str:
        """The path or URL of a set that the document names, as a swap takes it."""
        folder = self._storage.folder
        if "://" in weights.source or weights.source.startswith("/"):
            return weights.source
        found = folder / weights.source
        return found.raw if isinstance(found, Url) else found

    def located(self, weights: DesiredWeights) -> DesiredWeights:
        """The same, with its bases as they are found from anywhere."""
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
        """Desire weights by hand: a packed file, its URL, an index of shards, or a delta from what is desired.

        A hold stays, and forbids nothing here. What was withdrawn is no more, if it is set. allow_other_graph: take one
        that was packed for another graph than what is desired now. known: as for `promote`.

        Raises WeightFileError for what cannot be opened, GraphMismatch, BaseMismatch for a delta from other weights,
        and Unsupported for a file that weightswap has not packed, which does not say which weights it holds.
        """
        found = known or known_weights(source)

        def work(state: DesiredState) -> DesiredState:
            before = state.weights.graph_id if state.weights else ""
            if before and found.graph_id and before != found.graph_id and not allow_other_graph:
                raise GraphMismatch(
                    f"{printable(source)}: was packed for the graph {found.graph_id[:SHOWN]}, and what is desired for "
                    f"{before[:SHOWN]}. Pack it for that one; or say allow_other_graph=True, if all that follow take it"
                )
            return self._changed(state, source, found, by, why)

        return self._write(revision, work)

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
        """Desire earlier weights again, and withdraw what came after them.

        to: the beginning of a weights id of the history, or of what was withdrawn; None: what was desired before. hold:
        take nothing new until `release`. known_there: do not look for the file, as whoever is to serve them has them in
        memory.

        Raises NothingToRollBack, and WeightFileError or UnexpectedWeights where its file is not there any more.
        """
        check_said(by, why)

        def work(state: DesiredState) -> DesiredState:
            wanted = find_good(state, to, self.where)
            if not known_there:
                self._check_there(wanted)
            now = time.time()
            held = Hold(since=now, by=by, why=why or f"rolled back to {wanted.weights_id[:SHOWN]}") if hold else None
            return rolled_back(state, replace(wanted, since=now, by=by, why=why), held)

        return self._write(revision, work)

    def _check_there(self, weights: DesiredWeights) -> None:
        needed: tuple[DesiredWeights | DesiredBase, ...] = (*(weights.bases or ()), weights)
        for each in needed:
            where = self.locate(each)
            found = _stamp(where)
            if found is not None and found.weights_id != each.weights_id:
                raise UnexpectedWeights(
                    f"{printable(where)}: has the weights {found.weights_id[:SHOWN]} by now, not "
                    f"{each.weights_id[:SHOWN]}"
                )

    def hold(self, *, revision: int, by: str = "", why: str = "") -> DesiredState:
        """Let nothing be promoted until `release`; a hold that there is gives way."""
        check_said(by, why)
        return self._write(revision, lambda state: replace(state, hold=Hold(since=time.time(), by=by, why=why)))

    def release(self, *, revision: int) -> DesiredState:
        """Let promotions through again. What was withdrawn stays away."""
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
        """Desire new weights, unless that would undo what an operator has done: for trainers and watchers.

        known: what is known of the file by whoever has staged it; None: what its header says. may: raises what forbids
        it, with what is desired then. It names no revision: what other writers do meanwhile is looked at again. Weights
        that are desired already are left as they are.

        Raises Held, Superseded for weights that were desired or withdrawn before, DesiredError, and what `set` raises.
        """
        weights = known or known_weights(source)
        for _ in range(MOST_TRIES):
            stored, state = self._read(None)
            if state.weights_id == weights.weights_id:
                return state
            check_promotable(state, weights.weights_id, printable(source))
            after = self._changed(state, source, weights, by, why)
            may(state)
            if written := self._replace(stored, state, after):
                return written
        raise RevisionConflict(f"{self.where}: others write all the time; {MOST_TRIES} tries were in vain")

    def check_promotable(self, source: Source, weights_id: str | None, check: Check | None = None) -> None:
        """Raise now what `promote` would raise; of weights that are not known yet, whether anything is promoted."""
        state = self.read(check)
        check_promotable(state, weights_id or "", printable(source))

    def _changed(self, state: DesiredState, source: Source, known: Known, by: str, why: str) -> DesiredState:
        return changed(state, described(self._as_stored(as_location(source)), known, by, why, state))

    def _as_stored(self, location: Location) -> str:
        """Relative to the place where it lies below it, so that both may be mounted elsewhere."""
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

    def _write(self, revision: int, work: Callable[[DesiredState], DesiredState]) -> DesiredState:
        if type(revision) is not int:
            raise Unsupported(f"revision={revision!r}: expected the number that read() gives")
        stored, state = self._read(None)
        if state.revision == revision and (written := self._replace(stored, state, work(state))):
            return written
        now = self.read()
        whose = f", by {now.weights.by}" if now.weights and now.weights.by else ""
        raise RevisionConflict(
            f"{self.where}: is at revision {now.revision}{whose}, and you have seen {revision}. Read it again, and "
            "decide again."
        )

    def _replace(self, stored: Stored, before: DesiredState, after: DesiredState) -> DesiredState | None:
        """Write the next revision; None where somebody else has."""
        written = replace(after, revision=before.revision + 1)
        try:
            content = encode(written)
            decode(content, self.where)  # what nobody could read again
        except (UnicodeEncodeError, TypeError, DesiredDamaged) as error:
            raise Unsupported(
                f"{self.where}: by, why, a path or a label is no text that JSON holds ({error})"
            ) from error
        if len(content) > MOST_BYTES:
            raise Unsupported(
                f"{self.where}: would have {len(content)} bytes, and nobody reads more than {MOST_BYTES}: give shorter "
                "paths or URLs, or fewer labels; a full weight file needs no others"
            )
        return written if self._storage.replace(stored, content) else None


def _stamp(source: Source) -> Stamp | DeltaStamp | None:
    """What a file says of itself; None where weightswap has not written it."""
    with open_weights(source) as weights:
        return delta_stamp(weights) or weights.stamp


def described(source: str, known: Known, by: str, why: str, state: DesiredState) -> DesiredWeights:
    """Weights that somebody wants now. Raises BaseMismatch for a delta from others than are desired, and Unsupported
    where too much is said of them."""
    check_said(by, why)
    return DesiredWeights(
        source=source,
        weights_id=known.weights_id,
        graph_id=known.graph_id,
        labels=dict(known.labels),
        since=time.time(),
        by=by,
        why=why,
        bases=bases_of(state, known.base, known.weights_id, printable(source)),
    )


def known_weights(source: Source) -> Known:
    """What a packed file or a delta says of itself. Raises WeightFileError, and Unsupported for any other file."""
    if (stamp := _stamp(source)) is None:
        raise Unsupported(f"{printable(source)}: does not say which weights it holds; pack it (weightswap pack)")
    base = stamp.base if isinstance(stamp, DeltaStamp) else ""
    return Known(stamp.weights_id, stamp.graph_id, dict(stamp.labels), base)
