"""`weightswap swap`: swap checkpoints into an artifact, one after another, as a server would."""

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

from .swap_page import swaps_reported

_POLL_SECONDS = 0.2  # to notice that the watcher has ended by itself
swap_command = typer.Typer(add_completion=False)


KeysOption = Annotated[
    Keys | None,
    typer.Option(help="How to read a checkpoint's names, if they would fit both ways with different results."),
]


@swap_command.command()
def swap(
    artifact: Annotated[str, typer.Argument(help="The artifact's folder or URL.")],
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
        str | None, typer.Option(help="Then serve the desired state at this place (docs/desired.md), until Ctrl-C.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between polls of the directory or place.")] = 5.0,
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
        raise typer.BadParameter("give files, or --watch DIR, or --follow PLACE")
    if watch is not None and follow is not None:
        raise typer.BadParameter("--watch and --follow: give only one")
    continuous = watch is not None or follow is not None
    receipts: list[SwapReceipt] = []
    document = {} if continuous else {"receipts": receipts}
    with errors_as_exit(as_json, document):
        callback = print_event_as_json if as_json else print_event
        model = load(
            artifact,
            engine=engine,
            device=device,
            residency=residency,
            on_event=callback if continuous else None,
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
        with swaps_reported(html, model):
            for number, path in enumerate(checkpoints or (), start=1):
                part = only if number > 1 else None
                last = expect if number == len(checkpoints or ()) else None
                with warnings_said():
                    receipts.append(model.swap(path, only=part, expect=last, allow_nonfinite=allowed, **options))
                if not as_json and not continuous:
                    print_receipt(receipts[-1])
            options["allow_nonfinite"] = allowed or False
            if watch is not None:
                watch_until_interrupt(partial(model.watch, watch, interval, start=start, only=only, **options))
            if follow is not None:
                watch_until_interrupt(partial(model.follow, follow, interval, **options))
        if as_json and not continuous:
            print_json(document)


def print_event(event: Event) -> None:
    """Print an event as one line of text, with terminal control characters escaped."""
    say(" ".join(str(event).split()))


def print_event_as_json(event: Event) -> None:
    """Print an event as one line of JSON."""
    typer.echo(printable_json(event.as_dict()).decode())


def watch_until_interrupt(start: Callable[[], Watching]) -> None:
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


_VERIFIED = {"goldens": "recorded outputs are reproduced", "finite": "outputs of recorded calls are finite"}
