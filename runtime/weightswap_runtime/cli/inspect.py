"""`weightswap inspect`: what an artifact or a weight file is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from weightswap_runtime.artifact import Artifact
from weightswap_runtime.deltafile import DeltaStamp, delta_stamp
from weightswap_runtime.dtypes import describe
from weightswap_runtime.goldens import Record, artifact_goldens, record_beside
from weightswap_runtime.manifest import MANIFEST_NAME, Manifest, NamedTensor, Source
from weightswap_runtime.places import is_url
from weightswap_runtime.signature import Dict, Integer, Items, Literal, Node, Signature, Tensor, Tuple
from weightswap_runtime.weightset import WeightSet, open_weights

from .output import JsonOption, errors_as_exit, human_bytes, print_json, print_table

inspect_command = typer.Typer(add_completion=False)


@inspect_command.command()
def inspect(
    path: Annotated[str, typer.Argument(help="An artifact's folder, or what swap takes.")],
    as_json: JsonOption = False,
) -> None:
    """Show what an artifact, a weight file or a checkpoint is: ids, methods, tensors."""
    with errors_as_exit(as_json):
        if not is_url(path) and (Path(path) / MANIFEST_NAME).exists():
            _artifact(Artifact.open(path), as_json)
            return
        with open_weights(path) as weights:
            _weight_set(weights, as_json)


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
    manifest, goldens = artifact.manifest, artifact_goldens(artifact)
    record = goldens.record if goldens else None
    if as_json:
        print_json(_artifact_document(artifact, manifest) | _goldens_document(record))
        return
    typer.echo(f"artifact   {artifact.path}")
    typer.echo(f"graph id   {manifest.graph_id}")
    typer.echo(f"written by weightswap {manifest.producer.weightswap}, torch {manifest.producer.torch}")
    for name, method in manifest.methods.items():
        typer.echo(f"method     {signature_text(name, method.signature)}")
    typer.echo(f"engines    {', '.join(_engines(manifest))}")
    _goldens(record)
    size = human_bytes(manifest.total_bytes)
    _tensors(f"weights: {len(manifest.weights)} tensors, {size}, not in the artifact", manifest.weights, manifest)
    for title, tensors in (("state", manifest.state), ("constants", manifest.constants)):
        if tensors:
            _tensors(f"{title}: {len(tensors)} tensors", tensors, manifest)
    if manifest.adapter.ignored:
        typer.echo(f"checkpoint keys that are left out: {', '.join(manifest.adapter.ignored)}")
    if manifest.adapter.untraceable:
        typer.echo(f"checkpoints have to be packed, as loading could not be recorded: {manifest.adapter.untraceable}")


def _artifact_document(artifact: Artifact, manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": "artifact",
        "path": artifact.path,
        "total_bytes": manifest.total_bytes,
        "signatures": {name: signature_text(name, method.signature) for name, method in manifest.methods.items()},
        "engines": _engines(manifest),
        "manifest": manifest,
    }


def _engines(manifest: Manifest) -> list[str]:
    """What it was compiled for: the engine, and the target where there are several."""
    parts = [name.split("/") for name in manifest.files if name.startswith("engines/")]
    return ["torch", *sorted({" ".join(part[1:-1]) for part in parts})]


def _goldens(record: Record | None) -> None:
    if record is None:
        return
    counts = Counter(case.method for case in record.cases)
    cases = ", ".join(f"{count} of {method}" for method, count in counts.items())
    made = record.environment
    machine = f"torch {made.torch}, {made.device} {made.capability}, {made.threads} threads"
    exact = f"exact on {machine}"
    within = f"within rtol {record.tolerance[0]:g}, atol {record.tolerance[1]:g}" if record.tolerance else exact
    typer.echo(f"goldens    {cases}; of the weights {record.weights_id[:12]}; {within}")


def _goldens_document(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {"goldens": None}
    cases = Counter(case.method for case in record.cases)
    told = {"weights_id": record.weights_id, "tolerance": record.tolerance, "environment": record.environment}
    return {"goldens": told | {"cases": cases}}


def _tensors(title: str, tensors: tuple[NamedTensor, ...], manifest: Manifest) -> None:
    sources = {source.weight: source for source in manifest.adapter.sources}
    rows = [
        [
            tensor.name,
            describe(tensor.dtype, tensor.shape),
            human_bytes(tensor.nbytes),
            ", ".join(tensor.aliases),
            _origin(tensor, sources.get(tensor.name)),
        ]
        for tensor in tensors
    ]
    columns = ["name", "type", "size", "tied to", "in checkpoints"]
    kept = [index for index in range(len(columns)) if index < 3 or any(row[index] for row in rows)]
    print_table(title, [columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _origin(tensor: NamedTensor, source: Source | None) -> str:
    """Where a weight comes from in a checkpoint, unless that has it under its own name."""
    if source is None:
        return ""
    if source.transform is None:
        return ", ".join(key for key in source.keys if key not in tensor.names)
    more = f" and {len(source.keys) - 4} more" if len(source.keys) > 4 else ""
    return f"computed from {', '.join(source.keys[:4])}{more}"


def _delta(delta: DeltaStamp) -> None:
    typer.echo(f"from       {delta.base}")
    typer.echo(f"to         {delta.weights_id}")
    typer.echo(f"graph id   {delta.graph_id}")
    for name, changed in delta.changes.items():
        typer.echo(f"changes    {name}, {describe(changed.dtype, changed.shape)}")
    for label, text in delta.labels.items():
        typer.echo(f"label      {label} = {text}")


def _weight_set(weights: WeightSet, as_json: bool) -> None:
    stamp, delta, record = weights.stamp, delta_stamp(weights), record_beside(weights.place)
    if as_json:
        tensors = {
            name: {"dtype": t.dtype, "shape": t.shape, "file": t.file.where, "offset": t.offset, "nbytes": t.nbytes}
            for name, t in weights.tensors.items()
        }
        kind = "delta file" if delta else "weight file"
        print_json(
            {"kind": kind, "path": weights.where, "stamp": delta or stamp, "tensors": tensors}
            | _goldens_document(record)
        )
        return
    typer.echo(f"file       {weights.where}")
    if len(weights.files) > 1:
        typer.echo(f"shards     {', '.join(file.path.name for file in weights.files)}")
    if delta:
        _delta(delta)
    elif stamp:
        typer.echo(f"weights id {stamp.weights_id}")
        typer.echo(f"graph id   {stamp.graph_id}")
        for label, text in stamp.labels.items():
            typer.echo(f"label      {label} = {text}")
        for dtype, names in (stamp.cast or {}).items():
            typer.echo(f"cast       {len(names)} tensors from {dtype}: {', '.join(names)}")
    else:
        typer.echo("weights id not recorded; it is computed when the file is swapped in")
    _goldens(record)
    digests = delta.digests if delta else stamp.digests if stamp else {}
    rows = [
        [
            name,
            describe(tensor.dtype, tensor.shape),
            human_bytes(tensor.nbytes),
            digests[name][:12] if digests else "",
        ]
        for name, tensor in sorted(weights.tensors.items(), key=lambda item: (item[1].file.where, item[1].offset))
    ]
    total = human_bytes(sum(tensor.nbytes for tensor in weights.tensors.values()))
    print_table(f"{len(rows)} tensors, {total}", ["name", "type", "size", "digest"], rows)
