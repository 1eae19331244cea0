"""`weightswap swap`, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.errors import WeightswapError, plural
from weightswap_runtime.following.file_queue import Start
from weightswap_runtime.following.watching import Watching
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.live.receipt import Event, SwapReceipt
from weightswap_runtime.live.residency import ResidencyName
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_tools.reports.blocks import (
    Axis,
    Block,
    Cell,
    Column,
    Facts,
    Line,
    LinePlot,
    Note,
    Report,
    Section,
    table_of,
)
from weightswap_tools.reports.page import write_report
from weightswap_tools.terminal import (
    ArtifactArgument,
    DeviceOption,
    EngineOption,
    HtmlOption,
    IgnoreOption,
    JsonOption,
    KeysOption,
    OpLibraryOption,
    errors_as_exit,
    human_bytes,
    print_json,
    printable_json,
    say,
    warnings_said,
)

from .weights import time_text

_VERIFIED = {"goldens": "recorded outputs are reproduced", "finite": "outputs of recorded calls are finite"}
_POLL_SECONDS = 0.2  # to notice that the watcher has ended by itself
swap_command = typer.Typer(add_completion=False)


@swap_command.command()
def swap(
    artifact: ArtifactArgument,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="Weight files, deltas, .safetensors checkpoints, shard indices or Hugging Face folders, or their URLs."
        ),
    ] = None,
    watch: Annotated[
        str | None, typer.Option(help="Then swap in each new weight file of this directory or URL, until Ctrl-C.")
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(help="Then serve the desired state at this desired store (docs/desired.md), until Ctrl-C."),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between polls of the directory or desired store.")] = 5.0,
    start: Annotated[Start, typer.Option(help="Which existing files of the directory to swap in.")] = "newest",
    keys: KeysOption = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    residency: Annotated[ResidencyName, typer.Option(help="The residency that the server will have.")] = "double",
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Accept files of another graph, if their tensors fit.")
    ] = False,
    verify: Annotated[
        Mode, typer.Option(help="Verify weights with recorded calls, for finite outputs only, or not at all.")
    ] = "goldens",
    allow_nonfinite: Annotated[
        list[str] | None,
        typer.Option(
            help="Refuse NaN and infinities in weights that were finite, except in weights of this name, such as "
            "`*.mask`; `*` allows all. May be repeated. Without it, only --watch refuses them."
        ),
    ] = None,
    refuse_nonfinite: Annotated[
        bool, typer.Option("--refuse-nonfinite", help="Refuse NaN and infinities even without --watch.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Swap only weights of this name, such as `encoder.*`, from all files but the first; may be repeated."
        ),
    ] = None,
    ignore: IgnoreOption = None,
    expect: Annotated[str | None, typer.Option(help="Refuse the last file unless it gives this weights id.")] = None,
    rate_limit: Annotated[
        float | None, typer.Option(help="Maximum bytes to read and copy per second, such as 200e6.")
    ] = None,
    html: HtmlOption = None,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Swap checkpoints in one after another, to learn whether a server would accept them and what swaps cost.

    No server is involved. The first refused file ends the command with status 1. With --watch or --follow, each event
    is a line (with --json a JSON document), and refused files do not end the command; Ctrl-C does, with status 0.
    """
    if not checkpoints and watch is None and follow is None:
        raise typer.BadParameter("give files, or --watch DIR, or --follow STORE")
    if watch is not None and follow is not None:
        raise typer.BadParameter("--watch and --follow: give only one")
    continuous = watch is not None or follow is not None
    receipts: list[SwapReceipt] = []
    document = {} if continuous else {"receipts": receipts}
    with errors_as_exit(as_json, document):
        model = load(
            artifact,
            engine=engine,
            device=device,
            residency=residency,
            on_event=(print_event_as_json if as_json else print_event) if continuous else None,
            op_libraries=op_library or (),
        )
        options: dict[str, Any] = {
            "keys": keys,
            "ignore": ignore or (),
            "allow_other_graph": allow_other_graph,
            "verify": verify,
            "rate_limit": rate_limit,
        }
        allowed = allow_nonfinite or (False if refuse_nonfinite else None)
        with _swaps_reported(html, model):
            for number, path in enumerate(checkpoints or (), start=1):
                part = only if number > 1 else None
                last = expect if number == len(checkpoints or ()) else None
                with warnings_said():
                    receipts.append(model.swap(path, only=part, expect=last, allow_nonfinite=allowed, **options))
                if not as_json and not continuous:
                    print_receipt(receipts[-1])
            options["allow_nonfinite"] = allowed or False
            if watch is not None:
                _watch_until_interrupt(partial(model.watch, watch, interval, start=start, only=only, **options))
            if follow is not None:
                _watch_until_interrupt(partial(model.follow, follow, interval, **options))
        if as_json and not continuous:
            print_json(document)


def print_event(event: Event) -> None:
    """Print an event as one line of text, with terminal control characters escaped."""
    say(" ".join(str(event).split()))


def print_event_as_json(event: Event) -> None:
    """Print an event as one line of JSON."""
    typer.echo(printable_json(event.as_dict()).decode())


def _watch_until_interrupt(start: Callable[[], Watching]) -> None:
    """Start a watcher, and stop it on Ctrl-C. Returns once it has ended."""
    watcher: Watching | None = None
    try:
        watcher = start()
        while watcher.alive:
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        if watcher is not None:
            watcher.stop()


def print_receipt(receipt: SwapReceipt) -> None:
    """Print the receipt of a swap for people."""
    say(f"generation  {receipt.generation}: {receipt.source}")
    say(f"weights id  {receipt.weights_id}")
    rate = receipt.bytes_read / max(receipt.seconds_staged, 1e-9)
    size, speed = human_bytes(receipt.bytes_read), human_bytes(int(rate))
    say(f"staged      {size} in {receipt.seconds_staged:.3f} s ({speed}/s)")
    if receipt.verified != "none":
        say(f"verified    {_VERIFIED[receipt.verified]}, in {receipt.seconds_verified:.3f} s")
    say(f"paused      {receipt.seconds_paused * 1e6:.1f} us")
    for name, text in receipt.nonfinite.items():
        say(f"warning     {name} is not finite: {text}")
    if receipt.ignored:
        say(f"left out    {', '.join(receipt.ignored)}")


# The report.


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
    (Column("committed"), lambda receipt: time_text(receipt.committed_at)),
)


@contextmanager
def _swaps_reported(path: Path | None, model: Model) -> Iterator[None]:
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
    """Return a report with facts, a plot of the times, and a row for each commit."""
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
        swaps = (_plot(receipts), table_of(receipts, _COLUMNS))
    sections = (Section("Model", (Facts(facts), *notes)), Section("Swaps", swaps))
    verdict = "refused" if refusal else plural(len(receipts), "commit")
    return Report("Swaps", str(model.artifact.path), sections, verdict, not refusal)


def _engine_text(model: Model) -> str:
    """Return the engine, and the methods that torch runs in its place."""
    others = [name for name, engine in model.engines.items() if engine != model.engine]
    return f"{model.engine}; torch runs {', '.join(others)}" if others else model.engine


def _plot(receipts: Sequence[SwapReceipt]) -> LinePlot:
    """Return a plot with a line for each phase; a pause is many times shorter than the staging, hence the scale."""
    phases: dict[str, Callable[[SwapReceipt], float]] = {
        "staged": lambda receipt: receipt.seconds_staged,
        "verified": lambda receipt: receipt.seconds_verified,
        "paused": lambda receipt: receipt.seconds_paused,
    }
    lines = tuple(
        Line(name, tuple((receipt.generation, seconds(receipt) * 1e3) for receipt in receipts))
        for name, seconds in phases.items()
    )
    return LinePlot(lines, Axis("generation"), Axis("time", "ms", "log"), "The phases of each swap")
