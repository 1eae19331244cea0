"""Checkpoints in the forms in which trainers save them, and what packing makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint

from weightswap_exporter import pack
from weightswap_runtime import Artifact


def tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


def saved_before_zip(path: Path, state: object) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def saved_safetensors(path: Path, state: Mapping[str, Any]) -> Path:
    safetensors.torch.save_file(tensors(state), path)
    return path


def saved_distributed(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that there is only one process
        torch.distributed.checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def flipped(path: Path, tensor: torch.Tensor) -> Path:
    raw = bytearray(path.read_bytes())
    raw[raw.index(tensor.detach().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(raw)
    return path


def saved_folder(folder: Path, state: Mapping[str, Any], suffix: str) -> Path:
    """Save a model in one file, like Hugging Face."""
    folder.mkdir()
    if suffix == ".bin":
        saved(folder / "pytorch_model.bin", tensors(state))
    else:
        saved_safetensors(folder / "model.safetensors", state)
    (folder / "config.json").write_text("{}")
    return folder


def saved_shards(folder: Path, state: Mapping[str, Any], suffix: str) -> Path:
    """Save a model in two shards, like Hugging Face, and return the folder."""
    folder.mkdir()
    stem = "pytorch_model" if suffix == ".bin" else "model"
    names = sorted(tensors(state))
    weight_map = {name: f"{stem}-0000{1 + index % 2}-of-00002{suffix}" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        part = {name: state[name] for name in names if weight_map[name] == shard}
        saved(folder / shard, part) if suffix == ".bin" else saved_safetensors(folder / shard, part)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder


def weights_id(source: Any, artifact: Artifact, folder: Path, **options: Any) -> str:
    """Pack a checkpoint, and return the id of its weights; options: of `pack()`."""
    return pack(source, artifact, out=folder / "packed.safetensors", **options).weights_id


def refuses(error: type[Exception], says: str, source: Any, artifact: Artifact, folder: Path, **options: Any) -> str:
    """Expect that a checkpoint is not packed, and that nothing is written; return the whole message."""
    out = folder / "refused"
    out.mkdir(exist_ok=True)
    with pytest.raises(error) as refused:
        pack(source, artifact, out=out / "v.safetensors", **options)
    assert says in str(refused.value)
    assert not list(out.iterdir())
    return str(refused.value)


def by_error(table: Mapping[type[Exception], Mapping[str, tuple[Any, ...]]]) -> list[Any]:
    """Return the rows of a table as parameters, each after its error."""
    return [pytest.param(error, *row, id=name) for error, rows in table.items() for name, row in rows.items()]
