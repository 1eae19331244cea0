"""`weightswap generate`: continue a prompt, and stream the text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from weightswap_runtime.live.context import OnSwap
from weightswap_runtime.live.loading import load
from weightswap_runtime.live.model import Model
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.messages import visible, visible_lines
from weightswap_tools.terminal import DeviceOption, EngineOption, JsonOption, errors_as_exit, print_json

from .variant_option import VariantOption, add_variants, variant_ids

generate_command = typer.Typer(add_completion=False)


@generate_command.command()
def generate(
    artifact: Annotated[str, typer.Argument(help="The folder or URL of an artifact that generates text.")],
    weights: Annotated[str, typer.Argument(help="The weight file or checkpoint to load, as for swap.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; with --tokens, token ids such as 5,17,3.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Read and print token ids; needs no tokenizer.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="By default until the cache is full.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest with this total probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, repeated tokens become less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The random seed; the same seed gives the same tokens.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Stop after this text; with --tokens, after these token ids. May be repeated."),
    ] = None,
    on_swap: Annotated[
        str, typer.Option(help="What a swap does to the generation: pin, keep, reset or invalidate.", metavar="POLICY")
    ] = "pin",
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json; by default the one beside the weights or in the artifact.")
    ] = None,
    variant: VariantOption = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, and print the text as it is generated."""
    with errors_as_exit(as_json):
        model = load(artifact, weights, engine=engine, device=device)
        pieces = model.generate(
            _numbers(prompt) if tokens else prompt,
            variants=add_variants(model, variant),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=[_numbers(text) if tokens else text for text in stop or ()],
            on_swap=cast("OnSwap", on_swap),  # `generate` refuses others
            tokenizer=tokenizer,
            stream=True,
        )
        if as_json:
            _print_document(model, list(pieces), tokens)
            return
        for number, piece in enumerate(pieces):
            typer.echo(f"{',' if number else ''}{piece}" if tokens else visible_lines(piece), nl=False)
        typer.echo()


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--tokens: expected numbers such as 5,17,3, got {visible(text)}") from error


def _print_document(model: Model, pieces: list[int | str], tokens: bool) -> None:
    output = {"tokens": pieces} if tokens else {"text": "".join(map(str, pieces))}
    print_json({"weights_id": model.weights_id, "variants": variant_ids(model), **output})
