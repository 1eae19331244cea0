"""Tensors that are made of others, such as torchao's quantised weights: taken apart, and put together again.

torch's protocol for such classes (`__tensor_flatten__`) names the plain tensors, here the *parts*, and gives the rest,
which is a constant of every graph: block sizes, dtypes, what is done with activations. The class and that rest are the
tensor's *kind*.
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
"""What is no tensor, as JSON has it. `type` is the class; the kinds of parts that have one are under `parts`."""


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others that can stand for it. A sharded one is not: it has a part of the values."""
    composed: bool = is_traceable_wrapper_subclass(tensor)
    return composed and not is_sharded(tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor is made of, as `NAME.PART`; a plain one alone, under its name."""
    if not is_composed(tensor):
        return {name: tensor}
    return {key: value for part, inner in _inner(tensor) for key, value in parts_of(f"{name}.{part}", inner).items()}


def put_together(name: str, like: Any, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the kind of `like`, made of other parts, which have their names in `parts`."""
    if not is_composed(like):
        return parts[name]
    inner = {part: put_together(f"{name}.{part}", value, parts) for part, value in _inner(like)}
    kind: Any = type(like)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, like.__tensor_flatten__()[1], like.size(), like.stride())
    return made


def _inner(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """The kind of each parameter that is made of others, by FQN."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: kind_of(parameter) for name, parameter in parameters if is_composed(parameter)}


def kind_of(tensor: Any) -> Kind:
    """The kind of a tensor that is made of others. What JSON cannot say of it is there as `{"unknown": CLASS}`."""
    context = _plain(tensor.__tensor_flatten__()[1])
    found = context if isinstance(context, dict) else {} if context is None else {"context": context}
    nested = {name: kind_of(value) for name, value in _inner(tensor) if is_composed(value)}
    return {"type": type(tensor).__qualname__} | found | ({"parts": nested} if nested else {})


def _plain(value: Any) -> Any:
    """A value as JSON has it; of enumerations and torch's own constants the name."""
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
    """The classes of what a kind cannot say."""
    if isinstance(kind, list):
        return [name for item in kind for name in unknown_in(item)]
    if not isinstance(kind, dict):
        return []
    return [kind["unknown"]] if "unknown" in kind else [name for item in kind.values() for name in unknown_in(item)]


def describe_kind(kind: Any) -> str:
    """`Int8Tensor(block_size=[1, 64], dtype=bfloat16)`; None is a plain tensor's."""
    return "a plain tensor" if kind is None else _text(kind)


_DEEPEST = 20  # of what a kind is shown to have in it


def _text(value: Any, depth: int = 0) -> str:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        return f"[{', '.join(_text(item, depth + 1) for item in value)}]"
    if not isinstance(value, dict):
        return str(value)
    content = ", ".join(f"{name}={_text(item, depth + 1)}" for name, item in value.items() if name != "type")
    return f"{value.get('type', '')}({content})"
