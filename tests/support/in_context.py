"""In-context learner: `fit` stores the training rows in the state, and `predict` reads them."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim
from torch.nn.functional import pad, scaled_dot_product_attention

from weightswap_exporter import MethodSpec

FEATURES, CLASSES, WIDTH, HEADS, LAYERS, CAPACITY = 3, 4, 16, 2, 2, 32


class Layer(nn.Module):
    """Attention to the training rows, whose keys and values are in buffers of `CAPACITY` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.register_buffer("keys", torch.zeros(HEADS, CAPACITY, WIDTH // HEADS))
        self.register_buffer("values", torch.zeros(HEADS, CAPACITY, WIDTH // HEADS))

    def remember(self, rows: torch.Tensor) -> None:
        room = (0, 0, 0, CAPACITY - rows.shape[0])
        self.keys.copy_(pad(heads(self.key(rows)), room))
        self.values.copy_(pad(heads(self.value(rows)), room))

    def forward(self, rows: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        known_rows = torch.arange(CAPACITY) < known
        attended = scaled_dot_product_attention(heads(self.query(rows)), self.keys, self.values, known_rows)
        rows = rows + attended.transpose(0, 1).flatten(1)
        mlp: torch.Tensor = self.mlp(rows)
        return rows + mlp


def heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)


class InContext(nn.Module):
    """Classifier that learns from other rows in one pass, by statistics of each feature and by attention."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encode = nn.Linear(FEATURES, WIDTH)
        self.classes = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("spread", torch.ones(FEATURES))
        self.register_buffer("known", torch.zeros((), dtype=torch.int64))

    def fit(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Read training rows, [n, features], and their classes, int64 [n]; return the scores for them."""
        self.mean.copy_(x.mean(0))
        self.spread.copy_(x.std(0) + 1e-6)
        self.known.copy_(torch.ones_like(y).sum())
        rows = self.encode((x - self.mean) / self.spread) + self.classes(y)
        for layer in self.layers:
            layer.remember(rows)  # type: ignore[operator]
            rows = layer(rows, self.known)
        scores: torch.Tensor = self.head(rows)
        return scores

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores, [n, classes], for rows, [n, features]."""
        rows = self.encode((x - self.mean) / self.spread)
        for layer in self.layers:
            rows = layer(rows, self.known)
        scores: torch.Tensor = self.head(rows)
        return scores


def task(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return training rows, [rows, features], and their classes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, generator=random), torch.randint(CLASSES, (rows,), generator=random)


def methods() -> dict[str, MethodSpec]:
    n, m = Dim("train", min=2, max=CAPACITY), Dim("test", min=1, max=1024)
    x, y = task(0, 5)
    return {
        "fit": MethodSpec("fit", (x, y), dynamic_shapes={"x": {0: n}, "y": {0: n}}),
        "predict": MethodSpec("predict", (x,), dynamic_shapes={"x": {0: m}}),
    }
