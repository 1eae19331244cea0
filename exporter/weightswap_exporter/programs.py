"""An artifact's graphs as torch's programs, for compilers."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from weightswap_runtime import Artifact
from weightswap_runtime.graphs.programs import open_program, retarget
from weightswap_runtime.manifest import NamedTensor
from weightswap_runtime.tensors import as_tensor

CPU = torch.device("cpu")


def method_program(artifact: Artifact, name: str, device: torch.device = CPU) -> ExportedProgram:
    """A method's program on a device: constants have their values, weights and state are memory of any content.

    Raises ArtifactError.
    """
    manifest = artifact.manifest
    method = manifest.methods[name]
    program = open_program(artifact, method.graph)
    rows = {name: row for row in manifest.constants for name in row.names}
    header, data = artifact.constants()
    tables = (program.state_dict, program.constants)
    for item, spec in zip(method.inputs, program.graph_signature.input_specs, strict=True):
        table = next((table for table in tables if spec.target in table), None)
        if table is None or spec.target is None or not isinstance(table[spec.target], torch.Tensor):
            continue
        table[spec.target] = _like(table[spec.target], device)
        if item.kind == "constant":
            place = header.tensors[rows[item.name].name]
            _fill(table[spec.target], rows[item.name], data[place.begin : place.end])
    if device != CPU:
        retarget(program, device)
        _move_inputs(program, device)
    return program


def _move_inputs(program: ExportedProgram, device: torch.device) -> None:
    """Let the program's own record of what goes in be of the device, too: torch traces it again from there."""
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            with value.fake_mode:
                node.meta["val"] = value.to(device)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the same type, for a tensor without any."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


def _fill(tensor: torch.Tensor, row: NamedTensor, data: memoryview) -> None:
    with torch.no_grad():
        tensor.copy_(as_tensor(bytearray(data), row.dtype, row.shape))
