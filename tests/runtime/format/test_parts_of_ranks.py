"""The files of ranks in a folder: which are one set, and those that do not make up whole tensors, by broken input."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.descriptors import few_descriptors
from weightswap_runtime import SourceChanged, WeightFileError, read_weights
from weightswap_runtime.format.weight_set import open_weights

WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)
ALONE = np.full(3, 7, np.int64)
Tensors = Mapping[str, np.ndarray]


def name_of(rank: int) -> str:
    return f"shard-{rank:05}-model-00001-of-00001.safetensors"


def write(folder: Path, rank: int, tensors: Tensors, offsets: object) -> None:
    info = offsets if isinstance(offsets, str) else json.dumps(offsets)
    rows = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(rows, folder / name_of(rank), {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})


def at(*offsets: Any) -> dict[str, Any]:
    return {"w": {"saved_offsets": offsets}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four parts; the second rank has a whole tensor, too, the last an empty part."""
    write(tmp_path, 0, {"w": WHOLE[:2, 1:]}, at(0, 1))
    write(tmp_path, 1, {"w": WHOLE[:2, :1], "alone": ALONE}, at(0, 0))
    write(tmp_path, 2, {"w": WHOLE[2:, :1]}, at(2, 0))
    write(tmp_path, 3, {"w": WHOLE[2:, 1:]}, at(2, 1))
    write(tmp_path, 4, {"w": WHOLE[6:]}, at(6, 0))
    return tmp_path


def test_parts_are_one_set(folder: Path) -> None:
    for name in ("config.json", "step.goldens.safetensors"):
        (folder / name).write_text("{}")
    found = read_weights(folder)
    assert np.array_equal(found["w"], WHOLE)
    assert np.array_equal(found["alone"], ALONE)


def test_threads_read_a_large_tensor_side_by_side(tmp_path: Path) -> None:
    whole = np.random.default_rng(3).integers(0, 256, (9_000, 1_500), np.uint8)
    for rank, (low, high) in enumerate([(0, 700), (700, 701), (701, 1_500)]):
        write(tmp_path, rank, {"w": whole[:, low:high]}, at(0, low))
    assert np.array_equal(read_weights(tmp_path)["w"], whole)


def test_many_parts_are_not_open_at_a_time(tmp_path: Path) -> None:
    rows = np.arange(200, dtype=np.int32).reshape(100, 2)
    for rank, row in enumerate(rows):
        write(tmp_path, rank, {"w": row[None]}, at(rank, 0))
    with few_descriptors():
        assert np.array_equal(read_weights(tmp_path)["w"], rows)


def test_each_part_may_name_all_tensors(folder: Path) -> None:
    lengths = [int.from_bytes(path.read_bytes()[:8], "little") for path in folder.iterdir()]
    open_weights(folder, most_header=max(lengths)).close()
    with pytest.raises(WeightFileError, match="at most"):
        open_weights(folder, most_header=max(lengths) - 1)


def test_a_write_to_any_part_is_noticed(folder: Path) -> None:
    with open_weights(folder) as opened:
        opened.check_unchanged()
        opened.tensors["w"].source.check_unchanged()
        with (folder / name_of(3)).open("r+b") as file:
            file.write(b"\0")
        with pytest.raises((WeightFileError, SourceChanged), match=r"shard-00003.*written to"):
            opened.check_unchanged()


def test_a_folder_with_other_files_has_candidates(folder: Path) -> None:
    safetensors.numpy.save_file({"w": WHOLE}, folder / "other.safetensors")
    with pytest.raises(WeightFileError, match="holds 6 candidates"):
        read_weights(folder)
    (folder / "other.safetensors").rename(folder / "model.safetensors")
    assert read_weights(folder).keys() == {"w"}


def test_without_the_last_part_the_shape_is_too_small(folder: Path) -> None:
    for rank in (2, 3, 4):
        (folder / name_of(rank)).unlink()
    with open_weights(folder) as opened:
        assert opened.tensors["w"].shape == (2, 4)
        assert "may be missing" in opened.advice


def replaced(rank: int, tensors: Tensors, offsets: object) -> Callable[[Path], None]:
    return lambda folder: write(folder, rank, tensors, offsets)


def diagonal(folder: Path) -> None:
    for rank in (5, 6):
        write(folder, rank, {"x": np.zeros((1,) * 8)}, {"x": {"saved_offsets": [rank - 5] * 8}})


def truncated(folder: Path) -> None:
    path = folder / name_of(3)
    path.write_bytes(path.read_bytes()[:-4])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "lost": (lambda folder: (folder / name_of(1)).unlink(), r"w: the part at \[0, 0\] is missing"),
    "lost between": (lambda folder: (folder / name_of(2)).unlink(), r"w: the part at \[2, 0\] is missing"),
    "lost row": (
        lambda folder: [(folder / name_of(rank)).unlink() for rank in (0, 1)],
        r"w: along dimension 0 parts end at 0, and one begins at 2 \(shard-00002",
    ),
    "doubled": (
        replaced(5, {"w": WHOLE[:2, :1]}, at(0, 0)),
        r"w: two parts begin at \[0, 0\] \(shard-00001.* shard-00005",
    ),
    "whole and in parts": (
        replaced(5, {"w": WHOLE}, at(0, 0)),
        "w: .* 0 parts end at 2, and one begins at 0",
    ),
    "doubled whole": (
        replaced(5, {"alone": ALONE}, {}),
        r"alone: two parts begin at \[0\] \(shard.* shard-00005",
    ),
    "overlapping": (
        replaced(3, {"w": WHOLE[2:]}, at(2, 0)),
        "w: .* 1 parts end at 1, and one begins at 0",
    ),
    "moved": (
        replaced(3, {"w": WHOLE[2:, 1:]}, at(2, 2)),
        r"w: along dimension 1 parts end at 4, and one begins at 2 \(shard-00003",
    ),
    "far away": (replaced(3, {"w": WHOLE[2:, 1:]}, at(2**61, 1)), f"w: .* end at 6, and one begins at {2**61}"),
    "another dtype": (replaced(3, {"w": WHOLE[2:, 1:].astype("f8")}, at(2, 1)), r"w is F32\[2, 3\] in .* and F64"),
    "another dimension": (replaced(3, {"w": WHOLE[2:, 1]}, at(2)), r"w is F32\[2, 3\] in .* and F32\[4\]"),
    "too few offsets": (replaced(3, {"w": WHOLE[2:, 1:]}, at(2)), "w has 1 offsets and 2 sizes"),
    "too many offsets": (replaced(3, {"w": WHOLE[2:, 1:]}, at(2, 1, 0)), "w has 3 offsets and 2 sizes"),
    "text": (replaced(3, {"w": WHOLE[2:, 1:]}, at("2", 1)), "DCP_SHARDING_INFO.*does not say"),
    "fractions": (replaced(3, {"w": WHOLE[2:, 1:]}, at(2.5, 1)), "DCP_SHARDING_INFO.*does not say"),
    "negative": (replaced(3, {"w": WHOLE[2:, 1:]}, at(-2, 1)), "DCP_SHARDING_INFO.*does not say"),
    "huge": (replaced(3, {"w": WHOLE[2:, 1:]}, at(2**64, 1)), "DCP_SHARDING_INFO.*does not say"),
    "no offsets": (replaced(3, {"w": WHOLE[2:, 1:]}, {"w": {}}), "DCP_SHARDING_INFO.*does not say"),
    "no object": (replaced(3, {"w": WHOLE[2:, 1:]}, [1, 2]), "DCP_SHARDING_INFO.*does not say"),
    "no JSON": (replaced(3, {"w": WHOLE[2:, 1:]}, "{"), "DCP_SHARDING_INFO.*does not say"),
    "deep JSON": (replaced(3, {"w": WHOLE[2:, 1:]}, "[" * 5000), "DCP_SHARDING_INFO.*does not say"),
    "no entry": (replaced(3, {"w": WHOLE[2:, 1:]}, {}), "w: .* 0 parts end at 2, and one begins at 0"),
    "a diagonal": (diagonal, r"x: the part at \[0, 0, 0, 0, 0, 0, 0, 1\] is missing"),
    "truncated": (truncated, "shard-00003.*truncated"),
}


@pytest.mark.parametrize(("broken", "said"), BROKEN.values(), ids=BROKEN)
def test_parts_that_make_up_no_tensor_are_refused(broken: Callable[[Path], None], said: str, folder: Path) -> None:
    broken(folder)
    with pytest.raises(WeightFileError, match=said) as caught:
        open_weights(folder)
    assert "again" in str(caught.value) or "enable_consolidation" in str(caught.value)
