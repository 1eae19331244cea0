"""Row updates from memory: the rows that a trainer names, and whatever else has changed, become a patch, as a delta's
do. Tables are read where their rows have changed, and all other tensors are compared with what is served.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from weightswap_runtime.byte_ranges import ByteRanges
from weightswap_runtime.errors import WeightsMismatch
from weightswap_runtime.format.delta import Changed, check_rows
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.names import Match
from weightswap_runtime.memory.arena import Arena, ArenaLayout, HostArena, HostPatch
from weightswap_runtime.native import Offsets, same_bytes
from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.tensors import BLOCK, Blocks, block_count

from .delta import lay_over
from .given import ChangedRows, GivenRows
from .reading import STEP, confirm
from .request import Staging, StagingReport, report_of
from .sets import Plan, fill, plan

Contents = Mapping[str, tuple[Changed, memoryview]]  # what differs of each weight, and its new bytes end to end
_ADVICE = (
    "Give the ascending ids of the rows that have changed, each once, as by torch.unique(ids). What cannot be given by "
    "rows is left out of rows=: it is compared, and taken whole if it has changed."
)


def stage_rows(
    weights: GivenRows, arena: Arena, served: Identity, staging: Staging
) -> tuple[Identity, StagingReport, HostPatch, Contents]:
    """Lay what has changed over the served weights of an arena, which is not written to; return that, too.

    Raises WeightsMismatch, SourceChanged, UnexpectedWeights, NonFiniteWeights, MemoryError, StageCancelled, and what
    opening the conversion's graph raises.
    """
    start = time.perf_counter()
    planned = plan(weights, staging.manifest, staging.request)
    contents = _read_changes(weights, planned, served, staging)
    staged = time.perf_counter()
    parts = {name: ByteRanges.of(change.runs, data) for name, (change, data) in contents.items()}
    identity, patch = lay_over(parts, staging.request.labels, arena, served, staging)
    size = sum(part.nbytes for part in parts.values())
    base = served.weights_id
    report = report_of("delta", identity, weights, size, staging, start, staged, planned.ignored, base)
    return identity, report, patch, contents


def check_tables(planned: Plan, staging: Staging) -> None:
    """Raise WeightsMismatch if weights that are staged whole are not those of the tracker that is given with them."""
    if isinstance(planned.weights, GivenRows):
        _tables(planned.weights, planned.match, staging)


def _read_changes(weights: GivenRows, planned: Plan, served: Identity, staging: Staging) -> Contents:
    """Copy the rows that have changed, and all of what else differs from the served weights.

    Raises WeightsMismatch with every problem, SourceChanged, StageCancelled, and what opening the conversion's graph
    raises.
    """
    start = time.perf_counter()
    tables = _tables(weights, planned.match, staging)
    staging.job.begin("reading", sum(table.nbytes for table in tables))
    contents: dict[str, tuple[Changed, memoryview]] = {}
    for table in tables:
        staging.job.check()
        if len(table.ids):
            change = Changed.of_rows(table.ids, table.width, table.weight.nbytes)
            contents[table.weight.name] = change, table.source.rows(table.ids)
    named = {table.weight.name for table in tables}
    others = {name: keys for name, keys in planned.match.found.items() if name not in named}
    same, found = _compared(weights, others, served, staging)
    contents |= dict(_read_whole(weights, planned, found, served, staging))
    if staging.request.confirm:
        confirm(weights, same, {}, HostArena(ArenaLayout(())), staging.workers, staging.job, start)
        for table in tables:
            if len(table.ids) and not same_bytes(table.source.rows(table.ids), contents[table.weight.name][1]):
                raise table.source.changed()
    weights.check_unchanged()
    return contents


class _Table(NamedTuple):
    """A weight of which only some rows are read."""

    weight: NamedTensor
    source: MemorySource
    ids: Offsets

    @property
    def width(self) -> int:
        return self.weight.nbytes // self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return len(self.ids) * self.width if len(self.ids) else 0


def _tables(weights: GivenRows, match: Match, staging: Staging) -> list[_Table]:
    """Return the weights of the tables. Raises WeightsMismatch with every problem of their rows."""
    by_name = {weight.name: weight for weight in staging.manifest.weights}
    held = {key: name for name, keys in match.found.items() for key in keys}
    inputs = {key: name for name, keys in match.computed.items() for key in keys.values()}
    tables: dict[str, _Table] = {}
    problems = _ambiguous(weights, by_name, match)
    for rows in weights.rows:
        key = _key_of(rows, weights, match)
        if rows.tensor is not None and key in match.ignored:
            continue  # the model saves it, and the graph does not have it
        if key in held and held[key] not in tables:
            name = held[key]
            sources = [_source(weights, each) for each in match.found[name]]
            tables[name] = _Table(by_name[name], sources[0], rows.ids)
            problem = _problem(tables[name], sources[1:])
        elif key in held:
            problem = f"is {held[key]}, whose rows are given by another name, too"
        elif key in inputs:
            problem = f"{inputs[key]} is computed from it, so that it has no rows of its own"
        elif rows.tensor is not None:
            problem = (
                "no tensor that is given is this table of the tracker: give the model that it was made of; if that has "
                "got another tensor since, make a new tracker"
            )
        else:
            problem = "no such table"
        problems += [f"{rows.name}: {problem}"] if problem else []
    if problems:
        raise WeightsMismatch(f"{weights.where}: rows", problems, _ADVICE)
    return list(tables.values())


def _key_of(rows: ChangedRows, weights: GivenRows, match: Match) -> str | None:
    """Return the name among what is given of the table that rows are of."""
    if rows.tensor is not None:  # a tracker's name may have the prefix of a wrapper
        return next((key for key in weights.tensors if _source(weights, key).is_of(rows.tensor)), None)
    if rows.name in weights.tensors or rows.name not in match.found:
        return rows.name
    return match.found[rows.name][0]


def _ambiguous(weights: GivenRows, by_name: Mapping[str, NamedTensor], match: Match) -> list[str]:
    """Return problems of names that are of one given tensor, and of the weight that another one is, where others of the
    names are the weights' alone: nobody can tell which of both is meant."""
    names = [rows.name for rows in weights.rows if rows.tensor is None]
    if all(name in weights.tensors for name in names):
        return []
    return [
        f"{name}: the name of a given tensor, and in the graph that of another one; name all tables as they are given"
        for name in names
        if name in weights.tensors and name in by_name and name not in match.found.get(name, ())
    ]


def _source(weights: GivenRows, key: str) -> MemorySource:
    source = weights.tensors[key].source
    assert isinstance(source, MemorySource)
    return source


def _problem(table: _Table, others: Iterable[MemorySource]) -> str:
    """Return why rows are none of a table's; empty if they are. others: those of tensors that are tied to it."""
    if not all(table.source.is_of(other.value) for other in others):
        return "the graph's weight is held by several tensors, of which rows change apart"
    weight = table.weight
    if len(table.ids):
        try:
            check_rows(table.ids, weight.shape[0] if weight.shape else 0, weight.nbytes)
        except ValueError as error:
            return str(error)
        if table.width * weight.shape[0] != weight.nbytes:
            return "its rows do not fill whole bytes"
    return ""


def _compared(
    weights: GivenRows, names: Mapping[str, tuple[str, ...]], served: Identity, staging: Staging
) -> tuple[dict[str, Blocks], dict[str, tuple[str, ...]]]:
    """Compare tensors with what is served, by digests; nothing is copied.

    names: weight -> names of the tensors that hold it. Returns the digests of the tensors that are the same, and those
    of `names` that are not.
    """
    digests = {key: [b""] * block_count(weights.tensors[key].nbytes) for keys in names.values() for key in keys}

    def work(part: tuple[str, int]) -> None:
        staging.job.check()
        key, start = part
        stop = min(start + STEP, weights.tensors[key].nbytes)
        digests[key][start // BLOCK : block_count(stop)] = _source(weights, key).digests(start, stop)

    sizes = ((key, max(1, weights.tensors[key].nbytes)) for key in digests)
    staging.workers.run_all(work, ((key, start) for key, size in sizes for start in range(0, size, STEP)))
    found = {key: tuple(blocks) for key, blocks in digests.items()}
    differs = {name: keys for name, keys in names.items() if any(found[key] != served.digests[name] for key in keys)}
    other = {key for keys in differs.values() for key in keys}
    return {key: blocks for key, blocks in found.items() if key not in other}, differs


def _read_whole(
    weights: GivenRows, planned: Plan, found: dict[str, tuple[str, ...]], served: Identity, staging: Staging
) -> Iterator[tuple[str, tuple[Changed, memoryview]]]:
    """Read weights whole, and compute those that are computed; yield those that differ from the served ones."""
    match = planned.match._replace(found=found)
    manifest = msgspec.structs.replace(
        planned.manifest,
        weights=tuple(
            msgspec.structs.replace(weight, stride=None)  # a delta's bytes are row-major
            for weight in planned.manifest.weights
            if weight.name in match.found or weight.name in match.computed
        ),
    )
    if not manifest.weights:
        return
    arena = HostArena(ArenaLayout(manifest.weights))
    _, findings, _ = fill(Plan(weights, match, manifest, {}), arena, staging)
    for name, blocks in findings.digests.items():
        if blocks != served.digests[name]:
            content = arena.view(name)
            yield name, (Changed.whole(len(content)), content)
