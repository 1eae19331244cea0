"""Files of inputs and outputs of `weightswap run`: named tensors in .safetensors or .npz."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.errors import Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.format.header import parse_file
from weightswap_runtime.format.weight_file import encode_tensors
from weightswap_runtime.sources.atomic import new_file
from weightswap_runtime.tensors.content import TensorBytes, array_content, as_array, is_numpys
from weightswap_runtime.tensors.dtypes import describe

SUFFIXES = (".safetensors", ".npz")


def read_tensors(path: Path) -> dict[str, TensorBytes]:
    """Read every tensor of a .safetensors or .npz file. Raises WeightFileError and Unsupported."""
    _check_suffix(path)
    try:
        return _read_npz(path) if path.suffix == ".npz" else parse_file(path.read_bytes(), str(path))[0]
    except WeightswapError:
        raise
    except Exception as error:  # numpy and zipfile raise various ones for other files
        raise WeightFileError(f"{path}: cannot be read ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes]) -> None:
    """Write tensors atomically to a .safetensors or .npz file. Raises Unsupported."""
    _check_suffix(path)
    if path.suffix == ".npz":
        arrays = {name: _array(name, tensor) for name, tensor in tensors.items()}
        with new_file(path) as file:
            np.savez(file, **arrays)
        return
    with new_file(path) as file:
        file.writelines(encode_tensors(tensors))


def describe_value(value: Any) -> Any:
    """Return the type of a tensor as text, such as `F32[2, 10]`, and any other value unchanged."""
    return describe(value) if isinstance(value, TensorBytes) else value


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise Unsupported(f"{path}: tensors are read from and written to {' and '.join(SUFFIXES)} files")


def _read_npz(path: Path) -> dict[str, TensorBytes]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: _content(path, name, arrays[name]) for name in arrays.files}


def _content(path: Path, name: str, array: NDArray[Any]) -> TensorBytes:
    try:
        return array_content(array)
    except Unsupported as error:
        raise WeightFileError(f"{path}: {name}: {error}") from error


def _array(name: str, tensor: TensorBytes) -> Any:
    if not is_numpys(tensor.dtype):  # .npz does not record the type of ml_dtypes
        raise Unsupported(f"{name}: numpy has no {tensor.dtype}; write a .safetensors file")
    return as_array(tensor)
