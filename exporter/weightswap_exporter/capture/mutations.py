"""Which buffers a captured program changes.

The program changes them in place: an operator that writes to a parameter or a buffer itself names it. Functionalising a
copy of the program shows all other changes, and takes several times as long as the capture; so it is only done where an
operator may write to the memory of one by another way: through a view, in a subgraph, without declaring it.
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
    """FQNs of the buffers that a call changes. Raises CaptureError where it changes a parameter."""
    own = _placeholders(program, frozenset(InputKind) - {InputKind.USER_INPUT})
    written, kept = set(_writes(program.graph_module, set(own))), _placeholders(program, _NAMED)
    if not written <= kept.keys():
        return functionalised_mutations(program)
    touched = {storage for node in written for storage in memory(node.meta["val"])}
    return _buffers({name for node, name in kept.items() if touched & memory(node.meta["val"])}, program)


def functionalised_mutations(program: ExportedProgram) -> frozenset[str]:
    """What `mutated_buffers` finds, always by functionalising."""
    with warnings.catch_warnings():  # torch copies a class of its own that it deprecates
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        outputs = program.run_decompositions({}).graph_signature.output_specs
    changed = {str(spec.target) for spec in outputs if spec.kind in _MUTATIONS} | _written_in_a_run(program)
    return _buffers(changed, program)


def _buffers(changed: set[str], program: ExportedProgram) -> frozenset[str]:
    """What changes, if that is no parameter."""
    if parameters := sorted(changed.intersection(program.graph_signature.parameters)):
        raise CaptureError(
            f"a call changes the parameter(s) {listed(parameters)}; weights are only changed by a swap, and weightswap "
            "exports no model that changes its own. Switch the change off where the model can (nn.Embedding: "
            "max_norm=None, RWKV: rescale_every=0); in code of your own, register what changes as a buffer."
        )
    return frozenset(changed)


def _written_in_a_run(program: ExportedProgram) -> set[str]:
    """FQNs of what a run without values writes to: functionalising misses it where a result is the input."""
    inputs = [node.meta.get("val") for node, _ in graph_inputs(program)]
    kept = {name: node.meta["val"] for node, name in _placeholders(program, _NAMED).items()}
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
        for module in graphs(program)
        for node in module.graph.nodes
        if node.op == "call_function" and not _is_python(node)
    ) and not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _is_python(node: Node) -> bool:
    """Arithmetic on sizes, and taking one of several results."""
    return getattr(node.target, "__module__", "") in ("_operator", "math")


def _placeholders(program: ExportedProgram, kinds: Set[InputKind]) -> dict[Node, str]:
    """Those of some kinds, with the names of what they stand for."""
    return {node: str(spec.target) for node, spec in graph_inputs(program) if spec.kind in kinds}


def _writes(module: GraphModule, kept: set[Node]) -> Iterator[Node]:
    """What is written to of the memory of the placeholders `kept`; where that is not declared, the node that does."""
    shared = set(kept)  # what may be of their memory; only where that is written to, it is looked at more closely
    origins = _Origins(kept)
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
    """Nodes, and what they are views of."""

    def __init__(self, kept: set[Node]) -> None:
        self._kept = kept
        self._viewed = functools.cache(viewed)

    def __contains__(self, node: Node) -> bool:
        """Whether a node is one of `kept` or a view of it. Raises CaptureError for a view that torch does not see."""
        path = reached([node], self._viewed)
        secret = sorted(name for name in map(opname, path) if name in SECRET_VIEWS)
        if path & self._kept and secret:
            raise CaptureError(f"a call writes to what {secret[0]} gives, which may be a view: use the safe operator")
        return bool(path & self._kept)


def _region_writes(module: GraphModule, node: Node, origins: _Origins) -> bool:
    """Whether a region with its own gradient or autocast mode writes; of other subgraphs it is not known."""
    graphs = [item for item in node.all_input_nodes if item.op == "get_attr"]
    if node.target not in _REGIONS or len(graphs) != 1:
        return True
    region = getattr(module, str(graphs[0].target))
    inputs = node.args[node.args.index(graphs[0]) + 1 :]
    pairs = zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True)
    kept = {each for each, given in pairs if isinstance(given, Node) and given in origins}
    return any(True for _ in _writes(region, kept))


def _written(node: Node) -> Iterator[Node]:
    """The tensors that an operator writes to. Those that keep statistics do not declare it; of others' all count."""
    given = list(arguments(node))
    foreign = node.target.namespace != "aten"  # type: ignore[union-attr]
    keeps = any(argument.name in STATISTICS and value is True for argument, value in given)
    for argument, value in given:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or (keeps and (foreign or argument.name in _RUNNING)):
            yield from nodes(value)
