"""Comparisons of two files: matching of tensors, severity, what is read, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import fsspec
import msgspec
import pytest
import safetensors.torch
import torch

from tests.support.checkpoints import saved_shards
from tests.support.damage import damaged
from tests.support.loading import Fused
from tests.support.peaks import MEMORY
from tests.support.setups import different
from tests.support.tiny import TinyArtifact
from weightswap_exporter import export, pack
from weightswap_runtime import DigestMismatch, Unsupported, WeightFileError, WeightsMismatch, write_delta
from weightswap_runtime.format.canonical import pack_ranges, render_header
from weightswap_runtime.format.goldens import Environment, encode_goldens
from weightswap_tools.diff import WeightsDiff, compare_weights, streaming

NAN = float("nan")
Tensors = Mapping[str, torch.Tensor]
BASE = {
    "same": torch.arange(4.0),
    "w": torch.ones(3, 4),
    "gone": torch.tensor([1.0, 2.0]),
    "old.name": torch.arange(5.0),
    "cast": torch.tensor([1.0, 1.0009765625]),
    "shape": torch.ones(2, 2),
}


class Files:
    """Writes pairs of plain safetensors files and compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, tensors: Tensors) -> Path:
        path = self.folder / f"{name}.safetensors"
        safetensors.torch.save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path)
        return path

    def compare(self, before: Tensors, after: Tensors) -> WeightsDiff:
        return compare_weights(self.write("a", before), self.write("b", after))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_counters_have_no_part_in_the_relative_change(files: Files) -> None:
    before = {"norm.num_batches_tracked": torch.tensor(100), "w": torch.ones(3, 4)}
    after = {"norm.num_batches_tracked": torch.tensor(5000), "w": torch.full((3, 4), 1.25)}
    diff = files.compare(before, after)
    assert (diff.overall.rel_change, diff.overall.tensors) == (0.25, 1)
    told = [(tensor.name, tensor.level, tensor.rel_change) for tensor in diff.tensors]
    assert told == [("w", "changed", 0.25), ("norm.num_batches_tracked", "changed", 49.0)]
    alone = files.compare(before, after | {"w": before["w"]})
    assert (alone.overall.rel_change, alone.overall.tensors) == (49.0, 1)


def test_every_kind_of_difference(files: Files) -> None:
    after = {name: BASE[name] for name in ("same", "w", "cast", "shape")}
    after |= {"new.name": BASE["old.name"], "more": torch.zeros(2, 3)}
    after["w"] = torch.tensor([[1.0] * 4, [0.0] * 4, [1.0, NAN, 1.0, 1.0]])
    after["cast"] = after["cast"].bfloat16()
    after["shape"] = torch.ones(4)
    diff = files.compare(BASE, after)
    told = [(tensor.name, tensor.status, tensor.level, tensor.reasons) for tensor in diff.tensors]
    assert told == [
        ("w", "changed", "alarm", ("1 new NaN", "1 new dead row", "relative change 0.603")),
        ("gone", "removed", "alarm", ("removed, F32[2]",)),
        ("shape", "reshaped", "alarm", ("F32[2, 2] became F32[4]",)),
        ("more", "added", "notice", ("2 new dead rows", "added, F32[2, 3]")),
        ("cast", "retyped", "notice", ("F32[2] became BF16[2]",)),
        ("new.name", "renamed", "notice", ("renamed from old.name",)),
        ("same", "same", "same", ()),
    ]
    found = {tensor.name: tensor for tensor in diff.tensors}
    assert found["cast"].change is not None
    assert found["cast"].change.changed == 1
    assert (found["gone"].values_before is None, found["gone"].values_after is None) == (False, True)
    assert (found["shape"].change is None, found["shape"].values_after is None) == (True, False)
    assert diff.counts == dict.fromkeys(("changed", "removed", "reshaped", "added", "retyped", "renamed", "same"), 1)
    assert (diff.before.tensors, diff.after.tensors, diff.before.nbytes) == (6, 6, 4 * (4 + 12 + 2 + 5 + 2 + 4))
    assert (diff.level, diff.overall.tensors, diff.notices) == ("alarm", 2, ())


def test_the_order_within_a_level(files: Files) -> None:
    before = {f"layer.{index}.w": torch.ones(4, 2) for index in (2, 9, 10, 11)}
    after = {name: value.clone() for name, value in before.items()}
    after["layer.10.w"][0, 0] = NAN
    after["layer.9.w"][0] = NAN
    after["layer.11.w"] *= 1.01
    after["layer.2.w"] *= 1.25
    diff = files.compare(before, after)
    assert [tensor.name for tensor in diff.tensors] == ["layer.9.w", "layer.10.w", "layer.2.w", "layer.11.w"]
    assert [tensor.level for tensor in diff.tensors] == ["alarm", "alarm", "changed", "changed"]
    assert diff.tensors[2].rel_change == 0.25
    assert files.compare(before, after) == diff


def test_a_large_change_is_a_notice(files: Files) -> None:
    diff = files.compare({"w": torch.ones(4)}, {"w": torch.full((4,), 1.6)})
    assert (diff.level, diff.tensors[0].reasons) == ("notice", ("relative change 0.6",))


def test_equal_tensors_are_renamed_in_their_order(files: Files) -> None:
    zero = torch.zeros(3)
    before = {f"block.{index}.bias": zero for index in (2, 10)} | {"lost": zero, "other": torch.ones(3)}
    after = {f"h.{index}.b": zero for index in (2, 10)} | {"o": torch.ones(3), "typed": torch.ones(3).double()}
    diff = files.compare(before, after)
    renamed = {tensor.name: tensor.renamed_from for tensor in diff.tensors if tensor.status == "renamed"}
    assert renamed == {"h.2.b": "block.2.bias", "h.10.b": "block.10.bias", "o": "other"}
    others = {tensor.name: tensor.status for tensor in diff.tensors if tensor.status != "renamed"}
    assert others == {"lost": "removed", "typed": "added"}


def test_values_of_a_renamed_tensor_are_read_on_request(files: Files) -> None:
    tensor = torch.tensor([float("nan"), 1.0])
    paths = files.write("a", {"old": tensor}), files.write("b", {"new": tensor.clone()})
    assert compare_weights(*paths).tensors[0].values_after is None
    (found,) = compare_weights(*paths, values=True).tensors
    assert (found.status, found.renamed_from) == ("renamed", "old")
    assert found.values_after is not None
    assert (found.values_after.nan, found.values_after.norm) == (1, 1.0)


def test_names_of_something_else_give_a_notice(files: Files) -> None:
    before = {f"a.{index}": torch.full((2,), float(index)) for index in range(20)}
    after = {f"b.{index}": torch.full((2,), float(index) + 0.5) for index in range(20)}
    (notice,) = files.compare(before, after).notices
    assert "--artifact" in notice
    assert files.compare(before, {}).notices == ()


def test_empty_sets(files: Files) -> None:
    diff = files.compare({}, {})
    assert (diff.tensors, diff.level, diff.overall.rel_change) == ((), "same", 0.0)


@pytest.fixture
def packed(tiny: TinyArtifact, weight_file: Callable[[int], Path]) -> tuple[Path, Path]:
    return weight_file(1), weight_file(2)


def test_equal_digests_are_not_read(
    tiny: TinyArtifact, packed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny.values(1) | {"bias": torch.zeros(5)}
    other = tiny.write(tmp_path / "other.safetensors", values)
    read: list[int] = []
    diff = compare_weights(packed[0], other, progress=lambda done, total: read.append(total))
    assert {tensor.name: tensor.status for tensor in diff.tensors if tensor.level != "same"} == {"bias": "changed"}
    assert read == [2 * 5 * 4]
    assert next(tensor for tensor in diff.tensors if tensor.name == "weight").change is None
    full = compare_weights(packed[0], other, values=True)
    assert [tensor.level for tensor in full.tensors] == [tensor.level for tensor in diff.tensors]
    assert all(tensor.change is not None for tensor in full.tensors)
    assert diff.after.weights_id != diff.before.weights_id is not None


def test_damage_is_found_by_the_digests(packed: tuple[Path, Path]) -> None:
    damaged(packed[1])
    with pytest.raises(DigestMismatch, match=r"v2\.safetensors: refused, 1 problem") as refused:
        compare_weights(*packed)
    assert "its bytes do not match the digest that the file records" in str(refused.value)


def test_damage_in_a_renamed_tensor_is_reported_under_its_old_name(packed: tuple[Path, Path], files: Files) -> None:
    tensors = safetensors.torch.load_file(packed[0])
    copy = files.write("copy", {f"new.{name}": value for name, value in tensors.items()})
    damaged(packed[0])
    with pytest.raises(DigestMismatch) as refused:
        compare_weights(packed[0], copy, values=True)
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].partition(":")[0] in tensors


def test_truncated_files_are_named(files: Files) -> None:
    path = files.write("b", BASE)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightFileError, match=r"b\.safetensors"):
        compare_weights(files.write("a", BASE), path)


def test_files_that_change_meanwhile_are_named(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = files.write("a", BASE), files.write("b", BASE)
    read = streaming.Scan._read
    monkeypatch.setattr(streaming.Scan, "_read", lambda *arguments: (os.utime(paths[1]), read(*arguments))[1])
    with pytest.raises(WeightFileError, match=r"b\.safetensors: the file was written to while it was read"):
        compare_weights(*paths)


def test_shards_and_directories(files: Files, tmp_path: Path) -> None:
    diff = compare_weights(files.write("a", BASE), saved_shards(tmp_path / "shards", BASE, ".safetensors"))
    assert (diff.level, len(diff.tensors)) == ("same", len(BASE))


def test_urls(files: Files) -> None:
    paths = files.write("a", BASE), files.write("b", {name: value * 2 for name, value in BASE.items()})
    filesystem = fsspec.filesystem("memory")
    for path in paths:
        filesystem.pipe_file(f"/diffed/{path.name}", path.read_bytes())
    remote = compare_weights("memory://diffed/a.safetensors", "memory://diffed/b.safetensors")
    assert remote.tensors == compare_weights(*paths).tensors
    assert remote.after.where == "memory://diffed/b.safetensors"


def test_files_of_something_else_are_refused(packed: tuple[Path, Path], tmp_path: Path) -> None:
    delta, goldens = tmp_path / "d.safetensors", tmp_path / "v.goldens.safetensors"
    write_delta(*packed, delta)
    environment = Environment(torch="2", device="cpu", capability="", threads=1)
    goldens.write_bytes(encode_goldens([], {}, graph_id="", weights_id="", environment=environment, tolerance=None))
    says = "holds goldens, not weights; compare the weight files beside them"
    for path, said in ((delta, "a delta file"), (goldens, says)):
        with pytest.raises(Unsupported, match=said):
            compare_weights(packed[0], path)


def test_a_checkpoint_and_a_packed_file_under_the_names_of_an_artifact(
    tiny: TinyArtifact, packed: tuple[Path, Path], files: Files
) -> None:
    values = tiny.values(1)
    checkpoint = {"w": values["weight"], "bias": values["bias"] + 1, "again": values["tied"], "steps": values["steps"]}
    path = files.write("checkpoint", checkpoint | {"extra": torch.ones(1)})
    diff = compare_weights(packed[0], path, artifact=tiny.path)
    expected = dict.fromkeys(("weight", "tied", "steps"), "same") | {"bias": "changed"}
    assert {tensor.name: tensor.status for tensor in diff.tensors} == expected
    assert diff.after.ignored == ("extra",)
    plain = compare_weights(packed[0], path)
    assert {tensor.name for tensor in plain.tensors if tensor.status == "renamed"} == {"w", "again"}
    with pytest.raises(WeightsMismatch, match="weight: missing"):
        compare_weights(packed[0], files.write("foreign", {"x": torch.ones(1)}), artifact=tiny.path)


@torch.no_grad()
def test_weights_that_the_conversion_computes(tmp_path: Path) -> None:
    models = [different(lambda: Fused(4), seed) for seed in range(2)]
    artifact = export(models[0], (torch.zeros(2, 4),), out=tmp_path / "a.artifact")
    for index, model in enumerate(models):
        safetensors.torch.save_file(model.state_dict(), tmp_path / f"c{index}.safetensors")
        pack(tmp_path / f"c{index}.safetensors", artifact, out=tmp_path / f"v{index}.safetensors")
    names = [[tmp_path / f"{kind}{index}.safetensors" for index in range(2)] for kind in "cv"]
    (checkpoint, other), (packed, later) = names
    assert compare_weights(checkpoint, packed, artifact=artifact).level == "same"
    expected = {tensor.name: tensor.change for tensor in compare_weights(packed, later, values=True).tensors}
    for pair in ((checkpoint, later), (checkpoint, other), (packed, other)):
        diff = compare_weights(*pair, artifact=artifact)
        assert {tensor.name: tensor.change for tensor in diff.tensors} == expected


def test_tied_tensors_under_several_names(files: Files) -> None:
    value = torch.ones(3)
    diff = files.compare({"tied": value, "again": value}, {"tied": value})
    assert {tensor.name: tensor.status for tensor in diff.tensors} == {"tied": "same", "again": "removed"}


def test_the_document_is_plain_json(files: Files) -> None:
    after = BASE | {"w": torch.full((3, 4), NAN), "cast": torch.full((2,), 1e30)}
    diff = files.compare(BASE, after)
    document = msgspec.json.decode(msgspec.json.encode(diff))
    assert msgspec.convert(document, WeightsDiff).tensors[0].name == "w"
    zero = files.compare({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    assert msgspec.json.decode(msgspec.json.encode(zero))["tensors"][0]["change"]["rel_change"] is None


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from weightswap_tools.diff import compare_weights
diff = compare_weights(*sys.argv[1:])
print(diff.level, len(diff.tensors))
"""


def test_no_torch_is_needed(files: Files) -> None:
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
    before = {str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}
    after = {str(dtype): torch.zeros(3).to(dtype) for dtype in dtypes}
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, files.write("a", before), files.write("b", after)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("notice 4\n", "")


ALLOWED = 128 << 20


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_tensors(tmp_path: Path) -> None:
    size = 160 << 20  # bytes, in one tensor: 320 MB in both files
    header = render_header(pack_ranges([("w", "BF16", (1 << 10, size >> 11))]), {})
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, value in zip(paths, (b"\x80\x3f", b"\x81\x3f"), strict=True):
        path.write_bytes(header + value * (size // 2))
    command = [sys.executable, "-c", MEMORY, *map(str, paths)]
    level, grown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert level == "changed"
    assert int(grown) < ALLOWED < size
