"""A model's tensors: their names, ties and parts; and values of a model's own classes as trees."""

from __future__ import annotations

import enum
import io
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import islice
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightswap_runtime.errors import CaptureError, Unsupported, listed
from weightswap_runtime.format.names import EXTRA_STATE
from weightswap_runtime.format.signature import Dict, Items, Key, Leaf, Node, Tuple, key_text
from weightswap_runtime.torch_tensors import DTYPE_NAMES, class_name, context_text

Kind = dict[str, Any]
"""JSON of what is no tensor. `type` is the class; `parts` has the kinds of those parts that are composed, too."""

TieKey = tuple[object, ...]
_DEEPEST = 20  # levels of nesting to show: a kind may come from a file


class ModelView:
    """A model's parameters and buffers by FQN, as they are when the view is made; tied ones under each name.

    A verb makes one and passes it on, so that all that it checks, captures and writes has the same names in the same
    order. What a call or loading code leaves behind is found by comparing with a second view, made afterwards: modules
    may register buffers and replace tensors when they are called.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]  # parameters, then buffers, in the order of registration
    saved: dict[str, torch.Tensor]  # those of them that checkpoints have: no non-persistent buffers

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = {name: plain_bits(value) for name, value in model.named_buffers(remove_duplicate=False)}
        self.whole = self.parameters | self.buffers
        unsaved = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        self.saved = {name: tensor for name, tensor in self.whole.items() if name not in unsaved}

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers; for composed ones, their parts."""
        return _in_parts(self.whole)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """FQNs of parameters; for composed ones, of their parts."""
        return frozenset(_in_parts(self.parameters))

    @cached_property
    def saved_names(self) -> frozenset[str]:
        """FQNs of what checkpoints have; for composed ones, of their parts."""
        return frozenset(_in_parts(self.saved))

    @cached_property
    def composed(self) -> dict[str, nn.Parameter]:
        """Composed parameters."""
        return {name: parameter for name, parameter in self.parameters.items() if is_composed(parameter)}

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each composed parameter."""
        return {name: kind_of(parameter) for name, parameter in self.composed.items()}

    @cached_property
    def hollow(self) -> list[str]:
        """FQNs of tensors without values: those of a skeleton, which cannot be called."""
        return [name for name, tensor in self.tensors.items() if is_fake(tensor)]

    def check_separable(self) -> None:
        """Raise Unsupported for composed tensors that cannot be taken apart."""
        texts = {name: _inseparable(tensor, name in self.parameters) for name, tensor in self.whole.items()}
        if problems := [f"{name} is a {text}" for name, text in texts.items() if text]:
            raise Unsupported(f"{listed(problems, between='; ')}. Export the model before that is done.")


def plain_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a table of torchrec's integers of 4 or 2 bits as the bytes that it has; other tensors as they are."""
    packed = type(tensor).__module__ == "torchrec.tensor_types"
    return tensor.elem if packed else tensor  # type: ignore[attr-defined]


@contextmanager
def plain_buffers(model: nn.Module) -> Iterator[None]:
    """Have a model's buffers as `plain_bits` in the block: its calls read the memory that they are views of."""
    packed = [
        (module._buffers, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and plain_bits(buffer) is not buffer
    ]
    try:
        for buffers, name, buffer in packed:
            buffers[name] = plain_bits(buffer)
        yield
    finally:
        for buffers, name, buffer in packed:
            buffers[name] = buffer


def computed_anew() -> AbstractContextManager[Any]:
    """Have weights of torch's parametrizations computed in the block, even where their values are kept for a while
    (`parametrize.cached()`): what was kept before would be a constant of the graph."""
    return mock.patch.multiple(parametrize, _cache_enabled=0, _cache={})


def _in_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for name, tensor in tensors.items() for key, value in parts_of(name, tensor).items()}


def _inseparable(tensor: torch.Tensor, is_parameter: bool) -> str:
    name = type(tensor).__qualname__
    if is_sharded(tensor):
        return f"{name}, which has only a part of the values"
    if not is_composed(tensor):
        return ""
    if not is_parameter:
        return f"{name}, and only parameters may be made of other tensors"
    unknown = _unknown_in(kind_of(tensor))
    return f"{name} with a {unknown[0]} in it, which an artifact cannot record" if unknown else ""


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by FQN, tied ones under each name; for composed ones, their parts."""
    return ModelView(model).tensors


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without wrappers, whose names the artifact shall not have. Raises CaptureError for no module."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected a module, got a {type(model).__qualname__}")
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second; compiling imports it
    compiled = compiler.OptimizedModule if compiler else ()
    while isinstance(model, (compiled, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model._orig_mod if isinstance(model, compiled) else model.module
    return model


def extra_states(model: nn.Module) -> dict[str, str]:
    """Return the keys of extra states that say something, each with a text in place of the state."""
    modules = model.named_modules(remove_duplicate=False)
    own = {path: module for path, module in modules if type(module).get_extra_state is not nn.Module.get_extra_state}
    return {f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: "saved" for path, module in own.items() if _says(module)}


def _says(module: nn.Module) -> bool:
    try:
        return not is_empty_state(module.get_extra_state())
    except Exception:  # it may need what only a trainer has; `state_dict()` would say so
        return True


def is_empty_state(value: Any) -> bool:
    """Return whether an extra state says nothing."""
    if isinstance(value, io.BytesIO):
        return not value.getbuffer()
    if isinstance(value, torch.Tensor):
        return not value.numel()
    return value is None or (isinstance(value, Sized) and not len(value))


def tie_key(tensor: torch.Tensor) -> TieKey:
    """Return a key that tied tensors share: those of the same elements of a storage. Empty tensors are never tied."""
    if not tensor.numel():
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata  # not its address, which fake tensors lack
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def extents(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, int]]:
    """Return the storage of each tensor with elements, and the begin and the end of its bytes there."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            begin, size = int(tensor.storage_offset()), tensor.element_size()
            found[name] = tensor.untyped_storage()._cdata, begin * size, (begin + int(last) + 1) * size
    return found


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the safetensors name of a torch dtype. Raises CaptureError if it has none."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        advice = ". Make it complex64, which is one" if dtype == torch.complex128 else ""
        raise CaptureError(f"{where}: {dtype} is not a dtype of the safetensors format{advice}")
    return name


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has shape and dtype but no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


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
    return _function_name(value) or {"unknown": type(value).__qualname__}


def _function_name(value: Any) -> str:
    """Return the name of a function of torchao; empty for other values. Names are compared, and never looked up."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    known = isinstance(value, FunctionType) and str(module).startswith("torchao.")
    return f"{module}.{name}" if known and getattr(sys.modules.get(str(module)), name, None) is value else ""


def _with_type(value: Any, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": type(value).__qualname__} | {name: _plain(item) for name, item in content.items()}


def _unknown_in(kind: Any) -> list[str]:
    """Return the classes of values that a kind cannot express."""
    if isinstance(kind, list):
        return [name for item in kind for name in _unknown_in(item)]
    if not isinstance(kind, dict):
        return []
    return [kind["unknown"]] if "unknown" in kind else [name for item in kind.values() for name in _unknown_in(item)]


def describe_kind(kind: Any) -> str:
    """Return a text such as `Int8Tensor(block_size=[1, 64], dtype=bfloat16)`; the kind of a plain tensor is None."""
    return "a plain tensor" if kind is None else _text(kind)


def _text(value: Any, depth: int = 0) -> str:
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, list):
        return f"[{', '.join(_text(item, depth + 1) for item in value)}]"
    if not isinstance(value, dict):
        return str(value)
    content = ", ".join(f"{name}={_text(item, depth + 1)}" for name, item in value.items() if name != "type")
    return f"{value.get('type', '')}({content})"


def tree_of(spec: pytree.TreeSpec, path: str, values: Iterator[Any], leaf: Callable[[Any, str], Leaf]) -> Node:
    """Return a value's tree; `leaf(value, path)` makes its leaves of the flat `values`, in order.

    Raises CaptureError for unsupported keys.
    """
    if spec.is_leaf():
        return leaf(next(values), path)
    own = list(islice(values, spec.num_leaves))
    keys = _keys(spec, own, path)
    names = map(key_text, keys or range(spec.num_children))
    rest = iter(own)
    parts = [
        tree_of(child, f"{path}.{name}" if path else name, rest, leaf)
        for child, name in zip(children(spec), names, strict=True)
    ]
    if keys is None:
        return Tuple(tuple(parts)) if issubclass(_kind(spec), tuple) else Items(tuple(parts))
    items = tuple(zip(keys, parts, strict=True))
    if issubclass(_kind(spec), Mapping):
        return Dict(items)
    return Dict(items, class_name(_kind(spec)), _context(spec, path))


def children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    # torch 2.11 has the attribute only, later versions deprecate it
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def _kind(spec: pytree.TreeSpec) -> type[Any]:
    kind: Any = spec.type
    return tuple if kind is namedtuple else kind


def _keys(spec: pytree.TreeSpec, values: list[Any], path: str) -> list[Key] | None:
    """Return the keys of a node that the server rebuilds as a dict; None for a sequence."""
    kind = _kind(spec)
    if issubclass(kind, tuple | list | deque):
        return None
    keys: list[Any]
    if kind in (dict, OrderedDict):
        keys = list(spec.context)
    elif kind is defaultdict:
        keys = list(spec.context[1])
    else:
        keys = _class_keys(spec, values, path)
    if not all(_is_key(key) for key in keys):
        raise CaptureError(
            f"an input or output is a dict with the keys {keys}; keys must be strings, integers, or tuples of these"
        )
    tuples = {key_text(key) for key in keys if isinstance(key, tuple)}
    if ambiguous := sorted(tuples.intersection(keys)):
        raise CaptureError(f"a dict has the key {ambiguous[0]!r} and a tuple that is written the same way; rename one")
    return keys


def _is_key(key: Any) -> bool:
    parts = key if type(key) is tuple else (key,)
    return all(type(part) in (str, int) for part in parts)


def _class_keys(spec: pytree.TreeSpec, values: list[Any], path: str) -> list[Any]:
    """Return the names of a registered class's fields.

    Only an object has them, so one is made of the values. Its context may look like names, and is none: that of a
    KeyedJaggedTensor of six features has six strings, and the class has six fields.
    """
    kind = _kind(spec)
    node = pytree.SUPPORTED_NODES[kind]
    try:
        entries, _ = (node.flatten_with_keys_fn or _named_by_attributes(node))(pytree.tree_unflatten(values, spec))
        names = [_entry_name(entry) for entry, _ in entries]
    except Exception as error:
        raise CaptureError(
            f"{path or 'output'}: a {class_name(kind)} cannot be made of its own parts: {error}"
        ) from error
    usable = len(names) == spec.num_children == len(set(names)) and None not in names
    return names if usable else list(range(spec.num_children))


def _entry_name(entry: Any) -> Any:
    """Return the name in an entry of a key path: of an attribute, a key or an index."""
    return next((getattr(entry, name) for name in ("name", "key", "idx") if hasattr(entry, name)), None)


def _named_by_attributes(node: pytree.NodeDef) -> pytree.FlattenWithKeysFn:
    """Return a function that names an object's parts by the keys or attributes that have them, or else numbers them."""

    def flatten(whole: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = node.flatten_fn(whole)
        attributes = whole if isinstance(whole, Mapping) else getattr(whole, "__dict__", {})
        names = [next((name for name, value in attributes.items() if value is part), None) for part in parts]
        numbered = None in names or len(set(names)) < len(names)
        keys: list[Any] = [
            pytree.SequenceKey(index) if numbered else pytree.MappingKey(name) for index, name in enumerate(names)
        ]
        return list(zip(keys, parts, strict=True)), context

    return flatten


@contextmanager
def key_paths() -> Iterator[None]:
    """Register key paths in the block for the classes that have none: torch.export takes no others as inputs."""
    without = {kind: node for kind, node in pytree.SUPPORTED_NODES.items() if node.flatten_with_keys_fn is None}
    try:
        for kind, node in without.items():
            pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=_named_by_attributes(node))
        yield
    finally:
        pytree.SUPPORTED_NODES.update(without)


def _context(spec: pytree.TreeSpec, path: str) -> str:
    kind = _kind(spec)
    try:
        return context_text(kind, spec.context)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"{path or 'output'}: a {class_name(kind)} keeps what JSON cannot express ({error}). Give "
            "to_dumpable_context where it is registered with pytree"
        ) from error
