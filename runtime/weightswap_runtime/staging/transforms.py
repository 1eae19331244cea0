"""Value transforms: the conversion's graph computes weights from a checkpoint's tensors, one weight at a time."""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("a checkpoint from which weights have to be computed", "torch") from error

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weightswap_runtime.engines.graph import checked, compile_graph, read_graph
from weightswap_runtime.engines.graph_archive import Graph, Node, argument_names
from weightswap_runtime.engines.operators import ForeignFunction, find_operator
from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.manifest import CONVERSION_CONSTANTS_NAME, CONVERSION_NAME, NamedTensor
from weightswap_runtime.tensors import describe
from weightswap_runtime.torch_tensors import DTYPE_NAMES, copied_tensor, default_torch_modes

Read = Callable[[str], torch.Tensor]
CPU = torch.device("cpu")


class Transform(NamedTuple):
    """One weight as a function of inputs of the conversion's graph.

    `inputs` are the positions of these inputs; `needs` continues with those of the graph's nodes that compute it.
    """

    row: NamedTensor
    call: Callable[..., Any]
    inputs: tuple[int, ...]
    needs: tuple[int, ...]


class Transforms:
    """Graph of an artifact's conversion. Only functional operators are accepted, so inputs are never changed."""

    def __init__(self, artifact: Artifact) -> None:
        """Open the graph. Raises ArtifactError."""
        self._where = str(artifact.path / CONVERSION_NAME)
        conversion = artifact.manifest.conversion
        rows = {weight.name: weight for weight in artifact.manifest.weights}
        computed = [source for source in conversion.sources if source.transform is not None]
        raw = artifact.read(CONVERSION_NAME)
        graph = read_graph(raw, self._where)
        if len(graph.inputs) != len(conversion.inputs) or len(graph.outputs) != len(computed):
            raise ArtifactError(
                f"{self._where}: its inputs and outputs are not those of the conversion in the manifest"
            )
        self._inputs = conversion.inputs
        parts = checked(raw, self._where, lambda: _parts(graph))
        self._transforms = {
            source.weight: Transform(rows[source.weight], *parts[source.transform or 0]) for source in computed
        }
        self._constants = _constants(artifact)

    def compute(self, weights: Sequence[str], read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """Compute weights, in an order in which neighbours share inputs, and yield each with its name.

        `read(key)` returns a tensor of the checkpoint with the recorded dtype and shape; a result may be a view of it.
        At any time one weight, its inputs, and the inputs that the next one shares are held.

        Raises ArtifactError, and what `read` and the operators raise.
        """
        order = sorted(weights, key=lambda weight: self._transforms[weight].needs)
        held: dict[int, torch.Tensor] = {}
        for weight, following in zip(order, [*order[1:], None], strict=True):
            transform = self._transforms[weight]
            value = self._run(transform, held, read)
            self._check_result(transform.row, value)
            yield weight, value
            next_inputs = self._transforms[following].inputs if following else ()
            held = {position: held[position] for position in next_inputs if position in held}

    def _run(self, transform: Transform, held: dict[int, torch.Tensor], read: Read) -> torch.Tensor:
        for position in transform.inputs:
            if position not in held:
                item = self._inputs[position]
                held[position] = read(item.name) if item.kind == "key" else self._constants[item.name]
        with default_torch_modes():
            (value,) = transform.call(*(held[position] for position in transform.inputs))
        result: torch.Tensor = value
        return result

    def _check_result(self, row: NamedTensor, value: torch.Tensor) -> None:
        dtype, shape = DTYPE_NAMES.get(value.dtype), tuple(value.shape)
        if (dtype, shape) != (row.dtype, row.shape):
            raise ArtifactError(
                f"{self._where}: computes {dtype}{list(shape)} for {row.name}, expected {describe(row)}. Export again."
            )


def _parts(graph: Graph) -> list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]]:
    """Return for each output: the compiled part of the graph that computes it, its inputs, and all positions needed."""
    for node in graph.nodes:
        operator = find_operator(node.target)
        if operator.mutable or operator.higher_order:
            raise ForeignFunction(f"a call of {node.target!r:.80} in a conversion")
    made = {name: position for position, item in enumerate(graph.inputs) for name in argument_names(item)}
    count = len(graph.inputs)
    made |= {
        name: position
        for position, node in enumerate(graph.nodes, count)
        for item in node.outputs
        for name in argument_names(item)
    }
    uses = {position: _uses(node, made) for position, node in enumerate(graph.nodes, count)}
    parts = []
    for output in graph.outputs:
        needs = _needed([made[name] for name in argument_names(output) if name in made], uses)
        inputs = tuple(position for position in needs if position < count)
        part = Graph(
            inputs=tuple(graph.inputs[position] for position in inputs),
            outputs=(output,),
            nodes=tuple(graph.nodes[position - count] for position in needs[len(inputs) :]),
        )
        parts.append((compile_graph(part, CPU).call, inputs, needs))
    return parts


def _uses(node: Node, made: Mapping[str, int]) -> set[int]:
    return {made[name] for item in node.inputs for name in argument_names(item.arg) if name in made}


def _needed(positions: Sequence[int], uses: Mapping[int, set[int]]) -> tuple[int, ...]:
    """Return the positions and all those that they are computed from, sorted."""
    needed, queue = set(positions), list(positions)
    while queue:
        new = uses.get(queue.pop(), set()) - needed
        needed |= new
        queue += new
    return tuple(sorted(needed))


def _constants(artifact: Artifact) -> Mapping[str, torch.Tensor]:
    rows = [item for item in artifact.manifest.conversion.inputs if item.kind == "constant"]
    if not rows:
        return {}
    tensors = artifact.tensors(CONVERSION_CONSTANTS_NAME, rows)
    return {row.name: copied_tensor(tensors[row.name]) for row in rows}
