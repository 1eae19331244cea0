"""Graphs as archives, and read again.

An archive is what torch.export.save writes, without all that a server does not need or must not trust: values, Python
source, the model's own classes. The same program gives the same bytes. A server reads the documents in it without
torch.export; compilers on the build side open it as a program again, from checked content alone.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from weightswap_exporter.modules.tensors import children
from weightswap_runtime import Artifact
from weightswap_runtime.engines.graph import checked, compile_graph, open_graph, read_graph
from weightswap_runtime.engines.graph_archive import check_records
from weightswap_runtime.engines.operators import RANKS
from weightswap_runtime.errors import ArtifactError, CaptureError, listed
from weightswap_runtime.format.signature import Dict, Items, Node, Signature, Tuple, key_text, leaves, unflatten
from weightswap_runtime.torch_tensors import copied_tensor

from .document_check import program_problems, tensor_problems
from .programs import fix_dtypes, graphs, neutral_names, rename_tensors

CPU = torch.device("cpu")
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_NONE = {"as_none": True}


def graph_archive(program: ExportedProgram, signature: Signature, group: str | None = None) -> bytes:
    """Return the content of `graphs/<method>.pt2`. The program loses the values of its tensors.

    group: `RANKS` for a graph that several ranks call together, else None.

    Its inputs and outputs are described with plain dicts, lists and tuples instead of the model's own classes, so that
    a server without those classes can open it.
    """
    _use_plain_containers(program, signature)
    for name, tensor in program.state_dict.items():
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        program.state_dict[name] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for name, constant in program.constants.items():
        if isinstance(constant, torch.Tensor):
            program.constants[name] = torch.empty_like(constant, device="meta")
    return program_archive(program, group)


def program_archive(program: ExportedProgram, group: str | None = None) -> bytes:
    """Return the content of an archive for a program whose tensors have no values."""
    fix_dtypes(program)
    program._example_inputs = None
    saved = io.BytesIO()
    with warnings.catch_warnings():  # about tensors without storage sharing it, which _own_records undoes
        warnings.filterwarnings("ignore", "No complete tensor found", UserWarning)
        try:
            torch.export.save(program, saved)
        except Exception as error:
            raise CaptureError(
                *f"torch {torch.__version__} cannot write the graph it has captured: {error}".splitlines()
            ) from error
    archive = _rewrite(saved)
    _check_readable(archive, group)
    return archive


def _use_plain_containers(program: ExportedProgram, signature: Signature) -> None:
    (root,) = (entry.signature for entry in program.module_call_graph if entry.fqn == "")
    assert root is not None
    _, keywords = children(root.in_spec)
    args = tuple(_plain(node) for _, node in signature.args)
    kwargs = {name: _plain(node) for name, (_, node) in zip(keywords.context, signature.kwargs, strict=True)}
    root.in_spec = pytree.tree_structure((args, kwargs))
    root.out_spec = pytree.tree_structure(_plain(signature.output))


def _plain(node: Node) -> Any:
    """Return a value of the tree. It has texts for tuples as keys: torch writes keys as JSON, and reads no tuples."""
    return unflatten(_with_text_keys(node), leaves(node))


def _with_text_keys(node: Node) -> Node:
    match node:
        case Dict(items):
            texts = ((key_text(key) if isinstance(key, tuple) else key, item) for key, item in items)
            return Dict(tuple((key, _with_text_keys(item)) for key, item in texts))
        case Items(items) | Tuple(items):
            return type(node)(tuple(map(_with_text_keys, items)))
        case _:
            return node


def _rewrite(saved: io.BytesIO) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as target:
        # that id is one of the content as torch has written it
        names = [name for name in source.namelist() if not name.endswith(".data/serialization_id")]
        records = {name: source.read(name) for name in names}
        for name in names:
            if name.endswith("_config.json"):
                records |= _own_records(name, records)
        for name, content in sorted(records.items()):
            # a plain ZipInfo: fixed date, no platform
            target.writestr(zipfile.ZipInfo(name), _trimmed_model(content) if "/models/" in name else content)
    return written.getvalue()


def _own_records(config_name: str, records: dict[str, bytes]) -> dict[str, bytes]:
    """Give every tensor an empty record of its own: torch puts all tensors without storage into one."""
    config = json.loads(records[config_name])
    folder = config_name.rpartition("/")[0]
    prefix = "weight_" if folder.endswith("weights") else "tensor_"
    for index, entry in enumerate(config["config"].values()):
        entry["path_name"] = f"{prefix}{index}"
    own = {f"{folder}/{entry['path_name']}": b"" for entry in config["config"].values()}
    return {config_name: json.dumps(config).encode(), **own}


def _trimmed_model(model: bytes) -> bytes:
    document = json.loads(model, object_hook=_without_trace)
    _drop_texts(document["graph_module"])
    return json.dumps(document, separators=(",", ":")).encode()


def _without_trace(part: dict[str, Any]) -> dict[str, Any]:
    """Keep only the module path in the metadata of a node."""
    if "target" in part and isinstance(part.get("metadata"), dict):
        part["metadata"] = {key: text for key, text in part["metadata"].items() if key == "nn_module_stack"}
    return part


def _drop_texts(graph_module: dict[str, Any]) -> None:
    """Replace text outputs by None: torch writes them and cannot read them. The manifest has their values."""
    outputs = graph_module["graph"]["outputs"]
    graph_module["graph"]["outputs"] = [_NONE if "as_string" in output else output for output in outputs]
    for spec in graph_module["signature"]["output_specs"]:
        output = spec.get("user_output", {})
        if "as_string" in output.get("arg", {}):
            output["arg"] = _NONE


def _check_readable(archive: bytes, group: str | None) -> None:
    """Raise CaptureError for a graph that torch writes, but that servers or compilers cannot read."""
    where = "the captured graph"
    try:
        _checked_archive(archive, where)
        graph = read_graph(archive, where)
        checked(archive, where, lambda: compile_graph(graph, CPU, group=group))
    except ArtifactError as error:
        reason = str(error).removeprefix(f"{where}: ").partition(" Export the artifact again")[0]
        raise CaptureError(f"the captured graph cannot be served: {reason}") from error


def open_program(artifact: Artifact, name: str) -> ExportedProgram:
    """Return the program in the artifact's file `name`; torch reads checked content alone. Raises ArtifactError."""
    open_graph(artifact, name, CPU, group=RANKS if artifact.manifest.ranks else None)
    raw, where = artifact.read(name), str(artifact.path / name)
    try:
        # torch logs why it cannot open a program, with texts of an untrusted file
        with mock.patch.object(logging.getLogger("torch.export"), "disabled", new=True):
            program = torch.export.load(io.BytesIO(_checked_archive(raw, where)))
    except ArtifactError:
        raise
    except Exception as error:
        reason = error.__cause__ or error.__context__ or error
        raise ArtifactError(
            f"{where}: torch {torch.__version__} cannot open the graph that torch {artifact.manifest.producer.torch} "
            f"wrote ({reason}). Install that version, or export again."
        ) from error
    _only_symbols(program)
    return program


def _only_symbols(program: ExportedProgram) -> None:
    """Remove ranges of sizes such as `3*rows` from where torch has those of symbols: its decompositions fail there."""
    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")])
    if mode is not None and mode.shape_env is not None:
        ranges = mode.shape_env.var_to_range
        for size in [size for size in ranges if not size.is_Symbol]:
            del ranges[size]


def _checked_archive(raw: bytes, where: str) -> bytes:
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

    Some tensors have other names, which compilers can write into source code. Raises ArtifactError.
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
    rename_tensors(program, neutral_names(program))
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
