"""A rank reads its share of each weight, from files, checkpoints and memory, and knows the digests of the whole."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.support import warm
from tests.support.refusals import because
from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.format.canonical import canonical_order, new_weight_file
from weightswap_runtime.format.cuts import Rank
from weightswap_runtime.format.manifest import Cut, NamedTensor, Split
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging.reading import Findings, read_tensors
from weightswap_runtime.staging.shares import bytes_to_read, read_shares
from weightswap_runtime.tensors import BLOCK, block_digests
from weightswap_runtime.threads import WorkerThreads

SIZE = 4
# rows of 1 KiB (a block has 1024 of them), columns, groups that are shorter and longer than a block, shared parts
CUTS = {
    "rows": ((8192, 256), Cut(dim=0)),
    "columns": ((2048, 1000), Cut(dim=1)),
    "packed": ((2 * 4096, 300), Cut(dim=0, groups=2)),
    "inner": ((3, 16, 7), Cut(dim=1, groups=2)),
    "repeated": ((8, 5000), Cut(dim=0, repeat=2)),
    "vector": ((400_000,), Cut(dim=0)),
    "empty": ((0, 8), Cut(dim=1)),
}
WEIGHTS = tuple(NamedTensor(name=name, dtype="F32", shape=shape) for name, (shape, _) in CUTS.items())
SPLIT = Split(size=SIZE, whole="5" * 64, cuts={name: cut for name, (_, cut) in CUTS.items()})
workers = WorkerThreads(2)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, (shape, _) in CUTS.items()}


def chunk(name: str, whole: torch.Tensor, number: int) -> torch.Tensor:
    cut = SPLIT.cuts[name]
    groups = whole.split(whole.shape[cut.dim] // cut.groups, cut.dim)
    return torch.cat([each.chunk(SIZE // cut.repeat, cut.dim)[number // cut.repeat] for each in groups], cut.dim)


def write(path: Path, with_blocks: bool, seed: int = 0) -> Path:
    values = tensors(seed)
    rows = canonical_order(weight.row for weight in WEIGHTS)
    data = {row.name: [memoryview(values[row.name].numpy().reshape(-1).view(np.uint8))] for row in rows}
    with new_weight_file(path, rows, data, graph_id="5" * 64, labels={}, cast={}, with_blocks=with_blocks) as (file, _):
        file.rename(path)
    return path


def read(path: Path, number: int) -> tuple[HostArena, Findings, int]:
    """Return a rank's arena, what was found, and the bytes that were read."""
    arena = HostArena(ArenaLayout(WEIGHTS, Rank(SPLIT, number)))
    with open_weights(path) as weights:
        names = {weight.name: weight.name for weight in WEIGHTS}
        nbytes = sum(bytes_to_read(weights, name, arena.layout.shares[name]) for name in names)
        return arena, read_shares(weights, names, arena, workers, Job()), nbytes


@pytest.fixture(scope="module", params=["blocks", "no blocks", "no stamp"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares") / "w.safetensors"
    if request.param == "no stamp":
        safetensors.torch.save_file(tensors(), path)
        return path
    return write(path, request.param == "blocks")


@pytest.mark.parametrize("number", range(SIZE))
def test_a_rank_has_its_chunks_and_the_digests_of_the_whole(path: Path, number: int) -> None:
    arena, found, _ = read(path, number)
    for name, whole in tensors().items():
        expected = chunk(name, whole, number).contiguous()
        assert arena.layout.weights[name].shape == tuple(expected.shape)
        assert bytes(arena.view(name)) == expected.numpy().tobytes(), name
        assert found.digests[name] == block_digests(memoryview(whole.numpy().reshape(-1).view(np.uint8)))
    assert not found.nonfinite


def test_rows_are_read_alone_where_the_file_has_the_digests_of_blocks(tmp_path: Path) -> None:
    whole = sum(weight.nbytes for weight in WEIGHTS)
    without, with_blocks = write(tmp_path / "n", with_blocks=False), write(tmp_path / "b", with_blocks=True)
    for number in range(SIZE):
        assert read(without, number)[2] == whole
        nbytes = read(with_blocks, number)[2]
        # a quarter of rows, packed rows and the vector, with a block at each end; all of what is cut otherwise
        rows = sum(weight.nbytes for weight in WEIGHTS if weight.name in ("rows", "packed", "vector"))
        assert nbytes <= whole - rows + rows // 4 + 4 * 2 * BLOCK


def test_the_tied_names_of_what_is_shared_are_compared(tmp_path: Path) -> None:
    """`read_tensors` leaves out what ranks share, but hashes its further names."""
    values = tensors()
    safetensors.torch.save_file({**values, "again": values["rows"].clone()}, tmp_path / "t.safetensors")
    arena = HostArena(ArenaLayout(WEIGHTS, Rank(SPLIT, 0)))
    with open_weights(tmp_path / "t.safetensors") as weights:
        found = read_tensors(weights, {"rows": ("rows", "again")}, arena, workers, Job())
        mine = read_shares(weights, {"rows": "rows"}, arena, workers, Job())
    assert found.digests.keys() == {"again"}
    assert found.digests["again"] == mine.digests["rows"]


@pytest.mark.parametrize("number", range(SIZE))
def test_what_is_not_finite_is_counted_where_it_is(number: int, tmp_path: Path) -> None:
    values = tensors()
    values["rows"][8191, 255] = float("nan")
    values["columns"][0, 0] = float("inf")
    safetensors.torch.save_file(values, tmp_path / "n.safetensors")
    _, found, _ = read(tmp_path / "n.safetensors", number)
    assert found.nonfinite.keys() == {*(["columns"] if number == 0 else []), *(["rows"] if number == SIZE - 1 else [])}


@contextmanager
def broken_byte(path: Path, name: str, place: int) -> Iterator[None]:
    """Let a byte of a tensor have another value during the block."""
    with open_weights(path) as weights:
        begin = weights.tensors[name].offset
    with path.open("r+b") as file:
        content = mmap.mmap(file.fileno(), 0)
        content[begin + place] ^= 1
        yield
        content[begin + place] ^= 1


@pytest.fixture(scope="module")
def with_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("broken") / "w.safetensors", with_blocks=True)


@settings(max_examples=12)
@given(st.data())
def test_a_broken_byte_changes_the_digest_of_each_rank_that_has_it(with_blocks: Path, data: st.DataObject) -> None:
    weight = data.draw(st.sampled_from([weight for weight in WEIGHTS if weight.nbytes]))
    place = data.draw(st.integers(0, weight.nbytes - 1))
    whole = block_digests(memoryview(tensors()[weight.name].numpy().reshape(-1).view(np.uint8)))
    with broken_byte(with_blocks, weight.name, place):
        for number in range(SIZE):
            share = Rank(SPLIT, number).share(weight)
            assert share is not None
            if share.before(place) < share.before(place + 1):
                assert read(with_blocks, number)[1].digests[weight.name] != whole


BROKEN: dict[str, Any] = {
    "too few": lambda text: text[:40],
    "no Base64": lambda text: "!" * len(text),
    "none": lambda _: "",
}


@pytest.mark.parametrize("how", BROKEN)
def test_digests_of_blocks_that_are_none_are_refused(how: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", with_blocks=True)
    with open_weights(path) as weights:
        assert weights.stamp is not None
        text = dict(weights.stamp.blocks or {})["rows"]
    raw = path.read_bytes()
    other = BROKEN[how](text)
    broken = raw.replace(text.encode(), other.encode())
    length = int.from_bytes(raw[:8], "little") + len(other) - len(text)
    path.write_bytes(length.to_bytes(8, "little") + broken[8:])
    with pytest.raises(WeightFileError, check=because("damaged"), match="digest for each block of rows"):
        open_weights(path)


PEAK = """
import sys
from tests.support.peaks import taken
from weightswap_runtime.format.cuts import Rank
from weightswap_runtime.format.manifest import Cut, NamedTensor, Split
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging.shares import read_shares
from weightswap_runtime.threads import WorkerThreads

cut, row = Cut(dim=1), NamedTensor(name="w", dtype="F32", shape=(4096, 6144))
workers, layout = WorkerThreads(2), ArenaLayout([row], Rank(Split(4, "", {"w": cut}), 1))

def read():
    with open_weights(sys.argv[1]) as weights:
        read_shares(weights, {"w": "w"}, HostArena(layout), workers, Job())

print(layout.nbytes, taken(read))
"""


def test_a_rank_needs_memory_for_its_part_and_a_few_blocks(tmp_path: Path) -> None:
    """Of a tensor of 101 MB it has a quarter, and reads all."""
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4096, 6144)}, path)
    done = subprocess.run([warm.python(), "-c", PEAK, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    part, grown = map(int, done.stdout.split())
    assert part == 4096 * 6144
    assert grown < part + 2 * 4 * BLOCK + (16 << 20)  # two threads, four blocks each, and what imports leave behind
