"""Inputs and outputs of `weightswap run` as files: named tensors in .safetensors or .npz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weightswap_runtime.dtypes import DTYPES, TORCH_NAMES, describe
from weightswap_runtime.errors import MissingExtra, Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.files import new_file
from weightswap_runtime.header import header_length, pack_ranges, parse_header, render_header
from weightswap_runtime.weightfile import TensorRow, canonical_order

try:
    import torch
except ImportError as error:
    raise MissingExtra("weightswap run", "torch") from error

from weightswap_runtime.tensors import as_tensor, tensor_bytes

SUFFIXES = (".safetensors", ".npz")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a .safetensors or .npz file. Raises WeightFileError and Unsupported."""
    _check_suffix(path)
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except WeightswapError:
        raise
    except Exception as error:  # numpy's and zipfile's own, for files of another kind
        raise WeightFileError(f"{path}: cannot be read ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a .safetensors or .npz file, which appears whole or not at all. Raises Unsupported."""
    _check_suffix(path)
    if path.suffix == ".npz":
        arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
        with new_file(path) as file:
            np.savez(file, **arrays)
        return
    rows = {name: TensorRow(name, _dtype(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    order = canonical_order(rows.values())
    with new_file(path) as file:
        file.write(render_header(pack_ranges(order), {"format": "pt"}))
        for row in order:
            file.write(tensor_bytes(tensors[row.name]))


def describe_value(value: Any) -> Any:
    """`F32[2, 10]` for a tensor; another value as it is."""
    return describe(_dtype("output", value), tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise Unsupported(f"{path}: tensors are read from and written to {' and '.join(SUFFIXES)} files")


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        found: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    return {name: torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape) for name, array in found.items()}


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    raw = bytearray(path.read_bytes())
    length = header_length(bytes(raw[:8]), len(raw), str(path))
    header = parse_header(bytes(raw[8 : 8 + length]), len(raw), str(path))
    tensors = {}
    for name, place in header.tensors.items():
        values = raw[header.data_start + place.begin : header.data_start + place.end]
        tensors[name] = as_tensor(values, place.dtype, place.shape)
    return tensors


def _dtype(name: str, tensor: torch.Tensor) -> str:
    dtype = TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise Unsupported(f"{name}: {tensor.dtype} has no place in the safetensors format")
    return dtype


def _array(name: str, tensor: torch.Tensor) -> Any:
    if DTYPES[_dtype(name, tensor)].numpy is None:
        raise Unsupported(f"{name}: numpy has no {tensor.dtype}; write a .safetensors file")
    return tensor.numpy()
