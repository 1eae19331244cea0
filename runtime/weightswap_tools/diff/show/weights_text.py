"""The terminal output of a comparison of weights."""

from __future__ import annotations

from collections.abc import Mapping

from weightswap_tools.diff import TensorDiff, WeightsDiff
from weightswap_tools.terminal import print_table, say

from .phrases import condition_words, largest_change, overall, percent, set_facts, verdict

COLUMNS = ["level", "tensor", "what", "relative change", "largest change", "elements changed", "cosine"]


def print_weights(diff: WeightsDiff, most: int | None) -> None:
    """Print a summary and the `most` alarming changed tensors; None prints all tensors, also unchanged ones."""
    facts = [*set_facts("before", diff.before), *set_facts("after", diff.after)]
    facts += [("tensors", verdict(diff)), ("change", overall(diff)), *(("note", notice) for notice in diff.notices)]
    for title, text in facts:
        say(f"{title:<12}{text}")
    differing = [tensor for tensor in diff.tensors if tensor.level != "same"]
    shown = differing[:most] if most is not None else list(diff.tensors)
    if shown:
        title = f"{len(shown)} of {len(diff.tensors)} tensors, the most alarming first"
        print_table(title, COLUMNS, [tensor_cells(tensor) for tensor in shown])
    if len(shown) < len(differing):
        say(f"{len(differing) - len(shown)} more differ; --all shows them")


def print_failures(failures: Mapping[str, tuple[str, ...]]) -> None:
    """Print which tensors meet each condition."""
    for condition, names in failures.items():
        say(f"{'failed' if names else 'passed':<12}{condition_words(condition, names)}")


def tensor_cells(tensor: TensorDiff) -> list[str]:
    """Return the cells of a tensor, in the order of COLUMNS."""
    change = tensor.change
    return [
        tensor.level,
        tensor.name,
        "; ".join(tensor.reasons),
        f"{change.rel_change:.3g}" if change else "",
        largest_change(tensor),
        percent(change.share_changed) if change else "",
        f"{change.cosine:.6f}" if change and change.cosine is not None else "",
    ]
