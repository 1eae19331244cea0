"""Reading what a trainer saves: a live module, a state dict, or a checkpoint file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import nn

from weightswap_runtime.dtypes import TORCH_NAMES
from weightswap_runtime.errors import CheckpointError, MissingExtra
from weightswap_runtime.weightfile import WeightFile

from .skeletons import is_fake
from .tables import persistent_buffers

PICKLED = (".pt", ".pth", ".bin")


class Values(NamedTuple):
    """A tensor of a checkpoint: its safetensors type, and how to get it. `load()` may return memory of the source."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


class Checkpoint(NamedTuple):
    """Tensors by name. `names` says that these are runtime FQNs for certain; else they may be the checkpoint's keys."""

    where: str
    tensors: dict[str, Values]
    names: bool


Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]


def open_checkpoint(source: Source) -> AbstractContextManager[Checkpoint]:
    """Open a module, a state dict or a path. Tensors of files are mapped, not read. Raises CheckpointError."""
    if isinstance(source, nn.Module):
        return nullcontext(_from_module(source))
    if isinstance(source, Mapping):
        return nullcontext(Checkpoint("the state dict", _values(source, "the state dict"), names=False))
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"expected a module, a state dict or a path, got a {type(source).__qualname__}")
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. Give a .safetensors, .pt, .pth or .bin checkpoint.")
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    if path.suffix in PICKLED:
        return nullcontext(_from_pickled(path))
    raise CheckpointError(f"{path}: unknown kind of checkpoint; known are .safetensors, {', '.join(PICKLED)}")


def _from_module(model: nn.Module) -> Checkpoint:
    lasting = persistent_buffers(model)
    tensors: dict[str, torch.Tensor] = {}
    tensors |= dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: value for name, value in model.named_buffers(remove_duplicate=False) if name in lasting}
    return Checkpoint(type(model).__qualname__, _values(tensors, type(model).__qualname__), names=True)


@contextmanager
def _from_safetensors(path: Path) -> Iterator[Checkpoint]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingExtra("packing a .safetensors checkpoint", "export") from error
    # our own header check is stricter, and its errors say more
    with WeightFile(path) as checked, safe_open(path, framework="pt") as file:
        tensors = {
            name: Values(tensor.dtype, tensor.shape, partial(file.get_tensor, name))
            for name, tensor in checked.tensors.items()
        }
        yield Checkpoint(str(path), tensors, names=checked.stamp is not None)


def _from_pickled(path: Path) -> Checkpoint:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, and unpickling it could run anything, so it was not opened. "
            "Save model.state_dict() alone, or a .safetensors file."
        ) from error
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        raise CheckpointError(f"{path}: not a checkpoint that torch.load can open ({error})") from error
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: holds a {type(loaded).__qualname__}, expected a state dict")
    return Checkpoint(str(path), _values(loaded, str(path)), names=False)


def _values(tensors: Mapping[str, Any], where: str) -> dict[str, Values]:
    """Keep the tensors. Entries of other kinds (`_extra_state`) have no place in a weight file."""
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise CheckpointError(f"{where}: has the key {odd[0]!r}; the keys of a state dict are texts")
    found = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    if not found and tensors:
        nested = [name for name, value in tensors.items() if isinstance(value, Mapping)]
        hint = f" (a state dict may be under {nested[0]!r})" if nested else ""
        raise CheckpointError(f"{where}: holds no tensors{hint}; give the state dict itself")
    problems = [
        f"{name}: has no values (a skeleton's or a meta tensor)" for name, value in found.items() if is_fake(value)
    ]
    problems += [
        f"{name}: {value.dtype} {value.layout} cannot be written as safetensors"
        for name, value in found.items()
        if value.layout is not torch.strided or _name(value) not in TORCH_NAMES
    ]
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(problems[:10]))
    return {
        name: Values(TORCH_NAMES[_name(value)], tuple(value.shape), partial(_same, value))
        for name, value in found.items()
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
