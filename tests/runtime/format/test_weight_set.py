"""Weight sets in one file or several: the choice of a file in a directory, and the errors of a wrong index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.descriptors import few_descriptors
from weightswap_runtime import WeightFileError, read_weights
from weightswap_runtime.format import weight_set as weightset
from weightswap_runtime.format.safetensors import WeightFile
from weightswap_runtime.format.weight_set import open_weights

VALUES = {name: np.full((2, size), size, np.float32) for size, name in enumerate("abcd", start=1)}
SHARDS = {"model-1.safetensors": ("a", "d"), "model-2.safetensors": ("b", "c")}
INDEX = "model.safetensors.index.json"


def write_shards(folder: Path, shards: dict[str, tuple[str, ...]] = SHARDS) -> dict[str, str]:
    for name, keys in shards.items():
        safetensors.numpy.save_file({key: VALUES[key] for key in keys}, folder / name)
    weight_map = {key: name for name, keys in shards.items() for key in keys}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 80}, "weight_map": weight_map}))


def read(path: Path) -> dict[str, list[float]]:
    values = {}
    with open_weights(path) as opened:
        for name, tensor in opened.tensors.items():
            raw = Path(tensor.source.where).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
            values[name] = np.frombuffer(raw, np.float32).reshape(tensor.shape).tolist()
        opened.check_unchanged()
    assert all(file.source.fd == -1 for file in opened.files)
    return values


WANTED = {name: value.tolist() for name, value in VALUES.items()}


@pytest.mark.parametrize("name", ["", INDEX], ids=["directory", "index"])
def test_shards_are_one_set(name: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert read(tmp_path / name) == WANTED


def test_a_link_that_is_turned_while_shards_are_opened_gives_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, factor in (("one", 1), ("two", 2)):
        (tmp_path / version).mkdir()
        write_shards(tmp_path / version)
        for name in SHARDS:
            path = tmp_path / version / name
            values = {key: value * factor for key, value in safetensors.numpy.load_file(path).items()}
            safetensors.numpy.save_file(values, path)
    link = tmp_path / "current"
    link.symlink_to("one")

    def opened(path: Path, *_: object) -> WeightFile:
        file = WeightFile(path)
        link.unlink(missing_ok=True)
        link.symlink_to("two")
        return file

    monkeypatch.setattr(weightset, "WeightFile", opened)
    assert read(link) == WANTED


def test_a_folder_that_is_replaced_while_shards_are_opened_gives_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("current", "next"):
        (tmp_path / folder).mkdir()
        write_shards(tmp_path / folder)

    def opened(path: Path, *rest: Any) -> WeightFile:
        file = WeightFile(path, *rest)
        if path.name == "model-1.safetensors":
            (tmp_path / "current").rename(tmp_path / "last")
            (tmp_path / "next").rename(tmp_path / "current")
        return file

    monkeypatch.setattr(weightset, "WeightFile", opened)
    match = r"model-1\.safetensors: was replaced while .* Try again"
    with pytest.raises(WeightFileError, match=match):
        open_weights(tmp_path / "current")
    monkeypatch.undo()
    assert read(tmp_path / "last") == WANTED


def many_shards(folder: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    values = {f"t{number:03}": np.full(5, number, np.float32) for number in range(200)}
    for name, value in values.items():
        safetensors.numpy.save_file({name: value}, folder / f"{name}.safetensors")
    write_index(folder, {name: f"{name}.safetensors" for name in values})
    return folder / INDEX, values


def test_only_some_of_many_shards_are_open_at_a_time(tmp_path: Path) -> None:
    index, values = many_shards(tmp_path)
    with few_descriptors():
        found = read_weights(index)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("change", ["replaced", "written", "gone"])
def test_a_shard_that_is_not_the_same_when_it_is_read_is_refused(change: str, tmp_path: Path) -> None:
    index, values = many_shards(tmp_path)
    last = tmp_path / "t199.safetensors"
    with open_weights(index) as opened:
        tensor = opened.tensors["t199"]
        memory = memoryview(bytearray(tensor.nbytes))
        tensor.source.read_into([memory], tensor.offset)
        assert memory == values["t199"].tobytes()
        if change == "replaced":
            other = tmp_path / "other"
            safetensors.numpy.save_file({"t199": values["t198"]}, other)
            os.utime(other, ns=(0, last.stat().st_mtime_ns))
            other.replace(last)
        elif change == "written":
            safetensors.numpy.save_file({"t199": values["t198"]}, last)
            os.utime(last, ns=(0, 0))
        else:
            last.unlink()
        with pytest.raises(WeightFileError, match=r"t199.*(while it was read|no such file|No such file)"):
            tensor.source.read_into([memory], tensor.offset)
        with pytest.raises(WeightFileError, match="t199"):
            opened.check_unchanged()


def test_a_folder_that_leads_in_circles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(WeightFileError, match="cannot be opened"):
        read(tmp_path / "circle" / "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "model-00001-of-00001.safetensors"])
def test_a_directory_with_one_file(name: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file(VALUES, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert read(tmp_path) == WANTED


def test_a_file_beside_shards_is_taken_with_a_warning(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "other.safetensors.index.json")
    safetensors.numpy.save_file({"a": VALUES["b"]}, tmp_path / "model.safetensors")
    assert read(tmp_path) == {"a": VALUES["b"].tolist()}
    (tmp_path / "other.safetensors.index.json").rename(tmp_path / INDEX)
    with pytest.warns(UserWarning, match=r"holds model\.safetensors, which is taken, .*index\.json with shards"):
        assert read(tmp_path) == {"a": VALUES["b"].tolist()}


def test_shards_may_be_links_and_lie_in_folders_below(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    (snapshot / "parts").mkdir(parents=True)
    write_shards(snapshot, {"parts/one.safetensors": ("a", "b", "c", "d")})
    (snapshot / "parts/one.safetensors").rename(tmp_path / "blobs" / "0123")
    (snapshot / "parts/one.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    assert read(snapshot) == WANTED


def missing_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-2.safetensors").unlink()


def truncated_shard(folder: Path) -> None:
    write_shards(folder)
    shard = folder / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])


def escaping(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        safetensors.numpy.save_file(VALUES, folder.parent / "outside.safetensors")
        write_index(folder, dict.fromkeys(VALUES, name.replace("@", str(folder.parent))))

    return write


def contradicting(change: dict[str, str]) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, write_shards(folder) | change)


def lacking(folder: Path) -> None:
    weight_map = write_shards(folder)
    del weight_map["d"]
    write_index(folder, weight_map)


def several(folder: Path) -> None:
    for name in ("one", "two"):
        safetensors.numpy.save_file(VALUES, folder / f"{name}.safetensors")


def several_indices(folder: Path) -> None:
    safetensors.numpy.save_file(VALUES, folder / "single.safetensors")
    for name in ("one", "two"):
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "single.safetensors"}}))


def lost(*numbers: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for number in numbers:
            safetensors.numpy.save_file(VALUES, folder / f"model-{number:05}-of-00003.safetensors")

    return write


def adapter_beside(folder: Path, name: str) -> None:
    for each in (name, "adapter_config.json", "adapter_model.safetensors"):
        (folder / each).touch()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (missing_shard, "names the shard model-2.safetensors, which is missing"),
    "truncated shard": (truncated_shard, "model-2.safetensors: the tensors need 40 bytes, the file holds 36"),
    "escapes upwards": (escaping("../outside.safetensors"), "expected the name of a .safetensors file in the index's"),
    "escapes below": (escaping("a/../../outside.safetensors"), "expected the name of a .safetensors file in the index"),
    "absolute": (escaping("@/outside.safetensors"), "expected the name of a .safetensors file in the index's folder"),
    "another kind of file": (escaping("weights.bin"), "names the shard 'weights.bin'; expected"),
    "a key in another shard": (contradicting({"a": "model-2.safetensors"}), "'a' is not in model-2.safetensors"),
    "a key nowhere": (contradicting({"e": "model-2.safetensors"}), "'e' is not in model-2.safetensors"),
    "a tensor that it lacks": (lacking, "model-1.safetensors has 'd' (F32[2, 4]), the index does not list it"),
    "not JSON": (lambda folder: (folder / INDEX).write_text("{"), "not an index of safetensors shards"),
    "no map": (lambda folder: (folder / INDEX).write_text("{}"), "`weight_map`"),
    "a map of numbers": (lambda folder: write_index(folder, {"a": 1}), "Expected `str`, got `int`"),
    "an empty map": (lambda folder: write_index(folder, {}), "an index without tensors"),
    "a pipe": (lambda folder: os.mkfifo(folder / INDEX), "cannot be opened (not a regular file)"),
    "an empty directory": (lambda folder: None, "a directory without a .safetensors file"),
    "a pickled checkpoint": (
        lambda folder: (folder / "pytorch_model.bin").write_bytes(b""),
        "holds pytorch_model.bin, which is pickled",
    ),
    "several files": (several, "holds 2 candidates (one.safetensors, two.safetensors) and no model.safetensors"),
    "several indices beside a file": (
        several_indices,
        "holds 2 candidates (one.safetensors.index.json, two.safetensors.index.json) and no model.safetensors",
    ),
    "an adapter of old": (
        lambda folder: (folder / "adapter_model.bin").write_bytes(b""),
        "holds adapter_model.bin, a PEFT adapter and not a model's weights. Merge it into the model first",
    ),
    "an adapter beside a model": (
        lambda folder: adapter_beside(folder, "model.safetensors"),
        "holds a PEFT adapter (adapter_config.json) beside model.safetensors, and transformers would load both",
    ),
    "an adapter beside an index": (
        lambda folder: adapter_beside(folder, INDEX),
        "for the model without it, give the path of model.safetensors.index.json",
    ),
    "a lost index": (
        lost(1, 2, 3),
        "checkpoint: holds 3 of 3 shards, but not their index, model.safetensors.index.json. Copy that too",
    ),
    "a lost index and shards": (lost(2), "holds 1 of 3 shards, but not their index"),
}


@pytest.mark.parametrize(("damage", "says"), BAD.values(), ids=BAD)
def test_a_wrong_directory_is_refused_with_a_reason(
    damage: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    damage(folder)
    with pytest.raises(WeightFileError) as refused:
        open_weights(folder)
    assert says in str(refused.value)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(WeightFileError, match="expected the path or URL of a weight file, got a int"):
        open_weights(3)  # type: ignore[arg-type]
