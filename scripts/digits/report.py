"""Report: the failures, if any, and the JSON summary."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import sklearn
import torch
from ledger import Generation, Latency, Ledger, Sends, accuracy, latency
from story import CLIENTS, Options, Outcome

from weightswap_runtime import NotPromoted, __version__

Document = dict[str, Any]


def failures(outcome: Outcome, options: Options) -> list[str]:
    """Return every broken promise of the run, one sentence each."""
    sends = outcome.sends
    own = _delivery_failures(outcome, options) if sends is None else _sending_failures(outcome.ledger, sends)
    return [*_answer_failures(outcome), *own, *_server_failures(outcome)]


def _answer_failures(outcome: Outcome) -> Iterator[str]:
    ledger = outcome.ledger
    if ledger.wrong:
        yield f"{ledger.wrong} answers came from a generation other than the one they claim"
    if ledger.mixed:
        yield f"{ledger.mixed} answers came from no generation at all"
    if ledger.stale:
        yield f"{ledger.stale} answers came from weights that had been replaced before they were asked for"
    checked = len(ledger.samples) + ledger.strays
    if checked != outcome.answers_given:
        yield f"{outcome.answers_given} answers were given, {checked} were checked"
    committed = [generation.weights_id for generation in ledger.generations]
    if committed != outcome.expected_weights_ids:
        yield f"{len(committed)} commits, without the expected weights ids"


def _delivery_failures(outcome: Outcome, options: Options) -> Iterator[str]:
    generations = outcome.ledger.generations
    for generation in generations:
        if not generation.samples:
            yield f"generation {generation.generation} answered no requests"
    if len(generations) != options.epochs + 2:
        yield f"{len(generations)} commits, expected {options.epochs + 2}"
    if not _rollback_correct(outcome):
        yield "the rollback did not bring the previous generation back"


def _rollback_correct(outcome: Outcome) -> bool:
    *_, previous, _, last = outcome.ledger.generations
    same = last.rolled_back and last.weights_id == previous.weights_id
    return same and bool(last.samples) and not last.wrong and not last.mixed


def _sending_failures(ledger: Ledger, sends: Sends) -> Iterator[str]:
    generations = ledger.generations
    steps = [generation.version for generation in generations]
    if steps != sorted(steps) or steps[-1] != sends.last_step:
        yield f"the steps {steps} were served, expected ever later ones up to {sends.last_step}"
    for send in sends.served:
        claimed = generations[send.generation] if send.generation < len(generations) else None
        if claimed is None or (claimed.version, claimed.weights_id) != (send.step, send.weights_id):
            yield f"the trainer was told that step {send.step} is generation {send.generation}, which it is not"
    told = [(other["error"], other["message"]) for other in sends.others if other["error"] != NotPromoted.__name__]
    if told != [(refusal.error, refusal.message) for refusal in ledger.refusals]:
        yield f"the trainer was told the refusals {told}, which are not those of the server"
    if sends.resumed_at != sends.halted_at:
        yield f"the trainer was killed at step {sends.halted_at} and went on from step {sends.resumed_at}"
    if any(each.version == sends.halted_at and each.at < sends.resumed for each in generations):
        yield f"step {sends.halted_at} was served, of which half was sent"
    if not ledger.answers_between(sends.killed, sends.resumed):
        yield "no request was answered while there was no trainer"


def _server_failures(outcome: Outcome) -> Iterator[str]:
    ledger = outcome.ledger
    expected = ["WeightFileError", "DigestMismatch"] if outcome.sends is None else ["NonFiniteWeights"]
    found = [refusal.error for refusal in ledger.refusals]
    if found != expected:
        yield f"refused were {found}, expected {expected}"
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
    return {
        "ok": not problems,
        "failures": problems,
        "seconds": round(seconds, 2),
        "options": {
            "epochs": options.epochs,
            "live": options.live,
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
        "generations": [_generation(generation, ledger.unit) for generation in ledger.generations],
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
        **(_rollback(outcome) if outcome.sends is None else _sending(ledger, outcome.sends)),
        "server_imports_clean": not outcome.forbidden_imports,
    }


def _rollback(outcome: Outcome) -> Document:
    last = outcome.ledger.generations[-1]
    fields = {
        "generation": last.generation,
        "weights_id": last.weights_id,
        "epoch": last.version,
        "correct": _rollback_correct(outcome),
        "pause_us": _rounded(last.seconds_paused * 1e6),
    }
    return {"rollback": fields}


def _sending(ledger: Ledger, sends: Sends) -> Document:
    fields = {
        "steps_served": len({generation.version for generation in ledger.generations}),
        "superseded": sum(other["error"] == NotPromoted.__name__ for other in sends.others),
        "until_served_p50_ms": _rounded(
            median([send.seconds_until_served for send in sends.served] or [math.nan]) * 1e3
        ),
        "trainer_held_p50_ms": _rounded(median([send.seconds_held for send in sends.served] or [math.nan]) * 1e3),
        "trainer_held_ms": _rounded(sum(send.seconds_held for send in sends.served) * 1e3),
        "killed_at_step": sends.halted_at,
        "answers_without_trainer": ledger.answers_between(sends.killed, sends.resumed),
    }
    return {"sending": fields}


def _generation(generation: Generation, unit: str) -> Document:
    return {
        "generation": generation.generation,
        "weights_id": generation.weights_id,
        unit: generation.version,
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
        "stale": ledger.stale,
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
