"""A comparison of weights on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from weightswap_tools.diff import SetInfo, TensorDiff, WeightsDiff
from weightswap_tools.terminal import print_table, say

from .phrases import condition_words, largest_change, overall, percent, set_facts, short, verdict

COLUMNS = ["level", "tensor", "what", "relative change", "largest change", "elements changed", "cosine"]


def print_weights(diff: WeightsDiff, most: int | None) -> None:
    """A summary, and the `most` alarming tensors; None: all of them. Without `most`, those that are the same, too."""
    for title, info in (("before", diff.before), ("after", diff.after)):
        _print_set(title, info)
    _say("tensors", verdict(diff))
    _say("change", overall(diff))
    for notice in diff.notices:
        _say("note", notice)
    differing = [tensor for tensor in diff.tensors if tensor.level != "same"]
    shown = differing[:most] if most is not None else list(diff.tensors)
    if shown:
        print_table(_title(len(shown), len(diff.tensors)), COLUMNS, [tensor_cells(tensor) for tensor in shown])
    if len(shown) < len(differing):
        say(f"{len(differing) - len(shown)} more differ; --all shows them")


def print_failures(failures: Mapping[str, tuple[str, ...]]) -> None:
    """Which tensors meet each condition."""
    for condition, names in failures.items():
        _say("failed" if names else "passed", condition_words(condition, names))


def _print_set(title: str, info: SetInfo) -> None:
    _say(title, set_facts(info))
    if info.weights_id:
        _say("weights id", info.weights_id)
    for label, text in info.labels.items():
        _say("label", f"{label} = {text}")
    if info.ignored:
        _say("left out", ", ".join(info.ignored))


def _say(title: str, text: str) -> None:
    say(f"{title:<12}{text}")


def _title(shown: int, count: int) -> str:
    return f"{shown} of {count} tensors, the most alarming first"


def tensor_cells(tensor: TensorDiff) -> list[str]:
    """A tensor's row, in the order of COLUMNS."""
    change = tensor.change
    return [
        tensor.level,
        tensor.name,
        "; ".join(tensor.reasons),
        short(change.rel_change) if change else "",
        largest_change(tensor),
        percent(change.share_changed) if change else "",
        f"{change.cosine:.6f}" if change and change.cosine is not None else "",
    ]
