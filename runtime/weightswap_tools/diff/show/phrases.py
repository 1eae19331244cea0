"""Texts that the terminal and the page share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from weightswap_runtime.messages import listed, plural
from weightswap_tools.diff import SetInfo, TensorDiff, WeightsDiff
from weightswap_tools.diff.report import LEVELS
from weightswap_tools.terminal import human_bytes

NAMED = 20  # the most tensors to name for a condition


def percent(share: float) -> str:
    """Return a share as `100 %` or `0.02 %`. A nonzero share never reads as 0."""
    return f"{100 * share:.3g} %"


def largest_change(diff: TensorDiff) -> str:
    """Return the largest change of an element, as `0.5 at [3, 128]`."""
    if diff.change is None or diff.change.largest is None:
        return ""
    largest = diff.change.largest
    return f"{largest.change:.3g} at {list(largest.index)}" if largest.index else f"{largest.change:.3g}"


def condition_words(condition: str, names: Sequence[str]) -> str:
    """Return the condition and the tensors that meet it, at most NAMED of them."""
    return f"{condition}: {listed(names, NAMED)}" if names else condition


def set_facts(title: str, info: SetInfo) -> Iterator[tuple[str, str]]:
    """Yield a set's file and size, as `v1.safetensors (12 tensors, 1.2 MB)`, its id, labels and ignored tensors."""
    level = f", level {info.level}" if info.level else ""
    yield title, f"{info.where}{level} ({info.tensors} tensors, {human_bytes(info.nbytes)})"
    if info.weights_id:
        yield "weights id", info.weights_id
    yield from (("label", f"{label} = {text}") for label, text in info.labels.items())
    if info.ignored:
        yield "left out", ", ".join(info.ignored)


def verdict(diff: WeightsDiff) -> str:
    """Return the number of tensors by level, as `1 alarm, 2 notices, 3 changed, 4 the same`."""
    counts = Counter(tensor.level for tensor in diff.tensors)
    words = {
        "alarm": plural(counts["alarm"], "alarm"),
        "notice": plural(counts["notice"], "notice"),
        "changed": f"{counts['changed']} changed",
        "same": f"{counts['same']} the same",
    }
    return ", ".join(words[level] for level in LEVELS if counts[level]) or "no tensors"


def overall(diff: WeightsDiff) -> str:
    """Return the overall change of the tensors that changed."""
    whole = diff.overall
    if not whole.tensors:
        return "no value changed"
    change = "infinite" if math.isinf(whole.rel_change) else f"{whole.rel_change:.3g}"
    share = percent(whole.changed / max(1, whole.elements))
    tensors = plural(whole.tensors, "tensor")
    return f"{change} (relative, of {tensors} with other values); {share} of the elements"
