"""Saved contexts: the tensors of a model's state, with the ids of the graph and the weights that they belong to.

State means something only together with the graph and the weights that computed it, so a context of others is refused
unless the caller says otherwise. The file is a safetensors file in canonical layout, with a stamp (docs/format.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import (
    ContextError,
    OutOfMemory,
    Unsupported,
    WeightFileError,
    listed,
)
from weightswap_runtime.sources.byte_source import ByteSource
from weightswap_runtime.sources.location import as_location, check_writable
from weightswap_runtime.sources.opening import find_source
from weightswap_runtime.tensors import TensorBytes, describe, digest_of, same_type

from .canonical import StampedFile, canonical_order
from .manifest import NamedTensor
from .safetensors import LEAST_HEADER, METADATA_KEY, FileTensor, read_header

_FORMAT_VERSION = 1


class ContextStamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a context file."""

    context_version: int
    graph_id: str
    weights_id: str | None  # of the weights that computed the state; None if none have yet
    digests: dict[str, str]  # by the names of the tensors
    variants: dict[str, str] | msgspec.UnsetType = (
        msgspec.UNSET
    )  # group -> id of the chosen variant; absent if none was


Read = tuple[ContextStamp, Mapping[str, TensorBytes]]  # and the tensors, by the names of the manifest's rows


def write_context(
    path: str | os.PathLike[str],
    rows: Sequence[NamedTensor],
    content: Callable[[str], TensorBytes],
    graph_id: str,
    weights_id: str | None,
    variants: Mapping[str, str],
) -> None:
    """Write a context file, which appears under `path` whole or not at all. One tensor is copied at a time.

    weights_id, variants: what computed the state; None if there are no weights yet; ids of variants by group. Raises
    Unsupported for a URL, and for a tensor that a call has resized.
    """
    check_writable(path)
    order = canonical_order(row.row for row in rows)
    by_name = {row.name: row for row in rows}
    blank = ContextStamp(
        context_version=_FORMAT_VERSION,
        graph_id=graph_id,
        weights_id=weights_id,
        digests={},
        variants=dict(variants) or msgspec.UNSET,
    )
    with StampedFile(Path(path), order, METADATA_KEY, {}) as file:
        data = ((row.name, _pieces(by_name[row.name], content(row.name))) for row in order)
        file.write_stamp(replace(blank, digests=file.write_tensors(data, blank)))
        file.rename(Path(path))


def _pieces(row: NamedTensor, content: TensorBytes) -> Iterable[memoryview]:
    if content.shape != row.shape:
        raise Unsupported(
            f"the state {row.name!r} was resized by a call from {describe(row)} to {describe(content)}. Such a "
            "context cannot be saved"
        )
    return [content.data]


def read_context(path: str | os.PathLike[str], rows: Sequence[NamedTensor], graph_id: str | None = None) -> Read:
    """Read a context that `write_context` wrote, from a local path or a URL, into memory.

    graph_id: the graph to which it must belong; None accepts any. Raises ContextError for another graph, before the
    tensors are checked, and for a file that is missing, is no context, was altered, or does not have the tensors of
    `rows`; and OutOfMemory.
    """
    where = str(as_location(path))
    try:
        source = find_source(path)
        if source is None:
            raise ContextError(f"{where}: no such file", reason="file")
        with closing(source):
            return _read(source, where, rows, graph_id)
    except WeightFileError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise ContextError(f"{where}: no such file", reason="file") from error
        raise ContextError(str(error), reason="file") from error


def _read(source: ByteSource, where: str, rows: Sequence[NamedTensor], graph_id: str | None) -> Read:
    header = read_header(source, LEAST_HEADER + sum(1000 + 6 * len(row.name) for row in rows))
    stamp = _stamp(header.metadata, where)
    if graph_id is not None and stamp.graph_id != graph_id:
        raise ContextError(
            f"{where}: belongs to the graph {stamp.graph_id[:12]}, but the model has {graph_id[:12]}. Load "
            "it with the artifact that it was saved with, or start a new context. allow_other_graph=True is for a "
            "state that means the same in both",
            reason="mismatch",
        )
    _refuse(where, _row_problems(header.tensors, rows))
    size = source.size - header.data_start  # no more than the state's: its tensors were checked first
    try:
        content = bytearray(size)
    except MemoryError as error:
        raise OutOfMemory(f"{where}: no memory for {size} bytes") from error
    source.read_into([memoryview(content)], header.data_start)
    source.check_unchanged()
    state = header.contents(memoryview(content))
    _refuse(where, _digest_problems(stamp, state))
    return stamp, state


def _stamp(metadata: Mapping[str, str], where: str) -> ContextStamp:
    try:
        stamp = from_json(metadata.get(METADATA_KEY, ""), ContextStamp)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ContextError(f"{where}: is not a context that Context.save() wrote ({error})", reason="file") from error
    if stamp.context_version != _FORMAT_VERSION:
        raise ContextError(
            f"{where}: has the format version {stamp.context_version}, expected {_FORMAT_VERSION}", reason="file"
        )
    return stamp


def _refuse(where: str, problems: Iterable[str]) -> None:
    if texts := list(problems):
        raise ContextError(f"{where}: is not the state of this model: {listed(texts, between='; ')}", reason="file")


def _row_problems(tensors: Mapping[str, FileTensor], rows: Sequence[NamedTensor]) -> Iterator[str]:
    expected = {row.name: row for row in rows}
    yield from (f"it lacks {name!r}" for name in expected if name not in tensors)
    yield from (f"it has {name!r}, which the model does not have" for name in tensors if name not in expected)
    for name in expected.keys() & tensors.keys():
        tensor, row = tensors[name], expected[name]
        if not same_type(tensor, row):
            yield f"{name!r}: expected {describe(row)}, got {describe(tensor)}"


def _digest_problems(stamp: ContextStamp, state: Mapping[str, TensorBytes]) -> Iterator[str]:
    for name, tensor in state.items():
        if digest_of([tensor.data]) != stamp.digests.get(name):
            yield f"{name!r}: its bytes differ from those that were saved"
