"""Value transforms: weights computed from a checkpoint's tensors by the adapter's graph, one weight at a time."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .artifact import Artifact
from .dtypes import TORCH_NAMES, describe
from .errors import ArtifactError, MissingExtra
from .manifest import ADAPTER_CONSTANTS_NAME, ADAPTER_NAME, AdapterInput, NamedTensor

try:
    import torch
except ImportError as error:
    raise MissingExtra("a checkpoint from which weights have to be computed", "torch") from error

from torch.fx import Node, map_arg

from .graphs.programs import open_program
from .plainly import plainly
from .tensors import as_tensor

Read = Callable[[str], torch.Tensor]


class Transforms:
    """The graph of an artifact's adapter. Only functional operators are accepted: inputs are never changed."""

    def __init__(self, artifact: Artifact) -> None:
        """Open the graph. Raises ArtifactError."""
        self._where = str(artifact.path / ADAPTER_NAME)
        adapter = artifact.manifest.adapter
        rows = {weight.name: weight for weight in artifact.manifest.weights}
        *body, last = open_program(artifact, ADAPTER_NAME).graph.nodes
        self._order = {node: position for position, node in enumerate(body)}
        places = [node for node in body if node.op == "placeholder"]
        outputs: Any = last.args[0]
        computed = [source for source in adapter.sources if source.transform is not None]
        if len(places) != len(adapter.inputs) or len(outputs) != len(computed):
            raise ArtifactError(f"{self._where}: its inputs and outputs are not those of the adapter in the manifest")
        for node in body:
            self._check(node)
        self._inputs: dict[Node, AdapterInput] = dict(zip(places, adapter.inputs, strict=True))
        self._outputs: dict[str, tuple[NamedTensor, Node]] = {
            source.weight: (rows[source.weight], outputs[source.transform]) for source in computed
        }
        self._constants = _constants(artifact)

    def _check(self, node: Node) -> None:
        schema = getattr(node.target, "_schema", None)
        known = node.op == "placeholder" or node.target is operator.getitem or schema is not None
        if not known or (schema is not None and schema.is_mutable):
            raise ArtifactError(f"{self._where}: {node.op} {node.target} has no place in an adapter. Export again.")

    def compute(self, weights: Sequence[str], read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """Compute weights, in an order in which neighbours share inputs.

        `read(key)` gives a tensor of the checkpoint with the recorded dtype and shape; a result may be a view of it. No
        more is held than one weight, what it is computed from, and inputs that the next one needs too.

        Raises ArtifactError, and what `read` and the operators raise.
        """
        needs = {weight: self._needs(self._outputs[weight][1]) for weight in weights}
        order = sorted(weights, key=lambda weight: [self._order[node] for node in needs[weight]])
        held: dict[Node, torch.Tensor] = {}
        for weight, following in zip(order, [*order[1:], None], strict=True):
            value = self._run(needs[weight], self._outputs[weight][1], held, read)
            self._check_result(weight, value)
            yield weight, value
            wanted = needs[following] if following else []
            held = {node: held[node] for node in wanted if node in held}

    def _needs(self, output: Node) -> list[Node]:
        """The node and all that it is computed from, in order of execution."""
        found = {output}
        open_nodes = [output]
        while open_nodes:
            new = set(open_nodes.pop().all_input_nodes) - found
            found |= new
            open_nodes += new
        return sorted(found, key=self._order.__getitem__)

    def _run(self, nodes: list[Node], output: Node, held: dict[Node, torch.Tensor], read: Read) -> torch.Tensor:
        uses = Counter(argument for node in nodes for argument in node.all_input_nodes)
        values: dict[Node, Any] = {}
        with plainly():
            for node in nodes:
                if node.op == "placeholder":
                    values[node] = held[node] = held[node] if node in held else self._input(node, read)
                    continue
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                for argument in node.all_input_nodes:
                    uses[argument] -= 1
                    if not uses[argument]:
                        del values[argument]
        result: torch.Tensor = values[output]
        return result

    def _input(self, node: Node, read: Read) -> torch.Tensor:
        item = self._inputs[node]
        return read(item.name) if item.kind == "key" else self._constants[item.name]

    def _check_result(self, weight: str, value: torch.Tensor) -> None:
        row = self._outputs[weight][0]
        found = TORCH_NAMES.get(str(value.dtype).removeprefix("torch.")), tuple(value.shape)
        if found != (row.dtype, row.shape):
            raise ArtifactError(
                f"{self._where}: computes {found[0]}{list(found[1])} for {weight}, expected "
                f"{describe(row.dtype, row.shape)}. Export again."
            )


def _constants(artifact: Artifact) -> Mapping[str, torch.Tensor]:
    rows = [item for item in artifact.manifest.adapter.inputs if item.kind == "constant"]
    if not rows:
        return {}
    header, data = artifact.tensors(ADAPTER_CONSTANTS_NAME, rows)
    places = {row.name: header.tensors[row.name] for row in rows}
    return {
        row.name: as_tensor(bytearray(data[places[row.name].begin : places[row.name].end]), row.dtype, row.shape)
        for row in rows
    }
