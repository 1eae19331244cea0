"""What torchrec and fbgemm tell of tables that they shard and train: lookups, optimizers, and what nobody tells.

torchrec is never imported for it: its sharded modules exist only if it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightswap_runtime.errors import CheckpointError, Unsupported, listed

CONSUMER = "weightswap"  # of torchrec's tracker: each consumer gets every id once
ALTERNATIVE = (
    "Train it with SGD without momentum, Adagrad or SparseAdam, without weight decay; or leave it out of "
    "RowTracker(tables=): it is then compared with what was published last, and written whole if it has changed; or "
    "publish without rows=, and compare the file with the last one: write_delta(last, new, out)"
)
# of fbgemm, by the names of its EmbOptimType: they touch the rows of the batch alone, and decay these alone
_FUSED = {
    "SGD",
    "EXACT_SGD",
    "ADAM",
    "LAMB",
    "LARS_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "PARTIAL_ROWWISE_ADAM",
    "PARTIAL_ROWWISE_LAMB",
}
# of torchrec: they start rows anew that nobody has looked up
_REUSING = {
    "torchrec.distributed.mc_embedding_modules": ("BaseShardedManagedCollisionEmbeddingCollection",),
    "torchrec.distributed.itep_embeddingbag": (
        "ShardedITEPEmbeddingBagCollection",
        "ShardedITEPEmbeddingCollection",
    ),
}


def sharded_tables(model: nn.Module) -> Iterator[ShardedTables]:
    """Yield the parts of a model that torchrec has sharded. Raises CheckpointError, and Unsupported."""
    parallel = sys.modules.get("torchrec.distributed.model_parallel")
    if parallel is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, parallel.DistributedModelParallel):
            if (ranks := torch.distributed.get_world_size()) > 1:
                raise Unsupported(
                    f"RowTracker: the tables are sharded over {ranks} processes, each of which has only a part of the "
                    "rows. Gather the state dict on one, pack it, and compare: write_delta(last, new, out)"
                )
            yield ShardedTables(path, module)


def changed_by_backward(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that a backward pass changes, with a fused optimizer."""
    fused = getattr(sys.modules.get("torchrec.optim.fused"), "FusedOptimizerModule", ())
    # it has the optimizers of what is within, and plain parameters beside
    parallel = getattr(sys.modules.get("torchrec.distributed.model_parallel"), "DistributedModelParallel", ())
    return {
        id(parameter)
        for module in model.modules()
        if (isinstance(module, fused) and not isinstance(module, parallel)) or _fused_optimizer(module) is not None
        for parameter in module.parameters()
    }


class ShardedTables:
    """A DistributedModelParallel, whose fused optimizers change what was looked up."""

    def __init__(self, path: str, model: Any) -> None:
        tracker = model.get_delta_tracker()
        if tracker is None:
            _check_trackable(model)
            types = sys.modules["torchrec.distributed.model_tracker.types"]
            tracker = model.init_torchrec_delta_tracker(types.DeltaTrackerConfig(consumers=[CONSUMER]))
        elif CONSUMER not in tracker.per_consumer_batch_idx:
            raise CheckpointError(
                f"RowTracker: torchrec's tracker of this model has no consumer {CONSUMER!r}; initialize it with "
                f"DeltaTrackerConfig(consumers=[..., {CONSUMER!r}])"
            )
        if (other := getattr(tracker, "_weightswap", None)) is not None and other() is not None:
            raise CheckpointError(
                f"RowTracker: there is one of this model already, and torchrec's tracker tells {CONSUMER!r} each "
                "change once; use that one"
            )
        tracker._weightswap = weakref.ref(self)
        self._tracker = tracker
        self._kept_under = _kept_under(path, model, tracker)
        self.names = list(self._kept_under)
        _check_fused(model)

    def drain(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ids that were looked up since the last call, by table: all of its own, and others.

        Not by `get_unique_ids`: that of torchrec 1.8 fails if one of the tables was not looked up.
        """
        tracker = self._tracker
        end = tracker.curr_batch_idx + 1
        lookups = tracker.store.get_indexed_lookups(tracker.per_consumer_batch_idx[CONSUMER], end)
        tracker.per_consumer_batch_idx[CONSUMER] = end
        tracker.step()  # else lookups that do not pass through the parallel model's forward are of this batch, too
        if tracker._delete_on_read:
            tracker.store.delete(up_to_idx=min(tracker.per_consumer_batch_idx.values()))
        for name, keys in self._kept_under.items():
            for key in keys:
                for lookup in lookups.get(key, ()):
                    yield name, lookup.ids


def _kept_under(path: str, model: nn.Module, tracker: Any) -> dict[str, set[str]]:
    """Return the names under which torchrec's tracker keeps the ids of each table.

    It keeps those of a feature under one table alone, whichever others the feature has, and finds that table's module
    by its name, which may be another's, too. Tables of which it is not told each row are compared as a whole.
    """
    reused = _reused(model)
    found = {}
    for module_path, module in tracker.tracked_modules.items():
        if id(module) in reused:
            continue
        part = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
        for table, config in module._table_name_to_config.items():
            keys = {tracker.feature_to_fqn.get(feature) for feature in config.feature_names}
            if None not in keys:  # one that the tracker skips is compared as a whole
                found[".".join(filter(None, [path, module_path, part, table, "weight"]))] = keys
    return found


def _reused(model: nn.Module) -> set[int]:
    """Return the ids of the modules whose rows are given to other ids, and started anew, by what they are in.

    torchrec's tracker is told of no such row, and of managed collisions of no lookup either.
    """
    kinds = tuple(
        kind
        for place, names in _REUSING.items()
        for name in names
        if (kind := getattr(sys.modules.get(place), name, None)) is not None
    )
    return {id(inner) for outer in model.modules() if isinstance(outer, kinds) for inner in outer.modules()}


def _check_trackable(model: Any) -> None:
    """Raise CheckpointError for a model with which torchrec's tracker fails, or with whose tables the training does."""
    if not hasattr(model._dmp_wrapped_module, "module"):
        raise CheckpointError(
            "RowTracker: torchrec's tracker needs a model with dense parameters, of which DistributedModelParallel has "
            "made a DistributedDataParallel (init_data_parallel). Publish without rows=, and compare the file with the "
            "last one: write_delta(last, new, out)"
        )
    kinds = sys.modules["torchrec.distributed.model_tracker.model_delta_tracker"].SUPPORTED_MODULES
    collections = [module for module in model.modules() if isinstance(module, kinds)]
    configs = [found for module in collections for found in module._table_name_to_config.items()]
    known = {feature for config in dict(configs).values() for feature in config.feature_names}
    if odd := {name for name, config in configs if not known.issuperset(config.feature_names)}:
        raise CheckpointError(
            f"RowTracker: several tables have the name {listed(sorted(odd))}, by which torchrec's tracker knows them; "
            "give each table a name of its own"
        )


def _fused_optimizer(module: nn.Module) -> str | None:
    """Return the name of the optimizer that is part of a module of fbgemm; None for other modules."""
    if not type(module).__module__.startswith("fbgemm_gpu."):
        return None
    name: str | None = getattr(getattr(module, "optimizer", None), "name", None)
    return name


def _check_fused(model: nn.Module) -> None:
    for path, module in _looking_up(model):
        optimizer = _fused_optimizer(module)
        if optimizer is not None and optimizer not in _FUSED:
            raise Unsupported(
                f"RowTracker: {path}: fbgemm's {optimizer} may change rows that are not in the batch, so that a "
                f"tracker would miss them. {ALTERNATIVE}"
            )


def _looking_up(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths; torchrec's sharded ones keep those that look up in lists of their own."""
    for path, module in model.named_modules():
        yield path, module
        for lookup in getattr(module, "_lookups", ()):
            for inner in lookup.modules() if isinstance(lookup, nn.Module) else ():
                yield path, inner
