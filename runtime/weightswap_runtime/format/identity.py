"""Which weights: the id that their content gives them, and what is needed to prove the id of a changed set."""

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
    """One full set of weights. `digests` are those of each weight's blocks, by FQN, of its row-major bytes.

    `nonfinite` has the weights that are not finite throughout.
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
    found = weights_id((weight.row, tensor_digest(digests[weight.name])) for weight in weights)
    return Identity(found, dict(digests), dict(labels), dict(nonfinite))
