"""Skeletons: modules whose parameters have shape and dtype but no memory, while buffers stay real.

A parameter is replaced by a fake CPU tensor when a module registers it. Meta tensors would put `device="meta"` into the
graph, and buffers computed in `__init__` would lose their values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from weightswap_runtime.errors import CaptureError

from .parts import is_sharded, parts_of, put_together
from .stand_ins import stand_in
from .user_errors import first_line, frame_of, wants_values

_patching = threading.Lock()


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


def _no_memo(t: torch.Tensor, v: FakeTensor) -> None: ...


def _copy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """Copy a fake tensor for copy.deepcopy; torch's own implementation needs its address."""
    if id(tensor) not in memo:
        with tensor.fake_mode:
            values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    return memo[id(tensor)]


class _Builder:
    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # the memo's weak references to new tensors would keep Module.to() and .half() from swapping parameters
        self._mode.fake_tensor_converter.set_tensor_memo = _no_memo  # type: ignore[method-assign]
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
                name: self._skipping_fakes(function)
                for name, function in vars(nn.init).items()
                if callable(function) and name.endswith("_") and not name.startswith("__")
            }
            with (
                mock.patch.object(nn.Module, "register_parameter", register),
                mock.patch.object(FakeTensor, "__deepcopy__", _copy, create=True),
                mock.patch.multiple(nn.init, **initialisers),
            ):
                yield
        finally:
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
            self._replacements[param] = fake
        return self._replacements[param]

    def _skipping_fakes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if isinstance(tensor, FakeTensor) else function(tensor, *args, **kwargs)

        return initialise
