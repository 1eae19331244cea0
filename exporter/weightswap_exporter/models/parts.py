"""Composed tensors, which are made of others, such as torchao's quantised weights: taken apart and put together.

torch's protocol for such classes (`__tensor_flatten__`) names the plain tensors, here the *parts*, and gives the rest,
a constant of every graph: block sizes, dtypes, how activations are quantised. The class and that rest are the tensor's
*kind*.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Kind = dict[str, Any]
"""JSON of what is no tensor. `type` is the class; `parts` has the kinds of those parts that are composed, too."""


def is_composed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is composed of others. A sharded one is not: it has only a part of the values."""
    composed: bool = is_traceable_wrapper_subclass(tensor)
    return composed and not is_sharded(tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of a tensor as `NAME.PART`; for a plain tensor, itself under its name."""
    if not is_composed(tensor):
        return {name: tensor}
    return {key: value for part, inner in _inner(tensor) for key, value in parts_of(f"{name}.{part}", inner).items()}


def put_together(name: str, like: Any, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the kind of `like`, composed of `parts`, which are named as by `parts_of(name, like)`."""
    if not is_composed(like):
        return parts[name]
    inner = {part: put_together(f"{name}.{part}", value, parts) for part, value in _inner(like)}
    kind: Any = type(like)
    composed: torch.Tensor = kind.__tensor_unflatten__(inner, like.__tensor_flatten__()[1], like.size(), like.stride())
    return composed


def _inner(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each composed parameter, by FQN."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: kind_of(parameter) for name, parameter in parameters if is_composed(parameter)}


def kind_of(tensor: Any) -> Kind:
    """Return the kind of a composed tensor. A value that JSON cannot express is there as `{"unknown": CLASS}`."""
    context = _plain(tensor.__tensor_flatten__()[1])
    entries = context if isinstance(context, dict) else {} if context is None else {"context": context}
    nested = {name: kind_of(value) for name, value in _inner(tensor) if is_composed(value)}
    return {"type": type(tensor).__qualname__} | entries | ({"parts": nested} if nested else {})


def _plain(value: Any) -> Any:
    """Return a value as JSON; enumerations and torch's own constants as their names."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.layout | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return _with_type(value, value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return _with_type(value, {field.name: getattr(value, field.name) for field in fields(value)})
    return {"unknown": type(value).__qualname__}


def _with_type(value: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": type(value).__qualname__} | {name: _plain(item) for name, item in content.items()}


def unknown_in(kind: Any) -> list[str]:
    """Return the classes of values that a kind cannot express."""
    if isinstance(kind, list):
        return [name for item in kind for name in unknown_in(item)]
    if not isinstance(kind, dict):
        return []
    return [kind["unknown"]] if "unknown" in kind else [name for item in kind.values() for name in unknown_in(item)]


def describe_kind(kind: Any) -> str:
    """Return a text such as `Int8Tensor(block_size=[1, 64], dtype=bfloat16)`; the kind of a plain tensor is None."""
    return "a plain tensor" if kind is None else _text(kind)


_DEEPEST = 20  # levels of nesting to show


def _text(value: Any, depth: int = 0) -> str:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        return f"[{', '.join(_text(item, depth + 1) for item in value)}]"
    if not isinstance(value, dict):
        return str(value)
    content = ", ".join(f"{name}={_text(item, depth + 1)}" for name, item in value.items() if name != "type")
    return f"{value.get('type', '')}({content})"
