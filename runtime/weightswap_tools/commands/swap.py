"""`weightswap swap`: put checkpoints behind an artifact, one after another, as a server would."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.name_matching import Keys
from weightswap_runtime.live.events import Event
from weightswap_runtime.live.loading import load
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.live.residency.residency import ResidencyName
from weightswap_runtime.live.watching.intake import Start
from weightswap_runtime.live.watching.loop import Watching
from weightswap_runtime.memory.device_choice import HOST
from weightswap_tools.terminal import (
    DeviceOption,
    EngineOption,
    HtmlOption,
    IgnoreOption,
    JsonOption,
    OpLibraryOption,
    errors_as_exit,
    human_bytes,
    print_json,
    printable_json,
    say,
    warnings_said,
)

from .swap_page import reported

POLL_SECONDS = 0.2  # how soon it is noticed that the watching has ended by itself
swap_command = typer.Typer(add_completion=False)


KeysOption = Annotated[
    Keys | None,
    typer.Option(help="What the names of a checkpoint are, where it would fit both ways with different results."),
]


@swap_command.command()
def swap(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder, or its URL.")],
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="Weight files, deltas, .safetensors checkpoints, indices of shards, Hugging Face folders, or "
            "their URLs."
        ),
    ] = None,
    watch: Annotated[
        str | None, typer.Option(help="Then swap in each new weight file of this directory or URL, until Ctrl-C.")
    ] = None,
    follow: Annotated[
        str | None, typer.Option(help="Then serve what this place says is desired (docs/desired.md), until Ctrl-C.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at the directory or place.")] = 5.0,
    start: Annotated[
        Start, typer.Option(help="Which of the files that the directory has already are taken.")
    ] = "newest",
    keys: KeysOption = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    residency: Annotated[ResidencyName, typer.Option(help="As the server will be loaded.")] = "double",
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Take files packed for another graph, if their tensors fit.")
    ] = False,
    verify: Annotated[
        Mode, typer.Option(help="Try weights with recorded calls, for finite outputs alone, or not at all.")
    ] = "goldens",
    allow_nonfinite: Annotated[
        list[str] | None,
        typer.Option(
            help="Refuse files that bring NaN or infinities to weights that were finite, but for weights of this name, "
            "as `*.mask`; `*` takes all. May be repeated. Without it, only --watch refuses them."
        ),
    ] = None,
    refuse_nonfinite: Annotated[
        bool, typer.Option("--refuse-nonfinite", help="Refuse such files also without --watch.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Take only weights of this name, as `encoder.*`, of every file but the first; may be repeated."
        ),
    ] = None,
    ignore: IgnoreOption = None,
    expect: Annotated[str | None, typer.Option(help="Refuse the last file unless it gives this weights id.")] = None,
    rate_limit: Annotated[
        float | None, typer.Option(help="Read and copy at most so many bytes per second, as 200e6.")
    ] = None,
    html: HtmlOption = None,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Swap checkpoints in, one after another: whether a server would take them, and what it would cost.

    The first that is refused ends the command with status 1. No server is touched. With --watch or --follow, each event
    is a line (with --json a JSON document), and files that are refused then do not end the command; Ctrl-C does, with
    status 0.
    """
    if not checkpoints and watch is None and follow is None:
        raise typer.BadParameter("give files, or --watch DIR, or --follow PLACE")
    if watch is not None and follow is not None:
        raise typer.BadParameter("--watch and --follow: give one")
    goes_on = watch is not None or follow is not None
    receipts: list[SwapReceipt] = []
    document = {} if goes_on else {"receipts": receipts}
    with errors_as_exit(as_json, document):
        told = print_event_as_json if as_json else print_event
        model = load(
            artifact,
            engine=engine,
            device=device,
            residency=residency,
            on_event=told if goes_on else None,
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
        with reported(html, model):
            for number, path in enumerate(checkpoints or (), start=1):
                part = only if number > 1 else None
                last = expect if number == len(checkpoints or ()) else None
                with warnings_said():
                    receipts.append(model.swap(path, only=part, expect=last, allow_nonfinite=allowed, **options))
                if not as_json and not goes_on:
                    say_receipt(receipts[-1])
            options["allow_nonfinite"] = allowed or False
            if watch is not None:
                watch_until_interrupt(partial(model.watch, watch, interval, start=start, only=only, **options))
            if follow is not None:
                watch_until_interrupt(partial(model.follow, follow, interval, **options))
        if as_json and not goes_on:
            print_json(document)


def print_event(event: Event) -> None:
    """An event as one line of text; what a terminal would obey, in the names of a file's tensors, is escaped."""
    say(" ".join(str(event).split()))


def print_event_as_json(event: Event) -> None:
    """An event as one line of JSON."""
    typer.echo(printable_json(event.as_dict()).decode())


def watch_until_interrupt(start: Callable[[], Watching]) -> None:
    """Start the watching, and return on Ctrl-C when it has ended. Events may be printed before it has been started."""
    watcher: Watching | None = None
    try:
        watcher = start()
        while watcher.alive:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        if watcher is not None:
            watcher.stop()


def say_receipt(receipt: SwapReceipt) -> None:
    """What a swap did, in lines for people."""
    say(f"generation  {receipt.generation}: {receipt.source}")
    say(f"weights id  {receipt.weights_id}")
    rate = receipt.bytes_read / max(receipt.seconds_staged, 1e-9)
    size, speed = human_bytes(receipt.bytes_read), human_bytes(int(rate))
    say(f"staged      {size} in {receipt.seconds_staged:.3f} s ({speed}/s)")
    if receipt.verified != "none":
        say(f"verified    {_VERIFIED[receipt.verified]}, in {receipt.seconds_verified:.3f} s")
    say(f"paused      {receipt.seconds_paused * 1e6:.1f} us")
    for name, found in receipt.nonfinite.items():
        say(f"warning     {name} is not finite: {found}")
    if receipt.ignored:
        say(f"left out    {', '.join(receipt.ignored)}")


_VERIFIED = {"goldens": "recorded outputs are reproduced", "finite": "outputs of recorded calls are finite"}
