"""`weightswap export`, `weightswap compile` and `weightswap pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weightswap_runtime import Artifact
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.messages import listed, plural
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
pack_command = typer.Typer(add_completion=False)
compile_command = typer.Typer(add_completion=False)

EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", help="Compile the graphs for this engine, too (aoti, onnx); may be repeated."),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        help="file.py:function for hf:DIR: gets the model and returns what its forward takes, a tuple or a dict; else "
        "its inputs are guessed.",
    ),
]
PicturesOption = Annotated[
    bool, typer.Option("--pictures", help="For hf:DIR: sample inputs with images, where texts alone would do.")
]
TaskOption = Annotated[
    Literal["generate"] | None,
    typer.Option("--task", help="For hf:DIR, a language model: generate exports what `weightswap generate` needs."),
]
LengthOption = Annotated[
    int, typer.Option("--length", help="With --task generate: tokens of a prompt and its answer together, at most.")
]
BatchOption = Annotated[int, typer.Option("--batch", help="With --task generate: sequences side by side.")]
NoGoldensOption = Annotated[bool, typer.Option("--no-goldens", help="Leave out the goldens that the recipe asks for.")]


@export_command.command()
def export(
    recipe: Annotated[
        str, typer.Argument(help="file.py:function or module:function, which returns what export() takes; or hf:DIR.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The artifact's folder; an artifact there is replaced.")],
    skeleton: Annotated[
        bool, typer.Option("--skeleton", help="Run the recipe under skeleton(): parameters without memory.")
    ] = False,
    inputs: InputsOption = None,
    pictures: PicturesOption = False,
    task: TaskOption = None,
    length: LengthOption = 2048,
    batch: BatchOption = 1,
    engine: EngineOption = None,
    no_goldens: NoGoldensOption = False,
    as_json: JsonOption = False,
) -> None:
    """Export a model's graphs, without its weights.

    The recipe is a function without arguments that returns the arguments of weightswap_exporter.export(), without
    out: a dict, or a tuple (model, args) or (model, args, kwargs).

    hf:DIR is a local directory of a transformers model, of which config.json alone is read: the model is always a
    skeleton, sample inputs are guessed and tried with the eager model, and as many sizes as possible stay dynamic.
    """
    with errors_as_exit(as_json):
        from weightswap_runtime.format.goldens import artifact_goldens
        from weightswap_tools.wording import signature_text

        from .recipes import export_recipe

        with warnings_said() as said, status_line("building the model") as tell:
            artifact = export_recipe(
                recipe,
                out=out,
                skeleton=skeleton,
                goldens=not no_goldens,
                engines=engine or (),
                tell=tell,
                caches={"length": length, "batch": batch} if task else None,
                inputs=inputs,
                pictures=pictures,
            )
        manifest = artifact.manifest
        goldens = artifact_goldens(artifact)
        recorded = len(goldens.cases) if goldens else 0
        alone = goldens is not None and not goldens.record.has_outputs
        if as_json:
            document = {"path": artifact.path, "graph_id": artifact.graph_id, "methods": artifact.methods}
            counts = {"weights": len(manifest.weights), "weights_bytes": manifest.total_bytes}
            counts |= {"goldens": 0 if alone else recorded, "inputs": recorded if alone else 0}
            print_json(document | counts | {"warnings": said})
            return
        say(f"artifact   {artifact.path}")
        say(f"graph id   {artifact.graph_id}")
        for name, method in manifest.methods.items():
            say(f"method     {signature_text(name, method.signature)}")
        say(f"weights    {len(manifest.weights)} tensors, {human_bytes(manifest.total_bytes)}, left out")
        if recorded:
            say(f"{'inputs ' if alone else 'goldens'}    {plural(recorded, 'case')}")


@compile_command.command(name="compile")
def compile_artifact(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder; the files are added to it.")],
    engine: Annotated[
        list[str], typer.Option("--engine", help="aoti, for machines like this one, or onnx; may be repeated.")
    ],
    device: Annotated[
        str, typer.Option(help="What aoti is compiled for: cpu, or cuda for GPUs like this machine's.")
    ] = HOST,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Compile this method alone; may be repeated.")
    ] = None,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Do not compare what was compiled with the graphs on random weights.")
    ] = False,
    op_library: OpLibraryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile an artifact's graphs for other engines, without the model's source code."""
    with errors_as_exit(as_json):
        from weightswap_exporter import compile_engines
        from weightswap_runtime.engines.graphs.libraries import import_libraries

        import_libraries(op_library or ())
        before = Artifact.open(artifact).manifest.files
        with status_line("opening the artifact") as tell:
            made = compile_engines(artifact, engine, methods=method, trial=not no_trial, device=device, tell=tell)
        folders, methods = tuple(f"engines/{name}/" for name in engine), method or made.methods
        added = [name for name in made.manifest.files if name.startswith(folders) and Path(name).stem in methods]
        if as_json:
            print_json({"path": made.path, "graph_id": made.graph_id, "files": added})
            return
        for name in added:
            size = human_bytes((made.folder / name).stat().st_size)
            say(f"{'replaced' if name in before else 'added'}  {name}, {size}")


@pack_command.command()
def pack(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint: a .safetensors, .pt, .pth, .bin or .ckpt file, an index of shards, or the folder of a "
            "Hugging Face model or of torch.distributed.checkpoint."
        ),
    ],
    artifact: Annotated[str, typer.Argument(help="The artifact that it is for, or its URL.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The weight file; a file there is replaced.")],
    label: LabelOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating tensors to this torch dtype where the graph wants it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="file.py:function, module:function or hf:DIR, as for export: the checkpoint is loaded into its model "
            "by `load(model, checkpoint)`, if it returns that too, or else as the model loads its own checkpoints, and "
            "the model is packed."
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(help="Where in the checkpoint the weights are: keys joined with dots, as ema or app.model."),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="Take only the tensors whose names begin with this, without it, as `net.`.")
    ] = "",
    ignore: IgnoreOption = None,
    no_goldens: NoGoldensOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's weights as a weight file for an artifact.

    A state dict below `state_dict`, `model`, `model_state_dict` or `module` is found, another with --level. Nothing
    that is pickled runs. Goldens that the recipe asks for are recorded with its model and lie beside the weight file.
    """
    labels = parse_labels(label)
    with errors_as_exit(as_json):
        from weightswap_exporter import pack as pack_checkpoint

        built: dict[str, Any] = {}
        if recipe is not None:
            from .recipes import load_model

            built = load_model(recipe, goldens=not no_goldens)
        with warnings_said(), progress_bar("packing") as progress:
            packed = pack_checkpoint(
                source,
                artifact,
                out=out,
                labels=labels,
                dtype=dtype,
                model=built.get("model"),
                load=built.get("load"),
                goldens=built.get("goldens"),
                tolerance=built.get("tolerance"),
                level=level,
                prefix=prefix,
                ignore=ignore or (),
                progress=progress,
            )
        if as_json:
            print_json(packed)
            return
        say(f"weight file {packed.path}, {human_bytes(packed.nbytes)}")
        say(f"weights id  {packed.weights_id}")
        if packed.goldens:
            say(f"goldens     {plural(packed.goldens, 'case')}")
        if packed.level:
            say(f"found in    {packed.level}")
        for found, names in packed.cast.items():
            say(f"cast        {plural(len(names), 'tensor')} from {found}")
        if packed.ignored:
            say(f"left out    {listed(packed.ignored, 10)}")
