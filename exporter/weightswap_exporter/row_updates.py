"""Row updates: a delta file from a live model, the ids of the rows that changed, and the digests of the file before.

All that has to be of one moment is done before `RowUpdates.prepare` returns: the changed rows and what else has changed
are copied, and the chunks around them are hashed where they are. Nothing reads a table whole but a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3

from weightswap_exporter.checkpoints.reading import Checkpoint
from weightswap_exporter.modules.tensors import tie_key
from weightswap_runtime import Artifact
from weightswap_runtime.byte_ranges import CHUNK, ByteRanges, gather
from weightswap_runtime.errors import CheckpointError, listed
from weightswap_runtime.format.canonical import StampedFile
from weightswap_runtime.format.delta import Changed, DeltaStamp, new_delta_file
from weightswap_runtime.format.identity import Counts, count_nonfinite, newly_nonfinite
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.safetensors import weights_id
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.native import Offsets
from weightswap_runtime.staging.given import ChangedRows
from weightswap_runtime.tensors import BLOCK, Blocks, TensorHasher, TensorType, tensor_digest
from weightswap_runtime.threads import WorkerThreads
from weightswap_runtime.torch_tensors import tensor_bytes

from .packing import MatchedWeights, Packed

_MOST_SHOWN = 3  # ranges of rows in a message
Places = tuple[tuple[Path, str], ...]  # a full file and the deltas after it, each with its weights id


class Last(NamedTuple):
    """The weights that were published last."""

    files: Places
    graph_id: str
    blocks: Mapping[str, Blocks]  # the digests of each weight's blocks

    @property
    def weights_id(self) -> str:
        return self.files[-1][1]


class RowUpdate(NamedTuple):
    """Delta from the weights that were published last, ready to be written, without a reference to the model."""

    artifact: Artifact
    last: Last
    contents: Mapping[str, tuple[Changed, memoryview]]  # what is new, and its bytes end to end
    blocks: Mapping[str, Blocks]  # of all weights
    # as in `Packed`
    ignored: tuple[str, ...]
    level: str
    cast: dict[str, list[str]]

    @property
    def weights_id(self) -> str:
        rows = self.artifact.manifest.weights
        return weights_id((row.row, tensor_digest(self.blocks[row.name])) for row in rows)

    @contextmanager
    def pack(self, out: Path, labels: Mapping[str, str]) -> Iterator[tuple[StampedFile, Packed]]:
        """Write the delta into a temporary file, which the block has only to rename. Raises CheckpointError."""
        rows = {weight.name: weight for weight in self.artifact.manifest.weights}
        stamp = DeltaStamp(
            graph_id=self.artifact.manifest.packed_for,
            base=self.last.weights_id,
            weights_id=self.weights_id,
            changes={name: TensorType.of(rows[name]) for name in self.contents},
            digests={},
            labels=dict(labels),
        )
        counts: dict[str, Counts] = {}
        for name, (_, data) in self.contents.items():
            if found := count_nonfinite(rows[name].dtype, data):
                counts[name] = found
        changes = {name: change for name, (change, _) in self.contents.items()}
        try:
            with new_delta_file(out, changes, lambda name: [self.contents[name][1]], stamp) as file:
                yield (
                    file,
                    Packed(
                        path=out,
                        graph_id=stamp.graph_id,
                        weights_id=stamp.weights_id,
                        nbytes=sum(len(data) for _, data in self.contents.values()),
                        labels=stamp.labels,
                        ignored=self.ignored,
                        level=self.level,
                        cast=self.cast,
                        nonfinite=newly_nonfinite(rows.values(), counts, served=None),
                        base=stamp.base,
                    ),
                )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{out}: cannot be written ({error})") from error


class Expected(NamedTuple):
    """What a full file should have of the tables, if the ids that came before it were all."""

    tables: Mapping[str, str]  # name in the checkpoint of each table, by FQN
    blocks: Mapping[str, Blocks]  # by FQN; empty if nothing is known


class RowUpdates:
    """The digests of what a training has published last, and the hash trees of its tables: 6 % of their memory."""

    def __init__(self) -> None:
        self.last: Last | None = None
        self._trees = HashTrees(None)
        self._workers = WorkerThreads()

    def prepare(self, weights: MatchedWeights, tables: Sequence[ChangedRows], *, check: bool) -> RowUpdate:
        """Copy and hash what has changed since the last publication. The model must not change meanwhile.

        weights: those of the live model. check: compare the tables with what is known of them. Raises WeightsMismatch,
        and CheckpointError for tables of which no rows can be published, or whose other rows have changed, too.
        """
        assert self.last is not None
        weights.check()
        artifact = weights.artifact
        by_weight = _by_weight(weights, tables)
        contents: dict[str, tuple[Changed, memoryview]] = {}
        blocks = dict(self.last.blocks)
        transforms = weights.transforms()
        for row in artifact.manifest.weights:
            if table := by_weight.get(row.name):
                if len(table.ids):
                    memory = _Memory(table.tensor)
                    change = Changed.of_rows(table.ids, memory.width, memory.nbytes)
                    contents[row.name] = change, memory.rows(table.ids)
                    blocks[row.name] = self._hashed(row, memory, table.ids)
            else:
                hasher = TensorHasher()
                for piece in weights.content(row.row, transforms):
                    hasher.update(piece)
                if (whole := hasher.blocks) != blocks[row.name]:
                    data = memoryview(b"".join(weights.content(row.row, transforms)))
                    contents[row.name] = Changed.whole(len(data)), data
                    blocks[row.name] = whole
        if check:
            self._check(by_weight, blocks)
        return RowUpdate(artifact, self.last, contents, blocks, weights.left_out, weights.level.path, weights.cast)

    def expect(self, weights: MatchedWeights, tables: Sequence[ChangedRows], *, is_known: bool) -> Expected:
        """Return what a full file should have of the tables. is_known: `tables` has all rows that changed.

        Raises what `prepare` raises.
        """
        by_weight = _by_weight(weights, tables)
        names = {name: weights.match.found[name][0] for name in by_weight}
        if not is_known or self.last is None or self.last.graph_id != weights.artifact.manifest.packed_for:
            return Expected(names, {})
        rows = {row.name: row for row in weights.artifact.manifest.weights}
        blocks = {name: self._hashed(rows[name], _Memory(table.tensor), table.ids) for name, table in by_weight.items()}
        return Expected(names, blocks)

    def learn(self, expected: Expected, copy: Checkpoint, blocks: Mapping[str, Blocks]) -> list[str]:
        """Build the trees of the tables in a full file, from its copy of the model.

        Return the tables that are not as expected: the tracker has missed rows.
        """
        tensors = copy.levels[0].tensors
        for name, key in expected.tables.items():
            memory = _Memory(tensors[key].load())
            if tree := self._trees.find(name, memory.nbytes):
                chunks = np.flatnonzero(~tree.is_built) * (BLOCK // CHUNK)
                tree.update(chunks, None, blocks[name], memory.chunks, self._workers, lambda: None)
        return [name for name, found in expected.blocks.items() if tuple(found) != tuple(blocks[name])]

    def _hashed(self, row: NamedTensor, memory: _Memory, ids: Offsets) -> Blocks:
        """Return the digests of a table's blocks after some of its rows have changed."""
        assert self.last is not None
        digests = list(self.last.blocks[row.name])
        ranges = ByteRanges.of_rows(ids, memory.width, memoryview(b""))
        found: dict[int, bytes] = {}
        if len(ids) and (tree := self._trees.find(row.name, memory.nbytes)):
            chunks = self._trees.chosen(tree, ranges.chunks())
            found = tree.update(chunks, None, digests, memory.chunks, self._workers, lambda: None)
        for index, digest in found.items():
            digests[index] = digest
        blocks = ranges.blocks()
        return self._whole(memory, digests, blocks[~np.isin(blocks, list(found))])

    def _whole(self, memory: _Memory, digests: list[bytes], numbers: Offsets) -> Blocks:
        """Hash whole blocks."""

        def work(number: int) -> None:
            digests[number] = blake3(memory.block(number)).digest()

        self._workers.run_all(work, numbers.tolist())
        return tuple(digests)

    def _check(self, tables: Mapping[str, ChangedRows], blocks: Mapping[str, Blocks]) -> None:
        problems = []
        for name, table in tables.items():
            memory, known = _Memory(table.tensor), blocks[name]
            found = self._whole(memory, list(known), np.arange(len(known)))
            odd = np.array([index for index, (old, new) in enumerate(zip(known, found, strict=True)) if old != new])
            if len(odd):
                problems.append(f"{table.name}, {_rows_of(odd, memory)}")
        if problems:
            self.last = None
            raise CheckpointError(
                f"the tracker has missed changes of {listed(problems, between='; ')}. Something else than a step of an "
                "optimizer has changed them: pass the rows to RowTracker.mark() afterwards. The next publication is a "
                "full file"
            )


class _Memory:
    """Bytes of a live table, on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        self._bytes = flat.view(torch.uint8)
        self._host = tensor_bytes(self._bytes) if tensor.is_cpu else None
        self.nbytes = len(self._bytes)
        self.width = self.nbytes // max(1, len(tensor))  # of a row

    def rows(self, ids: Offsets) -> memoryview:
        """Return a copy of rows, end to end."""
        if self._host is None:
            return self._copy(self._bytes.view(-1, self.width), ids)
        copy = np.empty(len(ids) * self.width, np.uint8).data
        gather(self._host, ByteRanges.of_rows(ids, self.width, copy))
        return copy

    def chunks(self, numbers: Offsets) -> tuple[memoryview, bool]:
        """Return all bytes, and False; or a copy of chunks, end to end, and True: a `Reader` of hash trees."""
        if self._host is not None:
            return self._host, False
        return self._copy(self._bytes[: self.nbytes // CHUNK * CHUNK].view(-1, CHUNK), numbers), True

    def block(self, number: int) -> memoryview:
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.nbytes)
        return self._host[begin:end] if self._host is not None else tensor_bytes(self._bytes[begin:end])

    def _copy(self, table: torch.Tensor, numbers: Offsets) -> memoryview:
        return tensor_bytes(table.index_select(0, torch.from_numpy(numbers).to(table.device)))


def _by_weight(weights: MatchedWeights, tables: Sequence[ChangedRows]) -> dict[str, ChangedRows]:
    """Return the tables by the FQN of their weights. Raises CheckpointError for those that are not as in the file."""
    by_key: dict[object, ChangedRows] = {tie_key(table.tensor): table for table in tables}
    tensors = weights.level.tensors
    keys = {name: tensors[name].tie_key for name in tensors}
    problems = [
        f"{table.name} is not among the tensors that this model saves: make a tracker of it"
        for key, table in by_key.items()
        if key not in keys.values()
    ]
    computed = {keys[name]: weight for weight, names in weights.match.computed.items() for name in names.values()}
    problems += [
        f"{by_key[key].name}: {weight} is computed from it" for key, weight in computed.items() if key in by_key
    ]
    found: dict[str, ChangedRows] = {}
    for row in weights.artifact.manifest.weights:
        names = weights.match.found.get(row.name, ())
        held = {keys[name] for name in names}
        if table := next((by_key[key] for key in held if key in by_key), None):
            found[row.name] = table
            if problem := _problem(table.tensor, tensors[names[0]].dtype, row, len(held)):
                problems.append(f"{table.name}: {problem}")
    if problems:
        raise CheckpointError(
            f"rows=: {listed(problems, 10, '; ')}. Leave what cannot be published by rows out of RowTracker(tables=): "
            "it is then compared, and written whole if it has changed"
        )
    return found


def _problem(tensor: torch.Tensor, dtype: str, row: NamedTensor, held: int) -> str:
    """Return why rows of a table are not rows of the weight; empty if they are."""
    if held > 1:
        return "the graph's weight is held by several tensors of the model, of which rows change apart"
    if dtype != row.dtype:
        return f"is {dtype}, and would be cast to {row.dtype}"
    if not tensor.is_contiguous() or not tensor.dim() or not tensor.numel():
        return "is not a dense row-major table"
    return ""


def _rows_of(odd: Offsets, memory: _Memory) -> str:
    """Return a text about the rows in which blocks differ."""
    firsts = np.flatnonzero(np.diff(odd, prepend=-2) != 1)
    edges = [*firsts.tolist(), len(odd)]
    spans = [
        f"among rows {odd[first] * BLOCK // memory.width} to "
        f"{(min((odd[last - 1] + 1) * BLOCK, memory.nbytes) - 1) // memory.width}"
        for first, last in pairwise(edges)
    ]
    return listed(spans, _MOST_SHOWN)
