"""Capture of a model's methods: one ATen program for each, with the buffers that it mutates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from weightswap_exporter.models.tensors import named_tensors
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.messages import listed

from .composed import in_parts, name_parts
from .inlining import inline_operators
from .leftovers import Leftovers, is_read_later, leftovers_of_calls
from .mutations import mutated_buffers
from .programs import graphs
from .random_numbers import INSTEAD, check_no_generator, no_seeding
from .replaced import check_seen, replaced_tensors
from .stale_constants import stale_constants
from .views import arguments

_CREATED = (
    "If it does not depend on weights, call the model once, then export; if it does, do not register it, but compute "
    "it in each call"
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
    """Program of a method. `parameters` is its Python signature, `mutated` the FQNs of buffers that a call changes.

    `leftovers` names attributes that a call changes and that no later call reads. `stale` are texts about constants
    that may follow from weights.
    """

    program: ExportedProgram
    parameters: inspect.Signature
    dynamic_shapes: Any
    mutated: frozenset[str]
    leftovers: Leftovers
    stale: list[str]


def capture(model: nn.Module, name: str, spec: MethodSpec) -> Captured:
    """Capture one method with `torch.export`, non-strict. Raises CaptureError with torch's reason."""
    _check_spec(name, spec)
    # whatever the caller's mode: the graph must not depend on it
    with torch.inference_mode(False), torch.enable_grad(), in_parts(model) as parts:
        return _capture(_as_forward(model, spec.fn_name), name, spec, parts)


def _capture(root: nn.Module, name: str, spec: MethodSpec, parts: Mapping[str, str]) -> Captured:
    args, kwargs = _distinct((tuple(spec.args), dict(spec.kwargs)))
    try:
        with leftovers_of_calls(root) as leftovers, _none_buffers_last(root), _no_new_tensors(root):
            with no_seeding(), replaced_tensors(root) as replaced:
                program = torch.export.export(root, args, kwargs, dynamic_shapes=spec.dynamic_shapes, strict=False)
            check_no_generator(program)
            if parts:
                name_parts(program, parts)
                inline_operators(program)
            mutated = mutated_buffers(program)
            check_seen(replaced, mutated)
        if any(leftovers) and is_read_later(root, (args, kwargs), program, mutated, leftovers):
            raise CaptureError(_problem_of(*leftovers))
        stale = stale_constants(root, (args, kwargs), program, mutated)
    except CaptureError as error:
        raise CaptureError(f"method {name!r}: {error}") from error
    except Exception as error:
        reason = str(error).partition("\n\nThe error above occurred")[0]
        text = f"method {name!r}: torch.export cannot capture it: {reason}{_advice(reason)}"
        raise CaptureError(*text.splitlines()) from error
    return Captured(program, inspect.signature(root.forward), spec.dynamic_shapes, mutated, leftovers, stale)


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
    if "torch._C.Generator" in reason:  # torch 2.11; later ones capture it
        return f". A call draws random numbers from a torch.Generator, which a graph cannot seed: {INSTEAD}"
    # torch 2.11 does not see that min(8 * n, 16 * n) is 8 * n, as in grouped-query attention of any length
    if torch.__version__ >= "2.13" or "Constraints violated" not in reason or "min(" not in reason:
        return ""
    return "Where that holds for every size, export with torch 2.13: what it exports runs on this torch, too."


def _check_spec(name: str, spec: MethodSpec) -> None:
    kinds = {"fn_name": (spec.fn_name, str), "args": (spec.args, tuple | list), "kwargs": (spec.kwargs, Mapping)}
    for field_name, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", "tuple")
            raise CaptureError(f"method {name!r}: {field_name} must be a {expected}, got a {type(value).__qualname__}")


def _distinct(inputs: Any) -> Any:
    """Return sample inputs in which no tensor occurs twice: torch would read all its occurrences from the first one."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        again = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.clone() if again else tensor

    return pytree.tree_map_only(torch.Tensor, own, inputs)


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


def _none_buffers_last(root: nn.Module) -> AbstractContextManager[object]:
    """Put the root's buffers that are None last: torch counts them, and would assign values to the wrong buffers."""
    in_order = sorted(root._buffers.items(), key=lambda item: item[1] is None)
    return mock.patch.object(root, "_buffers", dict(in_order))


@contextmanager
def _no_new_tensors(root: nn.Module) -> Iterator[None]:
    """Raise CaptureError if the block adds parameters or buffers to the model, and remove them."""
    tensors = named_tensors(root)
    try:
        yield
    finally:
        new = sorted(named_tensors(root).keys() - tensors.keys())
        for path, _, name in (fqn.rpartition(".") for fqn in new):
            delattr(root.get_submodule(path), name)
    if new:
        raise CaptureError(f"a call creates {listed(new)}, which the model did not have before. {_CREATED}")


def training_operators(captured: Captured) -> set[str]:
    """Return the operators that behave as in training: dropout that drops, norms that update their statistics."""
    return {
        str(node.target)
        for module in graphs(captured.program)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and _trains(node)
    }


def _trains(node: torch.fx.Node) -> bool:
    values = {argument.name: value for argument, value in arguments(node)}
    dropout = values.get("dropout_p")
    drops = isinstance(dropout, float) and dropout > 0
    return drops or values.get("train") is True or values.get("training") is True
