"""docs/transformers.md: every model type of transformers, and what happened to it when it was last tried."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch
import transformers

from tests import ROOT
from tests.wild.survey import BROKEN, EQUAL, FOUND, LARGE, REFUSED, SLOW, TRACED, UNBUILT, UNKNOWN, Outcome

PAGE = ROOT / "docs" / "transformers.md"
_MOST_LETTERS = 150  # of a reason
_MEANINGS = {
    EQUAL: "inputs were found, the exported model served other weights, and its outputs equalled eager's bit for bit",
    TRACED: "as equal, but to the outputs of `torch.export`'s own module: the model computes otherwise while captured",
    FOUND: "eager accepts the inputs that were found; no export was tried",
    REFUSED: "eager accepts the inputs, and the export is refused for the reason that is given",
    UNKNOWN: "no inputs were found that eager accepts: `--inputs` is needed",
    LARGE: "this machine has not the memory for two sets of weights and what is computed from them",
    SLOW: "it took longer than a minute or two here",
    UNBUILT: "transformers builds no small model from the type's default configuration here",
    BROKEN: "a fault of weightswap's",
}


def add(outcomes: Mapping[str, Outcome]) -> None:
    """Put these in the place of what the page says of their types."""
    PAGE.write_text(text(read() | outcomes))


def text(outcomes: Mapping[str, Outcome]) -> str:
    """The whole page."""
    return "\n".join([*_head(outcomes), *(_row(name, outcomes[name]) for name in sorted(outcomes)), ""])


def read() -> dict[str, Outcome]:
    """What the page says."""
    if not PAGE.exists():
        return {}
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: Outcome(what, inputs, reason) for name, what, inputs, reason in rows}


def _head(outcomes: Mapping[str, Outcome]) -> list[str]:
    counts = Counter(outcome.what for outcome in outcomes.values())
    served = counts[EQUAL] + counts[TRACED]
    called = served + sum(counts[what] for what in (FOUND, REFUSED, LARGE, BROKEN))
    exportable = served + counts[BROKEN] + sum(_is_ours(outcome) for outcome in outcomes.values())
    built = called + counts[UNKNOWN]
    return [
        "# Model types of transformers",
        "",
        "What `weightswap export hf:DIR` makes of each type that `AutoModel` of transformers",
        f"{transformers.__version__} has, on torch {torch.__version__}. Each is built from its default configuration,",
        "made small, with random weights, in a process of its own. `scripts/survey` prints this page.",
        "[checkpoints.md](checkpoints.md#hugging-face-models) says how inputs are found, and how to give others.",
        "",
        f"Of {len(outcomes)} types, {built} can be built and tried here; inputs are found for {called} of these",
        f"({100 * called / max(built, 1):.1f} %). Of {exportable} that were tried and that `torch.export` captures,",
        f"{served} are served ({100 * served / max(exportable, 1):.1f} %).",
        "",
        "| outcome | types | |",
        "|---|---|---|",
        *(f"| {what} | {counts[what]} | {meaning} |" for what, meaning in _MEANINGS.items()),
        "",
        "| type | outcome | inputs | why |",
        "|---|---|---|---|",
    ]


def _is_ours(outcome: Outcome) -> bool:
    """Whether weightswap has refused what torch captures."""
    return outcome.what == REFUSED and "torch.export cannot capture it" not in outcome.reason


def _row(name: str, outcome: Outcome) -> str:
    return f"| `{name}` | {outcome.what} | {outcome.inputs} | {_reason(outcome)} |"


def _reason(outcome: Outcome) -> str:
    """The part of an error that says most: a package that is needed, what eager says, else the beginning."""
    said = " ".join(outcome.reason.split())
    for pattern in (
        r"requires the (\S+) library",
        r"^.*?  - .*?\]: (.*?)(?:  - .*)? Give others",
        r"; (it takes .*?) Give others",
    ):
        if found := re.search(pattern, said.replace(" - ", "  - ")):
            said = f"needs the package {found[1]}" if "requires" in pattern else found[1]
            break
    said = re.sub(r"[|`<>\[\]]", " ", said)
    return said if len(said) <= _MOST_LETTERS else f"{said[: _MOST_LETTERS - 3]}..."
