"""The HTML report of `weightswap swap`: a timeline of swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightswap_runtime.errors import WeightswapError
from weightswap_runtime.live.model import Model
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.messages import plural
from weightswap_tools.reports.blocks import (
    Block,
    Cell,
    Column,
    Facts,
    Lane,
    Note,
    Report,
    Section,
    Span,
    Timeline,
    table_of,
)
from weightswap_tools.reports.page import write_report

_COLUMNS: tuple[tuple[Column, Callable[[SwapReceipt], Cell]], ...] = (
    (Column("generation", "number"), lambda receipt: receipt.generation),
    (Column("source"), lambda receipt: receipt.source),
    (Column("kind"), lambda receipt: receipt.kind),
    (Column("weights id"), lambda receipt: receipt.weights_id[:12]),
    (Column("verified"), lambda receipt: receipt.verified),
    (Column("not finite"), lambda receipt: ", ".join(f"{name}: {text}" for name, text in receipt.nonfinite.items())),
    (Column("read", "bytes"), lambda receipt: receipt.bytes_read),
    (Column("copied", "bytes"), lambda receipt: receipt.bytes_copied),
    (Column("staged, ms", "number"), lambda receipt: round(receipt.seconds_staged * 1e3, 4)),
    (Column("verified, ms", "number"), lambda receipt: round(receipt.seconds_verified * 1e3, 4)),
    (Column("paused, ms", "number"), lambda receipt: round(receipt.seconds_paused * 1e3, 4)),
)


@contextmanager
def swaps_reported(path: Path | None, model: Model) -> Iterator[None]:
    """Write a report of the swaps in the block, even if it ends with a refusal. Without a path, do nothing."""
    refusal = ""
    try:
        yield
    except WeightswapError as error:
        refusal = f"{type(error).__name__}: {error}"
        raise
    finally:
        if path is not None:
            write_report(path, swaps_report(model, model.history, refusal))


def swaps_report(model: Model, receipts: Sequence[SwapReceipt], refusal: str = "") -> Report:
    """Return a report with facts, a timeline, and a row for each commit."""
    facts = (
        ("artifact", str(model.artifact.path)),
        ("graph id", model.graph_id),
        ("engine", _engine_text(model)),
        ("device", model.device),
        ("residency", model.residency),
        ("weights id", model.weights_id or "none"),
    )
    notes: tuple[Block, ...] = (Note(refusal, "bad"),) if refusal else ()
    swaps: tuple[Block, ...] = (Note("nothing was committed"),)
    if receipts:
        timeline = Timeline((Lane("swaps", tuple(_spans(receipts))),), "From the first byte to the commit.")
        swaps = (timeline, table_of(receipts, _COLUMNS))
    count = len(receipts)
    return Report(
        title="Swaps",
        subtitle=str(model.artifact.path),
        sections=(Section("Model", (Facts(facts), *notes)), Section("Swaps", swaps)),
        verdict="refused" if refusal else plural(count, "commit"),
        good=not refusal,
    )


def _engine_text(model: Model) -> str:
    """Return the engine, and the methods that torch runs in its place."""
    others = [name for name, engine in model.engines.items() if engine != model.engine]
    return f"{model.engine}; torch runs {', '.join(others)}" if others else model.engine


def _spans(receipts: Sequence[SwapReceipt]) -> Iterator[Span]:
    """Yield the phases of each commit, in seconds from the start of the first."""
    begin = min(receipt.committed_at - _duration(receipt) for receipt in receipts)
    for receipt in receipts:
        at = receipt.committed_at - _duration(receipt) - begin
        phases = {
            "staged": receipt.seconds_staged,
            "verified": receipt.seconds_verified,
            "paused": receipt.seconds_paused,
        }
        for kind, length in phases.items():
            yield Span(at, at + length, f"generation {receipt.generation}, {kind}: {receipt.source}", kind)
            at += length


def _duration(receipt: SwapReceipt) -> float:
    return receipt.seconds_staged + receipt.seconds_verified + receipt.seconds_paused
