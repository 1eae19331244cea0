"""Capture: one ATen program for each method of a model, with what it reads and what it mutates."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from weightswap_runtime.errors import CaptureError

from .mutations import mutated_buffers
from .tensors import named_tensors

_STORED = re.compile(r"The tensor attributes? (.+?) (?:was|were) assigned during export")


@dataclass(frozen=True)
class MethodSpec:
    """How to capture one method: its name on the model, sample inputs and dynamic shapes as `torch.export` has them."""

    fn_name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None


@dataclass(frozen=True)
class Captured:
    """A method's program. `parameters` is its Python signature, `mutated` the FQNs of buffers that a call changes."""

    program: ExportedProgram
    parameters: inspect.Signature
    dynamic_shapes: Any
    mutated: frozenset[str]


def capture(model: nn.Module, name: str, spec: MethodSpec) -> Captured:
    """Capture one method with `torch.export`, non-strict. Raises CaptureError with torch's reason."""
    _check_spec(name, spec)
    root = _as_forward(model, spec.fn_name)
    args, kwargs = _distinct((tuple(spec.args), dict(spec.kwargs)))
    try:
        with warnings.catch_warnings():
            # torch only warns where a call assigns an attribute, and so freezes its value
            warnings.filterwarnings("error", r"The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", _assigned_again(root), UserWarning)
            # whatever the caller's mode: the graph must not depend on it
            with torch.inference_mode(False), torch.enable_grad(), _none_buffers_last(root), _no_new_tensors(root):
                program = torch.export.export(root, args, kwargs, dynamic_shapes=spec.dynamic_shapes, strict=False)
                mutated = mutated_buffers(program)
    except CaptureError as error:
        raise CaptureError(f"method {name!r}: {error}") from error
    except Exception as error:
        if stored := _STORED.match(str(error)):
            raise CaptureError(f"method {name!r}: {_stores(stored[1])}") from error
        reason = str(error).partition("\n\nThe error above occurred")[0]
        text = f"method {name!r}: torch.export cannot capture it: {reason}{_advice(reason)}"
        raise CaptureError(*text.splitlines()) from error
    return Captured(program, inspect.signature(root.forward), spec.dynamic_shapes, mutated)


def _stores(attributes: str) -> str:
    return (
        f"a call stores tensors in {attributes}, and what it leaves there would not be served. Register it as a buffer "
        "if the next call reads it; else clear that cache, or remove the hook or the line that stores it"
    )


def _advice(reason: str) -> str:
    """torch 2.11 does not see that min(8 * n, 16 * n) is 8 * n, as in grouped-query attention of any length."""
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
    """Sample inputs in which no tensor occurs twice: torch would wire all its places to the first, silently."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        again = id(value) in seen
        seen.add(id(value))
        return value.clone() if again else value

    return pytree.tree_map(own, inputs)


def _as_forward(model: nn.Module, fn_name: str) -> nn.Module:
    """A module whose forward is `model`'s method `fn_name`, over the same parameters, buffers and submodules.

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
    none = {name: type(found)() for name, found in hooks.items()}

    @functools.wraps(method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.__class__ = kind  # from here on `self(...)` and `self.forward` are the model's own
        self.__dict__.update(hooks)
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__class__ = shim
            self.__dict__.update(none)

    shim = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    shim.__qualname__ = kind.__qualname__
    root: nn.Module = object.__new__(shim)
    root.__dict__ = dict(vars(model))
    root.__dict__.update(none)
    return root


@contextmanager
def _none_buffers_last(root: nn.Module) -> Iterator[None]:
    """torch counts the buffers of the root that are None, and gives an assigned buffer's value to one further on."""
    buffers = root._buffers
    root._buffers = dict(sorted(buffers.items(), key=lambda item: item[1] is None))
    try:
        yield
    finally:
        root._buffers = buffers


@contextmanager
def _no_new_tensors(root: nn.Module) -> Iterator[None]:
    """Raises CaptureError for parameters and buffers that the call has made, and takes them off again."""
    before = named_tensors(root).keys()
    try:
        yield
    finally:
        made = sorted(named_tensors(root).keys() - before)
        for path, _, name in (fqn.rpartition(".") for fqn in made):
            delattr(root.get_submodule(path), name)
    if made:
        raise CaptureError(
            f"a call makes {', '.join(made)}, which the model does not have before it: call the model once, then export"
        )


def _assigned_again(model: nn.Module) -> str:
    """A pattern for the warnings about attributes that are assigned in each call before they are read.

    These are the weights of the old weight_norm and spectral_norm, and the list that recurrent layers keep of theirs.
    """
    computed = [
        re.escape(f"self.{path}.{hook.name}" if path else f"self.{hook.name}")
        for path, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm | SpectralNorm)
    ]
    names = "|".join([r"self\.(?:[\w.]+\.)?_flat_weights\S*", *computed])
    return rf"The tensor attributes? (?:(?:{names})(?:, )?)+ (?:was|were) assigned during export"


def training_operators(captured: Captured) -> set[str]:
    """Operators in the graph that are told to behave as in training: dropout that drops, norms that update."""
    return {
        str(node.target)
        for module in captured.program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and _trains(node)
    }


def _trains(node: torch.fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    values = dict(zip(names, node.args, strict=False)) | node.kwargs
    dropout = values.get("dropout_p", 0)
    return any(values.get(flag) is True for flag in ("train", "training")) or (
        isinstance(dropout, float) and dropout > 0
    )
