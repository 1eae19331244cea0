"""Each model of the zoo: exported from a skeleton, swapped from its own checkpoints, equal to eager bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import on_every_device
from tests.support.arriving import arriving
from tests.support.setups import equal
from tests.zoo.conftest import Exported, Shelf
from tests.zoo.entries import BY_NAME, Entry, named_tensors, randomised, save_pickled, save_pretrained
from tests.zoo.proving import deterministic, near, prove
from weightswap_exporter import pack
from weightswap_runtime import Artifact, load


def test_a_skeleton_exports_to_the_bytes_of_the_real_model(exported: Exported) -> None:
    hollow, real = (contents(artifact.path) for artifact in (exported.hollow, exported.real))
    assert hollow.keys() == real.keys()
    assert [name for name, content in hollow.items() if real[name] != content] == []


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an artifact."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@on_every_device
def test_the_proof(device: str, exported: Exported, tmp_path: Path) -> None:
    entry, artifact = exported.entry, exported.hollow
    models = {seed: randomised(entry, seed) for seed in (1, 2)}
    files = {seed: swappable(entry, model, artifact, tmp_path / f"v{seed}") for seed, model in models.items()}
    with deterministic(device):  # models choose other operators on other devices, so that eager is only near there
        prove(entry, artifact, "torch", models, files, equal if device == "cpu" else near(1e-4), device)


LARGE = ("llama-tied", "mixtral")


@pytest.mark.parametrize("name", ["vit", *(pytest.param(each, marks=pytest.mark.slow) for each in LARGE)])
def test_shards_and_state_dicts_give_the_same_weights_as_a_directory(name: str, shelf: Shelf, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    artifact, model = shelf(entry).hollow, randomised(entry, 4)
    served = load(artifact)
    saved = save_pretrained(model, tmp_path / "whole")
    whole = served.swap(saved).weights_id
    model.save_pretrained(tmp_path / "shards", max_shard_size="12KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3  # what is joined lies in several
    assert served.swap(tmp_path / "shards").weights_id == whole
    for source in (model, model.state_dict(), save_pickled(model, tmp_path / "pickled")):
        assert pack(source, artifact, out=tmp_path / "packed.safetensors").weights_id == whole
    arrives = arriving(saved / "model.safetensors")
    for given in (model, model.state_dict(), iter(model.state_dict().items()), arrives):
        assert served.swap(given).weights_id == whole


@pytest.mark.sampled(6)
def test_the_weights_in_a_module_are_those_that_pack_would_write(exported: Exported, tmp_path: Path) -> None:
    entry, artifact = exported.entry, exported.hollow
    model, served = randomised(entry, 5), load(artifact)
    packed = pack(model, artifact, out=tmp_path / "packed.safetensors").weights_id
    assert served.swap(model).weights_id == packed
    names = {name for weight in artifact.manifest.weights for name in weight.names}
    items = [item for item in named_tensors(model).items() if item[0] in names]
    assert served.swap(reversed(items), keys="fqn").weights_id == packed
    assert served.swap(arriving(tmp_path / "packed.safetensors")).weights_id == packed


def swappable(entry: Entry, model: Any, artifact: Artifact, folder: Path) -> Path:
    """A checkpoint of the entry's own kind; a pickle, which no server opens, is packed first."""
    saved = entry.save(model, folder)
    if saved.suffix == ".pt":
        return pack(saved, artifact, out=folder / "packed.safetensors").path
    return saved


def test_the_random_weights_differ_in_every_tensor(exported: Exported) -> None:
    one, two = (named_tensors(randomised(exported.entry, seed)) for seed in (1, 2))
    same = {name for name in one if torch.equal(one[name], two[name]) and one[name].numel()}
    assert same == exported.entry.state & one.keys()
