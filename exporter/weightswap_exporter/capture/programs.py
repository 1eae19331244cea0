"""Exported programs: their parts, which buffers their calls change, and what is made explicit before they are written.

A program as torch captures it writes in place, as eager code does. Which buffers a call changes is found by following
writes back to the memory that they reach: by functionalising the program, torch could say so, too, but that takes as
long as the capture. Before a program is written, operators of other packages are replaced by torch's, and what depends
on the default dtype of this process is written down: a server has neither.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from keyword import iskeyword
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from weightswap_runtime.engines.operators import (
    OF_TORCH,
    SECRET_VIEWS,
    STATISTICS,
    declares_views,
    is_composed,
    is_fresh,
)
from weightswap_runtime.errors import CaptureError, listed

_MUTATIONS = (OutputKind.PARAMETER_MUTATION, OutputKind.BUFFER_MUTATION)
_NAMED = frozenset({InputKind.PARAMETER, InputKind.BUFFER})
_RUNNING = {"running_mean", "running_var"}
# operators that run a graph of their own, under another gradient or autocast mode
_REGIONS = {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
_INTEGER, _FLOAT, _COMPLEX = range(3)  # kinds of values; each promotes those before it
_COMPARISONS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "isin"),
    *("not_equal", "less", "less_equal", "greater", "greater_equal"),
}
_PROMOTING = {"where", "logsumexp", "floor_divide", "isin"}  # as operators with the tag `pointwise` do
_SECRETLY = {"isclose"}  # casts integers to the default dtype inside
_Bodies = dict[str, Graph]  # of composed operators, by operator and types of the arguments


def graphs(program: ExportedProgram) -> Iterator[GraphModule]:
    """Return the program's graph and those nested in it."""
    return (module for module in program.graph_module.modules() if isinstance(module, GraphModule))


def graph_inputs(program: ExportedProgram) -> list[tuple[Node, InputSpec]]:
    """Return the placeholders with their input specs."""
    return list(zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))


def all_inputs(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes, and all nodes that they are computed from."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def is_random(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _reached(nodes: Iterable[Node], sources: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return nodes, their `sources`, the sources of these, and so on."""
    visited, unseen = set[Node](), set(nodes)
    while unseen:
        node = unseen.pop()
        visited.add(node)
        unseen |= set(sources(node)) - visited
    return visited


def memory(value: Any) -> set[int]:
    """Return the storages of the tensors in a value."""
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}


def _opname(node: Node) -> str:
    """Return the operator's name without its package; empty if the target is no operator."""
    return str(getattr(node.target, "_opname", ""))


def arguments(node: Node) -> Iterator[tuple[torch.Argument, Any]]:
    """Return the arguments of an operator's schema, with the node's values for them."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in declared), node.args, strict=False)) | node.kwargs
    return ((argument, values.get(argument.name)) for argument in declared)


def _nodes(value: Any) -> list[Node]:
    """Return the nodes in an argument: itself, or those in a list."""
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]


def functionalised(program: ExportedProgram) -> ExportedProgram:
    """Return the program without writes in place."""
    neutral = neutral_names(program)
    original = {new: old for old, new in neutral.items()}
    rename_tensors(program, neutral)
    try:
        with warnings.catch_warnings():  # torch itself copies a class that it has deprecated
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
            result: ExportedProgram = program.run_decompositions({})
    finally:
        rename_tensors(program, original)
    rename_tensors(result, original)
    return result


def neutral_names(program: ExportedProgram) -> dict[str, str]:
    """Return other names, by FQN, for those of the program's own tensors that torch cannot write into source code.

    It writes parts of FQNs into Python as they are, and into C++ with underscores between: a buffer `class`, `new` or
    `buf0` is an error there, or another variable.
    """
    own = enumerate(program.state_dict | program.constants)
    return {fqn: f"tensor_{index}" for index, fqn in own if "." not in fqn or any(map(iskeyword, fqn.split(".")))}


def rename_tensors(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Rename the program's own tensors that are in `names`."""
    signature = program.graph_signature
    own = [spec for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    for spec in (*own, *(spec for spec in signature.output_specs if spec.kind in _MUTATIONS)):
        spec.target = None if spec.target is None else names.get(spec.target, spec.target)
    program._state_dict = {names.get(fqn, fqn): value for fqn, value in program.state_dict.items()}
    program._constants = {names.get(fqn, fqn): value for fqn, value in program.constants.items()}


def drop_sets_to_itself(program: ExportedProgram) -> None:
    """Remove `w.set_(w)`, which is no change: a call that parametrises `w` does it, as PEFT's `target_parameters`."""
    for module in graphs(program):
        sets = module.graph.find_nodes(op="call_function", target=torch.ops.aten.set_.source_Tensor)
        for node in (each for each in sets if each.args[0] is each.args[1]):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            module.recompile()


def mutated_buffers(program: ExportedProgram) -> frozenset[str]:
    """Return the FQNs of the buffers that a call changes. Raises CaptureError if it changes a parameter."""
    own = _placeholders(program, frozenset(InputKind) - {InputKind.USER_INPUT})
    written, named = set(_writes(program.graph_module, set(own))), _placeholders(program, _NAMED)
    if not written <= named.keys():  # a write through a view, or in a region: torch must say what it reaches
        return functionalised_mutations(program)
    storages = {storage for node in written for storage in memory(node.meta["val"])}
    return _buffers({name for node, name in named.items() if storages & memory(node.meta["val"])}, program)


def functionalised_mutations(program: ExportedProgram) -> frozenset[str]:
    """Return the same as `mutated_buffers`, always by functionalising."""
    outputs = functionalised(program).graph_signature.output_specs
    changed = {str(spec.target) for spec in outputs if spec.kind in _MUTATIONS} | _written_in_a_run(program)
    return _buffers(changed, program)


def _buffers(changed: set[str], program: ExportedProgram) -> frozenset[str]:
    """Return the changed FQNs. Raises CaptureError if there is a parameter among them."""
    if parameters := sorted(changed.intersection(program.graph_signature.parameters)):
        raise CaptureError(
            f"a call changes the parameter(s) {listed(parameters)}; only a swap may change weights, so a model that "
            "changes its own cannot be exported. Turn the change off if the model has an option (nn.Embedding: "
            "max_norm=None, RWKV: rescale_every=0); in your own code, compute a new tensor in each "
            "call, and do not keep it."
        )
    return frozenset(changed)


def _written_in_a_run(program: ExportedProgram) -> set[str]:
    """Return FQNs of tensors that a run on fake tensors changes: functionalising misses results that are inputs."""
    inputs = [node.meta.get("val") for node, _ in graph_inputs(program)]
    tensors = {name: node.meta["val"] for node, name in _placeholders(program, _NAMED).items()}
    versions = {name: value._version for name, value in tensors.items()}
    mode = detect_fake_mode(inputs)
    # operators that branch on a size in this run must not specialise the program to it
    sizes = mode.shape_env.suppress_guards() if mode is not None and mode.shape_env is not None else nullcontext()
    with mode or nullcontext(), sizes, torch.no_grad():
        try:
            Interpreter(program.graph_module).run(*inputs)
        except RuntimeError:  # an operator in C++ takes no symbolic sizes; Python's decompositions know fewer views
            with enable_python_dispatcher():
                Interpreter(program.graph_module).run(*inputs)
    return {name for name, value in tensors.items() if value._version != versions[name]}


def _placeholders(program: ExportedProgram, kinds: Set[InputKind]) -> dict[Node, str]:
    """Return the placeholders of some kinds, with the FQNs that they stand for."""
    return {node: str(spec.target) for node, spec in graph_inputs(program) if spec.kind in kinds}


def _writes(module: GraphModule, owned: set[Node]) -> Iterator[Node]:
    """Yield written nodes that share memory with `owned`; for an undeclared write, the node that writes."""
    shared = set(owned)  # nodes that may share this memory; `origins` are exact, but slow
    origins = _Origins(owned)
    same: dict[Node, Node] = {}  # results of writes in place, which are what is written to
    for node in module.graph.nodes:
        if node.op != "call_function" or not shared.intersection(node.all_input_nodes):
            continue
        if isinstance(node.target, OpOverload):
            written = [item for item in shared.intersection(_written(node)) if item in origins]
            yield from (same.get(item, item) if node.target._schema.is_mutable else node for item in written)
            if len(written) == 1 and _opname(node).endswith("_"):
                same[node] = same.get(written[0], written[0])
            if shared.intersection(_may_view(node)):
                shared.add(node)
        else:
            if not _is_python(node) and _region_writes(module, node, origins):
                yield node
            shared.add(node)


class _Origins:
    """Set of the nodes that are views of others."""

    def __init__(self, owned: set[Node]) -> None:
        self._owned = owned
        self._viewed = functools.cache(viewed)

    def __contains__(self, node: Node) -> bool:
        """Return whether a node is of `owned` or a view of it. Raises CaptureError for views that torch cannot see."""
        path = _reached([node], self._viewed)
        secret = sorted(name for name in map(_opname, path) if name in SECRET_VIEWS)
        if path & self._owned and secret:
            raise CaptureError(f"a call writes to {secret[0]}'s result, which may be a view: use the safe operator")
        return bool(path & self._owned)


def _region_writes(module: GraphModule, node: Node, origins: _Origins) -> bool:
    """Return whether a region with its own gradient or autocast mode writes; True for other subgraphs, to be safe."""
    graphs = [item for item in node.all_input_nodes if item.op == "get_attr"]
    if node.target not in _REGIONS or len(graphs) != 1:
        return True
    region = getattr(module, str(graphs[0].target))
    inputs = node.args[node.args.index(graphs[0]) + 1 :]
    pairs = zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True)
    owned = {placeholder for placeholder, item in pairs if isinstance(item, Node) and item in origins}
    return any(True for _ in _writes(region, owned))


def _written(node: Node) -> Iterator[Node]:
    """Yield tensors that an operator writes to. One that updates statistics may declare none: if foreign, all count."""
    pairs = list(arguments(node))
    foreign = node.target.namespace != "aten"  # type: ignore[union-attr]
    keeps_statistics = any(argument.name in STATISTICS and value is True for argument, value in pairs)
    for argument, value in pairs:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (keeps_statistics and (foreign or argument.name in _RUNNING)):
            yield from _nodes(value)


def _may_view(node: Node) -> list[Node]:
    """Return the inputs that a result may share memory with, by the operator's schema.

    Composed operators do not always declare it, so all of their inputs count.
    """
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    if declares_views(node.target):
        return [item for argument, value in arguments(node) if argument.alias_info for item in _nodes(value)]
    if is_fresh(node.target):
        return []
    return node.all_input_nodes if is_composed(node.target) or _opname(node) in SECRET_VIEWS else []


def viewed(node: Node) -> list[Node]:
    """Return `_may_view(node)` more exactly, by running composed operators on fake tensors: a convolution is no view.

    As in eager mode, C++ decomposes them then. The results that the capture has recorded do not show it: Python's
    decompositions may copy where C++ returns an input.
    """
    views, target = _may_view(node), node.target
    if not views or not isinstance(target, OpOverload) or declares_views(target) or not is_composed(target):
        return views
    try:
        with FakeTensorMode(), torch.no_grad():
            stand_ins = {item: pytree.tree_map(_stand_in, item.meta["val"]) for item in node.all_input_nodes}
            args, kwargs = map_arg((node.args, node.kwargs), stand_ins.__getitem__)
            result = memory(target(*args, **kwargs))
    except Exception:  # the operator does not run on fake tensors, or its sizes depend on values
        return views
    return [item for item, value in stand_ins.items() if result & memory(value)]


def _stand_in(value: Any) -> Any:
    """Return a fake tensor, or a size, with the sizes of the sample inputs."""
    if isinstance(value, torch.Tensor):
        shape, stride = ([_sample(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return _sample(value)


def _sample(size: Any) -> Any:
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size
    if size.node.hint is None:
        raise ValueError(f"{size} depends on values")
    return size.node.hint


def is_plain(program: ExportedProgram) -> bool:
    """Return whether a program's operators write nothing, and no result has a size that depends on values.

    Operators may be in regions with a gradient or autocast mode.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy, which packing does without

    return all(
        node.target in _REGIONS or (isinstance(node.target, OpOverload) and not node.target._schema.is_mutable)
        for module in graphs(program)
        for node in module.graph.nodes
        if node.op == "call_function" and not _is_python(node)
    ) and not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _is_python(node: Node) -> bool:
    """Return whether a node is arithmetic on sizes, or takes one of several results."""
    return getattr(node.target, "__module__", "") in ("_operator", "math")


def inline_operators(program: ExportedProgram) -> None:
    """Replace other packages' composed operators by torch's: a server need not have those packages."""
    bodies: _Bodies = {}
    for module in graphs(program):
        for node in filter(_is_composed_operator, list(module.graph.nodes)):
            _inline(node, bodies)
        module.recompile()


def _is_composed_operator(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target.namespace not in OF_TORCH and is_composed(target)


def _inline(node: Node, bodies: _Bodies) -> list[Node]:
    """Replace a node by its composed operator's body, and return the new nodes.

    `bodies` caches them by operator and types of its arguments.
    """
    inputs = [item for item in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(item, Node)]
    types = [_type(item.meta["val"]) for item in inputs]
    key = str((node.target, pytree.tree_map_only(Node, lambda _: Node, (node.args, node.kwargs)), types))
    body = bodies[key] = bodies.get(key) or _body(node, inputs)
    copies = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        results = node.graph.graph_copy(body, copies)
    new = [copies[item] for item in body.nodes if item in copies and item.op != "placeholder"]
    for item in new:
        item.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    _replace(node, results, new)
    return new


def _type(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def _body(node: Node, inputs: list[Node]) -> Graph:
    target: Any = node.target
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))

    def run(*values: Any) -> Any:
        rest = iter(values)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(item, Node) else item for item in flat], spec)
        return target.decompose(*args, **kwargs)

    body: Graph = make_fx(run)(*(item.meta["val"] for item in inputs)).graph
    body.eliminate_dead_code()  # sizes that the operator only looked at
    if body.find_nodes(op="get_attr"):
        raise CaptureError(f"{target} keeps a tensor of its own, which a graph cannot hold without its package")
    return body


def _replace(node: Node, results: Any, new: list[Node]) -> None:
    """Replace a node by the results of its body, under the same names: the program's outputs are listed by name."""
    if isinstance(results, Node):
        if results not in new:  # an argument
            with node.graph.inserting_before(node):
                results = node.graph.call_function(torch.ops.aten.alias.default, (results,))
            results.meta = dict(node.meta)
        node.replace_all_uses_with(results)
        results.name = node.name
    else:
        for user in list(node.users):  # each is a getitem
            _replace(user, results[user.args[1]], new)
    node.graph.erase_node(node)


def fix_dtypes(program: ExportedProgram) -> None:
    """Make a program independent of the default dtype: what that is now becomes a part of the program."""
    bodies: _Bodies = {}
    for module in graphs(program):
        _fix(module.graph, bodies)
        module.recompile()


def _fix(graph: Graph, bodies: _Bodies) -> None:
    unseen = list(reversed(graph.nodes))
    while unseen:
        node = unseen.pop()
        target: Any = node.target
        if not isinstance(target, OpOverload) or target.namespace not in OF_TORCH:
            continue
        dtype = _default_taken(node)
        if dtype is None:
            continue
        if any(argument.name == "dtype" for argument in target._schema.arguments):
            node.kwargs = {**node.kwargs, "dtype": dtype}
        elif is_composed(target):
            unseen += reversed(_inline(node, bodies))
        elif torch.Tag.pointwise in target.tags or _opname(node) in _PROMOTING:
            _cast_arguments(node, dtype)


def _default_taken(node: Node) -> torch.dtype | None:
    """Return the dtype in which an operator computes, if neither its tensors nor its argument `dtype` determine it."""
    if any(argument.name == "dtype" and value is not None for argument, value in arguments(node)):
        return None
    given = pytree.tree_leaves((node.args, node.kwargs))
    values = [item.meta["val"] if isinstance(item, Node) else item for item in given]
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    results = [value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)]
    computed = values if _opname(node) in _COMPARISONS else results
    kind = _FLOAT if _opname(node) in _SECRETLY else max(map(_kind, computed), default=_INTEGER)
    # complex numbers that are computed from floats have these as their parts
    if kind == _INTEGER or min(kind, _FLOAT) <= max(map(_kind, tensors), default=_INTEGER):
        return None
    default = torch.get_default_dtype() if kind == _FLOAT else torch.get_default_dtype().to_complex()
    return next((result.dtype for result in results if _kind(result) == kind), default)


def _kind(value: Any) -> int:
    if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
        return _COMPLEX
    if isinstance(value, float | torch.SymFloat) or (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return _FLOAT
    return _INTEGER


def _cast_arguments(node: Node, dtype: torch.dtype) -> None:
    """Cast the tensors that the operator would cast to the default dtype."""
    for argument, value in list(arguments(node)):
        for item in _nodes(value):
            tensor = item.meta["val"]
            if argument.name == "condition" or not isinstance(tensor, torch.Tensor) or tensor.dtype == dtype:
                continue
            with node.graph.inserting_before(node):
                cast = node.graph.call_function(torch.ops.aten.to.dtype, (item, dtype))
            cast.meta["val"] = _cast_value(tensor, dtype)
            cast.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
            node.replace_input_with(item, cast)


def _cast_value(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not torch._C._functorch.is_batchedtensor(tensor):
        return tensor.to(dtype)
    # the level of vmap that it belongs to has ended
    return torch._C._functorch.get_unwrapped(tensor).new_empty(tensor.shape, dtype=dtype)
