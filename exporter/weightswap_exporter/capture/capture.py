"""Capturing a method: one call of the eager model becomes an exported program.

torch.export captures `forward` alone, reads tensors that occur twice from the first place, and numbers buffers that are
None; composed parameters it does not take at all. The model is changed around that, and left as it was.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._export import config as export_config
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _combine_args, _tree_map_with_path
from torch.export.graph_signature import InputKind
from torch.fx.experimental import _config as fx_config
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from weightswap_exporter.modules.tensors import ModelView, is_composed, key_paths, parts_of, put_together
from weightswap_runtime.errors import CaptureError, listed

from .document_check import is_identifier
from .programs import (
    arguments,
    drop_sets_to_itself,
    graph_inputs,
    graphs,
    inline_operators,
    memory,
    mutated_buffers,
    rename_tensors,
)
from .side_effects import (
    INSTEAD,
    SideEffects,
    check_no_generator,
    check_seen,
    is_read_later,
    no_seeding,
    replaced_tensors,
    side_effects_of_calls,
)
from .small_sizes import check_small_sizes, questions_about_sizes
from .stale_constants import settle_constants, stale_constants

# torch.ao.quantization's FusedMovingAvgObsFakeQuantize: it writes to the scale if a buffer says so
_OBSERVED = torch.ops.aten.fused_moving_avg_obs_fake_quant.default
_QUANTISED = ("quantized_decomposed.quantize_per_tensor.", "quantized_decomposed.dequantize_per_tensor.")
_MARK = "*"  # no attribute's name has it
_UNKNOWN_OUTPUT = re.compile("Found <class '(.*)'> in output, which is not a known type")
_INSTEAD_OF_OBJECTS = (
    ", but a graph returns tensors, numbers, and the containers that torch.utils._pytree knows. Return the tensors in "
    "it that callers need; or none of it, as use_cache=False does for the key-value cache of a transformers model; or "
    "register a dataclass with torch.export.register_dataclass"
)


@dataclass(frozen=True)
class MethodSpec:
    """Method to capture: its name on the model, with sample inputs and dynamic shapes as for `torch.export`.

    engines: engines that its graph is also compiled for; None: those of `export(engines=)`.
    """

    fn_name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    engines: Sequence[str] | None = None


@dataclass(frozen=True)
class Captured:
    """Program of a method, with what it was captured from."""

    program: ExportedProgram
    parameters: inspect.Signature  # of the method in Python
    keywords: tuple[str, ...]  # names of the keyword arguments, which the program may call otherwise
    shapes: list[Any]  # what `dynamic_shapes` has for each flat input
    mutated: frozenset[str]  # FQNs of buffers that a call changes
    side_effects: SideEffects  # attributes that a call changes and that no later call reads
    doubts: list[str]  # texts about constants that may follow from weights, and sizes that may have another branch


def capture(view: ModelView, name: str, spec: MethodSpec) -> Captured:
    """Capture one method with `torch.export`, non-strict. Raises CaptureError with torch's reason."""
    _check_spec(name, spec)
    # whatever the caller's mode: the graph must not depend on it
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _hollow_constants(view),
        key_paths(),
        _in_parts(view) as parts,
    ):
        root = _as_forward(view.model, spec.fn_name)
        try:
            with _identifiers(root, spec.kwargs) as kwargs:
                return _capture(root, replace(spec, kwargs=kwargs), parts, tuple(spec.kwargs))
        except CaptureError as error:
            raise CaptureError(f"method {name!r}: {error}") from error
        except Exception as error:
            reason = str(error).partition("\n\nThe error above occurred")[0] or type(error).__name__
            if unknown := _UNKNOWN_OUTPUT.search(reason):
                raise CaptureError(f"method {name!r}: a call returns a {unknown[1]}{_INSTEAD_OF_OBJECTS}") from error
            text = f"method {name!r}: torch.export cannot capture it: {reason}{_advice(reason)}"
            raise CaptureError(*text.splitlines()) from error


def _capture(root: nn.Module, spec: MethodSpec, parts: Mapping[str, str], keywords: tuple[str, ...]) -> Captured:
    args, kwargs = (tuple(spec.args), dict(spec.kwargs))
    shapes = spec.dynamic_shapes
    if isinstance(shapes, torch.export.ShapesCollection):  # it knows the tensors that the caller has
        shapes = shapes.dynamic_shapes(root, args, kwargs)  # type: ignore[no-untyped-call]
    args, kwargs = _distinct((args, kwargs))
    view = ModelView(root)  # not the caller's: composed parameters are in parts here
    # torch counts buffers that are None, and would assign values to the wrong ones: they come last
    buffers = dict(sorted(root._buffers.items(), key=lambda item: item[1] is None))
    with (
        side_effects_of_calls(root) as side_effects,
        mock.patch.object(root, "_buffers", buffers),
        _no_new_tensors(view),
    ):
        with no_seeding(), replaced_tensors(root) as replaced, questions_about_sizes() as questions:
            program = torch.export.export(root, args, kwargs, dynamic_shapes=shapes, strict=False)
        check_no_generator(program)
        _check_dense(program)
        _check_offsets(program)
        drop_sets_to_itself(program)
        settle_constants(program)
        if parts:
            _name_parts(program, parts)
            inline_operators(program)
        mutated = mutated_buffers(program)
        check_seen(replaced, mutated)
    if any(side_effects) and is_read_later(root, (args, kwargs), program, mutated, side_effects):
        raise CaptureError(_problem_of(*side_effects))
    doubts = stale_constants(view, (args, kwargs), program, mutated)
    assigned = _shapes(root, args, kwargs, shapes)
    _widen(program, assigned)
    doubts += check_small_sizes(view, (args, kwargs), program, mutated, questions, assigned)
    parameters = inspect.signature(root.forward)
    return Captured(program, parameters, keywords, assigned, mutated, side_effects, doubts)


def _shapes(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> list[Any]:
    """Return what `dynamic_shapes` has for each flat input, as torch assigns it; None for no tensor.

    It is by parameter or in their order, with `*args` in one; it has a list of the fields for a class that is
    registered with pytree.
    """
    if isinstance(shapes, torch.export.AdditionalInputs):
        shapes = shapes.dynamic_shapes(root, args, kwargs)  # type: ignore[no-untyped-call]
    found: dict[int, Any] = {}
    if shapes:
        combined = _combine_args(root, args, kwargs)
        whole = combined if isinstance(shapes, Mapping) else type(shapes)(combined.values())
        _tree_map_with_path(lambda _, value, shape: found.update({id(value): shape}), whole, shapes, tree_name="inputs")
    return [
        found.get(id(value)) if isinstance(value, torch.Tensor) else None
        for value in pytree.tree_leaves((args, kwargs))
    ]


def _widen(program: ExportedProgram, shapes: Sequence[Any]) -> None:
    """Let a dimension of which inputs have only multiples begin where its `Dim` does, as others do.

    torch has 2 there, even if it captures the graph for less. What the model computes is then tried, as for others.
    """
    if not fx_config.backed_size_oblivious:
        return
    inputs = (node for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT)
    for placeholder, shape in zip(inputs, shapes, strict=True):
        axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        derived: list[tuple[int, Any]] = [(axis, dim) for axis, dim in axes if hasattr(dim, "root")]
        for size, dim in ((placeholder.meta["val"].shape[axis], dim) for axis, dim in derived):
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                limits = program.range_constraints.get(symbol)
                if limits is not None and limits.lower == 2:
                    program.range_constraints[symbol] = ValueRanges(min(2, dim.root.min), limits.upper)


def training_operators(captured: Captured) -> set[str]:
    """Return the operators that behave as in training: dropout that drops, norms that update their statistics."""
    return {
        str(node.target)
        for module in graphs(captured.program)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and _trains(node)
    }


def scales_in_state(captured: Captured) -> Iterator[str]:
    """Yield the scales that calls may change, as fake quantisation with an observer does, even one that is off."""
    buffers = captured.program.graph_signature.inputs_to_buffers
    for module in graphs(captured.program):
        for node in module.graph.find_nodes(op="call_function", target=_OBSERVED):
            scale = {argument.name: value for argument, value in arguments(node)}["scale"]
            if (name := buffers.get(scale.name, "")) in captured.mutated:
                yield name


def scales_in_code(captured: Captured) -> bool:
    """Return whether tensors are quantised with scales that are numbers of the graph, as PT2E's conversion does."""
    return any(
        str(node.target).startswith(_QUANTISED) and isinstance(node.args[1], float)
        for module in graphs(captured.program)
        for node in module.graph.nodes
    )


def _trains(node: torch.fx.Node) -> bool:
    values = {argument.name: value for argument, value in arguments(node)}
    dropout = values.get("dropout_p")
    drops = isinstance(dropout, float) and dropout > 0
    return drops or values.get("train") is True or values.get("training") is True


def _check_spec(name: str, spec: MethodSpec) -> None:
    kinds = {"fn_name": (spec.fn_name, str), "args": (spec.args, tuple | list), "kwargs": (spec.kwargs, Mapping)}
    for field_name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", "tuple")
            raise CaptureError(f"method {name!r}: {field_name} must be a {expected}, got a {type(value).__qualname__}")


def _check_dense(program: ExportedProgram) -> None:
    """Raise CaptureError for sparse constants, which neither a weight file nor a graph's document has."""
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{name} is a {value.layout} tensor, and an artifact has dense ones alone. Keep what it is made of: "
                "the edges' indices and values, with index_add or scatter_add in the call; or keep it dense"
            )


def _check_offsets(program: ExportedProgram) -> None:
    """Raise CaptureError for `as_strided` that reaches beyond a weight into memory of which the weight is only a part.

    Served weights have memory of their own, and begin where it does: the call would read other elements.
    """
    parts = []
    for placeholder, spec in graph_inputs(program):
        weight = placeholder.meta.get("val")
        if spec.kind is not InputKind.USER_INPUT and isinstance(weight, torch.Tensor):
            begin = int(weight.storage_offset())
            end = _end(begin, weight.shape, weight.stride())
            if begin or end * weight.itemsize < weight.untyped_storage().nbytes():
                parts.append((str(spec.target), weight, begin, end))
    for node in (node for module in graphs(program) for node in module.graph.nodes if parts):
        if getattr(node.target, "_opname", "").startswith("as_strided"):
            given = {argument.name: value for argument, value in arguments(node)}
            value = given["self"].meta["val"]
            offset = int(value.storage_offset())
            for name, weight, begin, end in parts:
                if memory(value) & memory(weight) and begin <= offset <= end:
                    _check_reach(name, begin, end, given, offset)


def _check_reach(name: str, begin: int, end: int, given: Mapping[str, Any], offset: int) -> None:
    """Raise CaptureError unless the arguments of `as_strided` mean the same where the weight is all of its memory."""
    is_absolute = given["storage_offset"] is not None
    numbers = (*given["size"], *given["stride"], given["storage_offset"] if is_absolute else offset)
    known = all(isinstance(number, int) for number in numbers)
    if not known or (is_absolute and begin) or _end(numbers[-1], given["size"], given["stride"]) > end:
        raise CaptureError(
            f"as_strided counts elements of the memory that {name!r} is a part of, and served weights have memory of "
            "their own. Slice the tensor before and leave storage_offset out, or give the model a clone() of the part"
        )


def _end(begin: int, size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the place behind the last element of a strided tensor."""
    return begin + 1 + sum((each - 1) * step for each, step in zip(size, stride, strict=True)) if all(size) else begin


def _distinct(inputs: Any) -> Any:
    """Return sample inputs in which no tensor occurs twice: torch would read all its occurrences from the first one."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        again = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.clone() if again else tensor

    return pytree.tree_map_only(torch.Tensor, own, inputs)


@contextmanager
def _identifiers(root: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give keyword arguments under names that torch can write into Python source; in the block, forward takes those.

    What a method takes as `**kwargs` may have any name, such as `class`.
    """
    free = (name for index in count() if (name := f"keyword_{index}") not in kwargs)
    names = {name: next(free) for name in kwargs if not is_identifier(name)}
    originals = {new: name for name, new in names.items()}
    method = root.forward

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **{originals.get(name, name): value for name, value in kwargs.items()})

    with mock.patch.object(root, "forward", forward) if names else nullcontext():
        yield {names.get(name, name): value for name, value in kwargs.items()}


def _as_forward(model: nn.Module, fn_name: str) -> nn.Module:
    """Return a module whose forward is `model`'s method `fn_name`, over the same parameters, buffers and submodules.

    torch.export only captures `forward`. A subclass keeps FQNs, `super()` and calls of the real `forward` working,
    which wrapping the model or patching the instance would not.
    """
    if fn_name == "forward":
        return model
    kind = type(model)
    method = getattr(kind, fn_name, None)
    if not callable(method):
        raise CaptureError(f"{kind.__qualname__} has no method {fn_name!r}")

    # hooks of forward belong to calls of the real one
    hooks = {name: vars(model)[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    no_hooks = {name: type(registered)() for name, registered in hooks.items()}

    @functools.wraps(method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = kind  # from here on `self(...)` and `self.forward` are the model's own
        self.__dict__.update(hooks)
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__class__ = shim
            self.__dict__.update(no_hooks)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    shim = type(kind.__name__, (kind,), {"forward": forward, **names})
    root: nn.Module = object.__new__(shim)
    root.__dict__ = dict(vars(model))
    root.__dict__.update(no_hooks)
    return root


@contextmanager
def _no_new_tensors(view: ModelView) -> Iterator[None]:
    """Raise CaptureError if the block adds parameters or buffers to the model, and remove them."""
    try:
        yield
    finally:
        new = sorted(ModelView(view.model).tensors.keys() - view.tensors.keys())
        for path, _, name in (fqn.rpartition(".") for fqn in new):
            delattr(view.model.get_submodule(path), name)
    if new:
        raise CaptureError(
            f"a call creates {listed(new)}, which the model did not have before. If it does not depend on weights, "
            "call the model once, then export; if it does, do not register it, but compute it in each call"
        )


def _problem_of(tensors: list[str], numbers: list[str]) -> str:
    if tensors:
        return (
            f"a call stores tensors in {listed(tensors)} that a later call reads or that grow in number, but a server "
            "keeps none of them. Compute what follows from weights in each call, and register what calls remember of "
            "their inputs as a buffer; otherwise clear or turn off that cache, or remove the hook that stores it"
        )
    return (
        f"a call changes {listed(numbers)}, so a later call computes something else, but a server does not keep the "
        "numbers of modules. Compute what follows from weights in each call; make what calls remember a tensor, and "
        "register it as a buffer: servers begin with its value at the export, whatever a checkpoint has"
    )


def _advice(reason: str) -> str:
    """Return a text that says what the user can do; empty if nothing is known."""
    if "cast NotImplemented to Tensor" in reason:
        return ". A tensor subclass that is composed of other tensors must decompose this call in __torch_function__."
    if "inference tensor" in reason.lower():
        return " Make the model and its inputs outside of torch.inference_mode(); the export may be within it."
    if "fake tensor in the exported program constant's list" in reason:
        return " It may read a weight's `.data`, which no graph can: use `.detach()`."
    if "automatic differentiation" in reason or "is a view and is being modified inplace" in reason:
        return " Gradients are on while a graph is captured: decorate the method with torch.no_grad()."
    if "torch._C.Generator" in reason:  # torch 2.11; later ones capture it
        return f". A call draws random numbers from a torch.Generator, which a graph cannot seed: {INSTEAD}"
    # torch 2.11 does not see that min(8 * n, 16 * n) is 8 * n, as in grouped-query attention of any length
    if torch.__version__ >= "2.13" or "Constraints violated" not in reason or "min(" not in reason:
        return ""
    return "Where that holds for every size, export with torch 2.13: what it exports runs on this torch, too."


@contextmanager
def _hollow_constants(view: ModelView) -> Iterator[None]:
    """Let a skeleton's tensors be constants of a program in the block.

    torch takes what a list or closure has for constants, parameters, too, and refuses constants without values.
    `classify` finds out which of them are parameters, and refuses the others.
    """
    with warnings.catch_warnings(), export_config.patch(error_on_lifted_constant_tensors=not view.hollow):
        warnings.filterwarnings("ignore", "We found a fake tensor in the exported program constant's list")
        yield


@contextmanager
def _in_parts(view: ModelView) -> Iterator[dict[str, str]]:
    """Replace composed parameters by their parts in the block; reading a composed parameter's attribute composes it.

    Gives the FQN of each part by its name in the block. Nothing is copied; the block's end restores the model.
    """
    modules = [module for module in view.model.modules() if _composed_names(module)]
    originals = [(module, type(module), module._parameters, module._modules) for module in modules]
    names = {
        f"{name}{_MARK}.{index}": key
        for name, parameter in view.composed.items()
        for index, key in enumerate(parts_of(name, parameter))
    }
    shared: dict[int, nn.Parameter] = {}
    try:
        for module in modules:
            _take_apart(module, shared)
        yield names
    finally:
        for module, kind, parameters, children in originals:
            module.__class__ = kind
            module._parameters, module._modules = parameters, children


def _composed_names(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None and is_composed(value)]


def _take_apart(module: nn.Module, shared: dict[int, nn.Parameter]) -> None:
    kind = type(module)
    attributes: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module._parameters, module._modules = dict(module._parameters), dict(module._modules)
    for name in _composed_names(module):
        module._modules[name + _MARK] = _Parts(module._parameters.pop(name), shared)  # type: ignore[arg-type]
        attributes[name] = _composing_property(name + _MARK)
    module.__class__ = type(kind.__name__, (kind,), attributes)


def _composing_property(name: str) -> Any:
    return property(lambda module: module._modules[name].compose())


class _Parts(nn.Module):
    """Parts of a composed parameter; `shared` has one parameter for each distinct part, for ties."""

    def __init__(self, whole: torch.Tensor, shared: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self._like = (whole,)  # a tuple, so that it does not become a parameter of this module
        for index, part in enumerate(parts_of("", whole).values()):
            self._parameters[str(index)] = shared.setdefault(id(part), nn.Parameter(part, part.requires_grad))

    def compose(self) -> torch.Tensor:
        (like,) = self._like
        return put_together("", like, dict(zip(parts_of("", like), self._parameters.values(), strict=True)))  # type: ignore[arg-type]


def _name_parts(program: ExportedProgram, names: Mapping[str, str]) -> None:
    """Replace, in a program that was captured `_in_parts`, the names of the parts by their FQNs."""
    rename_tensors(program, names)
    program._module_call_graph = [entry for entry in program.module_call_graph if _MARK not in entry.fqn]
