"""Folders by torch's HuggingFaceStorageWriter(save_distributed=True): the files of 2 and 4 processes, read in place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import warm
from tests.support.checkpoints import saved
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, WeightFileError, WeightsMismatch, load, read_weights
from weightswap_tools.diff import compare_weights
from weightswap_tools.tensor_set import open_set

# Rows over all ranks (FSDP2), or over a mesh of two dimensions: rows and columns, columns alone, and copies.
RANK = """
import os, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tests.exporter.checkpoints.test_parts_of_ranks import Net

warnings.simplefilter("ignore")
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=ranks)
model = Net()
if ranks == 2:
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.wide, model.last):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
else:
    mesh = init_device_mesh("cpu", (2, 2))
    cut = {"wide.weight": (Shard(0), Shard(1)), "conv.weight": (Shard(1), Shard(0)), "last.bias": (Shard(0), Shard(0))}
    cut |= {"wide.bias": (Replicate(), Replicate()), "last.weight": (Replicate(), Shard(1))}
    state = {
        name: distribute_tensor(value, mesh, cut[name]) if name in cut else value
        for name, value in model.state_dict().items()
    }
dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # all is saved; the threads of gloo may still run, and abort a process that leaves them behind
"""


class Net(nn.Module):
    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv1d(3, 5, 3)
        self.wide = nn.Linear(11, 65)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(65, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.wide(self.norm(self.conv(x)))))


X = torch.ones(2, 3, 13)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export(Net().eval(), (X,), out=tmp_path_factory.mktemp("net") / "net.artifact")


@pytest.fixture(scope="module", params=[2, 4])
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, ranks = tmp_path_factory.mktemp("parts") / "step-1", request.param
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [warm.python(), "-c", RANK]
    running = [subprocess.Popen([*command, *map(str, (rank, ranks, folder))], env=environment) for rank in range(ranks)]
    assert [rank.wait(300) for rank in running] == [0] * ranks
    assert len(list(folder.glob("shard-*.safetensors"))) == ranks
    return folder


@pytest.fixture
def torn(parts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(parts, tmp_path / "torn"))


def test_swaps_and_packs_give_the_weights_of_the_model(parts: Path, artifact: Artifact, tmp_path: Path) -> None:
    model = Net().eval()
    expected = pack(model, artifact, out=tmp_path / "expected.safetensors")
    other = pack(Net(7), artifact, out=tmp_path / "other.safetensors")
    served = load(artifact, other.path)
    receipt = served.swap(parts)
    assert receipt.weights_id == expected.weights_id
    assert receipt.source == str(parts)
    assert torch.equal(served(X), model(X))
    packed = pack(parts, artifact, out=tmp_path / "packed.safetensors")
    assert packed.path.read_bytes() == expected.path.read_bytes()


def test_the_folder_may_be_the_working_directory(
    parts: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(parts)
    served = load(artifact, ".")
    assert torch.equal(served(X), Net().eval()(X))
    assert served.swap(str(parts)).weights_id == served.weights_id


def test_tools_see_whole_tensors(parts: Path, artifact: Artifact, tmp_path: Path) -> None:
    state = Net().state_dict()
    with open_set(parts) as found:
        assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
            name: tuple(value.shape) for name, value in state.items()
        }
        assert set(found.files.values()) == {file.name for file in parts.iterdir()}
        assert found.tensors["wide.weight"].file == str(parts)
        assert found.tensors["wide.weight"].offset is None
        assert found.tensors["norm.num_batches_tracked"].file in found.files
        found.check(found.tensors)
    for name, value in read_weights(parts).items():
        assert np.array_equal(value, state[name].numpy())
    expected = pack(Net(), artifact, out=tmp_path / "expected.safetensors")
    assert compare_weights(parts, saved(tmp_path / "same.pt", state)).level == "same"
    assert compare_weights(parts, expected.path, artifact=artifact).level == "same"


@pytest.mark.parametrize("rank", ["first", "last"])
def test_a_lost_part_is_refused(rank: str, torn: Path, artifact: Artifact, tmp_path: Path) -> None:
    lost = sorted(torn.iterdir())[0 if rank == "first" else -1]
    lost.unlink()
    served = load(artifact, pack(Net(7), artifact, out=tmp_path / "other.safetensors").path)
    before = served.weights_id
    # a lost first part leaves a gap; without the last one what remains may be whole, but too small
    with pytest.raises((WeightFileError, WeightsMismatch)):
        served.swap(torn)
    with pytest.raises((WeightFileError, WeightsMismatch)):
        pack(torn, artifact, out=tmp_path / "torn.safetensors")
    assert served.weights_id == before


def test_the_part_of_one_rank_is_refused(parts: Path, artifact: Artifact) -> None:
    with pytest.raises(WeightsMismatch):
        load(artifact, min(parts.iterdir()))


def test_parts_of_an_older_save_with_more_ranks_are_refused(torn: Path, artifact: Artifact) -> None:
    last = max(torn.iterdir())
    shutil.copy(last, last.with_name("shard-00009-model-00001-of-00001.safetensors"))
    with pytest.raises(WeightFileError, match=r"two parts begin at \[.*Copy the files of all"):
        load(artifact, torn)
