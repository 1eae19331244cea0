"""Comparing two sets of weights, and conditions on what changed (`--fail-if`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from weightswap_runtime.errors import DigestMismatch, Unsupported, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.expressions import NAME_MATCHES, parse_filter
from weightswap_runtime.format.names import Keys
from weightswap_runtime.tensors import TensorType
from weightswap_tools.tensor_set import SetRequest, check_levels, open_set

from .documents import Overall, TensorDiff, WeightsDiff, alarm_order, graded, new_values
from .statistics import merged, ratio
from .streaming import (
    READINGS,
    Computed,
    Progress,
    Readable,
    Reader,
    Scan,
    Side,
    TensorPair,
    pair,
    side,
    strangers,
)

Quantity = Callable[[TensorDiff], float | None]


def _of(part: Literal["values_after", "change"], field: str) -> Quantity:
    return lambda diff: getattr(getattr(diff, part), field, None)  # the part may be None


def _is(field: Literal["status", "level"], word: str) -> Quantity:
    return lambda diff: float(getattr(diff, field) == word)


OF_VALUES = ("nan", "inf", "mean", "std", "norm", "dead_rows")  # unchanged tensors have these, too
UNCHANGED: Mapping[str, float] = {
    "rel_change": 0.0,
    "max_change": 0.0,
    "max_rel_change": 0.0,
    "share_changed": 0.0,
    "sign_flips": 0.0,
    "cosine": 1.0,
}
"""The quantities of an unread tensor whose recorded digests are equal."""
QUANTITIES: Mapping[str, Quantity] = {
    **{name: _of("values_after", name) for name in OF_VALUES},
    "new_nan": lambda diff: new_values(diff)[0],
    "new_inf": lambda diff: new_values(diff)[1],
    "new_dead_rows": lambda diff: new_values(diff)[2],
    **{name: _of("change", name) for name in UNCHANGED},
    "max_change": lambda diff: (diff.change.largest.change if diff.change.largest else 0.0) if diff.change else None,
    **{name: _is("status", name) for name in ("removed", "added", "reshaped", "retyped", "renamed")},
    "changed": lambda diff: float(diff.level != "same" and diff.status != "renamed"),
    **{name: _is("level", name) for name in ("alarm", "notice")},
}


class Policy:
    """A parsed condition. `text` is its source, `quantities` are the names of the quantities in it."""

    def __init__(self, text: str) -> None:
        """Parse a condition. Raises Unsupported, with the column, if the text is not a condition."""
        self.text = text
        try:
            self._condition = parse_filter(text, QUANTITIES)
        except ValueError as error:
            raise Unsupported(str(error)) from error
        self.quantities = self._condition.names & QUANTITIES.keys()

    @property
    def needs_values(self) -> bool:
        """True if the condition needs values of tensors that did not change."""
        return not self.quantities.isdisjoint(OF_VALUES)

    def meets(self, tensor: TensorDiff) -> bool:
        """Return whether the condition holds for a tensor. Comparisons of an unknown quantity do not hold."""
        return self._condition.holds({name: _value(name, tensor) for name in self._condition.names})

    def failures(self, diff: WeightsDiff) -> tuple[str, ...]:
        """Return the names of all tensors for which the condition holds, the most alarming first."""
        return tuple(tensor.name for tensor in diff.tensors if self.meets(tensor))


def _value(name: str, diff: TensorDiff) -> float | None:
    """Return a quantity, which is also known for unchanged tensors that were not read, or whether a pattern matches."""
    if name not in QUANTITIES:
        return fnmatchcase(diff.name, name.removeprefix(NAME_MATCHES))
    value = QUANTITIES[name](diff)
    is_unread = value is None and diff.status in ("same", "renamed") and diff.change is None
    return UNCHANGED.get(name) if is_unread else value


T = TypeVar("T")
_Scans = tuple[Scan, ...]  # one of both sides, or one for each side that has the tensor
_DAMAGED = "The file is damaged: copy it again, or pack its checkpoint again."


def compare_weights(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    artifact: str | os.PathLike[str] | Artifact | None = None,
    keys: Keys | None = None,
    levels: tuple[str | None, str | None] = (None, None),
    values: bool = False,
    progress: Progress | None = None,
) -> WeightsDiff:
    """Compare two weight files or checkpoints.

    before, after: safetensors files or URLs, as for `open_weights`; with the exporter installed, also pickled and
    distributed checkpoints, as for `pack`.
    artifact: read both as its weights, under their FQNs, with keys renamed and values computed by its conversion.
    Without an artifact, names are compared as they are.
    keys: "checkpoint" or "fqn", how to read the names of a checkpoint that would fit both ways.
    levels: for each side, the level of the weights in a pickled or distributed checkpoint, as keys joined with dots;
    None for the level that fits the artifact, or else the one with the most tensors.
    values: also read tensors whose recorded digests are equal, and renamed ones.
    progress: called with bytes read and bytes in all, from several threads, one at a time.

    Recorded digests and torch's checksums are checked for every tensor that is read. Each thread has a few MiB in
    memory, whatever the tensors' sizes. Weights that the conversion computes need torch, and the memory of one of them;
    so do tensors that a checkpoint does not store as one row-major run. Files from before torch 1.6 are read whole.

    Raises WeightFileError and CheckpointError (also for files that change meanwhile), DigestMismatch, ArtifactError,
    MissingExtra, Unsupported, and WeightsMismatch if a set does not fit the artifact.
    """
    opened = artifact if artifact is None or isinstance(artifact, Artifact) else Artifact.open(artifact)
    with ExitStack() as stack:
        manifest = opened.manifest if opened else None
        requests = [SetRequest(level, manifest, READINGS[keys]) for level in levels]
        sets = [stack.enter_context(open_set(*item)) for item in zip((before, after), requests, strict=True)]
        check_levels(levels, sets)
        sides = [side(weights, opened, keys) for weights in sets]
        diff = compare_sides(sides[0], sides[1], values=values, by_artifact=opened is not None, progress=progress)
        for weights, compared in zip(sets, sides, strict=True):
            weights.check(compared.sources)
    return diff


def compare_sides(
    before: Side, after: Side, *, values: bool, by_artifact: bool = False, progress: Progress | None = None
) -> WeightsDiff:
    """Compare two sides whose files are open. Raises WeightFileError and DigestMismatch."""
    rows, aliases = pair(before, after)
    unknown = [row for row in rows if values or not _known_to_be_same(row, before, after)]
    scans = _run_scans(unknown, progress, hashed=bool(before.digests or after.digests))
    _check_digests(rows, scans, before, after)
    diffs = sorted((graded(_diff(row, scans.get(row.name, ()))) for row in rows), key=alarm_order)
    return WeightsDiff(
        before=before.info,
        after=after.info,
        tensors=tuple(diffs),
        overall=_overall(diffs),
        notices=tuple(_notices((before, after), aliases, by_artifact=by_artifact)),
    )


def _known_to_be_same(row: TensorPair, before: Side, after: Side) -> bool:
    """Return whether the recorded digests are equal, or matching found the contents equal."""
    if row.renamed_from:
        return True
    digests = before.digests.get(row.name), after.digests.get(row.name)
    return row.comparable and row.status == "same" and digests[0] is not None and digests[0] == digests[1]


def _run_scans(rows: Sequence[TensorPair], progress: Progress | None, *, hashed: bool) -> dict[str, _Scans]:
    reader = Reader(sum(tensor.nbytes for row in rows for tensor in row.present), progress)
    scans = {row.name: _scans(row, hashed=hashed) for row in rows if not row.is_computed}
    reader.run(scan for of_row in scans.values() for scan in of_row)
    for row in rows:
        if row.is_computed:  # one at a time, as each is in memory
            scans[row.name] = _scans(row, hashed=hashed)
            reader.run(scans[row.name])
    return scans


def _scans(row: TensorPair, *, hashed: bool) -> _Scans:
    sides: list[Readable] = [tensor.compute() if isinstance(tensor, Computed) else tensor for tensor in row.present]
    return (Scan(sides, hashed=hashed),) if row.comparable else tuple(Scan([tensor], hashed=hashed) for tensor in sides)


def _check_digests(rows: Sequence[TensorPair], scans: Mapping[str, _Scans], before: Side, after: Side) -> None:
    """Raise DigestMismatch if the digest of a tensor that was read is not the recorded one."""
    for index, compared in enumerate((before, after)):
        problems = []
        for row in rows:
            digests = _by_side(row, [digest for scan in scans.get(row.name, ()) for digest in scan.digests])
            name = row.renamed_from if row.renamed_from and compared is before else row.name
            expected = compared.digests.get(name)
            if expected and digests[index] not in (None, expected):
                problems.append(f"{name}: its bytes do not match the digest that the file records")
        if problems:
            raise DigestMismatch(compared.info.where, problems, _DAMAGED)


def _by_side(row: TensorPair, results: Iterable[T]) -> tuple[T | None, T | None]:
    """Return the results of the present sides as a pair, with None for a side that is absent or was not read."""
    rest = iter(results)
    return next(rest, None) if row.before is not None else None, next(rest, None) if row.after is not None else None


def _diff(row: TensorPair, scans: _Scans) -> TensorDiff:
    summaries = [scan.summary for scan in scans]
    old, new = _by_side(row, [values for summary in summaries for values in (summary.sides if summary else (None,))])
    comparable = row.comparable and bool(scans)
    return TensorDiff(
        name=row.name,
        status="changed" if comparable and row.status == "same" and not scans[0].equal else row.status,
        before=row.before and TensorType.of(row.before),
        after=row.after and TensorType.of(row.after),
        renamed_from=row.renamed_from,
        values_before=old,
        values_after=new,
        change=summaries[0].change if comparable and summaries[0] else None,
    )


def _overall(diffs: Sequence[TensorDiff]) -> Overall:
    """Return the overall change of changed tensors only, as others may not have been read."""
    changed = [diff for diff in diffs if diff.change and diff.change.changed]
    counted = [diff for diff in changed if not diff.counts] or changed
    measured = [(diff.change, diff.values_before) for diff in counted if diff.change and diff.values_before]
    change = math.hypot(*(change.norm for change, _ in measured))
    before = math.hypot(*(values.norm for _, values in measured))
    return Overall(
        tensors=len(measured),
        elements=sum(change.elements for change, _ in measured),
        changed=sum(change.changed for change, _ in measured),
        rel_change=ratio(change, before),
        histogram=merged(change.histogram for change, _ in measured),
    )


def _notices(sides: tuple[Side, Side], aliases: Sequence[Mapping[str, str]], *, by_artifact: bool) -> Iterator[str]:
    for side_, others in zip(sides, aliases, strict=True):
        if names := [f"{name} is {other}" for name, other in others.items()]:
            yield f"In {side_.info.where} {listed(names)}; the other set has only one of the names."
    before, after = sides
    if not by_artifact and before.tensors and after.tensors and strangers(before, after):
        yield (
            "The two sets have almost no names in common. If one has a checkpoint's names and the other is packed, "
            "give --artifact (artifact=): both are then compared under the names of its weights."
        )
    if before.info.graph_id and after.info.graph_id and before.info.graph_id != after.info.graph_id:
        yield f"They are packed for different graphs, {before.info.graph_id[:12]} and {after.info.graph_id[:12]}."
