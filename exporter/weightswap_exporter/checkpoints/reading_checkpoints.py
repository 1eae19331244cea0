"""Opening of checkpoints: live modules, state dicts, files and folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weightswap_exporter.models.tensors import extra_states, persistent_buffers, whole_tensors
from weightswap_runtime.errors import CheckpointError, Unsupported
from weightswap_runtime.format.weight_set import INDEX_SUFFIX, SUFFIX, StoredTensor, lost_index, open_weights
from weightswap_runtime.messages import listed
from weightswap_runtime.sources.location import check_scheme, is_url, printable
from weightswap_runtime.tensors.digests import digest_of
from weightswap_runtime.tensors.torch_tensors import torch_dtype

from . import pickled
from .dcp import open_dcp
from .dcp_metadata import CHUNKS_SUFFIX, METADATA_NAME
from .nested_state_dicts import ANYWHERE, Choice, Mappings, NestedStateDict, flat_levels, nested_levels
from .stored import Files
from .tensor import CheckpointTensor, pieces, values_of
from .torchao_files import named_as_parts

PICKLED_NAMES = ("pytorch_model.bin", f"pytorch_model{pickled.INDEX_SUFFIX}")
_KINDS = f"{SUFFIX}, {INDEX_SUFFIX}, {', '.join(pickled.SUFFIXES)}, {pickled.INDEX_SUFFIX}"
_FOLDERS = f"{METADATA_NAME} (torch.distributed.checkpoint), *{SUFFIX} or *{INDEX_SUFFIX}, {' or '.join(PICKLED_NAMES)}"

Source = nn.Module | Mapping[str, Any] | str | os.PathLike[str]


class Checkpoint(NamedTuple):
    """Open checkpoint.

    levels: state dicts in it that may have the weights. mappings: as in `Levels`. names: True if its tensors certainly
    have runtime FQNs; else they may have checkpoint keys. check_unchanged: raises CheckpointError or WeightFileError if
    one of its files was written to since it was opened. graph_id: of the graph that it was packed for, if any.
    """

    where: str
    levels: tuple[NestedStateDict, ...]
    mappings: Mappings
    names: bool = False
    check_unchanged: Callable[[], None] = lambda: None
    graph_id: str = ""


@contextmanager
def open_checkpoint(source: Source, choice: Choice = ANYWHERE) -> Iterator[Checkpoint]:
    """Open a module, a state dict or a path; values are read later. Raises CheckpointError and WeightFileError."""
    if isinstance(source, nn.Module):
        yield from_module(source, choice=choice)
    elif isinstance(source, Mapping):
        yield Checkpoint("the state dict", *nested_levels(source, values_of, "the state dict", choice))
    elif isinstance(source, str | os.PathLike):
        check_scheme(source)
        if is_url(source):
            raise Unsupported(f"{printable(source)}: checkpoints are packed from local files; copy it here")
        path = Path(source)
        with _opener(path)(path, choice) as checkpoint:
            yield checkpoint
    else:
        raise CheckpointError(f"expected a module, a state dict or a path, got a {type(source).__qualname__}")


def from_module(model: nn.Module, where: str | None = None, choice: Choice = ANYWHERE) -> Checkpoint:
    """Return a live module's parameters and persistent buffers, under their FQNs, without a copy.

    Its extra states are only named: its graph has what they were at the export.
    """
    saved = persistent_buffers(model) | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = {name: value for name, value in whole_tensors(model).items() if name in saved}
    where = where or type(model).__qualname__
    tree = {**tensors, **extra_states(model)}
    return Checkpoint(where, *nested_levels(tree, values_of, where, choice, deep=False), names=True)


Opener = Callable[[Path, Choice], AbstractContextManager[Checkpoint]]


def _opener(path: Path) -> Opener:
    if opener := find_opener(path):
        return opener
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file. Give a checkpoint: {_KINDS}, or a folder with one.")
    raise CheckpointError(f"{path}: unknown kind of checkpoint; expected {_KINDS}, or a folder")


def find_opener(path: Path) -> Opener | None:
    """Return an opener for a path by its name, or for a folder by its files; None if it is no checkpoint.

    Raises CheckpointError for a folder without a checkpoint, and for a file that is only part of one.
    """
    if path.is_dir():
        return _folder_opener(path)
    if not path.is_file():
        return None
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return _safetensors
    if path.name.endswith(pickled.INDEX_SUFFIX):
        return partial(_pickled, pickled.open_pickled_shards)
    if path.suffix in pickled.SUFFIXES:
        return partial(_pickled, pickled.open_pickled)
    if path.name == METADATA_NAME:
        return lambda metadata, choice: _dcp(metadata.parent, choice)
    if path.suffix == CHUNKS_SUFFIX:
        raise CheckpointError(f"{path}: one file of a distributed checkpoint; give its folder")
    return None


def _folder_opener(path: Path) -> Opener:
    names = sorted(entry.name for entry in path.iterdir())
    if METADATA_NAME in names:
        return _dcp
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        return _safetensors
    for name in PICKLED_NAMES:
        if name in names:
            return lambda folder, choice: _opener(folder / name)(folder / name, choice)
    if lost := lost_index([name for name in names if name.endswith(".bin")]):
        raise CheckpointError(f"{path}: {lost}")
    content = f"it holds {listed(names)}" if names else "it is empty"
    raise CheckpointError(f"{path}: no checkpoint in this folder ({content}); expected {_FOLDERS}")


@contextmanager
def _safetensors(path: Path, choice: Choice) -> Iterator[Checkpoint]:
    with open_weights(path) as weights:
        digests = weights.stamp.digests if weights.stamp else {}
        tensors = {name: _stored(name, stored, digests.get(name)) for name, stored in weights.tensors.items()}
        metadata = {name: text for file in weights.files for name, text in file.header.metadata.items()}
        tensors = named_as_parts(tensors, metadata, weights.where)
        levels = flat_levels(tensors, weights.where, choice)
        graph_id = weights.stamp.graph_id if weights.stamp else ""
        yield Checkpoint(weights.where, *levels, bool(graph_id), weights.check_unchanged, graph_id)


def _stored(name: str, tensor: StoredTensor, digest: str | None) -> CheckpointTensor:
    def load() -> torch.Tensor:
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
        tensor.file.source.read_into([memory.numpy().data], tensor.offset)
        return memory.view(torch_dtype(tensor.dtype)).view(tensor.shape)

    def problems() -> list[str]:
        if digest is None or digest_of(pieces(load())) == digest:
            return []
        return [f"{tensor.file.where}: {name} is damaged: its bytes do not match its digest. Copy the file again."]

    return CheckpointTensor(tensor.dtype, tensor.shape, (id(tensor.file.source), tensor.offset), load, problems)


@contextmanager
def _pickled(open_files: Callable[[Path, Files], Any], path: Path, choice: Choice) -> Iterator[Checkpoint]:
    files = Files()
    with open_files(path, files) as opened:
        levels = nested_levels(opened.tree, opened.values_of, str(path), choice)
        yield Checkpoint(str(path), *levels, False, files.check_unchanged)


@contextmanager
def _dcp(folder: Path, choice: Choice) -> Iterator[Checkpoint]:
    files = Files()
    tensors, holders, extra = open_dcp(folder, files)
    levels = flat_levels(tensors, str(folder), choice, holders, extra)
    yield Checkpoint(str(folder), *levels, False, files.check_unchanged)
