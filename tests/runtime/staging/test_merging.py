"""Several deltas as one: in a file, and in a swap from any of the weights on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.blocks import make_blocks_small, save
from tests.support.damage import damaged
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import (
    BaseMismatch,
    DigestMismatch,
    GraphMismatch,
    SwapError,
    Unsupported,
    WeightFileError,
    load,
    merge_deltas,
    read_weights,
    write_delta,
)
from weightswap_runtime.format.merging import write_merged_set
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.staging import delta as staging

STEPS = 5


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Path], list[Path]]:
    """Weight files in which no value comes back, and the deltas between them: rows, runs, and ones of all kinds."""
    make_blocks_small(monkeypatch, 256)
    random = np.random.default_rng(0)
    values = {
        "rows": np.zeros((400, 6), np.float32),
        "dense": np.zeros((40, 5), np.float32),
        "wide": np.zeros((3, 100), np.float32),  # its rows are more than a block
        "flat": np.zeros(700, np.float32),
        "scalar": np.zeros((), np.float32),
        "same": np.zeros((4, 4), np.float32),
    }
    files = [save(tmp_path / "v0.safetensors", values)]
    deltas = []
    for step in range(1, STEPS + 1):
        values["rows"][random.choice(400, 30, replace=False)] = step
        first = int(random.integers(0, 30))
        values["dense"][first : first + 9] = step
        values["wide"][step % 3, random.integers(0, 100)] = step
        values["flat"][random.integers(0, 700)] = step
        if step == 2:
            values["scalar"][...] = step
        files.append(save(tmp_path / f"v{step}.safetensors", values))
        deltas.append(write_delta(files[-2], files[-1], tmp_path / f"d{step}.safetensors").path)
    return files, deltas


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 2), (1, 4), (4, 5)])
def test_a_merge_is_the_delta_from_the_first_base_to_the_last_weights(
    first: int, last: int, chain: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    files, deltas = chain
    merged = merge_deltas(deltas[first:last], tmp_path / "merged.safetensors", labels={"k": "v"})
    direct = write_delta(files[first], files[last], tmp_path / "direct.safetensors", labels={"k": "v"})
    assert merged.path.read_bytes() == direct.path.read_bytes()
    assert {"rows:rows", "runs:dense", "runs:wide", "runs:flat"} <= read_weights(merged.path).keys()
    assert (merged.base, merged.weights_id, merged.nbytes) == (direct.base, direct.weights_id, direct.nbytes)
    full = write_merged_set(files[first], deltas[first:last], tmp_path / "full.safetensors")
    assert full.weights_id == merged.weights_id
    assert (tmp_path / "full.safetensors").read_bytes() == files[last].read_bytes()


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("seed", range(8))
def test_of_each_byte_the_last_value_is_kept(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values come back here: to those that the table had, too."""
    make_blocks_small(monkeypatch, 64)
    random = np.random.default_rng(seed)
    table = random.integers(0, 3, (50, 3)).astype(np.float32)
    files, deltas = [save(tmp_path / "0", {"t": table})], []
    for step in range(1, 6):
        table[random.choice(50, random.integers(0, 9), replace=False), random.integers(0, 3)] = random.integers(0, 3)
        files.append(save(tmp_path / str(step), {"t": table}))
        deltas.append(write_delta(files[-2], files[-1], tmp_path / f"d{step}").path)
    both = [merge_deltas(deltas[:2], tmp_path / "first").path, merge_deltas(deltas[2:], tmp_path / "second").path]
    for parts in (deltas, both):
        write_merged_set(files[0], [merge_deltas(parts, tmp_path / "merged").path], tmp_path / "result")
        assert (tmp_path / "result").read_bytes() == files[-1].read_bytes()


def test_labels_are_those_of_the_last_and_what_lies_beside_it_is_copied(
    tiny: TinyArtifact, delta: WriteDelta, tmp_path: Path
) -> None:
    base, new = (tiny.write(tmp_path / f"{i}", tiny.values(i), labels={"step": str(i)}) for i in (1, 2))
    last = write_delta(base, new, tmp_path / "last.safetensors").path
    out = tmp_path / "merged.safetensors"
    for name in ("last.goldens.safetensors", "last.safetensors.sig"):
        (tmp_path / name).write_text(name)
    assert merge_deltas([delta(0, 1), last], out).labels == {"step": "2"}
    assert merge_deltas([delta(0, 1), last], out, labels={"more": "x"}).labels == {"step": "2", "more": "x"}
    assert (tmp_path / "merged.goldens.safetensors").read_text() == "last.goldens.safetensors"
    assert (tmp_path / "merged.safetensors.sig").read_text() == "last.safetensors.sig"
    (tmp_path / "last.goldens.safetensors").unlink()
    merge_deltas([last], out)
    assert not (tmp_path / "merged.goldens.safetensors").exists()


Given = Callable[[TinyArtifact, WriteWeights, WriteDelta, Path], list[Path]]
REFUSED: dict[str, tuple[Given, type[SwapError] | type[Unsupported], str]] = {
    "none": (lambda *_: [], Unsupported, "no delta to merge"),
    "another order": (lambda t, w, d, p: [d(1, 2), d(0, 1)], BaseMismatch, r"d0-1.*d1-2\.safetensors leads to"),
    "a gap": (lambda t, w, d, p: [d(0, 1), d(2, 3)], BaseMismatch, "in order, without a gap"),
    "a full file": (lambda t, w, d, p: [w(0), d(0, 1)], WeightFileError, r"v0\.safetensors: not a delta"),
    "another graph": (
        lambda t, w, d, p: [d(0, 1), of_another_graph(t, p)],
        GraphMismatch,
        r"other\.safetensors: for the graph 111111111111",
    ),
    "a damaged one": (lambda t, w, d, p: [damaged(d(0, 1)), d(1, 2)], DigestMismatch, r"d0-1\.safetensors"),
    "a damaged last one": (lambda t, w, d, p: [d(0, 1), damaged(d(1, 2))], DigestMismatch, r"d1-2\.safetensors"),
    "the result": (lambda t, w, d, p: [d(0, 1).rename(p / "merged.safetensors")], Unsupported, "name another"),
}


def of_another_graph(tiny: TinyArtifact, folder: Path) -> Path:
    files = [tiny.write(folder / f"g{i}", tiny.values(i), graph_id="1" * 64) for i in (1, 2)]
    return write_delta(*files, folder / "other.safetensors").path


@pytest.mark.parametrize("what", REFUSED)
def test_deltas_that_are_not_a_chain_give_no_file(
    what: str, tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, tmp_path: Path
) -> None:
    given, error, says = REFUSED[what]
    deltas, out = given(tiny, weight_file, delta, tmp_path), tmp_path / "merged.safetensors"
    before = out.read_bytes() if out.exists() else None
    with pytest.raises(error, match=says):
        merge_deltas(deltas, out)
    assert (out.read_bytes() if out.exists() else None) == before
    assert not list(tmp_path.glob(".*"))


def test_a_full_set_is_only_written_with_the_weights_that_are_promised(
    weight_file: WriteWeights, delta: WriteDelta, tmp_path: Path
) -> None:
    out = tmp_path / "full.safetensors"
    with pytest.raises(BaseMismatch):
        write_merged_set(weight_file(1), [delta(0, 1)], out)
    path = write_delta(weight_file(1), weight_file(1), tmp_path / "nothing.safetensors").path
    with pytest.raises(DigestMismatch):
        write_merged_set(damaged(weight_file(1)), [path], out)
    assert not out.exists()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the files of which more than a header is read."""
    found: set[str] = set()
    read_into = LocalFile.read_into

    def noted(self: LocalFile, buffers: list[memoryview], offset: int) -> None:
        read_into(self, buffers, offset)
        if offset >= 4096:
            found.add(Path(self.where).name)

    monkeypatch.setattr(LocalFile, "read_into", noted)
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("together", [0, 700, 1 << 20])
@pytest.mark.parametrize("served", [0, 1, 2, 3, 7])
def test_a_chain_begins_with_the_last_of_its_weights_that_are_served(
    served: int,
    together: int,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    delta: WriteDelta,
    residency: Any,
    read: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "_TOGETHER", together)  # one delta, a few, or all
    ids = [load(tiny.path, weight_file(seed)).weights_id for seed in range(5)]
    deltas = [delta(seed, seed + 1) for seed in range(4)]
    onto = list(zip([weight_file(0), *deltas[:3]], map(str, ids[:4]), strict=True))
    model = load(tiny.path, weight_file(served), residency=residency, keep_previous="host")
    read.clear()
    receipt = model.stage(deltas[3], onto=onto).commit()
    assert (serves(model, 4), receipt.generation, receipt.weights_id) == (True, 1, ids[4])
    expected = {"v0.safetensors"} if served == 7 else set()
    assert read == expected | {f"d{seed}-{seed + 1}.safetensors" for seed in range(0 if served == 7 else served, 4)}
    model.rollback()
    assert serves(model, served)


def test_a_chain_without_its_full_set_is_for_those_who_serve_its_base(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, residency: Any
) -> None:
    onto = [(delta(0, 1), str(load(tiny.path, weight_file(1)).weights_id))]
    model = load(tiny.path, weight_file(0), residency=residency)
    assert model.stage(delta(1, 2), onto=onto).commit().generation == 1
    assert serves(model, 2)
    for other in (load(tiny.path, residency=residency), load(tiny.path, weight_file(3), residency=residency)):
        with pytest.raises(BaseMismatch):
            other.stage(delta(1, 2), onto=onto)


def test_a_chain_with_a_gap_or_a_damaged_delta_changes_nothing(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, residency: Any
) -> None:
    ids = [str(load(tiny.path, weight_file(seed)).weights_id) for seed in range(5)]
    model = load(tiny.path, weight_file(0), residency=residency)
    with pytest.raises(BaseMismatch, match=r"d2-3.*d0-1\.safetensors leads to"):
        model.stage(delta(2, 3), onto=[(weight_file(0), ids[0]), (delta(0, 1), ids[1])])
    with pytest.raises(DigestMismatch):
        model.stage(delta(1, 2), onto=[(weight_file(0), ids[0]), (damaged(delta(0, 1)), ids[1])])
    assert (model.generation, serves(model, 0)) == (0, True)
