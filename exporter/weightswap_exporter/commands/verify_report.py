"""HTML report of a verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightswap_exporter.parity import Divergence, EngineParity, ParityReport
from weightswap_exporter.parity.verification import SwapCheck, Verification
from weightswap_runtime.errors import plural
from weightswap_tools.reports.blocks import Block, Cell, Column, Facts, HeatMap, Note, Report, Section, Table, table_of

_BEFORE, _AFTER = 5, 20  # modules shown around the one where executions diverge
_SCALED = "largest difference, as a part of the largest value"
_PARITY = (
    Column("engine"),
    Column("call"),
    Column("output"),
    Column("type"),
    Column("differ", "number", flag=True),
    Column("max abs", "number"),
    Column("max rel", "number"),
    Column("ULP", "number"),
    Column("cosine", "number"),
    Column("NaN", "number"),
    Column("raised"),
)
_SWAPS: tuple[tuple[Column, Callable[[SwapCheck], Cell]], ...] = (
    (Column("engine"), lambda swap: swap.engine),
    (Column("residency"), lambda swap: swap.residency),
    (Column("calls", "number"), lambda swap: swap.calls),
    (Column("wrong", "number", flag=True), lambda swap: len(swap.problems)),
    (Column("read", "bytes"), lambda swap: swap.bytes_read),
    (Column("staged, ms", "number"), lambda swap: round(swap.seconds_staged * 1e3, 4)),
    (Column("paused, ms", "number"), lambda swap: round(swap.seconds_paused * 1e3, 4)),
)


def verification_report(result: Verification) -> Report:
    """Return the report: facts, problems, and a section for each kind of check."""
    count = len(result.problems)
    return Report(
        title="Verification",
        subtitle=f"{result.artifact} with {result.weights}",
        sections=tuple(_sections(result)),
        verdict="verified" if result.same else plural(count, "problem"),
        good=result.same,
    )


def _sections(result: Verification) -> Iterator[Section]:
    facts = (
        ("artifact", result.artifact),
        ("graph id", result.graph_id),
        ("weights", result.weights),
        ("weights id", result.weights_id),
        ("swapped from", result.before),
        ("took", f"{result.seconds:.1f} s"),
    )
    notes = tuple(Note(note) for note in result.notes)
    yield Section("What was verified", (Facts(facts), *notes))
    if result.parity:
        yield from _divergences(result.parity)
    if result.problems:
        yield Section("Problems", (Table((Column("what"),), tuple((problem,) for problem in result.problems)),))
    if result.parity:
        yield _parity(result.parity)
    yield Section("Recorded calls", (_goldens(result),))
    if result.swaps:
        yield Section(
            "Swap", (table_of(result.swaps, _SWAPS),), "Outputs against those of a model loaded with the weights."
        )


def _goldens(result: Verification) -> Table:
    rows = tuple((row.engine, row.verified, len(row.problems), "\n".join(row.problems)) for row in result.goldens)
    columns = (Column("engine"), Column("verified"), Column("wrong", "number", flag=True), Column("problems"))
    return Table(columns, rows)


def _parity(report: ParityReport) -> Section:
    return Section(
        f"Calls, against {report.reference}",
        (_heat(report), Table(_PARITY, tuple(row for engine in report.engines for row in _parity_rows(engine)))),
        "; ".join(f"{engine.engine}: compared {engine.compared_how}" for engine in report.engines),
    )


def _divergences(report: ParityReport) -> Iterator[Section]:
    """Yield each point of divergence once, with the engines that diverge there."""
    points: dict[tuple[str, str, str], tuple[Divergence, list[str]]] = {}
    for engine in report.engines:
        if divergence := engine.divergence:
            key = divergence.found, divergence.module, divergence.node
            points.setdefault(key, (divergence, []))[1].append(engine.engine)
        elif engine.note:
            yield Section(f"Where {engine.engine} diverges", (Note(engine.note, "bad"),))
    for divergence, names in points.values():
        verb = "diverges" if len(names) == 1 else "diverge"
        yield Section(f"Where {' and '.join(names)} {verb}", (*_divergence(divergence),))


def _heat(report: ParityReport) -> HeatMap:
    cells: dict[str, dict[str, float | None]] = {}
    for engine in report.engines:
        for case in engine.cases:
            for output in case.outputs:
                row = cells.setdefault(f"{case.method}, {case.case}: {output.name}", {})
                row[engine.engine] = output.measure.scaled if output.measure else None
    columns = tuple(engine.engine for engine in report.engines)
    values = tuple(tuple(row.get(name) for name in columns) for row in cells.values())
    return HeatMap(tuple(cells), columns, values, _SCALED, "log", "How far apart the outputs are.")


def _parity_rows(engine: EngineParity) -> Iterator[tuple[str | int | float | None, ...]]:
    for case in engine.cases:
        where = f"{case.method}, {case.case}"
        if case.error:
            yield engine.engine, where, "", "", 1, None, None, None, None, None, case.error
        for output in case.outputs:
            m = output.measure
            measured = (
                (m.found, m.mismatches, m.max_abs, m.max_rel, m.max_ulp, m.cosine, m.nan[1])
                if m
                else ("", int(bool(output.problem)), None, None, None, None, None)
            )
            yield engine.engine, where, output.name, *measured, ""


def _divergence(divergence: Divergence) -> Iterator[Block]:
    yield Facts(
        (
            ("module", f"{divergence.module or 'the model itself'} ({divergence.kind})"),
            ("inside", " > ".join(name or "the model" for name in divergence.within)),
            ("node", f"{divergence.node}, {divergence.operator}" if divergence.node else "none"),
            ("only one side calls", ", ".join(divergence.alone) or "nothing"),
            ("its tensors", ", ".join(divergence.weights) or "none"),
            ("value", divergence.measure.text),
            ("agree before", f"{divergence.agreed} of {divergence.compared} results"),
            ("between", f"{divergence.expected} and {divergence.found}, in {divergence.case}"),
        )
    )
    wrong = next((index for index, error in enumerate(divergence.modules) if error.module == divergence.module), 0)
    shown = divergence.modules[max(0, wrong - _BEFORE) : wrong + _AFTER]
    rows = tuple(error.module or "the model" for error in shown)
    values = tuple((error.scaled,) for error in shown)
    count = f"{len(shown)} of {len(divergence.modules)} modules, in the order in which they are reached."
    yield HeatMap(rows, ("difference",), values, _SCALED, "log", count)
