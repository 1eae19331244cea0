"""The build side's commands that write something: an artifact, its engines' files, weight files, ONNX models.

What needs torch is imported by the command that runs, so that `--help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weightswap_runtime import Artifact
from weightswap_runtime.errors import listed, plural
from weightswap_runtime.memory.device_memory import HOST
from weightswap_tools.terminal import (
    IgnoreOption,
    JsonOption,
    LabelOption,
    OpLibraryOption,
    errors_as_exit,
    human_bytes,
    parse_labels,
    print_json,
    progress_bar,
    say,
    status_line,
    warnings_said,
)

export_command = typer.Typer(add_completion=False)
compile_command = typer.Typer(add_completion=False)
pack_command = typer.Typer(add_completion=False)
export_onnx_command = typer.Typer(add_completion=False)
_EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", help="Also compile the graphs for this engine (aoti, onnx); may be repeated."),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        help="For hf:DIR: a function, as file.py:function, that gets the model and returns the inputs of its forward, "
        "a tuple or a dict. By default, inputs are guessed.",
    ),
]
PicturesOption = Annotated[
    bool, typer.Option("--pictures", help="For hf:DIR: also give sample images to a model that takes text alone.")
]
_TaskOption = Annotated[
    Literal["generate"] | None,
    typer.Option("--task", help="For hf:DIR with a language model: generate exports what `weightswap generate` needs."),
]
_LengthOption = Annotated[
    int, typer.Option("--length", help="With --task generate: maximum number of tokens of a prompt and its answer.")
]
_BatchOption = Annotated[int, typer.Option("--batch", help="With --task generate: number of parallel sequences.")]
_RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        help="Split the model over this many ranks: by its own plan, or by that of the recipe's `parallel`.",
    ),
]
_NoGoldensOption = Annotated[bool, typer.Option("--no-goldens", help="Do not record the goldens of the recipe.")]


@export_command.command()
def export(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: file.py:function or module:function, or hf:DIR for a transformers model.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="Artifact folder to write; an existing one is replaced.")],
    skeleton: Annotated[
        bool, typer.Option("--skeleton", help="Run the recipe under skeleton(), so that parameters take no memory.")
    ] = False,
    inputs: InputsOption = None,
    pictures: PicturesOption = False,
    task: _TaskOption = None,
    length: _LengthOption = 2048,
    batch: _BatchOption = 1,
    ranks: _RanksOption = None,
    engine: _EngineOption = None,
    no_goldens: _NoGoldensOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export a model's graphs, without its weights.

    The recipe is a function without arguments that returns the arguments of
    weightswap_exporter.export(), except for out: a dict, or a tuple (model, args)
    or (model, args, kwargs).

    hf:DIR is the local directory of a transformers model. Only its config.json is
    read: the model is always a skeleton, its sample inputs are guessed and tried
    on the eager model, and as many sizes as possible stay dynamic.
    """
    with errors_as_exit(as_json):
        from weightswap_runtime.format.goldens import artifact_goldens
        from weightswap_tools.terminal import ranks_text, signature_text

        from .recipes import export_recipe

        with warnings_said() as messages, status_line("building the model") as on_step:
            artifact = export_recipe(
                recipe,
                out=out,
                skeleton=skeleton,
                goldens=not no_goldens,
                engines=engine or (),
                on_step=on_step,
                caches={"length": length, "batch": batch} if task else None,
                inputs=inputs,
                pictures=pictures,
                ranks=ranks,
            )
        manifest = artifact.manifest
        goldens = artifact_goldens(artifact)
        recorded = len(goldens.cases) if goldens else 0
        inputs_alone = goldens is not None and not goldens.record.has_outputs
        if as_json:
            document = {"path": artifact.path, "graph_id": artifact.graph_id, "methods": artifact.methods}
            counts = {"weights": len(manifest.weights), "weights_bytes": manifest.total_bytes}
            counts |= {"ranks": manifest.ranks.size} if manifest.ranks else {}
            counts |= {"goldens": 0 if inputs_alone else recorded, "inputs": recorded if inputs_alone else 0}
            print_json(document | counts | {"warnings": messages})
            return
        say(f"artifact   {artifact.path}")
        say(f"graph id   {artifact.graph_id}")
        for name, method in manifest.methods.items():
            say(f"method     {signature_text(name, method.signature)}")
        say(f"weights    {len(manifest.weights)} tensors, {human_bytes(manifest.total_bytes)}, left out")
        if manifest.ranks:
            say(f"ranks      {ranks_text(manifest)}")
        if recorded:
            say(f"{'inputs ' if inputs_alone else 'goldens'}    {plural(recorded, 'case')}")


@compile_command.command(name="compile")
def compile_artifact(
    artifact: Annotated[str, typer.Argument(help="The artifact's folder; compiled files are added to it.")],
    engine: Annotated[
        list[str], typer.Option("--engine", help="aoti, for machines like this one, or onnx; may be repeated.")
    ],
    device: Annotated[
        str, typer.Option(help="Device that aoti compiles for: cpu, or cuda for GPUs like this machine's.")
    ] = HOST,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Compile only this method; may be repeated.")
    ] = None,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Do not compare the compiled files with the graphs on random weights.")
    ] = False,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile an artifact's graphs for other engines, without the model's source code."""
    with errors_as_exit(as_json):
        from weightswap_exporter import compile_engines
        from weightswap_runtime.engines.operators import import_libraries

        import_libraries(op_library or ())
        before = Artifact.open(artifact).manifest.files
        with status_line("opening the artifact") as on_step:
            compiled = compile_engines(
                artifact, engine, methods=method, trial=not no_trial, device=device, on_step=on_step
            )
        folders, methods = tuple(f"engines/{name}/" for name in engine), method or compiled.methods
        added = [name for name in compiled.manifest.files if name.startswith(folders) and Path(name).stem in methods]
        if as_json:
            print_json({"path": compiled.path, "graph_id": compiled.graph_id, "files": added})
            return
        for name in added:
            size = human_bytes((compiled.folder / name).stat().st_size)
            say(f"{'replaced' if name in before else 'added'}  {name}, {size}")


@pack_command.command()
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="Checkpoint: a .safetensors, .pt, .pth, .bin or .ckpt file, an index of shards, or a folder of a "
            "Hugging Face model or of torch.distributed.checkpoint."
        ),
    ],
    artifact: Annotated[str, typer.Argument(help="Folder or URL of the artifact that the weights are for.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Weight file to write; an existing one is replaced.")],
    label: LabelOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors to this torch dtype where the graph expects it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="file.py:function, module:function or hf:DIR, as for export. The checkpoint is loaded into the "
            "recipe's model, by `load(model, checkpoint)` if the recipe returns that function, else as the model loads "
            "its own checkpoints, and the model is packed."
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(help="Path of the weights in the checkpoint: keys joined with dots, such as ema or app.model."),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Take only tensors whose names begin with this prefix, such as `net.`, and strip it.")
    ] = "",
    ignore: IgnoreOption = None,
    no_goldens: _NoGoldensOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's weights as a weight file for an artifact.

    A state dict under `state_dict`, `model`, `model_state_dict` or `module` is
    found by itself; --level names another place. Pickled code is never run.
    Goldens of the recipe are recorded with its model, beside the weight file.
    """
    labels = parse_labels(label)
    with errors_as_exit(as_json):
        from weightswap_exporter import pack as pack_checkpoint

        arguments: dict[str, Any] = {}
        if recipe is not None:
            from .recipes import load_model

            arguments = load_model(recipe, goldens=not no_goldens)
        with warnings_said(), progress_bar("packing") as progress:
            packed = pack_checkpoint(
                source,
                artifact,
                out=out,
                labels=labels,
                dtype=dtype,
                model=arguments.get("model"),
                load=arguments.get("load"),
                goldens=arguments.get("goldens"),
                tolerance=arguments.get("tolerance"),
                level=level,
                prefix=prefix,
                ignore=ignore or (),
                progress=progress,
            )
        for name, counts in packed.nonfinite.items():
            say(f"warning: {packed.path}: {name} is not finite: {counts}", err=True)
        if as_json:
            print_json(packed)
            return
        say(f"weight file {packed.path}, {human_bytes(packed.nbytes)}")
        say(f"weights id  {packed.weights_id}")
        if packed.goldens:
            say(f"goldens     {plural(packed.goldens, 'case')}")
        if packed.level:
            say(f"found in    {packed.level}")
        for source_dtype, names in packed.cast.items():
            say(f"cast        {plural(len(names), 'tensor')} from {source_dtype}")
        if packed.ignored:
            say(f"left out    {listed(packed.ignored, 10)}")


@export_onnx_command.command(name="export-onnx")
def export_onnx(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder, or its URL.")],
    weights: Annotated[
        Path, typer.Argument(help="Weight file, or .safetensors files that hold every weight unchanged.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The .onnx file to write, in the folder of the weight file or above it.")
    ],
    method: Annotated[str | None, typer.Option(help="Method to write; by default forward, or the only one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a method as an ONNX model whose weights stay in a weight file, for tools that load ONNX files."""
    with errors_as_exit(as_json):
        from weightswap_exporter.engines.onnx_external import export_onnx as write

        path = write(artifact, weights, out=out, method=method)
        size = path.stat().st_size
        if as_json:
            print_json({"path": path, "bytes": size})
            return
        say(f"ONNX model  {path}, {human_bytes(size)}, with its weights in {weights}")
