"""`weightswap diff`: show what changed between two weight files, checkpoints or artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import is_artifact
from weightswap_tools.diff import Policy, compare_artifacts, compare_weights
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    HtmlOption,
    JsonOption,
    KeysOption,
    errors_as_exit,
    print_facts,
    print_json,
    progress_bar,
)

from .show import artifacts_report, print_artifacts, print_weights, weights_report

diff_command = typer.Typer(add_completion=False)
_MOST_SHOWN = 30  # tensors in the table, without --all
_FOR_WEIGHTS = "--artifact, --keys, --level, --values and --fail-if are for weights, not artifacts"


@diff_command.command()
def diff(
    before: Annotated[str, typer.Argument(help="A weight file, a checkpoint or an artifact, or its URL.")],
    after: Annotated[str, typer.Argument(help="The later weights, or the later artifact.")],
    artifact: Annotated[
        Path | None,
        typer.Option("--artifact", "-a", help="Compare both as weights of this artifact, as swap would read them."),
    ] = None,
    keys: KeysOption = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="The place of the weights in a pickled or distributed checkpoint: dotted keys, such as ema. "
            "Give it twice if they differ: first for BEFORE, then for AFTER."
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Also read tensors whose recorded digests are equal.")
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if a tensor meets this, as 'new_nan or rel_change > 0.5'; may be repeated."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every tensor, not only the 30 most alarming.")] = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed between two sets of weights or two artifacts, the most alarming first.

    Exits with 1 if a condition of --fail-if is met, else with 0. No code in a pickle is run.
    """
    with errors_as_exit(as_json):
        policies = [Policy(text) for text in fail_if or ()]
        if _are_artifacts(before, after):
            if artifact or policies or keys or values or level:
                raise typer.BadParameter(_FOR_WEIGHTS)
            _show_artifacts(before, after, html, as_json)
            return
        with progress_bar("comparing") as progress:
            result = compare_weights(
                before,
                after,
                artifact=artifact,
                keys=keys,
                levels=_level_pair(level or []),
                values=values or any(policy.needs_values for policy in policies),
                progress=progress,
            )
        failures = {policy.text: policy.failures(result) for policy in policies}
        if html:
            write_report(html, weights_report(result, failures))
        if as_json:
            failed = [{"condition": text, "tensors": names} for text, names in failures.items()]
            head = {"kind": "weights", "level": result.level, "counts": result.counts, "fail_if": failed}
            print_json(head | structs.asdict(result))
        else:
            print_weights(result, failures, None if show_all else _MOST_SHOWN)
            print_facts([("report", str(html))] if html else [])
    if any(failures.values()):
        raise typer.Exit(1)


def _show_artifacts(before: str, after: str, html: Path | None, as_json: bool) -> None:
    result = compare_artifacts(before, after)
    if html:
        write_report(html, artifacts_report(result))
    if as_json:
        print_json({"kind": "artifacts", "verdict": result.verdict, **structs.asdict(result)})
        return
    print_artifacts(result)
    print_facts([("report", str(html))] if html else [])


def _level_pair(levels: list[str]) -> tuple[str | None, str | None]:
    if len(levels) > 2:
        raise typer.BadParameter("--level: give it once for both sets, or twice: first for BEFORE, then for AFTER")
    return (levels[0], levels[-1]) if levels else (None, None)


def _are_artifacts(before: str, after: str) -> bool:
    """Return whether both are artifacts. Raises Unsupported if only one is."""
    kinds = [is_artifact(path) for path in (before, after)]
    if any(kinds) and not all(kinds):
        artifact, other = (before, after) if kinds[0] else (after, before)
        raise Unsupported(f"{artifact} is an artifact and {other} is not; give two artifacts, or two sets of weights")
    return all(kinds)
