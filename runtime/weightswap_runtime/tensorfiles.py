"""Inputs and outputs of `weightswap run` as files: named tensors in .safetensors or .npz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contents import Content, array_content, as_array
from .dtypes import DTYPES, describe
from .errors import Unsupported, WeightFileError, WeightswapError
from .files import new_file
from .header import header_length, pack_ranges, parse_header, render_header
from .weightfile import TensorRow, canonical_order

SUFFIXES = (".safetensors", ".npz")


def read_tensors(path: Path) -> dict[str, Content]:
    """Every tensor of a .safetensors or .npz file. Raises WeightFileError and Unsupported."""
    _check_suffix(path)
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except WeightswapError:
        raise
    except Exception as error:  # numpy's and zipfile's own, for files of another kind
        raise WeightFileError(f"{path}: cannot be read ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, Content]) -> None:
    """Write tensors to a .safetensors or .npz file, which appears whole or not at all. Raises Unsupported."""
    _check_suffix(path)
    if path.suffix == ".npz":
        arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
        with new_file(path) as file:
            np.savez(file, **arrays)
        return
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    with new_file(path) as file:
        file.write(render_header(pack_ranges(order), {"format": "pt"}))
        for row in order:
            file.write(tensors[row.name].data)


def describe_value(value: Any) -> Any:
    """`F32[2, 10]` for a tensor; another value as it is."""
    return describe(value.dtype, value.shape) if isinstance(value, Content) else value


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise Unsupported(f"{path}: tensors are read from and written to {' and '.join(SUFFIXES)} files")


def _read_npz(path: Path) -> dict[str, Content]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _content(path, name, arrays[name]) for name in arrays.files}


def _content(path: Path, name: str, array: NDArray[Any]) -> Content:
    try:
        return array_content(array)
    except Unsupported as error:
        raise WeightFileError(f"{path}: {name}: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Content]:
    raw = path.read_bytes()
    length = header_length(raw[:8], len(raw), str(path))
    header = parse_header(raw[8 : 8 + length], len(raw), str(path))
    data = memoryview(raw)[header.data_start :]
    return {
        name: Content(place.dtype, place.shape, data[place.begin : place.end]) for name, place in header.tensors.items()
    }


def _array(name: str, tensor: Content) -> Any:
    if DTYPES[tensor.dtype].numpy is None:
        raise Unsupported(f"{name}: numpy has no {tensor.dtype}; write a .safetensors file")
    return as_array(tensor)
