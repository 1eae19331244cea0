"""Broken deltas, and files between which no delta can be made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from tests.support.blocks import save
from tests.support.rows import prefer_rows
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights, serves
from weightswap_runtime import (
    DigestMismatch,
    GraphMismatch,
    SwapError,
    UnexpectedWeights,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
    merge_deltas,
    write_delta,
)
from weightswap_runtime.format.canonical import canonical_order, pack_ranges, render_header
from weightswap_runtime.format.delta import DELTA_KEY
from weightswap_runtime.format.merging import write_merged_set
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.tensors import block_digests


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    """Change a delta's stamp and tensors, and recompute its digests unless the change was to them."""
    with safetensors.safe_open(path, "np") as opened:
        stamp: dict[str, Any] = msgspec.json.decode(opened.metadata()[DELTA_KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    digests = dict(stamp["digests"])
    change(stamp, tensors)
    if stamp.get("digests") == digests:
        stamp["digests"] = {name: block_digest(value) for name, value in tensors.items()}
    rows = [TensorRow(name, {"|u1": "U8", "<i8": "I64"}[t.dtype.str], t.shape) for name, t in tensors.items()]
    order = canonical_order(rows)
    header = render_header(pack_ranges(order), {DELTA_KEY: msgspec.json.encode(stamp).decode()})
    path.write_bytes(header + b"".join(tensors[row.name].tobytes() for row in order))
    return path


def block_digest(value: np.ndarray) -> str:
    from weightswap_runtime.tensors import tensor_digest

    return tensor_digest(block_digests(memoryview(value.tobytes())))


def runs(values: list[list[int]]) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(stamp: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["runs:bias"] = np.array(values, np.int64).reshape(-1, 2)

    return change


def rows(values: list[int], width: int = 20) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    """Name other rows of the table of three, all of which change; with data of another width, too."""

    def change(stamp: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["rows:weight"] = np.array(values, np.int64)
        if width != 20 or not values:
            tensors["data:weight"] = np.zeros(len(values) * width, np.uint8)

    return change


def rename(old: str, new: str) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    """Let a delta change a weight of another name, as it says everywhere."""

    def change(stamp: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        stamp["changes"][new] = stamp["changes"].pop(old)
        for name in [name for name in tensors if name.partition(":")[2] == old]:
            tensors[f"{name.partition(':')[0]}:{new}"] = tensors.pop(name)

    return change


def drop(name: str) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda stamp, tensors: (tensors.pop(name), None)[1]


def set_(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda stamp, tensors: stamp.update({key: value})


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], None], type[SwapError], str]] = {
    "beyond the weight": (runs([[4, 24]]), WeightFileError, "bias: its ranges do not fit its data"),
    "before the weight": (runs([[-4, 16]]), WeightFileError, "bias: its ranges do not fit its data"),
    "overlapping": (runs([[0, 12], [8, 16]]), WeightFileError, "bias: its ranges do not fit its data"),
    "falling": (runs([[12, 20], [0, 12]]), WeightFileError, "bias: its ranges do not fit its data"),
    "empty": (runs([[0, 0], [0, 20]]), WeightFileError, "bias: its ranges do not fit its data"),
    "too short": (runs([[0, 16]]), WeightFileError, "bias: its ranges do not fit its data"),
    "overflowing": (
        runs([[-(2**62), 2**62], [2**62, 20 - 2**62]]),
        WeightFileError,
        "bias: its ranges do not fit its data",
    ),
    "other bytes": (
        lambda stamp, tensors: tensors.update({"data:bias": tensors["data:bias"] ^ 1}),
        DigestMismatch,
        "leads to the weights",
    ),
    "a wrong digest": (
        lambda stamp, tensors: stamp["digests"].update({"data:bias": "1" * 64}),
        DigestMismatch,
        "data:bias: the file records the digest 111111111111",
    ),
    "another result": (set_("weights_id", "1" * 64), DigestMismatch, "not to 111111111111"),
    "no ids": (set_("base", "nothing"), WeightFileError, "64 hexadecimal digits"),
    "no stamp": (lambda stamp, tensors: stamp.clear(), WeightFileError, "metadata cannot be read"),
    "a lost tensor": (drop("runs:bias"), WeightFileError, "do not match the weights"),
    "bytes of another kind": (
        lambda stamp, tensors: tensors.update({"data:bias": np.zeros(3, np.int64)}),
        WeightFileError,
        r"the tensors of bias are I64\[3\] and I64\[1, 2\]",
    ),
    "another graph": (set_("graph_id", "1" * 64), GraphMismatch, "allow_other_graph=True"),
    "another model": (
        lambda stamp, tensors: (
            stamp.update(graph_id="1" * 64),
            stamp["changes"].update(bias={"dtype": "F32", "shape": [6]}),
        )[0],
        GraphMismatch,
        r"packed for another graph, .*not fit:\n  - bias: expected F32\[5\], found F32\[6\]\nPack a checkpoint",
    ),
    "another type": (
        lambda stamp, tensors: stamp["changes"].update(bias={"dtype": "F32", "shape": [6]}),
        WeightsMismatch,
        r"bias: expected F32\[5\], found F32\[6\]",
    ),
    "no type": (
        lambda stamp, tensors: stamp["changes"].update(bias={"dtype": "F4", "shape": [5]}),
        WeightFileError,
        r"bias has the type F4\[5\]",
    ),
    "an unknown type": (
        lambda stamp, tensors: stamp["changes"].update(bias={"dtype": "F99", "shape": [5]}),
        WeightFileError,
        r"bias has the type F99\[5\]",
    ),
    "an unknown weight": (rename("bias", "other"), WeightsMismatch, "other: unexpected"),
    "an unknown table": (rename("weight", "other"), WeightsMismatch, "other: unexpected"),
    "rows that fall": (
        rows([0, 2, 1]),
        WeightFileError,
        "weight: row 1 comes after row 2: rows have to be in ascending",
    ),
    "a row twice": (rows([0, 1, 1]), WeightFileError, "weight: row 1 comes after row 1"),
    "a negative row": (rows([-1, -2, 1]), WeightFileError, "weight: row -1: the table has 3 rows"),
    "a row beyond the table": (rows([0, 1, 3]), WeightFileError, "weight: row 3: the table has 3 rows"),
    "an overflowing row": (rows([0, 1, 2**62 + 1]), WeightFileError, f"weight: row {2**62 + 1}: the table has 3 rows"),
    "an overflowing table": (
        lambda stamp, tensors: (
            stamp["changes"].update(weight={"dtype": "F32", "shape": [2**62, 5]}),
            tensors.update({"rows:weight": np.array([5, 2**59, 2**60])}),
        )[1],
        WeightFileError,
        rf"weight has the type F32\[{2**62}, 5\]",
    ),
    "no rows": (rows([]), WeightFileError, "weight: it has no rows"),
    "narrower rows": (rows([0, 1, 2], 16), WeightFileError, "weight: 3 rows have 48 bytes, a row of the table has 20"),
    "wider rows": (rows([0, 1, 2], 24), WeightFileError, "weight: 3 rows have 72 bytes, a row of the table has 20"),
    "fewer rows than data": (rows([0, 2]), WeightFileError, "weight: 2 rows have 60 bytes, a row of the table has 20"),
    "other rows": (
        lambda stamp, tensors: tensors.update({"data:weight": np.roll(tensors["data:weight"], 20)}),
        DigestMismatch,
        "leads to the weights",
    ),
    "rows and ranges": (
        lambda stamp, tensors: tensors.update({"runs:weight": np.array([[0, 60]])}),
        WeightFileError,
        "do not match the weights",
    ),
    "rows of two dimensions": (
        lambda stamp, tensors: tensors.update({"rows:weight": np.array([[0], [1], [2]])}),
        WeightFileError,
        r"the tensors of weight are U8\[60\] and I64\[3, 1\]",
    ),
    "rows of a scalar": (
        lambda stamp, tensors: (tensors.pop("runs:steps"), tensors.update({"rows:steps": np.array([0])}))[1],
        WeightFileError,
        "steps: row 0: the table has 0 rows",
    ),
    "rows of another table": (
        lambda stamp, tensors: stamp["changes"].update(weight={"dtype": "F32", "shape": [3, 6]}),
        WeightsMismatch,
        r"weight: expected F32\[3, 5\], found F32\[3, 6\]",
    ),
}


@pytest.mark.pairwise
@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("what", BROKEN)
def test_broken_deltas_are_refused(
    what: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    delta: WriteDelta,
    residency: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are damaged ones merged."""
    prefer_rows(monkeypatch)
    change, error, says = BROKEN[what]
    model, broken = load(tiny.path, weight_file(0), residency=residency), rewrite(delta(0, 1), change)
    with pytest.raises(error, match=says):
        model.swap(broken)
    if error is WeightFileError:
        with pytest.raises(error, match=says):
            merge_deltas([broken, delta(1, 2)], tmp_path / "merged.safetensors")
        assert not (tmp_path / "merged.safetensors").exists()
    assert (model.generation, serves(model, 0)) == (0, True)
    model.swap(delta(0, 1))
    assert serves(model, 1)


def test_a_delta_for_another_graph_is_accepted_on_request(
    tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(rewrite(delta(0, 1), set_("graph_id", "1" * 64)), allow_other_graph=True)
    assert serves(model, 1)


def test_files_without_a_possible_delta_are_refused(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    out = tmp_path / "d.safetensors"
    plain = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3)}, plain)
    with pytest.raises(WeightFileError, match=r"not packed by weightswap.*weightswap pack CHECKPOINT"):
        write_delta(plain, weight_file(0), out)
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(1), graph_id="1" * 64)
    with pytest.raises(GraphMismatch, match="two sets of weights for the same graph"):
        write_delta(weight_file(0), other, out)
    fewer = save(tmp_path / "fewer.safetensors", {"a": np.ones(3, np.uint8)}, tiny.manifest.graph_id)
    with pytest.raises(WeightsMismatch, match="bias: not the same in both files"):
        write_delta(weight_file(0), fewer, out)
    damaged = tmp_path / "damaged.safetensors"
    raw = weight_file(1).read_bytes()
    damaged.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    for pair in ((damaged, weight_file(0)), (weight_file(0), damaged)):
        with pytest.raises(DigestMismatch, match="do not match the digest that the file records"):
            write_delta(*pair, out)
    assert not out.exists()
    before = weight_file(0).read_bytes()
    for place in (weight_file(0), weight_file(1)):
        with pytest.raises(Unsupported, match="replace a file that it is made from"):
            write_delta(weight_file(0), weight_file(1), place)
    assert weight_file(0).read_bytes() == before
    delta_file = write_delta(weight_file(0), weight_file(1), out).path
    with pytest.raises(WeightFileError, match="a delta; deltas are written between full weight files"):
        write_delta(delta_file, weight_file(1), tmp_path / "dd.safetensors")
    with pytest.raises(Unsupported, match="only local files can be written"):
        write_delta(weight_file(0), weight_file(1), "s3://bucket/d.safetensors")


def test_no_delta_takes_the_place_of_goldens(weight_file: WriteWeights, tmp_path: Path) -> None:
    goldens = tmp_path / "v9.goldens.safetensors"
    goldens.write_bytes(b"recorded")
    delta = write_delta(weight_file(0), weight_file(1), tmp_path / "d.safetensors").path
    writers: list[Callable[[], object]] = [
        lambda: write_delta(weight_file(0), weight_file(1), goldens),
        lambda: merge_deltas([delta], goldens),
        lambda: write_merged_set(weight_file(0), [delta], goldens),
    ]
    for write in writers:
        with pytest.raises(Unsupported, match=r"names in \*\.goldens\.safetensors are for goldens"):
            write()
    assert goldens.read_bytes() == b"recorded"


@pytest.mark.parametrize("name", ["x" * 255 + ".safetensors", "x\0.safetensors", "file/x.safetensors"])
def test_a_name_that_no_file_can_have_is_refused(name: str, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        WeightFileError, match=r"cannot be written \((File name too long|.*null byte|Not a directory|File exists)"
    ):
        write_delta(weight_file(0), weight_file(1), tmp_path / name)


@pytest.mark.parametrize("asked", [{"only": "weight"}, {"expect": "0" * 64}])
def test_problems_of_a_header_are_found_before_the_base_files_are_read(
    asked: dict[str, Any], tiny: TinyArtifact, weight_file: WriteWeights, delta: WriteDelta
) -> None:
    model = load(tiny.path, weights=weight_file(2))
    error = Unsupported if "only" in asked else UnexpectedWeights
    with pytest.raises(error, match=r"d0-1\.safetensors"):
        model.stage(delta(0, 1), onto=[("not there", "0" * 64)], **asked)
    assert serves(model, 2)
