"""Opening a method's graph without torch's own reader, which turns names from the file into source code."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import torch

from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact

from .archives import calls, check_records
from .operators import OF_TORCH, ForeignFunction, MissingOperator, find_operator
from .schema import Graph, UnknownPart, read_program
from .straight_line import Compiled, DamagedGraph, compile_graph

Result = TypeVar("Result")
DAMAGED = (
    DamagedGraph,
    msgspec.MsgspecError,
    zipfile.BadZipFile,
    # raised by Python for numbers and nesting that no export writes
    OverflowError,
    RecursionError,
    SyntaxError,
    ValueError,
)


def open_graph(artifact: Artifact, name: str, device: torch.device, fixed: Sequence[bool] = ()) -> Compiled:
    """Compile the graph in the artifact's file `name`. Tensors that the function creates are made on `device`.

    fixed: for each input, whether it is the same in all calls, as for `compile_graph`.
    Raises ArtifactError, also for operators that no package in this process has registered.
    """
    raw = artifact.read(name)
    where = str(artifact.path / name)
    graph = read_graph(raw, where)
    return checked(raw, where, lambda: compile_graph(graph, device, fixed))


def read_graph(raw: bytes, where: str) -> Graph:
    """Read the graph from an archive's bytes. Raises ArtifactError."""
    check_records(raw, where)
    return checked(raw, where, lambda: read_program(raw).graph_module.graph)


def checked(raw: bytes, where: str, read: Callable[[], Result]) -> Result:
    """Return the result of `read`, which parses an archive's bytes; turn its errors into ArtifactError."""
    try:
        return read()
    except MissingOperator:
        raise ArtifactError(f"{where}: {_missing(calls(raw))}") from None
    except (UnknownPart, ForeignFunction) as reason:
        raise ArtifactError(
            f"{where}: has {reason}, which weightswap does not run. Export the artifact again, or install the "
            "weightswap that wrote it."
        ) from None
    except DAMAGED as error:
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error


def _missing(targets: Iterable[str]) -> str:
    """Return the message about operators that this process lacks."""
    missing = sorted(filter(_is_missing, targets))
    libraries = sorted({target.split(".")[2] for target in missing} - OF_TORCH)
    if not libraries:
        return f"needs {', '.join(missing)}, which torch {torch.__version__} lacks. Install the torch that exported it."
    return (
        f"needs {', '.join(missing)}, which this process lacks. Name what registers the operators of "
        f"{', '.join(libraries)}: load(..., op_libraries=[...]); or import it first; or export without it."
    )


def _is_missing(target: str) -> bool:
    try:
        find_operator(target)
    except MissingOperator:
        return True
    except (ForeignFunction, UnknownPart):
        pass
    return False
