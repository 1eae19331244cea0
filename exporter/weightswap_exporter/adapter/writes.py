"""What loading code does past the tracer: assignments of `.data` are followed, writes to other tensors are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode

from weightswap_exporter.models.parts import parts_of
from weightswap_exporter.models.user_errors import Unrecordable

_data: Any = torch._C.TensorBase.data


@contextmanager
def watched() -> Iterator[None]:
    """For a function that `make_fx` traces. Raises Unrecordable for what would be lost, or would be done for real."""
    writes: Any = _Writes  # torch has no types for it
    with writes(), mock.patch.object(torch.Tensor, "data", property(_data.__get__, _assign_data), create=True):
        yield


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A tensor that the model or a hook has kept is real: the tracer would change it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else given.get(argument.name)
                    _check(value if isinstance(value, list | tuple) else [value], func)
        return func(*args, **given)


def _check(values: Any, func: object) -> None:
    parts = [part for value in values if isinstance(value, torch.Tensor) for part in parts_of("", value).values()]
    if not all(isinstance(part, FakeTensor) for part in parts):
        raise Unrecordable(f"{func} writes to a tensor that is neither a weight nor of the checkpoint")


def _assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`: from here on the tensor is what the tracer knows as `value`."""
    mode = get_proxy_mode()
    proxy = get_proxy_slot(value, mode.tracer, None) if mode is not None else None
    if proxy is None or not isinstance(tensor, FakeTensor):
        raise Unrecordable("an assignment of `.data` that does not put a tensor of the checkpoint into a weight")
    _data.__set__(tensor, value)
    set_proxy_slot(tensor, mode.tracer, proxy)  # type: ignore[union-attr]
