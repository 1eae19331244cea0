"""AOTInductor packages of an artifact's graphs, without weights: each weight is bound under its FQN at run time."""

from __future__ import annotations

import io
import zipfile

import msgspec
import torch
from torch.export import ExportedProgram

from weightswap_exporter.capture.reopening import method_program
from weightswap_runtime import Artifact
from weightswap_runtime.engines.aoti.device import target_of
from weightswap_runtime.engines.aoti.library import Library
from weightswap_runtime.engines.aoti.targets import (
    LIBRARY_SUFFIX,
    NOTE_NAME,
    Note,
    NotedTensor,
    machine_name,
    machine_targets,
)
from weightswap_runtime.errors import CaptureError, Unsupported
from weightswap_runtime.format.manifest import GraphInput
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES

from .aoti_compiler import compile_library
from .aoti_graphs import flat_graph

_FOLDER = "data/aotinductor/model"
_FORMAT = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"3\n"}


def build_target(device: torch.device) -> str:
    """Return the target to compile for: the best that this machine can run. Raises Unsupported."""
    if device.type != "cpu":
        return target_of(device)
    targets = machine_targets()
    if not targets:
        raise Unsupported(f"the engine 'aoti' compiles for x86_64 with AVX2 on Linux; this machine is {machine_name()}")
    return targets[0]


def package(artifact: Artifact, name: str, target: str, device: torch.device) -> bytes:
    """Compile a method for the target of `device`. Returns a package that torch's package loader can also read.

    Raises ArtifactError, Unsupported, CaptureError for a graph that AOTInductor cannot express, and ExportError without
    a C++ compiler.
    """
    where = f"method {name!r}"
    method = artifact.manifest.methods[name]
    program = method_program(artifact, name, device)
    rows = _rows(program, method.inputs)
    graph = flat_graph(where, program, method, device)
    raw = compile_library(where, graph.module, graph.samples, target)
    bound = [constant.fqn for constant in Library(raw, where, device).constants]
    if unknown := sorted(set(bound) - rows.keys()):
        raise CaptureError(f"{where}: AOTInductor made a constant of its own, {unknown[0]!r}")
    swapped = {fqn for fqn, row in rows.items() if row.kind != "constant"}
    if lost := sorted(graph.read & swapped - set(bound)):
        raise CaptureError(f"{where}: AOTInductor compiled in the value of {lost[0]!r}, which no swap would change")
    note = Note(
        graph_id=artifact.graph_id,
        method=name,
        target=target,
        torch=str(torch.__version__),
        tensors=tuple(rows[fqn] for fqn in sorted(bound)),
        written=graph.written,
    )
    return _archive(name, note, raw, device)


def _rows(program: ExportedProgram, inputs: tuple[GraphInput, ...]) -> dict[str, NotedTensor]:
    """Return the program's tensors by FQN, with their names in the manifest."""
    tables = (program.state_dict, program.constants)
    rows = {}
    for item, spec in zip(inputs, program.graph_signature.input_specs, strict=True):
        tensor = next((table[spec.target] for table in tables if spec.target in table), None)
        if item.kind != "input" and spec.target is not None and isinstance(tensor, torch.Tensor):
            dtype = DTYPE_NAMES[tensor.dtype]
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            rows[spec.target] = NotedTensor(spec.target, item.kind, item.name, dtype, shape, stride)
    return rows


def _archive(name: str, note: Note, library: bytes, device: torch.device) -> bytes:
    metadata = {"AOTI_DEVICE_KEY": device.type}
    records = {
        **_FORMAT,
        NOTE_NAME: msgspec.json.encode(note),
        f"{_FOLDER}/{name}{LIBRARY_SUFFIX}": library,
        f"{_FOLDER}/{name}.wrapper_metadata.json": msgspec.json.encode(metadata),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in records.items():
            # a plain ZipInfo has a fixed date and no platform
            info = zipfile.ZipInfo(f"{name}/{path}")
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return buffer.getvalue()
