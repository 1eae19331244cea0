"""Weights that the adapter computes, from the files into an arena."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .arena import Arena
from .digests import block_digests
from .errors import OutOfMemory, WeightsMismatch, WeightswapError, lacks_memory
from .job import Job
from .nonfinite import count_nonfinite
from .reading import Found, lay, read_scratch
from .tensors import as_tensor, tensor_bytes
from .transforms import Transforms
from .weightset import WeightSet
from .workers import Workers


def compute_weights(
    weights: WeightSet,
    computed: Mapping[str, Mapping[str, str]],
    arena: Arena,
    workers: Workers,
    transforms: Transforms,
    job: Job,
) -> Found:
    """Compute each weight of `computed` into the arena; returns what was found, by weight.

    One weight and what it is computed from are held beside the arena. Raises WeightFileError, WeightsMismatch,
    OutOfMemory, StageCancelled and ArtifactError; the arena's content is then undefined.
    """
    names = {key: name for keys in computed.values() for key, name in keys.items()}
    found = Found({}, {})

    def read(key: str) -> torch.Tensor:
        stored = weights.tensors[names[key]]
        scratch, _ = read_scratch(weights, [names[key]], workers, job)
        return as_tensor(scratch.memory, stored.dtype, stored.shape)

    try:
        for name, value in transforms.compute(list(computed), read):
            rows = tensor_bytes(value)
            weight = arena.layout.weights[name]
            found.digests[name] = block_digests(rows)
            if nonfinite := count_nonfinite(weight.dtype, rows):
                found.nonfinite[name] = nonfinite
            lay(arena, weight, rows, job)
    except (WeightswapError, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise OutOfMemory(f"{weights.where}: no memory to compute a weight in ({error})") from error
        raise WeightsMismatch(
            weights.where,
            [f"the adapter cannot compute its weights: {type(error).__name__}: {error}"],
            "Load the checkpoint into the model on the build side and pack the model.",
        ) from error
    weights.check_unchanged()
    return found
