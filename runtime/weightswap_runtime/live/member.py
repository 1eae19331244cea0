"""Members of a store: the artifacts whose graphs run on its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightswap_runtime.engines.engine import Engine
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Goldens

if TYPE_CHECKING:
    from weightswap_runtime.staging.transforms import Transforms


@dataclass(eq=False)
class Member:
    """An artifact whose graphs run on the weights. `id` identifies its engine in every session."""

    artifact: Artifact
    engine: Engine
    id: int
    goldens: Goldens | None
    _transforms: Transforms | None = None

    def open_transforms(self) -> Transforms:
        """Return the adapter's graph, opened on first use. Raises ArtifactError, and MissingExtra without torch."""
        if self._transforms is None:
            from weightswap_runtime.staging.transforms import Transforms  # needs torch

            self._transforms = Transforms(self.artifact)
        return self._transforms
