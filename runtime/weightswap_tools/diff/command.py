"""`weightswap diff`: what changed between two weight files, checkpoints or artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.artifact import is_artifact
from weightswap_tools.commands.swap import KeysOption
from weightswap_tools.diff import ArtifactsDiff, Policy, WeightsDiff, compare_artifacts, compare_weights
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import HtmlOption, JsonOption, errors_as_exit, print_json, progress_bar, say

from .show.artifacts_page import artifacts_report
from .show.artifacts_text import print_artifacts
from .show.weights_page import weights_report
from .show.weights_text import print_failures, print_weights

diff_command = typer.Typer(add_completion=False)


@diff_command.command()
def diff(
    before: Annotated[str, typer.Argument(help="A weight file, a checkpoint or an artifact; or a URL.")],
    after: Annotated[str, typer.Argument(help="What it became.")],
    artifact: Annotated[
        Path | None,
        typer.Option("--artifact", "-a", help="Compare both as weights of this artifact, as swap would read them."),
    ] = None,
    keys: KeysOption = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="Where in a pickled or distributed checkpoint the weights are: keys joined with dots, as ema. Give it "
            "twice where they differ: for what was before, and for what is after."
        ),
    ] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Read tensors, too, of which both files record the same digest.")
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if any tensor meets this, as 'new_nan or rel_change > 0.5'; may be repeated."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every tensor, not the 30 most alarming alone.")] = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed between two sets of weights, or two artifacts: the most alarming first.

    The status is 0 whatever changed, and 1 where a condition of --fail-if is met. Nothing in a pickle runs.
    """
    with errors_as_exit(as_json):
        policies = [Policy(text) for text in fail_if or ()]
        if _are_artifacts(before, after):
            if artifact or policies or keys or values or level:
                raise typer.BadParameter(_FOR_WEIGHTS)
            _show_artifacts(compare_artifacts(before, after), html, as_json)
            return
        with progress_bar("comparing") as progress:
            levels = _levels(level or [])
            read = values or any(policy.needs_values for policy in policies)
            found = compare_weights(
                before, after, artifact=artifact, keys=keys, levels=levels, values=read, progress=progress
            )
        failures = {policy.text: policy.failures(found) for policy in policies}
        _show_weights(found, failures, html, None if show_all else SHOWN, as_json)
    if any(failures.values()):
        raise typer.Exit(1)


SHOWN = 30
_FOR_WEIGHTS = "--artifact, --keys, --level, --values and --fail-if are for weights, not artifacts"


def _levels(given: list[str]) -> tuple[str | None, str | None]:
    if len(given) > 2:
        raise typer.BadParameter("--level is given once for both, or twice: for what was before, and for what is after")
    return (given[0], given[-1]) if given else (None, None)


def _are_artifacts(before: str, after: str) -> bool:
    """Raises Unsupported for an artifact and something else."""
    found = [is_artifact(path) for path in (before, after)]
    if any(found) and not all(found):
        which, other = (before, after) if found[0] else (after, before)
        raise Unsupported(f"{which} is an artifact and {other} is not; give two artifacts, or two sets of weights")
    return all(found)


def _show_artifacts(result: ArtifactsDiff, html: Path | None, as_json: bool) -> None:
    if html:
        write_report(html, artifacts_report(result))
    if as_json:
        print_json({"kind": "artifacts", "verdict": result.verdict, **structs.asdict(result)})
        return
    print_artifacts(result)
    _say_where(html)


def _show_weights(
    result: WeightsDiff, failures: dict[str, tuple[str, ...]], html: Path | None, most: int | None, as_json: bool
) -> None:
    if html:
        write_report(html, weights_report(result, failures))
    if as_json:
        failed = [{"condition": text, "tensors": names} for text, names in failures.items()]
        head = {"kind": "weights", "level": result.level, "counts": result.counts, "fail_if": failed}
        print_json(head | structs.asdict(result))
        return
    print_weights(result, most)
    print_failures(failures)
    _say_where(html)


def _say_where(html: Path | None) -> None:
    if html:
        say(f"report      {html}")
