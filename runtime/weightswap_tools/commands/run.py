"""`weightswap run` and `weightswap generate`: one call, one generation, without a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from weightswap_runtime.errors import Unsupported, WeightswapError, visible, visible_lines
from weightswap_runtime.format.signature import call_arguments, flatten, leaves
from weightswap_runtime.live.context import OnSwap
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.model.loading import load
from weightswap_runtime.model.model import Model
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.tensors import TensorBytes
from weightswap_runtime.threads import without_garbage_collection
from weightswap_tools.inputs import (
    describe_value,
    engine_inputs,
    named_inputs,
    output_contents,
    read_tensors,
    write_tensors,
)
from weightswap_tools.terminal import (
    ArtifactArgument,
    DeviceOption,
    EngineOption,
    JsonOption,
    KeysOption,
    OpLibraryOption,
    errors_as_exit,
    print_json,
    print_table,
    say,
)

VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help="group=path: a variant to use, such as lora=customer-a, a directory that PEFT wrote; may be repeated.",
    ),
]
run_command = typer.Typer(add_completion=False)
generate_command = typer.Typer(add_completion=False)


@run_command.command()
def run(
    artifact: ArtifactArgument,
    weights: Annotated[
        str, typer.Option("--weights", "-w", help="The weight file or checkpoint to load, as for swap.")
    ],
    inputs: Annotated[
        Path | None, typer.Option("--input", "-i", help="The inputs by name: a .safetensors or .npz file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The .safetensors or .npz file to write the outputs to.")
    ] = None,
    keys: KeysOption = None,
    method: Annotated[str | None, typer.Option(help="The method to call; by default forward, or the only one.")] = None,
    variant: VariantOption = None,
    engine: EngineOption = "torch",
    device: DeviceOption = HOST,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Call a method of an artifact once.

    Inputs have the names of the signature, which `weightswap inspect` shows. Elements of lists and dicts are named like
    x.0 or x.key. Outputs are named in the same way; a single one is named output.
    """
    with errors_as_exit(as_json), without_garbage_collection():
        model = load(artifact, weights, engine=engine, device=device, keys=keys, op_libraries=op_library or ())
        name = method or model.default_method
        if name not in model.signatures:
            raise typer.BadParameter(f"{name!r} is not a method; there are: {visible(', '.join(model.signatures))}")
        call = model.method(name)
        if variants := _add_variants(model, variant):
            call = partial(call, variants=variants)
        signature = model.signatures[name]
        backend = engine_of(model)
        flat = named_inputs(name, signature, read_tensors(inputs) if inputs else {})
        args, kwargs = call_arguments(signature, engine_inputs(flat, backend))
        start = time.perf_counter()
        result = _call(name, call, args, kwargs)
        seconds = time.perf_counter() - start
        names = [leaf.name for leaf in leaves(signature.output)]
        named = dict(zip(names, output_contents(flatten(signature.output, result), backend), strict=True))
        if output:
            if len(named) != len(names):
                raise Unsupported("two outputs have the same name: a key contains a dot; call the method from Python")
            write_tensors(output, {key: value for key, value in named.items() if isinstance(value, TensorBytes)})
        _print(model, name, named, seconds, as_json)


def _call(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return call(*args, **kwargs)
    except WeightswapError:
        raise
    except Exception as error:  # operators raise various ones, such as for an index out of range
        say(f"{name}: the graph raised {type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error


def _print(model: Model, method: str, named: dict[str, Any], seconds: float, as_json: bool) -> None:
    described = {key: describe_value(value) for key, value in named.items()}
    if as_json:
        document = {
            "method": method,
            "engine": model.engines[method],
            "graph_id": model.graph_id,
            "weights_id": model.weights_id,
            "variants": _variant_ids(model),
        }
        print_json(document | {"seconds": seconds, "outputs": described})
        return
    say(f"weights id {model.weights_id}")
    for group, variant_id in _variant_ids(model).items():
        say(f"variant {group}: {variant_id}")
    title = f"{method}: {seconds * 1e3:.2f} ms"
    print_table(title, ["output", "value"], [[key, str(text)] for key, text in described.items()])


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
            variants=_add_variants(model, variant),
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
    print_json({"weights_id": model.weights_id, "variants": _variant_ids(model), **output})


# Variants.


def _add_variants(model: Model, options: list[str] | None) -> dict[str, str]:
    """Add the variants of the options to a model. Returns their names by group. Raises as `add_variant` does."""
    paths: dict[str, str] = {}
    for option in options or ():
        group, equals, path = option.partition("=")
        if not equals or not group or not path:
            raise typer.BadParameter(f"--variant: expected group=path, got {visible(option)}")
        if group in paths:
            raise typer.BadParameter(f"--variant: {visible(group)} is chosen more than once")
        paths[group] = path
    for group, path in paths.items():
        model.add_variant(group, path, path)
    return paths


def _variant_ids(model: Model) -> dict[str, str]:
    """Return the weights ids of the variants that `_add_variants` added, by group."""
    return {group: receipt.weights_id for group, names in model.variants.items() for receipt in names.values()}
