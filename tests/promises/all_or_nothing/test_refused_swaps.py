"""Swaps that are refused, and reads that fail: after each the served model is unchanged."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests import ROOT
from tests.runtime.format.test_header import BROKEN
from tests.support import warm
from tests.support.arriving import arriving
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import (
    DigestMismatch,
    GraphMismatch,
    InputMismatch,
    OutOfMemory,
    SwapError,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.format.canonical import write_weight_file
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.memory import arena


def copy_of(path: Path, change: Callable[[bytearray], None]) -> Path:
    raw = bytearray(path.read_bytes())
    change(raw)
    copy = path.with_name("changed.safetensors")
    copy.write_bytes(raw)
    return copy


def with_header(path: Path, size: int) -> Path:
    """Return a copy whose header has a size."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = size.to_bytes(8, "little") + raw[8 : 8 + length].ljust(size)
    return copy_of(path, lambda copy: copy.__setitem__(slice(8 + length), header))


REFUSED: dict[str, tuple[Callable[[TinyArtifact, WriteWeights, Path], Path], type[SwapError], str]] = {
    "empty": (lambda t, w, p: copy_of(w(1), bytearray.clear), WeightFileError, "too few"),
    "truncated": (
        lambda t, w, p: copy_of(w(1), lambda raw: raw.__delitem__(slice(-1, None))),
        WeightFileError,
        "truncated",
    ),
    "too long": (lambda t, w, p: copy_of(w(1), lambda raw: raw.append(0)), WeightFileError, "1 bytes follow"),
    "a flipped bit": (
        lambda t, w, p: copy_of(w(1), lambda raw: raw.__setitem__(-1, raw[-1] ^ 1)),
        DigestMismatch,
        "the file records the digest",
    ),
    "a header for many models": (lambda t, w, p: with_header(w(1), 5 << 20), WeightFileError, "for this model at most"),
    "another graph": (
        lambda t, w, p: t.write(p, t.values(1), graph_id="1" * 64),
        GraphMismatch,
        "allow_other_graph=True",
    ),
    "a wrong weights id": (
        lambda t, w, p: copy_of(w(1), forge_weights_id),
        DigestMismatch,
        "records the weights id",
    ),
    "the artifact": (lambda t, w, p: t.path, WeightFileError, "an artifact, not a checkpoint"),
    "a part of an artifact": (
        lambda t, w, p: without_manifest(shutil.copytree(t.path, p / "part")),
        WeightFileError,
        "looks like an artifact whose manifest.json is missing",
    ),
}


def without_manifest(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder


def test_a_named_pipe_is_refused_at_once(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    model = load(tiny.path, weight_file(0))
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(WeightFileError):
        model.swap(tmp_path / "pipe.safetensors")
    for odd in ("a\0b", "\ud800", "x" * 5000):
        with pytest.raises(WeightFileError):
            model.swap(odd)
    model.swap(weight_file(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_must_lie_where_the_graph_runs(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    nested = torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)
    for odd, says in (
        (X.to("meta"), "one on meta"),
        (X.to_sparse(), "expected a dense tensor"),
        (nested, "expected a dense tensor, got a nested one"),
    ):
        with pytest.raises(InputMismatch, match=says):
            model(odd)


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_leftovers_of_an_interrupt_end_by_themselves(seconds: int, residency: str, tmp_path: Path) -> None:
    command = [warm.python(), "-m", "tests.promises.all_or_nothing.interrupts", str(tmp_path), residency, str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("raw", [raw for raw, _ in BROKEN.values()], ids=BROKEN)
def test_no_broken_file_touches_a_live_model(
    raw: bytes, tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)
    for residency in ("double", "single"):
        model = load(tiny.path, weight_file(0), residency=residency)
        for given in (path, arriving(path, 9)):
            with pytest.raises(WeightFileError):
                model.swap(given)
        assert (model.generation, serves(model, 0)) == (0, True)


def forge_weights_id(raw: bytearray) -> None:
    start = raw.index(b"weights_id") + len(rb"weights_id\":\"")
    raw[start : start + 64] = b"0" * 64


@pytest.mark.parametrize("form", ["path", "arriving"])
@pytest.mark.parametrize(("make", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_a_refused_swap_changes_nothing(
    form: str,
    make: Callable[[TinyArtifact, WriteWeights, Path], Path],
    error: type[SwapError],
    says: str,
    tiny: TinyArtifact,
    weight_file: WriteWeights,
    residency: str,
    tmp_path: Path,
) -> None:
    model = load(tiny.path, weight_file(0), residency=residency)
    identity = (model.weights_id, model.generation)
    bad = make(tiny, weight_file, tmp_path / "other.safetensors")
    if form == "arriving" and bad.is_dir():
        pytest.skip("a folder")
    for attempt in (model.swap, model.stage):
        with pytest.raises(error) as refused:
            attempt(arriving(bad, 50) if form == "arriving" else bad)
        assert says in str(refused.value)
        assert (model.weights_id, model.generation) == identity
        assert serves(model, 0)
    model.swap(weight_file(1))
    assert serves(model, 1)


def test_a_file_for_another_graph_is_taken_when_its_tensors_fit_and_the_caller_says_so(
    tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(0))
    other = tiny.write(tmp_path / "other.safetensors", tiny.values(1), graph_id="1" * 64)
    model.swap(other, allow_other_graph=True)
    assert serves(model, 1)


def test_a_file_of_another_model_is_called_that_first(tiny: TinyArtifact, tmp_path: Path) -> None:
    rows = [TensorRow(f"layers.{index:02}", "F32", (2,)) for index in range(40)]
    data = {row.name: [memoryview(bytes(8))] for row in rows}
    other = tmp_path / "other.safetensors"
    write_weight_file(other, rows, data, graph_id="1" * 64)
    with pytest.raises(GraphMismatch) as refused:
        load(tiny.path).swap(other)
    first, *problems, advice = str(refused.value).splitlines()
    assert "packed for another graph, 111111111111" in first
    assert (len(problems), problems[-1]) == (11, "  - and 34 more")
    assert "allow_other_graph" not in advice
    with pytest.raises(WeightsMismatch, match="refused, 44 problems"):
        load(tiny.path).swap(other, allow_other_graph=True)


@pytest.mark.parametrize("rename", [{}, {"weight": "w"}, {"tied": "again"}])
def test_files_of_other_tools_are_taken(rename: dict[str, str], tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({rename.get(name, name): value for name, value in tiny.values(5).items()}, path)
    model = load(tiny.path, path)
    assert serves(model, 5)
    assert model.weights_id == load(tiny.path, tiny.write(tmp_path / "ours.safetensors", tiny.values(5))).weights_id


class Maps:
    """Memory for a limited number of further sets of weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 100
        original = arena._map

        def limited(nbytes: int) -> mmap.mmap:
            self.left -= 1
            if self.left < 0:
                raise OSError("Cannot allocate memory")
            return original(nbytes)

        monkeypatch.setattr(arena, "_map", limited)


@pytest.mark.parametrize(
    ("residency", "keep", "left", "advice"),
    [
        ("double", None, 1, 'residency="single"'),
        ("double", "host", 2, "without keep_previous"),
        ("single", None, 0, "the model holds only one set of weights"),
    ],
)
def test_advice_fits_what_lacks_memory_while_loading(
    residency: Any, keep: Any, left: int, advice: str, tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    Maps(monkeypatch).left = left
    with pytest.raises(OutOfMemory, match=re.escape(advice)) as caught:
        load(tiny.path, residency=residency, keep_previous=keep)
    assert ('residency="single"' in str(caught.value)) == (residency == "double" and keep is None)


@pytest.mark.parametrize(("keep", "left", "advice"), [("host", 1, "without keep_previous"), (None, 0, "swap a delta")])
def test_advice_in_single_residency_is_not_single_residency(
    keep: Any, left: int, advice: str, tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny.path, weight_file(0), residency="single", keep_previous=keep)
    maps = Maps(monkeypatch)
    maps.left = left
    with pytest.raises(OutOfMemory, match=advice) as caught:
        model.swap(weight_file(1))
    assert "residency" not in str(caught.value)
    assert "only=" not in str(caught.value)  # parts of two sets are not what was trained
    assert serves(model, 0)
    assert not model.failed
    maps.left = 100
    model.swap(weight_file(1))
    if keep:
        maps.left = 0
        with pytest.raises(OutOfMemory, match=advice):
            model.rollback()
        assert serves(model, 1)
        assert not model.failed
        maps.left = 100
        model.rollback()
        assert serves(model, 0)


def test_a_header_has_room_for_other_tensors(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path)
    model.swap(with_header(weight_file(1), 4 << 20))
    assert serves(model, 1)


def test_an_index_and_the_headers_of_its_shards_are_bounded(tiny: TinyArtifact, tmp_path: Path) -> None:
    model, values = load(tiny.path), {"w": tiny.values(1).pop("weight"), **tiny.values(1)}
    del values["weight"]
    index = tmp_path / "model.safetensors.index.json"
    for name, value in values.items():
        safetensors.torch.save_file({name: value}, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in values}
    index.write_text(json.dumps({"weight_map": weight_map}))
    model.swap(index)
    index.write_text(json.dumps({"weight_map": weight_map}).ljust(3 << 20))
    with pytest.raises(WeightFileError, match="expected at most"):
        model.swap(index)
    index.write_text(json.dumps({"weight_map": weight_map}))
    for name in values:  # each is small enough by itself
        path = tmp_path / f"{name}.safetensors"
        with_header(path, 3 << 20).replace(path)
    with pytest.raises(WeightFileError, match="for this model at most"):
        model.swap(index)
    assert serves(model, 1)
