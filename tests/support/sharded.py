"""Models of torchrec, and how it trains them: tables in one process, whose optimizers are fused into the backward."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, WIDTH, BATCH = 3_000, 8, 8
FEATURES = {"first": ["a", "b"], "second": ["c"]}
KEYS = ["a", "b", "c"]


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
        return torch.randint(0, ROWS, (len(KEYS) * BATCH,)), torch.ones(len(KEYS) * BATCH, dtype=torch.int64)


class Sharded:
    def __init__(self, optimizer: str, *, is_pooled: bool = True) -> None:
        self._plain = Jagged(is_pooled=is_pooled)
        module, _, name = optimizer.rpartition(".")
        kind = getattr(import_module(module), name)
        apply_optimizer_in_backward(kind, self._plain.tables.parameters(), {"lr": 0.1})
        self.model = DistributedModelParallel(self._plain, device=torch.device("cpu"))
        self.optimizers = [torch.optim.AdamW([p for n, p in self.model.named_parameters() if n.startswith("top")])]
        part = "embedding_bags" if is_pooled else "embeddings"
        self.tables = tuple(f"tables.{part}.{name}.weight" for name in FEATURES)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizers[0].zero_grad()
            (self.model(*self._plain.batch()) - 1).pow(2).mean().backward()
            self.optimizers[0].step()
