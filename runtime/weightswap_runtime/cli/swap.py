"""`weightswap swap`: put checkpoints behind an artifact, one after another, as a server would."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weightswap_runtime.adapter import Keys
from weightswap_runtime.model import Model, load
from weightswap_runtime.receipts import SwapReceipt

from .output import JsonOption, errors_as_exit, human_bytes, print_json
from .watching import StartChoice, print_event, print_event_as_json, watch_until_interrupt

swap_command = typer.Typer(add_completion=False)


class KeysChoice(StrEnum):
    """What the names of a file are, where that cannot be told."""

    CHECKPOINT = "checkpoint"
    FQN = "fqn"


KeysOption = Annotated[
    KeysChoice | None,
    typer.Option(help="What the names of a checkpoint are, where it would fit both ways with different results."),
]


def as_keys(choice: KeysChoice | None) -> Keys | None:
    return choice.value if choice else None


class Residency(StrEnum):
    """How many sets of weights are held."""

    DOUBLE = "double"
    SINGLE = "single"


@swap_command.command()
def swap(
    artifact: Annotated[Path, typer.Argument(help="An artifact's folder.")],
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Weight files, .safetensors checkpoints, indices of shards, or folders of Hugging Face models."
        ),
    ] = None,
    watch: Annotated[
        str | None, typer.Option(help="Then swap in each new weight file of this directory or URL, until Ctrl-C.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at the directory.")] = 5.0,
    start: Annotated[
        StartChoice, typer.Option(help="Which of the files that the directory has already are taken.")
    ] = StartChoice.NEWEST,
    keys: KeysOption = None,
    residency: Annotated[Residency, typer.Option(help="As the server will be loaded.")] = Residency.DOUBLE,
    allow_other_graph: Annotated[
        bool, typer.Option("--allow-other-graph", help="Take files packed for another graph, if their tensors fit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Swap checkpoints in, one after another: whether a server would take them, and what it would cost.

    The first that is refused ends the command with status 1. No server is touched. With --watch, each event is a line
    (with --json a JSON document), and files of the directory that are refused do not end the command; Ctrl-C does,
    with status 0.
    """
    if not checkpoints and watch is None:
        raise typer.BadParameter("give files, or --watch DIR")
    with errors_as_exit(as_json):
        told = print_event_as_json if as_json else print_event
        model = load(artifact, residency=residency.value, on_event=told if watch is not None else None)
        quiet = as_json or watch is not None
        receipts = [_swap(model, path, as_keys(keys), allow_other_graph, quiet) for path in checkpoints or ()]
        if watch is not None:
            names = as_keys(keys)
            watcher = model.watch(watch, interval, start=start.value, keys=names, allow_other_graph=allow_other_graph)
            watch_until_interrupt(watcher)
        elif as_json:
            print_json(receipts)


def _swap(model: Model, path: Path, keys: Keys | None, allow_other_graph: bool, quiet: bool) -> SwapReceipt:
    receipt = model.swap(path, keys=keys, allow_other_graph=allow_other_graph)
    if quiet:
        return receipt
    typer.echo(f"generation  {receipt.generation}: {receipt.source}")
    typer.echo(f"weights id  {receipt.weights_id}")
    rate = receipt.bytes_read / max(receipt.seconds_staged, 1e-9)
    size, speed = human_bytes(receipt.bytes_read), human_bytes(int(rate))
    typer.echo(f"staged      {size} in {receipt.seconds_staged:.3f} s ({speed}/s)")
    typer.echo(f"paused      {receipt.seconds_paused * 1e6:.1f} us")
    if receipt.ignored:
        typer.echo(f"left out    {', '.join(receipt.ignored)}")
    return receipt
