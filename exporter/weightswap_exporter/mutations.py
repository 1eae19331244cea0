"""Which buffers a captured program changes.

The program changes them in place. Functionalising a copy of it makes that explicit, and takes several times as long as
the capture; so it is only done for programs in which an operator may write to a parameter's or a buffer's memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from weightswap_runtime.errors import CaptureError

_REGIONS = {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
_SECRET_VIEWS = {"unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view", "lift"}
_STATISTICS = {"training", "use_input_stats", "train"}


def mutated_buffers(program: ExportedProgram) -> frozenset[str]:
    """FQNs of the buffers that a call changes. Raises CaptureError where it changes a parameter."""
    return functionalised_mutations(program) if may_mutate(program) else frozenset()


def functionalised_mutations(program: ExportedProgram) -> frozenset[str]:
    """What `mutated_buffers` finds, always by functionalising."""
    with warnings.catch_warnings():  # torch copies a class of its own that it deprecates
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        outputs = program.run_decompositions({}).graph_signature.output_specs
    changed = [spec.target for spec in outputs if spec.kind is OutputKind.PARAMETER_MUTATION]
    if changed:
        raise CaptureError(
            f"a call changes the parameter(s) {', '.join(map(str, changed))}; weights are only changed by a swap. "
            "Register what changes as a buffer, or switch the change off (nn.Embedding: max_norm=None)."
        )
    declared = {str(spec.target) for spec in outputs if spec.kind is OutputKind.BUFFER_MUTATION}
    return frozenset(declared | _written_in_a_run(program))


def _written_in_a_run(program: ExportedProgram) -> set[str]:
    """FQNs of buffers that a run without values writes to: functionalising misses them where a result is the input."""
    inputs = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    kept = {
        str(spec.target): value
        for spec, value in zip(program.graph_signature.input_specs, inputs, strict=True)
        if spec.kind is InputKind.BUFFER
    }
    before = {name: value._version for name, value in kept.items()}
    mode = detect_fake_mode(inputs)
    # operators that ask for a size in this run must not fix it in the program
    sizes = mode.shape_env.suppress_guards() if mode is not None and mode.shape_env is not None else nullcontext()
    with mode or nullcontext(), sizes, torch.no_grad():
        try:
            Interpreter(program.graph_module).run(*inputs)
        except RuntimeError:  # operators written in C++ that take no symbolic sizes; Python's know fewer views
            with enable_python_dispatcher():
                Interpreter(program.graph_module).run(*inputs)
    return {name for name, value in kept.items() if value._version != before[name]}


def is_plain(program: ExportedProgram) -> bool:
    """Whether its operators write nothing, and no result has a size that follows from values.

    They may be in regions with a gradient or autocast mode.
    """
    return all(
        node.target in _REGIONS or (isinstance(node.target, OpOverload) and not node.target._schema.is_mutable)
        for module in program.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and not _is_python(node)
    ) and not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _is_python(node: Node) -> bool:
    """Arithmetic on sizes, and taking one of several results."""
    return getattr(node.target, "__module__", "") in ("_operator", "math")


def may_mutate(program: ExportedProgram) -> bool:
    """Whether an operator writes, or may write, to memory that a parameter or buffer shares.

    Raises CaptureError for a write that functionalising would not find.
    """
    kept = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is not InputKind.USER_INPUT}
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    return _writes(program.graph_module, {node for node in places if node.name in kept})


def _writes(module: GraphModule, shared: set[Node]) -> bool:
    for node in module.graph.nodes:
        if node.op != "call_function" or not shared.intersection(node.all_input_nodes):
            continue
        if isinstance(node.target, OpOverload):
            if written := shared.intersection(_written(node, node.target)):
                _check_found(written)
                return True
            if shared.intersection(_viewed(node, node.target)):
                shared.add(node)
        elif not _is_python(node) and _region_writes(module, node, shared):
            return True
        else:
            shared.add(node)
    return False


def _check_found(written: set[Node]) -> None:
    unseen = list(written)
    while unseen:
        node = unseen.pop()
        if _name(node) in _SECRET_VIEWS:
            raise CaptureError(f"a call writes to what {_name(node)} gives, which may be a view: use the safe operator")
        unseen += node.all_input_nodes


def _name(node: Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _region_writes(module: GraphModule, node: Node, shared: set[Node]) -> bool:
    """Whether a region with its own gradient or autocast mode writes; of other subgraphs it is not known."""
    graphs = [item for item in node.all_input_nodes if item.op == "get_attr"]
    if node.target not in _REGIONS or len(graphs) != 1:
        return True
    region = getattr(module, str(graphs[0].target))
    inputs = node.args[node.args.index(graphs[0]) + 1 :]
    places = [item for item in region.graph.nodes if item.op == "placeholder"]
    return _writes(region, {place for place, given in zip(places, inputs, strict=True) if given in shared})


def _arguments(node: Node, target: OpOverload) -> Iterator[tuple[torch.Argument, Any]]:
    named = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False)) | node.kwargs
    return ((argument, named.get(argument.name)) for argument in target._schema.arguments)


def _nodes(value: Any) -> list[Node]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]


def _written(node: Node, target: OpOverload) -> Iterator[Node]:
    """The tensors that an operator writes to. Those that keep statistics do not declare it, so all of theirs count."""
    for argument, value in _arguments(node, target):
        if argument.name in _STATISTICS and value is True:
            yield from node.all_input_nodes
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes(value)


def _viewed(node: Node, target: OpOverload) -> Iterator[Node]:
    """The tensors of which a result may be a view. Operators that are composed of others do not always declare it."""
    name = target._schema.name + (f".{target._schema.overload_name}" if target._schema.overload_name else "")
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    if any(result.alias_info is not None for result in target._schema.returns):
        viewed = [value for argument, value in _arguments(node, target) if argument.alias_info]
        yield from (item for value in viewed for item in _nodes(value))
    elif composed or _name(node) in _SECRET_VIEWS:
        yield from node.all_input_nodes
