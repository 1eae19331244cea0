"""A small recommender: two tables, of which one has a pool, and layers on top."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

USERS, ITEMS, WIDTH = 5_000, 40_000, 16  # 320 KB, and 2.56 MB: two blocks and a part


class Recommender(nn.Module):
    def __init__(self, *, sparse: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, padding_idx=0, sparse=sparse, dtype=dtype)
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", sparse=sparse, dtype=dtype)
        self.top = nn.Linear(WIDTH, 2, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [batch, any number], each below USERS."""
        return self.top(self.users(ids).sum(1) * self.items(ids))

    def tables(self) -> Iterator[nn.Parameter]:
        yield self.users.weight
        yield self.items.weight


def ids_of(model: Recommender, batch: int = 8) -> torch.Tensor:
    return torch.randint(0, USERS, (batch, 4))


def train(model: Recommender, optimizers: Iterable[torch.optim.Optimizer], steps: int = 3) -> None:
    for _ in range(steps):
        loss = (model(ids_of(model)) - 1).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def sparse_optimizers(model: Recommender) -> Sequence[torch.optim.Optimizer]:
    return torch.optim.SparseAdam(list(model.tables())), torch.optim.AdamW(model.top.parameters())
