"""Delta files: written between weight files, applied to served weights, refused if they do not fit."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.blocks import make_blocks_small, save
from tests.support.refusals import because
from tests.support.rows import prefer_rows
from tests.support.sessions import sessions_of
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import (
    BaseMismatch,
    Unsupported,
    WeightFileError,
    load,
    write_delta,
)
from weightswap_runtime.byte_ranges import ByteRanges, scatter
from weightswap_runtime.format import safetensors as weight_file_format
from weightswap_runtime.format.canonical import canonical_order, pack_ranges, render_header, write_weight_file
from weightswap_runtime.format.delta import DATA, DELTA_KEY, RUNS, DeltaStamp, delta_stamp, ranges_of
from weightswap_runtime.format.identity import Counts, identify
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.safetensors import LEAST_HEADER, TensorRow
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.hash_tree import HashTrees
from weightswap_runtime.jobs import Job
from weightswap_runtime.live import residency as double
from weightswap_runtime.memory.arena import ArenaLayout, ByteRange, HostArena
from weightswap_runtime.staging.delta import stage_delta
from weightswap_runtime.staging.reading import write_rows
from weightswap_runtime.staging.request import Staging, SwapRequest
from weightswap_runtime.tensors import TensorType, block_digests
from weightswap_runtime.threads import WorkerThreads


@pytest.mark.parametrize(("base", "new"), [(0, 1), (2, 0), (1, 1)])
@pytest.mark.usefixtures("_places", "_blocks")
def test_a_delta_gives_the_weights_of_the_full_file(
    base: int, new: int, tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, residency: str
) -> None:
    model = load(tiny.path, weight_file(base), residency=residency)
    receipt = model.swap(delta(base, new))
    assert serves(model, new)
    assert receipt.kind == "delta"
    assert receipt.weights_id == load(tiny.path, weight_file(new)).weights_id


@pytest.mark.pairwise
@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("shape", [(5, 27), (8, 20), (24, 8), (9, 37), (1000, 1), (65, 1, 1)])
@pytest.mark.parametrize("places", [[0], [-1], [0, -1], [60, -2]])
def test_a_file_has_what_changes(shape: tuple[int, ...], places: list[int], tmp_path: Path) -> None:
    values = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
    values[1].reshape(-1)[places] = 1
    files = [tmp_path / "base.safetensors", tmp_path / "new.safetensors"]
    for path, value in zip(files, values, strict=True):
        write_weight_file(
            path, [TensorRow("w", "F32", shape)], {"w": [value.reshape(-1).data.cast("B")]}, graph_id="g" * 64
        )
    written = safetensors.numpy.load_file(write_delta(*files, tmp_path / "delta.safetensors").path)
    content = memoryview(bytearray(values[0].tobytes()))
    parts = {name: memoryview(value.tobytes()) for name, value in written.items()}
    scatter(content, ranges_of("w", TensorType("F32", shape), parts))
    assert content.tobytes() == values[1].tobytes()
    if "rows:w" in written:
        changed = (values[0] != values[1]).reshape(shape[0], -1).any(axis=1)
        assert written["rows:w"].tolist() == np.flatnonzero(changed).tolist()


@pytest.mark.usefixtures("_places", "_blocks")
def test_a_chain_is_taken_in_order_and_refused_otherwise(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta, residency: str
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency, keep_previous="host")
    with pytest.raises(BaseMismatch):
        model.swap(delta(1, 2))
    for base in range(4):
        model.swap(delta(base, base + 1))
        assert serves(model, base + 1)
        with pytest.raises(BaseMismatch, match=rf"{model.weights_id[:12]} are served"):
            model.swap(delta(base, base + 1))
    for expected in (3, 4, 3):
        model.rollback()
        assert serves(model, expected)
    model.swap(delta(3, 0))
    assert serves(model, 0)


def test_a_delta_needs_weights_that_are_served(tiny: TinyArtifact, delta: WriteDelta, residency: str) -> None:
    model = load(tiny.path, residency=residency)
    with pytest.raises(BaseMismatch):
        model.swap(delta(0, 1))


def test_a_chain_costs_what_it_changes(tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_small(monkeypatch, 16)
    values = tiny.values(0)
    files = []
    for step in range(5):
        values["bias"][step] += 1
        files.append(tiny.write(tmp_path / f"v{step}.safetensors", values))
    model = load(tiny.path, files[0])
    copied: list[int] = []  # the first staging copies everything, as the content of the other arena is unknown

    def count(target: HostArena, source: HostArena, ranges: list[ByteRange], *rest: Any) -> None:
        copied.append(sum(part.nbytes for part in ranges))
        copy(target, source, ranges, *rest)

    def count_places(target: HostArena, source: HostArena, places: ByteRanges, *rest: Any) -> None:
        copied.append(int((places.ends - places.begins).sum()))
        copy_scattered(target, source, places, *rest)

    copy, copy_scattered = double.copy_ranges, double.copy_places
    monkeypatch.setattr(double, "copy_ranges", count)
    monkeypatch.setattr(double, "copy_places", count_places)
    for step in range(1, 5):
        written = write_delta(files[step - 1], files[step], tmp_path / "d.safetensors")
        receipt = model.swap(written.path)
        assert receipt.bytes_read == written.nbytes + 16 * len(written.changed)
    assert copied == [sessions_of(load(tiny.path))[0].arena.layout.nbytes, 16, 16, 16]


def test_in_single_residency_only_what_changes_is_copied(tiny: TinyArtifact, tmp_path: Path) -> None:
    values = tiny.values(0)
    first = tiny.write(tmp_path / "v0.safetensors", values)
    values["steps"] += 1
    second = tiny.write(tmp_path / "v1.safetensors", values)
    model = load(tiny.path, first, residency="single", keep_previous="host")
    receipt = model.swap(write_delta(first, second, tmp_path / "d.safetensors").path)
    assert receipt.bytes_copied == 8
    assert model.rollback().bytes_copied == 8
    assert serves(model, 0)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_arrives(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch, data.draw(st.sampled_from([8, 24, 64])))
        if data.draw(st.booleans(), label="rows"):
            prefer_rows(patch)
        folder = tmp_path_factory.mktemp("delta")
        random = np.random.default_rng(data.draw(st.integers(0, 99)))
        weights = data.draw(st.lists(_weights(), min_size=1, max_size=4, unique_by=lambda weight: weight.name))
        some = np.array([0, 1, 0x7F, 0x80, 0xC0, 0xFF], np.uint8)  # values that are often not finite
        old = {w.name: random.choice(some, w.nbytes) for w in weights}
        new = {name: value.copy() for name, value in old.items()}
        for name, value in new.items():
            for _ in range(data.draw(st.integers(0, 4)) if value.size else 0):
                start = data.draw(st.integers(0, value.size - 1), label=name)
                value[start : start + data.draw(st.integers(1, 40))] ^= 1
        files = [_save_bytes(folder / f"{i}.safetensors", weights, values) for i, values in enumerate((old, new))]
        written = write_delta(*files, folder / "d.safetensors").path
        arena = _arena(weights, old)
        identity = identify(weights, {n: block_digests(v.data) for n, v in old.items()}, {}, _nonfinite(old))
        with open_weights(written) as opened:
            stamp = delta_stamp(opened)
            assert stamp is not None
            manifest: Any = SimpleNamespace(weights=tuple(weights), graph_id="0" * 64, packed_for="0" * 64)
            trees, workers = HashTrees(None), WorkerThreads(2)
            staging = Staging(SwapRequest(written), manifest, identity, pytest.fail, trees, workers, Job())
            reached, _, changes = stage_delta(opened, stamp, arena, identity, staging)
        undo = changes.undo(arena)
        changes.write_to(arena, WorkerThreads(2))
        assert _contents(arena) == _contents(_arena(weights, new))
        wanted = identify(weights, {n: block_digests(v.data) for n, v in new.items()}, {})
        assert reached.digests == wanted.digests
        assert reached.nonfinite == _nonfinite(new)
        undo.write_to(arena, WorkerThreads(2))
        assert _contents(arena) == _contents(_arena(weights, old))


def _nonfinite(values: dict[str, np.ndarray]) -> dict[str, Counts]:
    floats = {name: value.view(np.float32) for name, value in values.items()}
    found = {name: Counts(int(np.isnan(v).sum()), int(np.isinf(v).sum())) for name, v in floats.items()}
    return {name: counts for name, counts in found.items() if any(counts)}


@st.composite
def _weights(draw: st.DrawFn) -> NamedTensor:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    permuted = len(shape) == 2 and min(shape) > 1 and draw(st.booleans())
    stride = (1, shape[0]) if permuted else None
    return NamedTensor(name=draw(st.sampled_from("abcdef")), dtype="F32", shape=shape, stride=stride)


def _save_bytes(path: Path, weights: list[NamedTensor], values: dict[str, np.ndarray]) -> Path:
    rows = [weight.row for weight in weights]
    data = {row.name: [memoryview(values[row.name].tobytes())] for row in canonical_order(rows)}
    write_weight_file(path, rows, data, graph_id="0" * 64)
    return path


def _arena(weights: list[NamedTensor], values: dict[str, np.ndarray]) -> HostArena:
    arena = HostArena(ArenaLayout(weights))
    for weight in weights:
        write_rows(weight, memoryview(values[weight.name].tobytes()), arena.view(weight.name), Job())
    return arena


def _contents(arena: HostArena) -> dict[str, bytes]:
    return {name: bytes(arena.view(name)) for name in arena.layout.slots}


def test_labels_and_progress(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "d.safetensors"
    written = write_delta(
        weight_file(0),
        weight_file(1),
        out,
        labels={"step": "9"},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (92, 92)
    assert written.changed == ("bias", "steps", "tied", "weight")
    model = load(tiny.path, weight_file(0))
    assert model.swap(out).labels == {"step": "9"} == model.labels
    before = out.read_bytes()
    with pytest.raises(WeightFileError, match="its labels have"):
        write_delta(weight_file(0), weight_file(1), out, labels={"config": "x" * 65536})
    assert out.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(weight_file_format, "MOST_LABEL_BYTES", 1 << 30)
        write_delta(weight_file(0), weight_file(1), out, labels={"config": "x" * 65536})
    with pytest.raises(WeightFileError, check=because("damaged")):
        model.swap(out)


def test_only_and_deltas_do_not_mix(tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta) -> None:
    model = load(tiny.path, weight_file(0))
    with pytest.raises(Unsupported, match="a delta is applied as a whole"):
        model.swap(delta(0, 1), only="bias")
    assert serves(model, 0)


def test_a_file_is_byte_for_byte_what_the_format_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of which rows change, one of which runs do, and a vector: as docs/format.md describes them."""
    make_blocks_small(monkeypatch, 1 << 20)
    old = {"t": np.zeros((9, 3), np.float32), "u": np.zeros((9, 3), np.float32), "v": np.zeros(5, np.float32)}
    new = {name: value.copy() for name, value in old.items()}
    new["t"][[0, 1, 5, 8]] = 1  # three runs of 16 bytes, or four rows of 8
    new["u"][2:7] = 2  # one run, or five rows
    new["v"][4] = 3
    files = [save(tmp_path / f"{i}.safetensors", values) for i, values in enumerate((old, new))]
    written = write_delta(*files, tmp_path / "d.safetensors", labels={"k": "v"})
    assert written.nbytes == 60 + 48 + 20
    data = {
        "data:u": ("U8", [60], new["u"][2:7].tobytes()),
        "data:t": ("U8", [48], new["t"][[0, 1, 5, 8]].tobytes()),
        "rows:t": ("I64", [4], np.array([0, 1, 5, 8], "<i8").tobytes()),
        "runs:u": ("I64", [1, 2], np.array([[24, 84]], "<i8").tobytes()),
        "data:v": ("U8", [20], new["v"].tobytes()),
        "runs:v": ("I64", [1, 2], np.array([[0, 20]], "<i8").tobytes()),
    }
    order = ["rows:t", "data:t", "runs:u", "runs:v", "data:u", "data:v"]  # multiples of 32, 16, 16, 16, 4, 4
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    types = {"t": ("F32", [9, 3]), "u": ("F32", [9, 3]), "v": ("F32", [5])}
    stamp = {
        "graph_id": "0" * 64,
        "base": written.base,
        "weights_id": written.weights_id,
        "changes": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in types.items()},
        "digests": {name: blake3(data[name][2]).hexdigest() for name in order},
        "labels": {"k": "v"},
    }
    header["__metadata__"][DELTA_KEY] = json.dumps(stamp, separators=(",", ":"))
    place = 0
    for name in order:
        dtype, shape, content = data[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place := place + len(content)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text) + 1000) // 4096) * 4096 - 8)
    assert written.path.read_bytes() == struct.pack("<Q", len(text)) + text + b"".join(data[n][2] for n in order)


def test_goldens_beside_the_target_stay_if_the_delta_cannot_be_written(
    weight_file: WriteWeights, tmp_path: Path
) -> None:
    (tmp_path / "d.safetensors").mkdir()
    goldens = tmp_path / "d.goldens.safetensors"
    goldens.write_bytes(b"precious")
    for beside in (False, True):
        if beside:
            (tmp_path / "v1.goldens.safetensors").write_bytes(b"others")
        with pytest.raises(WeightFileError, match="cannot be written"):
            write_delta(weight_file(0), weight_file(1), tmp_path / "d.safetensors")
        assert goldens.read_bytes() == b"precious"


def test_a_delta_of_many_small_weights_fits_into_the_limit_of_headers(tiny: TinyArtifact) -> None:
    rows = [
        NamedTensor(name=f"layers.{i}.experts.{i % 9}.\u00e9.weight", dtype="F8_E4M3", shape=(1,)) for i in range(9000)
    ]
    manifest = msgspec.structs.replace(tiny.manifest, weights=tuple(rows))
    names = [prefix + row.name for row in rows for prefix in (DATA, RUNS)]
    changes = {row.name: TensorType("F8_E4M3", (1,)) for row in rows}
    digest = "0" * 64
    stamp = DeltaStamp(
        graph_id=digest, base=digest, weights_id=digest, changes=changes, digests=dict.fromkeys(names, digest)
    )
    ranges = pack_ranges([(name, "U8", (4_000_000_000,)) for name in names])
    header = render_header(ranges, {DELTA_KEY: msgspec.json.encode(stamp).decode()})
    assert LEAST_HEADER < len(header) < manifest.most_header / 3
