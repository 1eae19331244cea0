"""The weights of a node: the model in the memory that its replicas share, and the revision page that says which
revision it is.

They are staged here, from sources that another node may read; when they are committed, `changes` says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime.errors import text_of
from weightswap_runtime.following.desired_state import DesiredWeights
from weightswap_runtime.following.file_queue import refused_weights
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.model.model import Model
from weightswap_server.signed_weights import requires

from .memory import RevisionPage
from .relay import Relay

_MOST_REFUSED = 20  # ids of refused weights that are remembered, with why


class NodeWeights:
    """The model of a node, and the revision page of its revisions. One commit at a time."""

    def __init__(
        self, spec: DeploymentSpec, node: str, model: Model, revision_page: RevisionPage, relay: Relay | None = None
    ) -> None:
        self.node = node
        self.model = model
        self.revision_page = revision_page
        self._relay = relay
        self.refused: dict[str, str] = {}  # why weights were refused and not served since, by id, the latest last
        self.model.listen(self._note)
        self.deploy(spec)

    def deploy(self, spec: DeploymentSpec) -> None:
        """Verify later weights as a deployment says. The served ones stay."""
        keys = spec.require_signature
        self.model._store.admit = requires(*keys) if keys else None
        self.spec = spec

    def _note(self, event: Event) -> None:
        """Remember weights that are refused. The dict is replaced, as other threads read it."""
        if weights_id := refused_weights(event):
            self._refuse(weights_id, text_of(event.error) if event.error else "")
        elif event.receipt is not None:
            self.refused = self._others_refused(event.weights_id)

    def _refuse(self, weights_id: str, why: str) -> None:
        refused = self._others_refused(weights_id) | {weights_id: why}
        self.refused = dict(list(refused.items())[-_MOST_REFUSED:])

    def _others_refused(self, weights_id: str | None) -> dict[str, str]:
        return {each: why for each, why in self.refused.items() if each != weights_id}

    def stage(self, path: str | Path, weights: DesiredWeights, reader: str = "") -> Staged:
        """Start to stage. reader: the node that reads a URL for all. Raises what `Model.stage` raises."""
        onto = [(self._routed(base.source, reader), base.weights_id) for base in weights.bases or ()]
        return self.model.stage(self._routed(path, reader), onto=onto, background=True, **self._options(weights))

    def _options(self, weights: DesiredWeights) -> dict[str, Any]:
        """Return the options of `Model.stage`."""
        return {
            "expect": weights.weights_id,
            "allow_other_graph": weights.graph_id not in ("", self.model.artifact.manifest.packed_for),
            "verify": self.spec.verify,
            "allow_nonfinite": self.spec.allow_nonfinite,
            "by": weights.by,
        }

    def complete(self, staged: Staged, is_wanted: Callable[[], bool]) -> None:
        """Do what is left to do once weights are staged here. Raises what refuses them."""

    def keeps(self, weights_id: str) -> bool:
        """Return whether a rollback would serve exactly these weights."""
        return self.model.previous_weights_id == weights_id

    def _routed(self, path: str | Path, reader: str) -> Any:
        if self._relay is not None and self.spec.relay and isinstance(path, str):
            return self._relay.route(path, reader)
        return path  # all that `open_source` takes

    def mark_next(self, revision: int) -> None:
        """Write the next revision before its commit, so that no replica answers with new weights and an older one.

        A client could then go back: to a node that still serves the older weights, at the revision that it has seen.
        """
        generation = self.model.generation
        self.revision_page.set_revision(0 if generation is None else generation + 1, revision)

    def mark(self, revision: int) -> None:
        """Raise the revision of the served weights."""
        generation = self.model.generation
        if generation is not None and self.revision_page.revision(generation) < revision:
            self.revision_page.set_revision(generation, revision)

    @property
    def revision(self) -> int:
        """The served revision; 0 before the first."""
        return self.revision_page.revision(self.model.generation)
