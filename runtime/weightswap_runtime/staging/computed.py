"""Weights that the adapter computes from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightswap_runtime.errors import OutOfMemory, WeightsMismatch, WeightswapError, lacks_memory
from weightswap_runtime.format.nonfinite import count_nonfinite
from weightswap_runtime.format.weight_set import WeightSet
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.tensors.digests import block_digests

from .reading import Findings, lay, read_scratch
from .request import Staging

if TYPE_CHECKING:
    import torch


def compute_weights(
    weights: WeightSet, computed: Mapping[str, Mapping[str, str]], arena: Arena, staging: Staging
) -> Findings:
    """Compute each weight of `computed` into the arena, and return the findings by weight.

    `computed` maps each weight to its inputs: checkpoint key -> name in the files. Beside the arena, one weight and its
    inputs are held. Raises WeightFileError, WeightsMismatch, OutOfMemory, StageCancelled, and what opening the
    adapter's graph raises; the arena's content is then undefined.
    """
    transforms = staging.open_transforms()
    from weightswap_runtime.tensors.torch_tensors import as_tensor, tensor_bytes  # needs torch

    names = {key: name for keys in computed.values() for key, name in keys.items()}
    findings = Findings({}, {})

    def read(key: str) -> torch.Tensor:
        stored = weights.tensors[names[key]]
        scratch, _ = read_scratch(weights, [names[key]], staging.workers, staging.job)
        return as_tensor(scratch.memory, stored.dtype, stored.shape)

    try:
        for name, value in transforms.compute(list(computed), read):
            rows = tensor_bytes(value)
            weight = arena.layout.weights[name]
            findings.digests[name] = block_digests(rows)
            if nonfinite := count_nonfinite(weight.dtype, rows):
                findings.nonfinite[name] = nonfinite
            lay(arena, weight, rows, staging.job)
    except (WeightswapError, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{weights.where}: no memory to compute a weight ({error})") from error
        raise WeightsMismatch(
            weights.where,
            [f"the adapter cannot compute its weights: {type(error).__name__}: {error}"],
            "Load the checkpoint into the model on the build side and pack the model.",
        ) from error
    weights.check_unchanged()
    return findings
