"""docs/transformers.md and docs/libraries.md: models of others, and what happened to each when it was last tried."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from tests import ROOT
from tests.wild.survey import BROKEN, EQUAL, FOUND, LARGE, REFUSED, SLOW, TRACED, UNBUILT, UNKNOWN, Outcome

TRANSFORMERS, LIBRARIES = ROOT / "docs" / "transformers.md", ROOT / "docs" / "libraries.md"
_MOST_LETTERS = 150  # of a reason
_MEANINGS = {
    EQUAL: "the exported model served other weights, and its outputs equalled eager's bit for bit",
    TRACED: "equal to the outputs of `torch.export`'s own module: the model computes something else while captured",
    FOUND: "eager accepts the inputs that were found; no export was tried",
    REFUSED: "eager accepts the inputs, and the export is refused for the reason in the last column",
    UNKNOWN: "no inputs were found that eager accepts: `--inputs` is needed",
    LARGE: "this machine lacks the memory for two sets of weights and what is computed from them",
    SLOW: "it takes longer than a minute or two here",
    UNBUILT: "its library cannot build or call a small model of it here",
    BROKEN: "a fault of weightswap's",
}


def add(page: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Put these in the place of what the page says of them."""
    page.write_text(text(page, read(page) | outcomes))


def text(page: Path, outcomes: Mapping[str, Outcome]) -> str:
    """The whole page."""
    head = _on_transformers if page == TRANSFORMERS else _on_libraries
    counts = Counter(outcome.what for outcome in outcomes.values())
    meanings = [f"| {what} | {counts[what]} | {meaning} |" for what, meaning in _MEANINGS.items() if counts[what]]
    rows = [_row(name, outcomes[name]) for name in sorted(outcomes)]
    table = ["", "| outcome | models | |", "|---|---|---|", *meanings, "", "| model | outcome | inputs | why |"]
    return "\n".join([*head(outcomes, counts), *table, "|---|---|---|---|", *rows, ""])


def read(page: Path) -> dict[str, Outcome]:
    """What the page says."""
    if not page.exists():
        return {}
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", page.read_text(), re.MULTILINE)
    return {name: Outcome(what, inputs, reason) for name, what, inputs, reason in rows}


def _on_transformers(outcomes: Mapping[str, Outcome], counts: Counter[str]) -> list[str]:
    served, exportable = _served(outcomes, counts)
    called = served + sum(counts[what] for what in (FOUND, REFUSED, LARGE, BROKEN))
    built = called + counts[UNKNOWN]
    return [
        "# Model types of transformers",
        "",
        "What `weightswap export hf:DIR` does with each model type of `AutoModel` in transformers",
        f"{version('transformers')}, on torch {torch.__version__}. Each model is built from its default configuration,",
        "made small, with random weights, in a process of its own. `scripts/survey` prints this page.",
        "[checkpoints.md](checkpoints.md#hugging-face-models) says how inputs are found, and how to give others.",
        "",
        f"Of {len(outcomes)} types, {built} can be built and tried here; inputs are found for {called} of these",
        f"({100 * called / max(built, 1):.1f} %). Of {exportable} that were tried and that `torch.export` captures,",
        f"{served} are served ({100 * served / max(exportable, 1):.1f} %).",
    ]


def _on_libraries(outcomes: Mapping[str, Outcome], counts: Counter[str]) -> list[str]:
    served, exportable = _served(outcomes, counts)
    return [
        "# Models of other libraries",
        "",
        "The smallest model of each family of timm and models of torchvision, diffusers, torch_geometric and",
        "segmentation_models_pytorch; recommenders of torchrec, torch-rechub, deepctr-torch, recbole, fuxictr and",
        "pytorch-widedeep, these also as skeletons. Each is exported with a dynamic batch if it has one, packed",
        "twice with random weights, and called with another batch after a swap; on torch",
        f"{torch.__version__}, in a process of its own. `scripts/survey --libraries` and `--recommenders` print this",
        "page. [transformers.md](transformers.md) has those of transformers.",
        "",
        f"Of the {exportable} that can be built here and that `torch.export` captures, {served} are served.",
    ]


def _served(outcomes: Mapping[str, Outcome], counts: Counter[str]) -> tuple[int, int]:
    """How many are served, and how many of those that were tried torch can capture."""
    served = counts[EQUAL] + counts[TRACED]
    return served, served + counts[BROKEN] + sum(_is_ours(outcome) for outcome in outcomes.values())


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
