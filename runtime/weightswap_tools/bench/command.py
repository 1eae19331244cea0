"""`weightswap bench`: measure the calls and swaps of an artifact's engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightswap_tools.bench import BenchReport, bench
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    OpLibraryOption,
    errors_as_exit,
    print_json,
    progress_bar,
    say,
)

from .show_page import bench_report
from .show_text import print_bench

MOST_SECONDS = 86400.0
bench_command = typer.Typer(add_completion=False)


@bench_command.command(name="bench")
def bench_(
    artifact: Annotated[str, typer.Argument(help="The artifact's folder or URL.")],
    weights: Annotated[str, typer.Argument(help="The weight file or checkpoint to serve and to swap in.")],
    engine: Annotated[
        list[str] | None, typer.Option(help="An engine to measure; may be repeated; by default all.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method to call; by default forward, or the first.")] = None,
    batch: Annotated[str, typer.Option(help="Sizes of the dimension `batch`, or of the first dynamic one.")] = "1,8,32",
    size: Annotated[str, typer.Option(help="Sizes of other dynamic dimensions, as length=128,rows=7.")] = "",
    inputs: Annotated[
        Path | None, typer.Option("--input", "-i", help="Inputs by name, a .safetensors or .npz file; not random ones.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="The number of threads that call concurrently.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0, max=MOST_SECONDS, help="How long to call with each size, in each residency.")
    ] = 1.0,
    swaps: Annotated[int, typer.Option(min=0, help="The number of swaps of the file, in each residency.")] = 5,
    html: HtmlOption = None,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure calls and swaps of every engine that the artifact has and this machine can run.

    Each engine runs in its own processes. The exit status is 1 if one of them failed.
    """
    batches, sizes = _parse_batches(batch), _parse_sizes(size)
    with errors_as_exit(as_json):
        with progress_bar("measuring", of_bytes=False) as progress:
            report = bench(
                artifact,
                weights,
                engines=engine or (),
                method=method,
                batches=batches,
                sizes=sizes,
                inputs=inputs,
                threads=threads,
                seconds=seconds,
                swaps=swaps,
                op_libraries=op_library or (),
                progress=progress,
            )
        _show(report, html, as_json)
    if any(result.failed for result in report.engines):
        raise typer.Exit(1)


def _parse_batches(text: str) -> list[int]:
    try:
        return [_parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--batch {text!r}: expected numbers, such as 1,8,32") from error


def _parse_sizes(text: str) -> dict[str, int]:
    try:
        pairs = (part.partition("=") for part in text.split(",") if part)
        return {name: _parse_size(value) for name, _, value in pairs}
    except ValueError as error:
        raise typer.BadParameter(f"--size {text!r}: expected names and numbers, such as length=128,rows=7") from error


def _parse_size(text: str) -> int:
    """Parse a size. Raises ValueError."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _show(report: BenchReport, html: Path | None, as_json: bool) -> None:
    if html:
        write_report(html, bench_report(report))
    if as_json:
        print_json(report)
        return
    print_bench(report)
    if html:
        say(f"report      {html}")
