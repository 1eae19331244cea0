"""Answers of the server, stored bit for bit and passed to the checker in shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Answer(NamedTuple):
    """Answered request: the images, the output, and the weights that it claims to come from.

    `started` is in seconds of the monotonic clock, `seconds` is the latency. `indices`: int64 [n], rows of the held-out
    images. `logits`: float32 [n, 10].
    """

    started: float
    seconds: float
    generation: int
    weights_id: str
    indices: NDArray[np.int64]
    logits: NDArray[np.float32]


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Write at least one answer to an .npz file that appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(
            file,
            started=np.array([answer.started for answer in answers]),
            seconds=np.array([answer.seconds for answer in answers]),
            generation=np.array([answer.generation for answer in answers]),
            weights_id=np.array([answer.weights_id for answer in answers]),
            sizes=np.array([len(answer.indices) for answer in answers]),
            indices=np.concatenate([answer.indices for answer in answers]),
            logits=np.concatenate([answer.logits for answer in answers]),
        )
    temporary.replace(path)


def read_shard(path: Path) -> list[Answer]:
    """Return the answers of one shard, in the order in which they were written."""
    with np.load(path) as shard:
        columns: dict[str, NDArray[Any]] = dict(shard)
    ends = np.cumsum(columns["sizes"])[:-1]
    rows = zip(
        columns["started"].tolist(),
        columns["seconds"].tolist(),
        columns["generation"].tolist(),
        columns["weights_id"].tolist(),
        np.split(columns["indices"], ends),
        np.split(columns["logits"], ends),
        strict=True,
    )
    return [Answer(*row) for row in rows]
