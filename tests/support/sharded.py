"""Models of torchrec, and how it trains them: tables in one process, whose optimizers are fused into the backward."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torchrec.distributed import mc_embedding, mc_embeddingbag
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules import mc_embedding_modules
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, WIDTH, BATCH = 3_000, 8, 8
FEATURES = {"first": ["a", "b"], "second": ["c"]}
KEYS = ["a", "b", "c"]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, ROWS, (len(KEYS) * BATCH,)), torch.ones(len(KEYS) * BATCH, dtype=torch.int64)


class Jagged(nn.Module):
    def __init__(self, *, is_pooled: bool) -> None:
        super().__init__()
        config: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
        configs = [
            config(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=features)
            for name, features in FEATURES.items()
        ]
        collection: Any = EmbeddingBagCollection if is_pooled else EmbeddingCollection
        self.is_pooled = is_pooled
        self.tables = collection(tables=configs, device=torch.device("cpu"))
        self.top = nn.Linear(len(KEYS) * WIDTH, 1)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = self.tables(KeyedJaggedTensor(KEYS, values, lengths=lengths))
        rows = found.values() if self.is_pooled else torch.cat([found[key].values() for key in KEYS], 1)
        return self.top(rows)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return batch()


class Towers(nn.Module):
    """Collections of tables for the same features, each in a tower of its name."""

    def __init__(self, *collections: nn.Module, names: Sequence[str] = ("one", "two")) -> None:
        super().__init__()
        for name, collection in zip(names, collections, strict=False):
            self.add_module(name, nn.ModuleDict({"tables": collection, "top": nn.Linear(WIDTH, 1)}))

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        ids = KeyedJaggedTensor(KEYS, values, lengths=lengths)
        towers: Any = self.children()
        found = [each["top"](each["tables"](ids).values().reshape(-1, WIDTH)).pow(2).sum() for each in towers]
        return torch.stack(found).sum()


def bags(**features: Sequence[str]) -> nn.Module:
    """features: those of each table, by its name."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=list(of_table))
        for name, of_table in features.items()
    ]
    collection: nn.Module = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    return collection


def shard(model: nn.Module, optimizer: Any = torch.optim.SGD, sharders: Any = None) -> DistributedModelParallel:
    """Shard tables in this process, with an optimizer that is fused into the backward; None: that of the sharders."""
    tables = [parameter for name, parameter in model.named_parameters() if ".embedding" in name]
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, tables, {"lr": 0.1})
    return DistributedModelParallel(model, device=torch.device("cpu"), sharders=sharders)


class Sharded:
    def __init__(self, optimizer: str, *, is_pooled: bool = True) -> None:
        self._plain = Jagged(is_pooled=is_pooled)
        module, _, name = optimizer.rpartition(".")
        self.model = shard(self._plain, getattr(import_module(module), name))
        self.optimizers = [torch.optim.AdamW([p for n, p in self.model.named_parameters() if n.startswith("top")])]
        part = "embedding_bags" if is_pooled else "embeddings"
        self.tables = tuple(f"tables.{part}.{name}.weight" for name in FEATURES)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizers[0].zero_grad()
            (self.model(*self._plain.batch()) - 1).pow(2).mean().backward()
            self.optimizers[0].step()


def evicting(*, is_pooled: bool) -> DistributedModelParallel:
    """Shard a table `e`, whose rows are given to the ids that come most, beside a plain one."""
    kind = "ManagedCollisionEmbedding" + ("BagCollection" if is_pooled else "Collection")
    sharder = getattr(mc_embeddingbag if is_pooled else mc_embedding, f"{kind}Sharder")()
    config: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    collection: Any = EmbeddingBagCollection if is_pooled else EmbeddingCollection
    configs = [config(name="e", embedding_dim=WIDTH, num_embeddings=9, feature_names=KEYS)]
    policy, device = DistanceLFU_EvictionPolicy(), torch.device("cpu")
    managed = {"e": MCHManagedCollisionModule(9, device, policy, eviction_interval=1, input_hash_size=ROWS)}
    tables = collection(tables=configs, device=device)
    model = nn.ModuleDict({"plain": nn.Embedding(9, WIDTH)})
    model["tables"] = getattr(mc_embedding_modules, kind)(tables, ManagedCollisionCollection(managed, configs))
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    rows = {"e": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(model["tables"], rows, sharder, 1, 1, "cpu")
    return DistributedModelParallel(model, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder])
