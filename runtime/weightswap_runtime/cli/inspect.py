"""`weightswap inspect`: what an artifact or a weight file is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.artifact import Artifact
from weightswap_runtime.dtypes import describe
from weightswap_runtime.manifest import Manifest, NamedTensor
from weightswap_runtime.signature import Dict, Integer, Items, Literal, Node, Signature, Tensor, Tuple
from weightswap_runtime.weightfile import WeightFile

from .output import JsonOption, errors_as_exit, human_bytes, print_json, print_table

inspect_command = typer.Typer(add_completion=False)


@inspect_command.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact's folder, or a .safetensors file.")],
    as_json: JsonOption = False,
) -> None:
    """Show what an artifact or a weight file is: ids, methods, tensors."""
    with errors_as_exit(as_json):
        if path.is_dir():
            _artifact(Artifact.open(path), as_json)
        else:
            with WeightFile(path) as file:
                _weight_file(file, as_json)


def signature_text(name: str, signature: Signature) -> str:
    """`forward(x: F32[batch, 1, 8, 8]) -> F32[batch, 10], batch in 0..256`."""
    parameters = [f"{parameter}: {node_text(node)}" for parameter, node in signature.args]
    if signature.kwargs:
        parameters += ["*", *(f"{parameter}: {node_text(node)}" for parameter, node in signature.kwargs)]
    ranges = [
        f"{dim} in {limits.min}..{'any' if limits.max is None else limits.max}"
        for dim, limits in signature.dims.items()
    ]
    return ", ".join([f"{name}({', '.join(parameters)}) -> {node_text(signature.output)}", *ranges])


def node_text(node: Node) -> str:
    match node:
        case Tensor():
            return f"{node.dtype}[{', '.join(map(str, node.shape))}]"
        case Integer():
            return f"int {node.value}"
        case Literal():
            return repr(node.content)
        case Items():
            return f"[{', '.join(map(node_text, node.items))}]"
        case Tuple():
            return f"({', '.join(map(node_text, node.items))}{',' if len(node.items) == 1 else ''})"
        case Dict():
            return "{" + ", ".join(f"{key}: {node_text(item)}" for key, item in node.items) + "}"


def _artifact(artifact: Artifact, as_json: bool) -> None:
    artifact.verify()
    manifest = artifact.manifest
    if as_json:
        print_json(_artifact_document(artifact, manifest))
        return
    typer.echo(f"artifact   {artifact.path}")
    typer.echo(f"graph id   {manifest.graph_id}")
    typer.echo(f"written by weightswap {manifest.producer.weightswap}, torch {manifest.producer.torch}")
    for name, method in manifest.methods.items():
        typer.echo(f"method     {signature_text(name, method.signature)}")
    size = human_bytes(manifest.total_bytes)
    _tensors(f"weights: {len(manifest.weights)} tensors, {size}, not in the artifact", manifest.weights, manifest)
    for title, tensors in (("state", manifest.state), ("constants", manifest.constants)):
        if tensors:
            _tensors(f"{title}: {len(tensors)} tensors", tensors, manifest)
    if manifest.adapter.ignored:
        typer.echo(f"checkpoint keys that are left out: {', '.join(manifest.adapter.ignored)}")


def _artifact_document(artifact: Artifact, manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": "artifact",
        "path": artifact.path,
        "total_bytes": manifest.total_bytes,
        "signatures": {name: signature_text(name, method.signature) for name, method in manifest.methods.items()},
        "manifest": manifest,
    }


def _tensors(title: str, tensors: tuple[NamedTensor, ...], manifest: Manifest) -> None:
    keys = {source.weight: source.keys for source in manifest.adapter.sources}
    rows = [
        [
            tensor.name,
            describe(tensor.dtype, tensor.shape),
            human_bytes(tensor.nbytes),
            ", ".join(tensor.aliases),
            ", ".join(key for key in keys.get(tensor.name, ()) if key not in tensor.names),
        ]
        for tensor in tensors
    ]
    columns = ["name", "type", "size", "tied to", "checkpoint key"]
    kept = [index for index in range(len(columns)) if index < 3 or any(row[index] for row in rows)]
    print_table(title, [columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _weight_file(file: WeightFile, as_json: bool) -> None:
    stamp = file.stamp
    if as_json:
        tensors = {name: tensor._asdict() for name, tensor in file.tensors.items()}
        print_json({"kind": "weight file", "path": file.path, "stamp": stamp, "tensors": tensors})
        return
    typer.echo(f"file       {file.path}")
    if stamp:
        typer.echo(f"weights id {stamp.weights_id}")
        typer.echo(f"graph id   {stamp.graph_id}")
        for label, text in stamp.labels.items():
            typer.echo(f"label      {label} = {text}")
        for dtype, names in (stamp.cast or {}).items():
            typer.echo(f"cast       {len(names)} tensors from {dtype} when packed")
    else:
        typer.echo("weights id not recorded; it is computed when the file is swapped in")
    rows = [
        [
            name,
            describe(tensor.dtype, tensor.shape),
            human_bytes(tensor.end - tensor.begin),
            stamp.digests[name][:12] if stamp else "",
        ]
        for name, tensor in sorted(file.tensors.items(), key=lambda item: item[1].begin)
    ]
    total = human_bytes(sum(tensor.end - tensor.begin for tensor in file.tensors.values()))
    print_table(f"{len(rows)} tensors, {total}", ["name", "type", "size", "digest"], rows)
