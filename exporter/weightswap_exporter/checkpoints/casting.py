"""Casting of a checkpoint's floating tensors to a requested dtype, where the graph has exactly this dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weightswap_runtime.errors import CheckpointError
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.name_matching import Match, Reading, Readings, by_key
from weightswap_runtime.tensors.dtypes import DTYPES, TensorType, Typed
from weightswap_runtime.tensors.torch_tensors import torch_dtype

from .tensor import CheckpointTensor, dtype_of

SCALED = ("F8", "F4")  # dtypes of floats that mostly have a scale beside them
FLOATING = frozenset(name for name in DTYPES if name.startswith(("F", "BF")))


def requested(dtype: torch.dtype | str | None, manifest: Manifest) -> str | None:
    """Return the safetensors name of a torch dtype, given as such or by name (`bfloat16`).

    Raises CheckpointError unless it is floating and the graph has a tensor of it.
    """
    if dtype is None:
        return None
    torch_type = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    name = dtype_of(torch_type) if isinstance(torch_type, torch.dtype) else ""
    if name not in FLOATING:
        known = ", ".join(row.torch for row in DTYPES.values() if row.torch and row.name in FLOATING)
        raise CheckpointError(f"dtype {str(dtype)!r}: tensors can be cast to {known}")
    dtypes = {weight.dtype for weight in manifest.weights}
    dtypes |= {item.dtype for item in manifest.adapter.inputs if item.kind == "key"}
    if name not in dtypes:
        wants = ", ".join(DTYPES[other].torch or other for other in sorted(dtypes & FLOATING)) or "no float tensors"
        raise CheckpointError(
            f"dtype {DTYPES[name].torch}: the graph expects none, so nothing would be cast; it expects {wants}. Leave "
            "the dtype out or give one of these, or export the model in this dtype."
        )
    return name


def casting(readings: Readings, dtype: str | None, manifest: Manifest) -> Readings:
    """Return readings that accept floating tensors of any dtype where the graph has `dtype`."""
    if dtype is None or (manifest.adapter.untraceable and by_key in readings):  # `resolve` refuses these
        return readings
    return tuple(_casting(reading, dtype) for reading in readings)


def _casting(reading: Callable[[Manifest], Reading], dtype: str) -> Callable[[Manifest], Reading]:
    class Casting(Reading):
        def match(self, tensors: Mapping[str, Typed]) -> Match:
            expected = [(key, typed) for demand in self.demands for key, typed in demand.keys.items()]
            cast = {
                key: TensorType(dtype, tuple(tensors[key].shape))
                for key, typed in expected
                if typed.dtype == dtype and key in tensors and tensors[key].dtype in FLOATING
            }
            return super().match({**tensors, **cast})

    return lambda manifest: Casting(*reading(manifest))


def casts(match: Match, manifest: Manifest, tensors: Mapping[str, CheckpointTensor]) -> dict[str, list[str]]:
    """Return the weights that a match casts, sorted, by their dtype in the checkpoint."""
    rows = {weight.name: weight for weight in manifest.weights}
    inputs = {item.name: item.dtype for item in manifest.adapter.inputs}
    sources = {(tensors[names[0]].dtype, weight) for weight, names in match.found.items()}
    changed = {(dtype, weight) for dtype, weight in sources if dtype != rows[weight].dtype}
    changed |= {
        (tensors[name].dtype, weight)
        for weight, names in match.computed.items()
        for key, name in names.items()
        if tensors[name].dtype != inputs[key]
    }
    return {
        dtype: sorted(weight for of, weight in changed if of == dtype) for dtype in sorted({of for of, _ in changed})
    }


def cast(tensor: torch.Tensor, dtype: str, where: str) -> torch.Tensor:
    """Cast a tensor as `Tensor.to` does; return the same tensor if it has the dtype.

    Raises CheckpointError if a finite value is beyond the dtype's range.
    """
    target = torch_dtype(dtype)
    if tensor.dtype == target:
        return tensor
    result = tensor.to(target)
    lost = ~torch.isfinite(result.float())
    if lost.any() and (lost & torch.isfinite(tensor.double())).any():
        raise CheckpointError(f"{where}: has values outside the range of {dtype}, to which it would be cast")
    return result
