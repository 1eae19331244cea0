"""Report: the failures, if any, and the JSON summary."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from ledger import Generation, Latency, Ledger, accuracy, latency
from story import CLIENTS, Options, Outcome

from weightswap_runtime import __version__

DAMAGED_FILES = 2
Document = dict[str, Any]


def failures(outcome: Outcome, options: Options) -> list[str]:
    """Return every broken promise of the run, one sentence each."""
    return [*_answer_failures(outcome), *_commit_failures(outcome, options), *_server_failures(outcome)]


def _answer_failures(outcome: Outcome) -> Iterator[str]:
    ledger = outcome.ledger
    if ledger.wrong:
        yield f"{ledger.wrong} answers came from a generation other than the one they claim"
    if ledger.mixed:
        yield f"{ledger.mixed} answers came from no generation at all"
    checked = len(ledger.samples) + ledger.strays
    if checked != outcome.answers_given:
        yield f"{outcome.answers_given} answers were given, {checked} were checked"
    for generation in ledger.generations:
        if not generation.samples:
            yield f"generation {generation.generation} answered no requests"


def _commit_failures(outcome: Outcome, options: Options) -> Iterator[str]:
    committed = [generation.weights_id for generation in outcome.ledger.generations]
    if committed != outcome.expected_weights_ids or len(committed) != options.epochs + 2:
        yield f"{len(committed)} commits, without the expected weights ids"
    if not _rollback_correct(outcome):
        yield "the rollback did not bring the previous generation back"


def _rollback_correct(outcome: Outcome) -> bool:
    *_, previous, _, last = outcome.ledger.generations
    same = last.rolled_back and last.weights_id == previous.weights_id
    return same and bool(last.samples) and not last.wrong and not last.mixed


def _server_failures(outcome: Outcome) -> Iterator[str]:
    ledger = outcome.ledger
    if len(ledger.refusals) != DAMAGED_FILES:
        yield f"{len(ledger.refusals)} of {DAMAGED_FILES} damaged files were refused"
    for refusal in ledger.refusals:
        if not refusal.unchanged:
            yield f"refusing {refusal.file} changed what is served"
        if not ledger.answers_after(refusal):
            yield f"no request was answered after {refusal.file} was refused"
    if outcome.forbidden_imports:
        yield f"the server process imported {', '.join(outcome.forbidden_imports)}"


def summarise(outcome: Outcome, options: Options, seconds: float) -> Document:
    """Return the content of `summary.json`. Times have their unit in their name; accuracies are 0 to 1."""
    ledger = outcome.ledger
    problems = failures(outcome, options)
    last = ledger.generations[-1]
    return {
        "ok": not problems,
        "failures": problems,
        "seconds": round(seconds, 2),
        "options": {
            "epochs": options.epochs,
            "residency": options.residency,
            "pace": options.pace,
            "clients": CLIENTS,
            "rate": options.rate,
        },
        "versions": {
            "weightswap": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "scikit-learn": sklearn.__version__,
        },
        "processors": len(os.sched_getaffinity(0)),
        "graph_id": outcome.graph_id,
        "artifact_bytes": outcome.artifact_bytes,
        "weight_file_bytes": outcome.weight_file_bytes,
        "generations": [_generation(generation) for generation in ledger.generations],
        "totals": _totals(ledger),
        "refused": [
            {
                "file": refusal.file,
                "error": refusal.error,
                "message": refusal.message,
                "generation": refusal.generation,
                "weights_id": refusal.weights_id,
                "unchanged": refusal.unchanged,
                "answers_after": ledger.answers_after(refusal),
            }
            for refusal in ledger.refusals
        ],
        "rollback": {
            "generation": last.generation,
            "weights_id": last.weights_id,
            "epoch": last.epoch,
            "correct": _rollback_correct(outcome),
            "pause_us": _rounded(last.seconds_paused * 1e6),
        },
        "server_imports_clean": not outcome.forbidden_imports,
    }


def _generation(generation: Generation) -> Document:
    return {
        "generation": generation.generation,
        "weights_id": generation.weights_id,
        "epoch": generation.epoch,
        "rolled_back": generation.rolled_back,
        "accuracy": _rounded(accuracy(generation.samples)),
        "requests": len(generation.samples),
        **_latencies(latency(generation.samples)),
        "staged_ms": _rounded(generation.seconds_staged * 1e3),
        "pause_us": _rounded(generation.seconds_paused * 1e6),
        "wrong": generation.wrong,
        "mixed": generation.mixed,
    }


def _totals(ledger: Ledger) -> Document:
    samples = ledger.samples
    return {
        "requests": len(samples),
        "images": sum(sample.images for sample in samples),
        "wrong": ledger.wrong,
        "mixed": ledger.mixed,
        **_latencies(latency(samples)),
        "longest_silence_ms": _rounded(ledger.longest_silence() * 1e3),
    }


def _latencies(times: Latency) -> Document:
    return {"latency_p50_ms": _rounded(times.p50), "latency_p99_ms": _rounded(times.p99)}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def write_summary(path: Path, summary: Document) -> None:
    """Write the summary; the file appears whole."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    temporary.replace(path)
