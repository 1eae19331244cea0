"""`weightswap verify`: checks that an artifact serves weights correctly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weightswap_runtime.errors import listed, plural
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
    from weightswap_exporter.parity import EngineParity, ParityReport
    from weightswap_exporter.parity.verification import GoldensCheck, Verification
    from weightswap_runtime.tensors import Tolerance


verify_command = typer.Typer(add_completion=False)
_MOST_SHOWN = 20  # problems, and tensors, that are printed one by one


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
            from .verify_report import verification_report

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
