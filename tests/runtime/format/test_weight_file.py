"""Weight files are pinned byte for byte, readable by the reference, and refused if their stamp is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import TinyArtifact
from weightswap_runtime import WeightFile, WeightFileError
from weightswap_runtime.format.canonical import canonical_order, size_alignment, write_weight_file
from weightswap_runtime.format.safetensors import METADATA_KEY, MOST_LABEL_BYTES, TensorRow, weights_id
from weightswap_runtime.sources.byte_source import LocalFile


def test_bytes_are_pinned_by_the_specification(tmp_path: Path) -> None:
    path = tmp_path / "pinned.safetensors"
    rows = [TensorRow("b", "U8", (3,)), TensorRow("a", "I16", (2,))]
    write_weight_file(path, rows, {"a": [memoryview(b"\1\0\2\0")], "b": [memoryview(b"\7\10\11")]}, graph_id="0" * 64)
    digests = {"a": blake3(b"\1\0\2\0").hexdigest(), "b": blake3(b"\7\10\11").hexdigest()}
    identity = blake3(f"a I16 [2] {digests['a']}\nb U8 [3] {digests['b']}\n".encode()).hexdigest()
    stamp = {"graph_id": "0" * 64, "weights_id": identity, "digests": digests, "labels": {}}
    header = {
        "__metadata__": {"format": "pt", "weightswap": json.dumps(stamp, separators=(",", ":"))},
        "a": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [4, 7]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    assert path.read_bytes() == struct.pack("<Q", 4088) + text.ljust(4088) + b"\1\0\2\0\7\10\11"


def test_the_reference_reads_what_we_write(weight_file: Callable[[int], Path], tiny: TinyArtifact) -> None:
    loaded = safetensors.torch.load_file(weight_file(3))
    assert loaded.keys() == tiny.values(3).keys()
    assert all(torch.equal(loaded[name], value) for name, value in tiny.values(3).items())


def test_layout_does_not_move_with_values_or_labels(tiny: TinyArtifact, tmp_path: Path) -> None:
    starts = set()
    for seed, labels in enumerate(({}, {"step": "1"}, {"step": "1000000", "note": "é" * 300})):
        path = tmp_path / f"{seed}.safetensors"
        values = {name: [value.reshape(-1).view(torch.uint8).numpy().data] for name, value in tiny.values(seed).items()}
        order = canonical_order(weight.row for weight in tiny.manifest.weights)
        rows = [weight.row for weight in tiny.manifest.weights]
        write_weight_file(path, rows, {row.name: values[row.name] for row in order}, graph_id="g", labels=labels)
        with WeightFile(path) as file:
            starts.add((file.header.data_start, tuple(file.tensors.items())))
            assert file.stamp is not None
            assert file.stamp.labels == labels
    assert len(starts) == 1


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_canonical_order_keeps_every_tensor_aligned_to_its_own_size(sizes: list[int]) -> None:
    rows = canonical_order(TensorRow(f"t{index}", "U8", (size,)) for index, size in enumerate(sizes))
    position = 0
    for row in rows:
        assert position % size_alignment(row.shape[0]) == 0
        position += row.shape[0]
    assert rows == canonical_order(reversed(rows))


def test_weights_id_depends_on_contents_alone() -> None:
    rows = [(TensorRow("a", "F32", (2,)), "d1"), (TensorRow("b", "F32", (2,)), "d2")]
    assert weights_id(rows) == weights_id(reversed(rows))
    others = [
        [(TensorRow("a", "F32", (2,)), "d2"), (TensorRow("b", "F32", (2,)), "d1")],
        [(TensorRow("a", "I32", (2,)), "d1"), rows[1]],
        [(TensorRow("a", "F32", (1, 2)), "d1"), rows[1]],
        [(TensorRow("c", "F32", (2,)), "d1"), rows[1]],
    ]
    assert len({weights_id(rows), *(weights_id(other) for other in others)}) == 5


def rewrite_stamp(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    changed = change(json.loads(header["__metadata__"][METADATA_KEY]))
    header["__metadata__"][METADATA_KEY] = changed if isinstance(changed, str) else json.dumps(changed)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def without_digest(stamp: dict[str, object]) -> object:
    digests = stamp["digests"]
    assert isinstance(digests, dict)
    return {**stamp, "digests": {name: digest for name, digest in digests.items() if name != "bias"}}


STAMPS = {
    "not JSON": (lambda stamp: "nope", "is not that of a weight file"),
    "not an object": (lambda stamp: "[]", "is not that of a weight file"),
    "no graph id": (
        lambda stamp: {k: v for k, v in stamp.items() if k != "graph_id"},
        "is not that of a weight file",
    ),
    "labels not strings": (lambda stamp: {**stamp, "labels": {"step": 1}}, "is not that of a weight file"),
    "labels too long": (
        lambda stamp: {**stamp, "labels": {"config": "x" * (MOST_LABEL_BYTES - len('{"config":""}') + 1)}},
        "its labels have 65537 bytes as JSON, but servers read at most 65536",
    ),
    "too many labels": (
        lambda stamp: {**stamp, "labels": {str(number): "" for number in range(10_000)}},
        "its labels have 98891 bytes as JSON",
    ),
    "a graph id too long": (lambda stamp: {**stamp, "graph_id": "0" * 65}, "has more than 64 digits"),
    "a digest missing": (without_digest, "lacks one BLAKE3 digest for each tensor (bias)"),
    "a digest too many": (
        lambda stamp: {**stamp, "digests": {**stamp["digests"], "more": "0" * 64}},
        "lacks one BLAKE3 digest for each tensor (more)",
    ),
    "a cast tensor that is not there": (
        lambda stamp: {**stamp, "cast": {"F32": ["bias", "more"]}},
        "says that more were cast, which the file does not hold",
    ),
    "casts of another kind": (lambda stamp: {**stamp, "cast": ["bias"]}, "is not that of a weight file"),
    "a digest of another kind": (
        lambda stamp: {**stamp, "digests": {**stamp["digests"], "bias": "sha"}},
        "lacks one BLAKE3 digest for each tensor (bias)",
    ),
}


@pytest.mark.parametrize(("change", "says"), STAMPS.values(), ids=STAMPS)
def test_broken_stamps_are_refused(
    change: Callable[[dict[str, object]], object], says: str, weight_file: Callable[[int], Path]
) -> None:
    path = weight_file(1)
    rewrite_stamp(path, change)
    with pytest.raises(WeightFileError) as refused:
        WeightFile(path)
    assert says in str(refused.value)


def test_labels_have_a_largest_size(tiny: TinyArtifact, tmp_path: Path) -> None:
    path, rows = tmp_path / "v.safetensors", [TensorRow("a", "U8", (1,))]
    longest = {"config": "é" * ((MOST_LABEL_BYTES - len('{"config":""}')) // 2)}
    write_weight_file(path, rows, {"a": [memoryview(b"x")]}, graph_id="g", labels=longest)
    with WeightFile(path) as file:
        assert file.stamp is not None
        assert file.stamp.labels == longest
    before = path.read_bytes()
    with pytest.raises(ValueError, match="its labels have 65546 bytes"):
        write_weight_file(path, rows, {"a": [memoryview(b"y")]}, graph_id="g", labels={**longest, "more": "1"})
    assert (path.read_bytes(), list(tmp_path.glob(".*"))) == (before, [])


def test_an_unknown_field_of_a_later_version_is_tolerated(weight_file: Callable[[int], Path]) -> None:
    path = weight_file(1)
    rewrite_stamp(path, lambda stamp: {**stamp, "later": True})
    with WeightFile(path) as file:
        assert file.stamp is not None


def test_a_header_that_was_read_before_the_file_settled_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2), "b": torch.ones(2)}, path)
    swapped = path.read_bytes().replace(b'"a"', b'"c"', 1)

    def await_stable_mtime(source: LocalFile) -> None:
        path.write_bytes(swapped)  # within a tick of the clock for file times, so no time shows the write

    monkeypatch.setattr(LocalFile, "await_stable_mtime", await_stable_mtime)
    with pytest.raises(WeightFileError, match="written to while it was opened"):
        WeightFile(path)
