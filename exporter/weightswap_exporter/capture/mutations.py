"""Detection of the buffers that a captured program changes.

The program changes them in place, and an operator that writes to a parameter or buffer directly names it. All other
changes show after functionalising a copy of the program, which takes several times as long as the capture. So that is
only done if an operator may write to such memory indirectly: through a view, in a subgraph, or without declaring it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Set
from contextlib import nullcontext

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from weightswap_runtime.engines.graphs.effects import SECRET_VIEWS, STATISTICS
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.messages import listed

from .programs import graph_inputs, graphs, reached
from .views import arguments, may_view, memory, nodes, opname, viewed

_MUTATIONS = (OutputKind.PARAMETER_MUTATION, OutputKind.BUFFER_MUTATION)
_NAMED = frozenset({InputKind.PARAMETER, InputKind.BUFFER})
_RUNNING = {"running_mean", "running_var"}
_REGIONS = {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}


def mutated_buffers(program: ExportedProgram) -> frozenset[str]:
    """Return the FQNs of the buffers that a call changes. Raises CaptureError if it changes a parameter."""
    own = _placeholders(program, frozenset(InputKind) - {InputKind.USER_INPUT})
    written, named = set(_writes(program.graph_module, set(own))), _placeholders(program, _NAMED)
    if not written <= named.keys():
        return functionalised_mutations(program)
    storages = {storage for node in written for storage in memory(node.meta["val"])}
    return _buffers({name for node, name in named.items() if storages & memory(node.meta["val"])}, program)


def functionalised_mutations(program: ExportedProgram) -> frozenset[str]:
    """Return the same as `mutated_buffers`, always by functionalising."""
    with warnings.catch_warnings():  # torch itself copies a class that it has deprecated
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        outputs = program.run_decompositions({}).graph_signature.output_specs
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


def is_plain(program: ExportedProgram) -> bool:
    """Return whether a program's operators write nothing, and no result has a size that depends on values.

    Operators may be in regions with a gradient or autocast mode.
    """
    return all(
        node.target in _REGIONS or (isinstance(node.target, OpOverload) and not node.target._schema.is_mutable)
        for module in graphs(program)
        for node in module.graph.nodes
        if node.op == "call_function" and not _is_python(node)
    ) and not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _is_python(node: Node) -> bool:
    """Return whether a node is arithmetic on sizes, or takes one of several results."""
    return getattr(node.target, "__module__", "") in ("_operator", "math")


def _placeholders(program: ExportedProgram, kinds: Set[InputKind]) -> dict[Node, str]:
    """Return the placeholders of some kinds, with the FQNs that they stand for."""
    return {node: str(spec.target) for node, spec in graph_inputs(program) if spec.kind in kinds}


def _writes(module: GraphModule, owned: set[Node]) -> Iterator[Node]:
    """Yield written nodes that share memory with `owned`; for an undeclared write, the node that writes."""
    shared = set(owned)  # nodes that may share this memory; `origins` are exact, but slow
    origins = _Origins(owned)
    for node in module.graph.nodes:
        if node.op != "call_function" or not shared.intersection(node.all_input_nodes):
            continue
        if isinstance(node.target, OpOverload):
            written = (item for item in shared.intersection(_written(node)) if item in origins)
            yield from (item if node.target._schema.is_mutable else node for item in written)
            if shared.intersection(may_view(node)):
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
        path = reached([node], self._viewed)
        secret = sorted(name for name in map(opname, path) if name in SECRET_VIEWS)
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
            yield from nodes(value)
