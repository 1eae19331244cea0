"""Running a model's own code without values: skeletons, stand-ins for tensors, and where the code's errors come from.

Constructors, loading code and calls run on fake tensors, which have a shape and a dtype but no memory. What they leave
behind in modules is reset afterwards.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from weightswap_runtime.errors import CaptureError

from .tensors import ModelView, TieKey, is_composed, is_sharded, parts_of, put_together, tie_key

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_WANTS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
# errors of torch for the same reason that have no class of their own
_TEXTS = ("numpy() is not supported for tensor subclasses", "Can't call metadata mutating ops on non-Fake Tensor")
_DEEPEST = 6  # levels of nesting in attributes
_patching = threading.Lock()
_weak: Any = StorageWeakRef  # torch has no types for it
# The real parameters that were replaced, by memory and tie key, with their stand-ins and the part of these: a list or
# closure may have them. A weak reference frees the memory, but keeps its number in the tie key from another one's use.
_REPLACED: list[tuple[Any, TieKey, Any, nn.Parameter, str]] = []


@contextmanager
def skeleton() -> Iterator[None]:
    """Context manager: modules that this thread builds in its block get parameters without memory.

    Shapes, dtypes, ties (one Parameter registered twice), buffers and everything that `__init__` computes from them
    stay as they are. Initialisers of `torch.nn.init` do nothing to such a parameter. A skeleton can be exported; its
    calls return tensors without values. The block runs without gradients.

    Raises CaptureError if `__init__` needs the value of a parameter.
    """
    builder = _Builder()
    # autograd's graph of a tensor computed from parameters would keep Module.to() and .half() from replacing them
    with builder.patched(), torch.no_grad():
        try:
            yield
        except Exception as error:
            if not wants_values(error):
                raise
            raise CaptureError(
                f"{frame_of(error)}the model's constructor needs the values of a parameter ({first_line(error)}), "
                f"which a skeleton does not have; the last one made is {builder.last}. Initialise with torch.nn.init, "
                "and compute in the call what calls need of a parameter's values: made here, it would stay the same "
                "when weights change."
            ) from error


class _Builder:
    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # the memo's weak references to new tensors would keep Module.to() and .half() from swapping parameters
        self._mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
        # one stand-in for each parameter, as a constructor may register one twice: that is a tie
        self._replacements: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()
        self._thread = threading.get_ident()
        self.last = "no module yet"

    @contextmanager
    def patched(self) -> Iterator[None]:
        if not _patching.acquire(blocking=False):
            raise CaptureError("skeleton() is already active; only one at a time can build a model")
        try:
            register = self._registering(nn.Module.register_parameter)
            initialisers: dict[str, Any] = {
                name: _skipping_fakes(function)
                for name, function in vars(nn.init).items()
                if callable(function) and name.endswith("_") and not name.startswith("__")
            }

            def copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:  # a function: it becomes a method of tensors
                return self._copy(tensor, memo)

            with (
                mock.patch.object(nn.Module, "register_parameter", register),
                mock.patch.object(FakeTensor, "__deepcopy__", copied, create=True),
                mock.patch.multiple(nn.init, **initialisers),
            ):
                yield
        finally:
            _REPLACED[:] = [entry for entry in _REPLACED if entry[2]() is not None or not entry[0].expired()]
            _patching.release()

    def _registering(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and not isinstance(param, FakeTensor) and threading.get_ident() == self._thread:
                self.last = f"{type(module).__qualname__}.{name}"
                param = self._fake(param)
            original(module, name, param)

        return register_parameter

    def _fake(self, param: nn.Parameter) -> nn.Parameter:
        if is_sharded(param):
            kind = type(param).__qualname__
            raise CaptureError(f"{self.last}: is a {kind}, which a skeleton cannot hold. Export the whole model.")
        if is_lazy(param):
            raise CaptureError(f"{self.last}: a lazy parameter has no shape yet; give the layer its sizes")
        if param not in self._replacements:
            parts = {name: stand_in(part, self._mode) for name, part in parts_of("", param).items()}
            fake = nn.Parameter(put_together("", param, parts), requires_grad=param.requires_grad)
            for key, value in vars(param).items():
                fake.__dict__.setdefault(key, value)
            self._note(param, fake)
        return self._replacements[param]

    def _note(self, param: nn.Parameter, fake: nn.Parameter) -> None:
        self._replacements[param] = fake
        for name, part in parts_of("", param).items():
            if part.numel():  # the key of an empty tensor is that of an object
                _REPLACED.append((_weak(part.untyped_storage()), tie_key(part), weakref.ref(param), fake, name))

    def _copy(self, tensor: Any, memo: dict[int, Any]) -> Any:
        """Copy a fake tensor for copy.deepcopy; torch's own implementation needs its address."""
        if id(tensor) not in memo:
            with tensor.fake_mode:
                values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            # the lists of the copy shall have its own stand-ins, or copies of the real parameters that are known
            for real in [real for real, fake in self._replacements.items() if fake is tensor]:
                if id(real) in memo:
                    self._note(memo[id(real)], memo[id(tensor)])
                memo[id(real)] = memo[id(tensor)]
        return memo[id(tensor)]


def _skipping_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else function(tensor, *args, **kwargs)

    return initialise


def replaced_by(view: ModelView) -> list[tuple[TieKey, str]]:
    """Return the real tensors that a skeleton has replaced by the view's parameters, and whose memory something holds.

    They are given by the tie keys that they have, with the FQNs of their stand-ins.
    """
    names = {tie_key(tensor): name for name, tensor in reversed(view.tensors.items())}
    found = []
    for _, key, reference, fake, part in _REPLACED:
        if (name := names.get(tie_key(parts_of("", fake)[part]))) is not None:
            found.append((key, name))
            if (real := reference()) is not None:  # its `data` may be another one since
                found.append((tie_key(parts_of("", real)[part]), name))
    return found


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode, *, contiguous: bool = False) -> torch.Tensor:
    """Return a fake CPU tensor with the same shape, dtype and, unless `contiguous`, strides."""
    with mode:
        if contiguous:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def without_values(view: ModelView, mode: FakeTensorMode, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return a stand-in for each parameter and buffer of these FQNs; tied tensors have separate ones."""
    return {name: stand_in(tensor, mode) for name, tensor in view.tensors.items() if name in names}


def tied(view: ModelView, stand_ins: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the stand-ins with the same one for all names of a tied tensor."""
    first: dict[TieKey, torch.Tensor] = {}
    return {name: first.setdefault(tie_key(view.tensors[name]), value) for name, value in stand_ins.items()}


def install(view: ModelView, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters and buffers of the view's model by tensors, by FQN; one tensor for two names ties them.

    Parameters keep their attributes, except composed ones, which are composed of the given parts.
    """
    whole = dict(tensors)
    composed: dict[tuple[int, ...], torch.Tensor] = {}  # by their parts: tied ones stay one tensor
    for name, parameter in view.composed.items():
        if (parts := parts_of(name, parameter)).keys() <= tensors.keys():
            key = tuple(id(whole.pop(part)) for part in parts)
            whole[name] = composed.setdefault(key, put_together(name, parameter, tensors))
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in whole.items():
        path, _, leaf = name.rpartition(".")
        module = view.model.get_submodule(path)
        if leaf not in module._parameters:
            module._buffers[leaf] = tensor
            continue
        if id(tensor) not in parameters:
            original = module._parameters[leaf]
            assert original is not None
            parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=original.requires_grad)
            if not is_composed(tensor):
                vars(parameters[id(tensor)]).update(vars(original))
        module._parameters[leaf] = parameters[id(tensor)]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Reset all attributes of all modules when the block ends, and the contents of their containers and objects."""
    saved = [(module, dict(vars(module))) for module in model.modules()]
    containers = (item for _, attributes in saved for value in attributes.values() for item in _containers(value))
    contents = {id(item): (item, item.copy()) for item in containers}
    try:
        yield
    finally:
        for item, content in contents.values():
            item.clear()
            item.extend(content) if isinstance(item, list | deque) else item.update(content)
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


@contextmanager
def quiet(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Hide in the block what the loggers of these names log below a level."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger, before in levels.items():
        logger.setLevel(max(before, level))
    try:
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists, deques, dicts and sets nested in a value, and the attributes of objects."""
    for _, item in within("", value):
        if isinstance(item, list | dict | set | deque) and type(item).__module__ in ("builtins", "collections"):
            yield item
        if (attributes := attributes_of(item)) is not None:
            yield attributes


def within(path: str, value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield a value and those nested in it (in containers and objects), by path; `seen` has the ids of objects."""
    yield path, value
    seen = set() if seen is None else seen
    items: list[tuple[str, Any]] = []
    if id(value) not in seen and (attributes := attributes_of(value)) is not None:
        seen.add(id(value))
        items += [(f".{name}", item) for name, item in attributes.items()]
    if isinstance(value, list | tuple | deque):
        items += [(f"[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        items += [(f"[{key!r}]", item) for key, item in value.items()]
    for key, item in items if depth <= _DEEPEST else ():
        yield from within(path + key, item, depth + 1, seen)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class; None for others, as of torch or the standard library."""
    origin = type(value).__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "torch" or isinstance(value, nn.Module | torch.Tensor | type):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


class Unrecordable(Exception):
    """Error for an operation of loading code that a recording would lose."""


def wants_values(error: BaseException) -> bool:
    """Return whether an operation failed because it needs values of a fake tensor or cannot be recorded."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # its import takes half a second

    kinds = (*_WANTS_VALUES, GuardOnDataDependentSymNode, Unrecordable)
    return isinstance(error, kinds) or any(text in str(error) for text in _TEXTS)


def frame_of(error: BaseException) -> str:
    """Return `hook (model.py, line 12): `, the innermost frame outside torch and weightswap; empty without one."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<")]
    if not frames:
        return ""
    return f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno}): "


def first_line(error: BaseException) -> str:
    """Return the name of an error's class and the first line of its text."""
    return reason(error, lines=1)


def reason(error: BaseException, lines: int = 60) -> str:
    """Return the name of an error's class and at most `lines` lines of its text."""
    if isinstance(error, Unrecordable):
        return str(error)
    text = str(error).strip().splitlines()
    more = f"\n... and {len(text) - lines} lines more" if len(text) > lines > 1 else ""
    return f"{type(error).__name__}: " + "\n".join(text[:lines]) + more
