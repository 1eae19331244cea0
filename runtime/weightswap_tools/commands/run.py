"""`weightswap run`: call a method of an artifact once, with inputs and outputs in files."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.errors import Unsupported, WeightswapError
from weightswap_runtime.format.signature import call_arguments, flatten, leaves
from weightswap_runtime.live.loading import load
from weightswap_runtime.live.model import Model, engine_of
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.messages import visible
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.threads.garbage import without_garbage_collection
from weightswap_tools.call_inputs import engine_inputs, named_inputs, output_contents
from weightswap_tools.tensor_files import describe_value, read_tensors, write_tensors
from weightswap_tools.terminal import (
    DeviceOption,
    EngineOption,
    JsonOption,
    OpLibraryOption,
    errors_as_exit,
    print_json,
    print_table,
    say,
)

from .swap import KeysOption
from .variant_option import VariantOption, add_variants, variant_ids

run_command = typer.Typer(add_completion=False)


@run_command.command()
def run(
    artifact: Annotated[str, typer.Argument(help="The artifact's folder or URL.")],
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
        if variants := add_variants(model, variant):
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
            "variants": variant_ids(model),
        }
        print_json(document | {"seconds": seconds, "outputs": described})
        return
    say(f"weights id {model.weights_id}")
    for group, variant_id in variant_ids(model).items():
        say(f"variant {group}: {variant_id}")
    title = f"{method}: {seconds * 1e3:.2f} ms"
    print_table(title, ["output", "value"], [[key, str(text)] for key, text in described.items()])
