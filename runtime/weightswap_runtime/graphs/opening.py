"""Opening the graph of a method: by this package's own reader, or by torch where that does not know something."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence

import msgspec
import torch

from weightswap_runtime.artifact import Artifact
from weightswap_runtime.errors import ArtifactError

from .archives import check_records
from .compiling import Compiled, DamagedGraph, compile_graph
from .operators import ForeignFunction, MissingOperator
from .programs import open_program, retarget
from .schema import UnknownPart, read_program

_log = logging.getLogger("weightswap.graphs")
_log.addHandler(logging.NullHandler())  # quiet unless the application configures logging
DAMAGED = (
    DamagedGraph,
    msgspec.MsgspecError,
    zipfile.BadZipFile,
    # what Python says to numbers and nestings that no export writes
    OverflowError,
    RecursionError,
    SyntaxError,
    ValueError,
)


def open_graph(artifact: Artifact, name: str, device: torch.device, fixed: Sequence[bool] = ()) -> Compiled:
    """The graph in the artifact's file `name` as a function; tensors that it creates are made on `device`.

    fixed: by input, whether it is the same in all calls, as for `compile_graph`.
    Raises ArtifactError, also for operators that no package in this process has registered.
    """
    raw = artifact.read(name)
    where = str(artifact.path / name)
    check_records(raw, where)
    try:
        return compile_graph(read_program(raw).graph_module.graph, device, fixed)
    except UnknownPart as reason:
        _log.info("%s: has %s, so torch.export.load opens it, which takes longer", where, reason)
    except (MissingOperator, ForeignFunction):
        pass  # the error names all of them
    except DAMAGED as error:
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error
    return _by_torch(artifact, name, device)


def _by_torch(artifact: Artifact, name: str, device: torch.device) -> Compiled:
    program = open_program(artifact, name)
    if device.type != "cpu":
        retarget(program, device)
    places = sum(node.op == "placeholder" for node in program.graph.nodes)
    (outputs,) = program.graph.output_node().args
    return Compiled(program.graph_module.forward, places, len(outputs), past_autograd=False)
