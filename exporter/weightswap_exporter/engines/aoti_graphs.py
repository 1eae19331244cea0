"""Graphs of methods in the form that AOTInductor takes: with tensors alone as inputs and outputs."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from weightswap_exporter.capture.mutations import is_plain
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.manifest import Method
from weightswap_runtime.format.signature import Integer, Leaf, Tensor, input_leaves, leaves


class FlatGraph(NamedTuple):
    """A graph module with flat inputs and outputs, and samples of its inputs.

    An integer input is passed as the size of a tensor, an integer output as a tensor without dimensions. read: FQNs of
    the tensors that the graph depends on. written: indices, among the method's flat inputs, of those that a call
    changes.
    """

    module: GraphModule
    samples: tuple[torch.Tensor, ...]
    read: frozenset[str]
    written: tuple[int, ...]


def flat_graph(where: str, program: ExportedProgram, method: Method, device: torch.device) -> FlatGraph:
    """Flatten the graph of a program on `device`. Raises CaptureError for inputs that AOTInductor cannot take."""
    written = _written_inputs(program)
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    _name_constants(module)
    if device.type == "cpu":
        _adapt(module)
    outputs = _flatten_outputs(module, leaves(method.signature.output))
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    samples = []
    for placeholder, leaf in zip(placeholders, input_leaves(method.signature), strict=True):
        if isinstance(leaf, Tensor):
            samples.append(_sample(where, leaf, placeholder.meta["val"]).to(device))
        elif isinstance(leaf, Integer):
            samples.append(_as_size(where, module, placeholder, leaf))
        else:
            module.graph.erase_node(placeholder)
    module.graph._codegen = CodeGen()
    module._in_spec = pytree.tree_structure((tuple(samples), {}))
    module._out_spec = pytree.tree_structure(outputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}
    return FlatGraph(module, tuple(samples), frozenset(read), written)


def _written_inputs(program: ExportedProgram) -> tuple[int, ...]:
    if is_plain(program):
        return ()
    with warnings.catch_warnings():  # torch itself uses a class that it deprecates
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        specs = program.run_decompositions({}).graph_signature.output_specs
    names = {spec.target for spec in specs if spec.kind is OutputKind.USER_INPUT_MUTATION}
    inputs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return tuple(index for index, spec in enumerate(inputs) if getattr(spec.arg, "name", None) in names)


def _name_constants(module: GraphModule) -> None:
    """Register all tensors as buffers: AOTInductor would rename those that are not registered."""
    registered = {
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    for node in module.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        submodule = module.get_submodule(owner)
        value = getattr(submodule, name)
        if isinstance(value, torch.Tensor) and node.target not in registered:
            delattr(submodule, name)
            submodule.register_buffer(name, value)
            registered.add(node.target)


def _adapt(module: GraphModule) -> None:
    """Replace operators for which AOTInductor generates checks that end the process."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in list(part.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)):
                _index_rows(part.graph, node)


def _index_rows(graph: torch.fx.Graph, node: Node) -> None:
    """Rewrite an embedding as an index operator, which would count negative indices from the end, and refuse those."""
    table, indices = node.args[:2]
    assert isinstance(table, Node)
    with graph.inserting_before(node):
        below = graph.call_function(torch.ops.aten.lt.Scalar, (indices, 0))
        beyond = graph.call_function(torch.ops.aten.sym_size.int, (table, 0))
        checked = graph.call_function(torch.ops.aten.masked_fill.Scalar, (indices, below, beyond))
    node.target, node.args, node.kwargs = torch.ops.aten.index.Tensor, (table, [checked]), {}


def _flatten_outputs(module: GraphModule, expected: list[Leaf]) -> tuple[Any, ...]:
    """Drop literals from the outputs of the graph, as they are in the manifest. Returns the other outputs."""
    output = module.graph.output_node()
    (values,) = output.args
    assert isinstance(values, list | tuple)
    with module.graph.inserting_before(output):
        outputs = [_output(module, value, leaf) for value, leaf in zip(values, expected, strict=True)]
    kept = tuple(value for value in outputs if value is not None)
    output.args = (kept,)
    return kept


def _output(module: GraphModule, value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return value
    if not isinstance(leaf, Integer):
        return None
    target = torch.ops.aten.scalar_tensor.default
    return module.graph.call_function(target, (value,), {"dtype": torch.int64, "device": torch.device("cpu")})


def _sample(where: str, leaf: Tensor, value: FakeTensor) -> torch.Tensor:
    """Return a tensor of the sizes that the graph was captured with. Raises CaptureError if it is not contiguous."""
    shape, stride = [_hint(size) for size in value.shape], [_hint(step) for step in value.stride()]
    contiguous = torch.empty(shape, dtype=value.dtype, device="meta").stride()
    steps = zip(stride, contiguous, shape, strict=True)
    if any(actual != expected for actual, expected, size in steps if size > 1) and 0 not in shape:
        raise CaptureError(
            f"{where}: was captured with {leaf.name!r} of shape {shape} with strides {stride}, and AOTInductor would "
            f"accept no others. Export with a contiguous sample, which has {list(contiguous)}"
        )
    return torch.zeros(shape, dtype=value.dtype)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _as_size(where: str, module: GraphModule, placeholder: Node, leaf: Integer) -> torch.Tensor:
    """Replace an integer input with the size of a tensor, as AOTInductor takes only tensors. Returns a sample."""
    value = placeholder.meta["val"]
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    if mode is None or not isinstance(value, torch.SymInt):
        raise CaptureError(f"{where}: takes the integer {leaf.name!r}, which AOTInductor cannot take")
    with module.graph.inserting_after(placeholder):
        size = module.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, 0))
    size.meta["val"] = value
    placeholder.replace_all_uses_with(size, delete_user_cb=lambda user: user is not size)
    with mode:
        placeholder.meta["val"] = torch.empty((value,), dtype=torch.uint8)
    return torch.zeros(_hint(value), dtype=torch.uint8)
