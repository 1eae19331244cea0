"""Writing of graphs as `torch.export` archives without weights, with the same bytes for the same program.

The archive has only what `torch.export.load` needs: tensors are on the meta device, there are no sample inputs (torch
would pickle them), and nodes keep their module path but no stack trace.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from weightswap_runtime.engines.graphs.graph_opening import checked, read_graph
from weightswap_runtime.engines.graphs.straight_line import compile_graph
from weightswap_runtime.errors import ArtifactError, CaptureError
from weightswap_runtime.format.signature import Dict, Items, Key, Node, Signature, Tuple, key_text, leaves, unflatten

from .fixed_dtypes import fix_dtypes
from .reopening import checked_archive

_KEPT_METADATA = frozenset({"nn_module_stack"})
_DROPPED = (".data/serialization_id",)


def graph_archive(program: ExportedProgram, signature: Signature) -> bytes:
    """Return the content of `graphs/<method>.pt2`. The program loses the values of its tensors.

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
    return program_archive(program)


def program_archive(program: ExportedProgram) -> bytes:
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
    _check_readable(archive)
    return archive


def _check_readable(archive: bytes) -> None:
    """Raise CaptureError for a graph that torch writes, but that servers or compilers cannot read."""
    where = "the captured graph"
    try:
        checked_archive(archive, where)
        graph = read_graph(archive, where)
        checked(archive, where, lambda: compile_graph(graph, torch.device("cpu")))
    except ArtifactError as error:
        reason = str(error).removeprefix(f"{where}: ").partition(" Export the artifact again")[0]
        raise CaptureError(f"the captured graph cannot be served: {reason}") from error


def _use_plain_containers(program: ExportedProgram, signature: Signature) -> None:
    (root,) = (entry.signature for entry in program.module_call_graph if entry.fqn == "")
    assert root is not None
    args = tuple(_plain(node) for _, node in signature.args)
    kwargs = {name: _plain(node) for name, node in signature.kwargs}
    root.in_spec = pytree.tree_structure((args, kwargs))
    root.out_spec = pytree.tree_structure(_plain(signature.output))


def _plain(node: Node) -> Any:
    return unflatten(_with_text_keys(node), leaves(node))


def _with_text_keys(node: Node) -> Node:
    """Return the tree with texts for tuples as keys: torch writes keys as JSON, and cannot read tuples back."""
    match node:
        case Dict(items):
            return Dict(tuple((_text_of(key), _with_text_keys(item)) for key, item in items))
        case Items(items) | Tuple(items):
            return type(node)(tuple(map(_with_text_keys, items)))
        case _:
            return node


def _text_of(key: Key) -> Key:
    return key_text(key) if isinstance(key, tuple) else key


def _rewrite(saved: io.BytesIO) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as target:
        records = {name: source.read(name) for name in source.namelist() if not name.endswith(_DROPPED)}
        for name in [name for name in records if name.endswith("_config.json")]:
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
        part["metadata"] = {k: v for k, v in part["metadata"].items() if k in _KEPT_METADATA}
    return part


def _drop_texts(graph_module: dict[str, Any]) -> None:
    """Replace text outputs by None: torch writes them and cannot read them. The manifest has their values."""
    none = {"as_none": True}
    outputs = graph_module["graph"]["outputs"]
    graph_module["graph"]["outputs"] = [none if "as_string" in output else output for output in outputs]
    for spec in graph_module["signature"]["output_specs"]:
        output = spec.get("user_output", {})
        if "as_string" in output.get("arg", {}):
            output["arg"] = none
