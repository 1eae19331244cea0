"""Graphs of methods, run node by node with the weights of a file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from weightswap_exporter.capture.reopening import method_program, open_program
from weightswap_exporter.checkpoints.tensor import contents_of
from weightswap_exporter.packing import pack_to_compare
from weightswap_runtime import Artifact, read_weights

from .compared_calls import CallCase, PathLike
from .executions import initial_state
from .steps import GraphRun, Step, StepRecorder


class OpenedGraph:
    """The graph of one method. Weights come from a weight file or any source that `pack` takes."""

    def __init__(self, artifact: Artifact, method: str) -> None:
        self.artifact = artifact
        self.method = method
        self.inputs = artifact.manifest.methods[method].inputs

    def open(self) -> ExportedProgram:
        """Return the program without values. Raises ArtifactError."""
        return open_program(self.artifact, self.artifact.manifest.methods[self.method].graph)

    def steps(self, weights: PathLike, case: CallCase) -> tuple[list[Step], list[Any]]:
        """Run a case. Returns its steps, operator by operator, and its flat outputs."""
        program = self._filled(weights)
        run = GraphRun(program)
        own = [*program.state_dict.values(), *program.constants.values()]
        recorder = StepRecorder(run.position, [value for value in own if isinstance(value, torch.Tensor)])
        with torch.no_grad(), recorder:
            values = run.run(*_flat(program, case))
        return recorder.steps, contents_of(values)

    def outputs(self, weights: PathLike, case: CallCase) -> list[Any]:
        """Run a case. Returns its flat outputs, with tensors as `TensorBytes`."""
        program = self._filled(weights)
        with torch.no_grad():
            return contents_of(GraphRun(program).run(*_flat(program, case)))

    def weights_of(self, node: str) -> tuple[str, ...]:
        """Return the first FQN of each weight, state, constant and variant tensor that a node takes."""
        graph = self.open().graph
        pairs = zip(graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        manifest = self.artifact.manifest
        tables = (*manifest.weights, *manifest.state, *manifest.constants, *manifest.variable)
        first = {name: row.name for row in tables for name in row.names}
        fqns = {placeholder: first[item.name] for placeholder, item in pairs if item.kind != "input"}
        inputs = [source for each in graph.nodes if each.name == node for source in each.all_input_nodes]
        return tuple(fqns[source] for source in inputs if source in fqns)

    def _filled(self, weights: PathLike) -> ExportedProgram:
        """Return the program filled with weights, the initial state, and zeros for variants."""
        program = method_program(self.artifact, self.method)
        values = _values(self.artifact, weights) | initial_state(self.artifact)
        zero = torch.zeros(())
        for spec, item in zip(program.graph_signature.input_specs, self.inputs, strict=True):
            if item.kind in ("weight", "state", "variant") and spec.target is not None:
                table = program.state_dict if spec.target in program.state_dict else program.constants
                with torch.no_grad():
                    table[spec.target].copy_(zero if item.kind == "variant" else values[item.name])
        return program


def _flat(program: ExportedProgram, case: CallCase) -> list[Any]:
    values = iter(case.flat)
    tables = program.state_dict | program.constants
    specs = program.graph_signature.input_specs
    return [next(values) if spec.kind is InputKind.USER_INPUT else tables[spec.target] for spec in specs]


def _values(artifact: Artifact, weights: PathLike) -> dict[str, torch.Tensor]:
    """Return weights by FQN, with tied ones under each of their names."""
    with TemporaryDirectory(prefix="weightswap-") as folder:
        packed = pack_to_compare(weights, artifact, Path(folder) / "weights.safetensors")
        values = read_weights(packed, framework="torch")
    return {name: values[row.name] for row in artifact.manifest.weights for name in row.names}
