"""Opening an artifact's graphs as torch does, which takes a millisecond for each call in them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from weightswap_runtime.artifact import Artifact
from weightswap_runtime.errors import ArtifactError

from .archives import check_archive, functions
from .operators import ForeignFunction, MissingOperator, find_operator
from .schema import UnknownPart

_AUTOCAST = {"wrap_with_autocast", "_enter_autocast"}


def open_program(artifact: Artifact, name: str) -> ExportedProgram:
    """Open the graph in the artifact's file `name`. Raises ArtifactError."""
    raw = artifact.read(name)
    where = str(artifact.path / name)
    check_archive(raw, where)
    _check_functions(functions(raw), where)
    try:
        return torch.export.load(io.BytesIO(raw))
    except Exception as error:
        raise ArtifactError(
            f"{where}: torch {torch.__version__} cannot open the graph that torch "
            f"{artifact.manifest.producer.torch} wrote ({error}). Install that torch, or export again."
        ) from error


def retarget(program: ExportedProgram, device: torch.device) -> None:
    """Let a program run on a device: each device in it becomes that one. `torch.export.passes` overlooks some."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for module in program.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
            autocast = node.op == "call_function" and str(node.target).split(".")[-1] in _AUTOCAST
            if autocast and node.args[0] == "cpu":
                node.args = (device.type, *node.args[1:])
        module.recompile()


def _check_functions(targets: Iterable[str], where: str) -> None:
    missing: list[str] = []
    for target in sorted(targets):
        try:
            find_operator(target)
        except MissingOperator:
            missing.append(target)
        except ForeignFunction as error:
            raise ArtifactError(f"{where}: calls {error}, which has no place in a graph. Export it again.") from None
        except UnknownPart:
            continue  # torch knows it
    if missing:
        raise ArtifactError(
            f"{where}: needs {', '.join(missing)}, which this process lacks. Name what registers "
            f"{_libraries(missing)}: load(..., op_libraries=[...]); or import it before; or export without it."
        )


def _libraries(missing: Iterable[str]) -> str:
    """The libraries of operators: the namespaces that they are registered in."""
    found = sorted({target.split(".")[2] for target in missing})
    return f"the operators of {', '.join(found)}"
