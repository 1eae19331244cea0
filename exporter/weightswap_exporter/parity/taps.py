"""Intermediate results of an engine, from a graph that is compiled again with them as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from blake3 import blake3
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node

from weightswap_exporter.capture.archive import graph_archive
from weightswap_exporter.capture.reopening import open_program
from weightswap_exporter.engines.compiling import compile_engines
from weightswap_runtime import Artifact
from weightswap_runtime.format.manifest import (
    ADAPTER_CONSTANTS_NAME,
    ADAPTER_NAME,
    CONSTANTS_NAME,
    MANIFEST_NAME,
    encode_manifest,
    with_graph_id,
)
from weightswap_runtime.format.signature import Tensor, Tuple
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES

from .steps import Position, computes, position_of_node

_KEPT = (CONSTANTS_NAME, ADAPTER_NAME, ADAPTER_CONSTANTS_NAME)


class Tap(NamedTuple):
    """A node of a graph whose result can be made an output."""

    node: str
    position: Position


def taps_of(program: ExportedProgram) -> list[Tap]:
    """Return every node that computes one tensor, in order."""
    return [Tap(node.name, position_of_node(node)) for node in program.graph.nodes if _is_tensor(node)]


def last_of_modules(taps: Sequence[Tap]) -> list[Tap]:
    """Return the last of each run of consecutive nodes in one module."""
    return [list(run)[-1] for _, run in groupby(taps, key=lambda tap: tap.position.modules)]


def tapped(artifact: Artifact, method: str, taps: Sequence[Tap], folder: Path, engines: Sequence[str]) -> Artifact:
    """Write an artifact with one method whose output is (old output, tuple of the taps), compiled for these engines.

    Results are copied where they are computed, as later nodes may overwrite them. Raises the errors of compiling.
    """
    old = artifact.manifest.methods[method]
    program = open_program(artifact, old.graph)
    nodes = {node.name: node for node in program.graph.nodes}
    results = Tuple(tuple(_tap(program, nodes[tap.node]) for tap in taps))
    signature = msgspec.structs.replace(old.signature, output=Tuple((old.signature.output, results)))
    raw = graph_archive(program, signature)
    methods = {method: msgspec.structs.replace(old, signature=signature)}
    kept = [name for name in _KEPT if name in artifact.manifest.files]
    files = {name: artifact.manifest.files[name] for name in kept} | {old.graph: blake3(raw).hexdigest()}
    manifest = with_graph_id(msgspec.structs.replace(artifact.manifest, methods=methods, files=files))
    for name in kept:
        (folder / name).write_bytes(artifact.read(name))
    (folder / old.graph).parent.mkdir(exist_ok=True)
    (folder / old.graph).write_bytes(raw)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return compile_engines(folder, engines, trial=False)


def _is_tensor(node: Node) -> bool:
    computed = node.op == "call_function" and isinstance(node.target, OpOverload) and computes(node.target)
    return computed and isinstance(node.meta.get("val"), torch.Tensor)


def _tap(program: ExportedProgram, node: Node) -> Tensor:
    """Add a node's result to the outputs. Returns the leaf that describes it."""
    value = node.meta["val"]
    with program.graph.inserting_after(node):
        copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    output = program.graph.output_node()
    output.args = ((*output.args[0], copy),)
    program.graph_signature.output_specs.append(
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=copy.name), target=None)
    )
    shape = tuple(size if isinstance(size, int) else str(size.node.expr) for size in value.shape)
    return Tensor(node.name, DTYPE_NAMES[value.dtype], shape)
