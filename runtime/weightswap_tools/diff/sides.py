"""The sides of a comparison: the names of their tensors, and where their bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from weightswap_runtime.errors import OutOfMemory, Unsupported, WeightFileError, WeightsMismatch
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.delta_file import delta_stamp
from weightswap_runtime.format.goldens import record_of
from weightswap_runtime.format.name_matching import KEYS, NAMES, UNAMBIGUOUS, Keys, Match, Readings, resolve
from weightswap_runtime.memory.arena import allocate
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_tools.tensor_set import SetTensor, TensorSet

from .report import SetInfo
from .streaming import Computed, Tensor, digests_of

if TYPE_CHECKING:
    import torch

    from weightswap_runtime.staging.transforms import Transforms

READINGS: dict[Keys | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}


class Side(NamedTuple):
    """One set of tensors under the names to compare.

    digests: the recorded ones, by name. sources: the names in the file that the tensors are made of. ties: the other
    names of each tensor, by name.
    """

    info: SetInfo
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, str]
    sources: tuple[str, ...] = ()
    ties: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def side(weights: TensorSet, artifact: Artifact | None, keys: Keys | None) -> Side:
    """Return the tensors of an open set under their own names, or, with an artifact, as its weights under their FQNs.

    Raises Unsupported for a delta file and for goldens. Raises WeightsMismatch if the set does not fit the artifact, or
    has different values for tied tensors.
    """
    if weights.weights and delta_stamp(weights.weights):
        raise Unsupported(f"{weights.where}: is a delta file; compare the weight files that it was made from")
    if weights.weights and record_of(weights.weights):
        raise Unsupported(f"{weights.where}: holds goldens, not weights; compare the weight files beside them")
    stamp = weights.weights.stamp if weights.weights else None
    digests = stamp.digests if stamp else {}
    if artifact is None:
        tensors = {name: _stored(tensor) for name, tensor in weights.tensors.items()}
        return Side(_info(weights, tensors), tensors, digests, tuple(tensors), weights.ties)
    readings = NAMES if stamp else READINGS[keys]
    match = resolve(weights.tensors, artifact.manifest, weights.full_where, readings=readings)
    _check_ties(weights, match)
    tensors = {name: _stored(weights.tensors[names[0]]) for name, names in match.found.items()}
    tensors |= _computed(weights, match, artifact)
    own = {name: digests[names[0]] for name, names in match.found.items() if names[0] in digests}
    return Side(_info(weights, tensors, match.ignored), tensors, own, tuple(_sources(match)))


def _sources(match: Match) -> Iterator[str]:
    for names in match.found.values():
        yield from names
    for keys in match.computed.values():
        yield from keys.values()


def _check_ties(weights: TensorSet, match: Match) -> None:
    """Raise WeightsMismatch if tied names have different values."""
    several = [names for names in match.found.values() if len({weights.tensors[name].tie_key for name in names}) > 1]
    digests = digests_of({name: _stored(weights.tensors[name]) for names in several for name in names})
    problems = [
        f"{' and '.join(names)} are one tensor in the graph, but the checkpoint has different values for them"
        for names in several
        if len({digests[name] for name in names}) > 1
    ]
    if problems:
        advice = "Save the checkpoint from a model whose tied tensors are tied."
        raise WeightsMismatch(weights.full_where, problems, advice)


def _stored(tensor: SetTensor) -> Tensor:
    if not tensor.whole:
        return tensor
    return Computed(tensor.dtype, tensor.shape, tensor.nbytes, partial(_read_whole, tensor))


def _read_whole(tensor: SetTensor) -> TensorBytes:
    try:
        memory = memoryview(allocate(tensor.nbytes))
        tensor.read_into(memory, 0)
    except MemoryError as error:
        raise OutOfMemory(f"{tensor.file}: a tensor that can only be read whole takes {tensor.nbytes} bytes") from error
    return TensorBytes(tensor.dtype, tensor.shape, memory)


def _info(weights: TensorSet, tensors: Mapping[str, Tensor], ignored: tuple[str, ...] = ()) -> SetInfo:
    stamp = weights.weights.stamp if weights.weights else None
    return SetInfo(
        where=weights.where,
        level=weights.level,
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        weights_id=stamp.weights_id if stamp else None,
        graph_id=stamp.graph_id if stamp else None,
        labels=stamp.labels if stamp else {},
        ignored=ignored,
    )


def _computed(weights: TensorSet, match: Match, artifact: Artifact) -> dict[str, Tensor]:
    if not match.computed:
        return {}
    from weightswap_runtime.staging.transforms import Transforms  # needs torch

    compute = partial(_compute, weights, Transforms(artifact))
    return {
        row.name: Computed(row.dtype, row.shape, row.nbytes, partial(compute, row.name, match.computed[row.name]))
        for row in artifact.manifest.weights
        if row.name in match.computed
    }


def _compute(weights: TensorSet, transforms: Transforms, name: str, keys: Mapping[str, str]) -> TensorBytes:
    from weightswap_runtime.tensors.torch_tensors import as_tensor, tensor_content

    def read(key: str) -> torch.Tensor:
        content = _read_whole(weights.tensors[keys[key]])
        return as_tensor(content.data, content.dtype, content.shape)

    try:
        ((_, value),) = transforms.compute([name], read)
    except Exception as error:
        raise WeightFileError(f"{weights.where}: {name} cannot be computed from it ({error})") from error
    return tensor_content(value)
