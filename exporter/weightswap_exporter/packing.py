"""`pack()`: from a checkpoint to a weight file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from weightswap_runtime import Artifact
from weightswap_runtime.adapter import KEYS_THEN_NAMES, NAMES, Match, resolve
from weightswap_runtime.errors import CheckpointError, WeightsMismatch
from weightswap_runtime.transforms import Transforms
from weightswap_runtime.weightfile import canonical_order, write_weight_file

from .checkpoints import Checkpoint, Source, open_checkpoint
from .values import tensor_bytes

PIECE = 16 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """A weight file that was written. `ignored` are keys of the checkpoint that are no weights (state, extra state)."""

    path: Path
    graph_id: str
    weights_id: str
    nbytes: int
    labels: dict[str, str]
    ignored: tuple[str, ...]


def pack(
    source: Source,
    artifact: Artifact | str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write the weights of a checkpoint as a weight file for an artifact.

    source: a module, a state dict, or the path of a .safetensors, .pt, .pth or .bin file. Keys may be those of
    `model.state_dict()` or runtime FQNs; pickled files are opened with `weights_only=True`.
    labels: short texts that travel with the file. progress: called with bytes done and bytes in all.

    The file appears whole or not at all. Raises CheckpointError, and WeightsMismatch with every problem found.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    manifest = opened.manifest
    with open_checkpoint(source) as checkpoint:
        match = resolve(
            checkpoint.tensors,
            manifest,
            checkpoint.where,
            readings=NAMES if checkpoint.names else KEYS_THEN_NAMES,
        )
        _check_ties(checkpoint, match)
        try:
            stamp = write_weight_file(
                out,
                [weight.row for weight in manifest.weights],
                _pieces(checkpoint, match, opened, progress),
                graph_id=manifest.graph_id,
                labels=_labels(labels or {}),
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{out}: cannot be written ({error})") from error
    return Packed(
        path=Path(out),
        graph_id=manifest.graph_id,
        weights_id=stamp.weights_id,
        nbytes=manifest.total_bytes,
        labels=stamp.labels,
        ignored=match.ignored,
    )


def _labels(labels: Mapping[str, object]) -> dict[str, str]:
    texts = {str(name): str(text) for name, text in labels.items()}
    for text in (*texts, *texts.values()):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"the label {text!a} is not Unicode text") from error
    return texts


def _check_ties(checkpoint: Checkpoint, match: Match) -> None:
    problems = [
        f"{' and '.join(keys)} are one tensor in the graph, the checkpoint has different values for them"
        for keys in match.found.values()
        if len(keys) > 1 and len({_digest(checkpoint.tensors[key].load()) for key in keys}) > 1
    ]
    if problems:
        raise WeightsMismatch(
            checkpoint.where, problems, "Save the checkpoint from a model whose tied tensors are tied."
        )


def _digest(tensor: torch.Tensor) -> str:
    return blake3(tensor_bytes(tensor)).hexdigest()


def _pieces(
    checkpoint: Checkpoint, match: Match, artifact: Artifact, progress: Progress | None
) -> Iterator[tuple[str, Iterator[memoryview]]]:
    done, total = 0, artifact.manifest.total_bytes

    def cut(raw: memoryview) -> Iterator[memoryview]:
        nonlocal done
        for start in range(0, len(raw), PIECE):
            part = raw[start : start + PIECE]
            yield part
            done += len(part)
            if progress:
                progress(done, total)

    values = _Weights(checkpoint, match, artifact)
    for row in canonical_order(weight.row for weight in artifact.manifest.weights):
        yield row.name, cut(tensor_bytes(values.load(row.name)))


class _Weights:
    """The weights that a checkpoint has, copied or computed, one at a time."""

    def __init__(self, checkpoint: Checkpoint, match: Match, artifact: Artifact) -> None:
        self._checkpoint = checkpoint
        self._match = match
        self._transforms = Transforms(artifact) if match.computed else None

    def load(self, weight: str) -> torch.Tensor:
        names = self._match.computed.get(weight)
        if names is None:
            return self._checkpoint.tensors[self._match.found[weight][0]].load()
        assert self._transforms is not None
        ((_, value),) = self._transforms.compute([weight], lambda key: self._checkpoint.tensors[names[key]].load())
        return value
