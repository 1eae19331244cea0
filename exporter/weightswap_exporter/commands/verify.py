"""`weightswap verify`: checks that an artifact serves weights correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from weightswap_runtime.errors import listed, plural
from weightswap_tools.reports.blocks import Block, Cell, Column, Facts, HeatMap, Note, Report, Section, Table, table_of
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    OpLibraryOption,
    errors_as_exit,
    print_json,
    print_table,
    say,
    status_line,
)

from .build import InputsOption, PicturesOption

if TYPE_CHECKING:
    from weightswap_exporter.parity import Divergence, EngineParity, ParityReport
    from weightswap_exporter.parity.verification import GoldensCheck, SwapCheck, Verification
    from weightswap_runtime.tensors import Tolerance


verify_command = typer.Typer(add_completion=False)
_MOST_SHOWN = 20  # problems, and tensors, that are printed one by one
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


@verify_command.command()
def verify(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder, or its URL.")],
    weights: Annotated[str, typer.Argument(help="Weight file, a checkpoint that pack takes, or a delta from --from.")],
    recipe: Annotated[
        str | None,
        typer.Option(help="Model to compare with: file.py:function, module:function or hf:DIR, as for export."),
    ] = None,
    inputs: InputsOption = None,
    pictures: PicturesOption = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            "--engines",
            help="Engines, such as torch,onnx; may be repeated. By default, all available ones.",
        ),
    ] = None,
    before: Annotated[str | None, typer.Option("--from", help="Weights to swap from; by default random ones.")] = None,
    tolerance: Annotated[
        str | None, typer.Option(help="RTOL,ATOL for every engine. By default, torch is compared bit for bit.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    html: HtmlOption = None,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify an artifact with weights: recorded calls, every engine against the eager model, and the swap itself.

    Without a recipe, the engines are compared with the engine torch.
    The exit status is 1 if any check fails.
    """
    engines = None if engine is None else [name.strip() for text in engine for name in text.split(",") if name.strip()]
    if engines == []:
        raise typer.BadParameter("--engines is empty; leave it out to check all available engines")
    limits = _parse_tolerance(tolerance)
    with errors_as_exit(as_json), status_line("opening the artifact") as on_step:
        from weightswap_exporter.parity.verification import verify as verify_artifact
        from weightswap_runtime.engines.operators import import_libraries

        from .recipes import load_recipe

        import_libraries(op_library or ())
        result = verify_artifact(
            artifact,
            weights,
            load_recipe(recipe, inputs=inputs, pictures=pictures) if recipe is not None else None,
            engines=engines,
            before=before,
            tolerance=limits,
            seed=seed,
            on_step=on_step,
        )
        if html is not None:
            write_report(html, verification_report(result))
    if as_json:
        print_json({"same": result.same, "problems": result.problems, "verification": result})
    else:
        _print(result)
    raise typer.Exit(0 if result.same else 1)


def _parse_tolerance(text: str | None) -> Tolerance | None:
    if text is None:
        return None
    try:
        rtol, atol = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--tolerance {text!r}: expected RTOL,ATOL, such as 1e-5,1e-6") from None
    if not (0 <= rtol < float("inf") and 0 <= atol < float("inf")):
        raise typer.BadParameter(f"--tolerance {text!r}: expected two finite numbers, 0 or more")
    return rtol, atol


def _print(result: Verification) -> None:
    say(f"artifact    {result.artifact}, graph id {result.graph_id[:12]}")
    say(f"weights     {result.weights}, weights id {result.weights_id[:12]}")
    print_table("recorded calls", ["engine", "result"], [[check.engine, _outcome(check)] for check in result.goldens])
    if result.parity:
        _print_parity(result.parity)
    if result.swaps:
        rows = [
            [
                swap.engine,
                swap.residency,
                str(swap.calls),
                _result(len(swap.problems)),
                f"{swap.seconds_staged:.3f} s",
                f"{swap.seconds_paused * 1e6:.1f} us",
            ]
            for swap in result.swaps
        ]
        title = f"swap from {result.before}, against a model loaded with the weights"
        print_table(title, ["engine", "residency", "calls", "result", "staged", "paused"], rows)
    for note in result.notes:
        say(f"note: {note}")
    problems = result.problems
    for problem in problems[:_MOST_SHOWN]:
        say(f"problem: {problem}", err=True)
    if len(problems) > _MOST_SHOWN:
        say(f"and {plural(len(problems) - _MOST_SHOWN, 'more problem')}; --json shows all", err=True)
    count = plural(len(problems), "problem")
    say(f"{'verified' if result.same else f'not verified, {count}'}, in {result.seconds:.1f} s")


def _outcome(check: GoldensCheck) -> str:
    if check.problems:
        return _result(len(check.problems))
    texts = {"goldens": "reproduced", "finite": "of other weights; outputs are finite", "none": "none recorded"}
    return texts[check.verified]


def _result(problems: int) -> str:
    return f"{problems} wrong" if problems else "equal"


def _print_parity(report: ParityReport) -> None:
    columns = ["engine", "calls", "result", "largest difference", "of the largest value", "compared"]
    print_table(f"calls, against {report.reference}", columns, [_parity_row(each) for each in report.engines])
    for engine in report.engines:
        if engine.divergence:
            first, *others = engine.divergence.text.split("\n")
            for line in (f"{engine.engine}, first divergence: {first}", *(f"  {line}" for line in others)):
                say(line)
        if engine.note:
            say(f"{engine.engine}: {engine.note}")
    if report.other_values:
        say(f"the model has different values for {listed(report.other_values, _MOST_SHOWN)}")


def _parity_row(engine: EngineParity) -> list[str]:
    measures = [output.measure for case in engine.cases for output in case.outputs if output.measure]
    wrong = sum(not case.same for case in engine.cases)
    return [
        engine.engine,
        str(len(engine.cases)),
        f"{wrong} differ" if wrong else "equal",
        f"{max((each.max_abs for each in measures), default=0):.3g}",
        f"{max((each.scaled for each in measures), default=0):.3g}",
        engine.compared_how,
    ]


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
        (_heat(report), Table(_PARITY, tuple(row for engine in report.engines for row in _output_rows(engine)))),
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
    return HeatMap(tuple(cells), columns, values, _SCALED, "How far apart the outputs are.")


def _output_rows(engine: EngineParity) -> Iterator[tuple[str | int | float | None, ...]]:
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
    yield HeatMap(rows, ("difference",), values, _SCALED, count)
