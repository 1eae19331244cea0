"""Packed weight files for vLLM 0.33: a weight transfer engine that verifies on every worker before any of them writes.

Not yet run inside vLLM: it is written for the contract of its 0.33.0, `vllm/distributed/weight_transfer/base.py`.
Importing this module imports vLLM. vLLM's plugin loader catches and logs errors of that, but none of `register()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from weightswap_runtime.errors import (
    DigestMismatch,
    GraphMismatch,
    NonFiniteWeights,
    UnexpectedWeights,
    WeightFileError,
)
from weightswap_runtime.format.safetensors import TensorRow, weights_id
from weightswap_runtime.format.weight_set import WeightSet, open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.staging.reading import read_scratch
from weightswap_runtime.staging.request import DAMAGED, digest_problems
from weightswap_runtime.staging.sets import check_tensors
from weightswap_runtime.threads import WorkerThreads
from weightswap_runtime.torch_tensors import as_tensor

__all__ = ["PackedFileEngine", "PackedFileInitInfo", "PackedFileUpdateInfo", "register"]

BACKEND = "weightswap"


def register() -> None:
    """Make the engine known to vLLM, for `--weight-transfer-config '{"backend": "weightswap"}'`. The entry point."""
    with suppress(ValueError):  # it is known already: vLLM may load its plugins more than once in a process
        WeightTransferEngineFactory.register_engine(BACKEND, PackedFileEngine)


@dataclass
class PackedFileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is an extra
    """What all files must be. There is no connection to make."""

    graph_id: str | None = None
    """Of the artifact that they were packed for, so that none lacks a tensor; None: any."""


@dataclass
class PackedFileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which file to load."""

    path: str
    """Of a packed weight file with the names of a checkpoint for this model; every worker reads it, so absolute."""
    expect: str | None = None
    """The weights id that the file must have; None: any."""
    allow_nonfinite: bool = False
    """Load NaN and infinities."""


class PackedFileEngine(WeightTransferEngine):  # type: ignore[misc]
    """A way of weights into vLLM's workers: `update_weights` verifies a whole file, `finish_weight_update` loads it.

    vLLM calls the former on every worker, and fails if any of them does, before it can call the latter on any. So a
    file that is damaged, has another id, NaN or no digests is refused while all workers have the weights from before;
    nothing is finished then. Of several updates the last one counts. A file that is replaced meanwhile (by name) is
    loaded as it was verified; one that was written to is refused. After a refusal by `finish_weight_update` vLLM's
    session is still open: update again, then finish.

    Loading itself is vLLM's, in place and layer by layer: serve nothing meanwhile. Each tensor is compared with its
    digest once more before vLLM gets it, so that no wrong byte is loaded. But once loading has begun, an error leaves a
    worker with neither the old weights nor the new ones, and says so: a file that cannot be read any more, or that
    was written to without a trace in its times; names or shapes that the model does not have; no memory. What a file
    lacks is not refused by vLLM: give `graph_id`.
    """

    init_info_cls = PackedFileInitInfo
    update_info_cls = PackedFileUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._workers = WorkerThreads()
        self._graph_id: str | None = None
        self._verified: WeightSet | None = None  # open, so that its bytes stay when its name is replaced

    def init_transfer_engine(self, init_info: PackedFileInitInfo) -> None:
        """Keep what all files must be."""
        self._graph_id = init_info.graph_id

    def start_weight_update(self) -> None:
        """Forget what was verified and not finished."""
        self.shutdown()

    def receive_weights(self, update_info: PackedFileUpdateInfo) -> None:
        """Read and verify every byte of a file. Writes nothing.

        Raises WeightFileError, DigestMismatch, GraphMismatch, UnexpectedWeights and NonFiniteWeights.
        """
        self.shutdown()
        weights = open_weights(update_info.path)
        try:
            self._verify(weights, update_info)
        except BaseException:
            weights.close()
            raise
        self._verified = weights

    def _verify(self, weights: WeightSet, info: PackedFileUpdateInfo) -> None:
        where, stamp = weights.where, weights.stamp
        if stamp is None or weights.holds_goldens:
            raise WeightFileError(f"{where}: not a packed weight file, so nothing proves its bytes: weightswap pack")
        if self._graph_id not in (None, stamp.graph_id):
            expected = f"expected {str(self._graph_id)[:12]}, the graph_id of init_info"
            raise GraphMismatch(f"{where}: packed for the graph {stamp.graph_id[:12]}, {expected}")
        if info.expect not in (None, stamp.weights_id):
            raise UnexpectedWeights(f"{where}: claims {stamp.weights_id[:12]}, expected {str(info.expect)[:12]}")
        nonfinite = check_tensors(weights, self._workers)
        rows = ((TensorRow(name, t.dtype, t.shape), stamp.digests[name]) for name, t in weights.tensors.items())
        if (found := weights_id(rows)) != stamp.weights_id:
            raise UnexpectedWeights(f"{where}: claims {stamp.weights_id[:12]}, gives {found[:12]}; pack it again")
        if nonfinite and not info.allow_nonfinite:
            problems = [f"{name}: {counts}" for name, counts in nonfinite.items()]
            raise NonFiniteWeights(where, problems, "If they are intended, allow_nonfinite=True loads them.")

    def finish_weight_update(self) -> None:
        """Load what was verified.

        Raises RuntimeError if there is nothing, or once loading has begun, and WeightFileError.
        """
        # imported here, as by vLLM's own engines: processes without workers load the plugin, too
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights, self._verified = self._verified, None
        if weights is None:
            raise RuntimeError("no verified weights to load; call update_weights first")
        with weights:
            weights.check_unchanged(proven=True)
            try:
                initialize_layerwise_reload(self.model)
                try:
                    self.model.load_weights(self._tensors(weights))
                finally:  # or the next load would go on with what this one has left
                    finalize_layerwise_reload(self.model, self.model_config)
            except Exception as error:
                raise RuntimeError(
                    f"{weights.where}: {error}. This worker's weights are half loaded, neither the old ones nor "
                    "these: load a set of weights before it serves."
                ) from error

    def _tensors(self, weights: WeightSet) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors on the CPU, by name, so that those of a layer follow each other; each was verified."""
        for name in sorted(weights.tensors):
            stored = weights.tensors[name]
            scratch, found = read_scratch(weights, [name], self._workers, Job())
            if problems := digest_problems(weights.stamp, found.digests):
                raise DigestMismatch(weights.where, problems, DAMAGED)
            yield name, as_tensor(scratch.memory, stored.dtype, stored.shape)

    def shutdown(self) -> None:
        """Close the file that was verified and not loaded."""
        weights, self._verified = self._verified, None
        if weights is not None:
            weights.close()
