"""Reading of an artifact's graphs as torch programs, for compilers and parity. A server never does this."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from weightswap_runtime import Artifact
from weightswap_runtime.engines.graphs.archives import check_records
from weightswap_runtime.engines.graphs.graph_opening import open_graph
from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.torch_tensors import copied_tensor

from .document_check import program_problems, tensor_problems
from .programs import graphs

CPU = torch.device("cpu")
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def open_program(artifact: Artifact, name: str) -> ExportedProgram:
    """Return the program in the artifact's file `name`; torch reads checked content alone. Raises ArtifactError."""
    open_graph(artifact, name, CPU)
    raw, where = artifact.read(name), str(artifact.path / name)
    try:
        # torch logs why it cannot open a program, with texts of an untrusted file
        with mock.patch.object(logging.getLogger("torch.export"), "disabled", new=True):
            return torch.export.load(io.BytesIO(checked_archive(raw, where)))
    except ArtifactError:
        raise
    except Exception as error:
        reason = error.__cause__ or error.__context__ or error
        raise ArtifactError(
            f"{where}: torch {torch.__version__} cannot open the graph that torch {artifact.manifest.producer.torch} "
            f"wrote ({reason}). Install that version, or export again."
        ) from error


def checked_archive(raw: bytes, where: str) -> bytes:
    """Return the archive, rewritten from its checked documents, without the guards, which torch would execute.

    Raises ArtifactError for a document with content that is not allowed.
    """
    check_records(raw, where)
    problems: dict[str, None] = {}
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".json"):
                document = json.loads(content)
                problems |= dict.fromkeys(_problems(name, document))
                content = json.dumps(document).encode()
            target.writestr(name, content)
    if problems:
        raise ArtifactError(f"{where}: {listed(problems, between='; ')}. Export the artifact again.")
    return written.getvalue()


def _problems(name: str, document: Any) -> Iterator[str]:
    if not name.endswith("/models/model.json"):
        return tensor_problems(document)
    document.pop("guards_code", None)
    return program_problems(document)


def retarget(program: ExportedProgram, device: torch.device) -> None:
    """Make a program run on a device: replace every device in it. `torch.export.passes` overlooks some."""
    for module in graphs(program):
        for node in module.graph.nodes:
            arguments = node.args, node.kwargs
            node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: device, arguments)
            if node.target is _AUTOCAST and node.args[0] == "cpu":
                node.args = (device.type, *node.args[1:])
        module.recompile()


def method_program(artifact: Artifact, name: str, device: torch.device = CPU) -> ExportedProgram:
    """Return a method's program on a device. Constants have their values; weights and state are uninitialised.

    Raises ArtifactError.
    """
    manifest = artifact.manifest
    method = manifest.methods[name]
    program = open_program(artifact, method.graph)
    rows = {name: row for row in manifest.constants for name in row.names}
    constants = artifact.constants()
    tables = (program.state_dict, program.constants)
    for item, spec in zip(method.inputs, program.graph_signature.input_specs, strict=True):
        table = next((table for table in tables if spec.target in table), None)
        if table is None or spec.target is None or not isinstance(table[spec.target], torch.Tensor):
            continue
        table[spec.target] = _like(table[spec.target], device)
        if item.kind == "constant":
            with torch.no_grad():
                table[spec.target].copy_(copied_tensor(constants[rows[item.name].name]))
    if device != CPU:
        retarget(program, device)
        _move_inputs(program, device)
    return program


def _move_inputs(program: ExportedProgram, device: torch.device) -> None:
    """Move the program's own fake inputs to the device: torch starts from them when it traces it again."""
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            with value.fake_mode:
                node.meta["val"] = value.to(device)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory of a tensor's type, shape and strides on a device."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
