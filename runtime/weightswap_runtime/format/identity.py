"""Identity of weights: the id of their content, and the digests from which the id of a changed set is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from weightswap_runtime.tensors.digests import Blocks, tensor_digest

from .manifest import NamedTensor
from .nonfinite import Counts
from .weight_file import weights_id


@dataclass(frozen=True, eq=False)
class Identity:
    """Identity of a full set of weights. `digests` maps FQNs to the digests of the blocks of row-major bytes.

    `nonfinite` has the weights with NaN or infinities.
    """

    weights_id: str
    digests: Mapping[str, Blocks]
    labels: Mapping[str, str]
    nonfinite: Mapping[str, Counts] = field(default_factory=dict)


def identify(
    weights: Iterable[NamedTensor],
    digests: Mapping[str, Blocks],
    labels: Mapping[str, str],
    nonfinite: Mapping[str, Counts] = MappingProxyType({}),
) -> Identity:
    """Compute the weights id from the digests of every weight's blocks."""
    computed_id = weights_id((weight.row, tensor_digest(digests[weight.name])) for weight in weights)
    return Identity(computed_id, dict(digests), dict(labels), dict(nonfinite))
