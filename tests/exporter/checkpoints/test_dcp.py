"""Distributed checkpoints: put together from the chunks of several processes; damaged or hostile ones are refused."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support import warm
from tests.support.checkpoints import refuses, saved_distributed, tensors, weights_id
from tests.support.models import Does, Renamed
from weightswap_exporter import export, pack
from weightswap_exporter.checkpoints import dcp
from weightswap_exporter.checkpoints.dcp import read_metadata
from weightswap_runtime import Artifact, CheckpointError, WeightsMismatch
from weightswap_runtime.torch_tensors import tensor_bytes
from weightswap_tools.diff import compare_weights
from weightswap_tools.tensor_set import open_set

RANK = """
import os, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tests.support.models import Renamed

warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(5)
state = {key: value for key, value in Renamed().state_dict().items() if isinstance(value, torch.Tensor)}
placements = dict(zip(state, [Shard(0), Replicate(), Shard(1), Shard(0)], strict=True))
sharded = {key: distribute_tensor(value, mesh, [placements[key]]) for key, value in state.items()}
optimizer = {"exp_avg": distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]), "lr": 0.1}
dcp.save({"model": sharded, "optimizer": optimizer, "step": 7}, checkpoint_id=folder)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # all is saved; the threads of gloo may still run, and abort a process that leaves them behind
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of two processes: rows over both, columns over both, copies, and an uneven share of each."""
    folder = tmp_path_factory.mktemp("sharded") / "dcp"
    command = [warm.python(), "-c", RANK]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    return folder


def test_the_chunks_of_two_processes_make_up_the_weights(sharded: Path, renamed: Artifact, tmp_path: Path) -> None:
    chunks = {name: len(tensor.chunks) for name, tensor in read_metadata(sharded / ".metadata").items()}
    assert sorted(chunks.values()) == [1, 1, 2, 2, 2]
    torch.manual_seed(5)
    expected = pack(Renamed(), renamed, out=tmp_path / "expected.safetensors")
    packed = pack(sharded, renamed, out=tmp_path / "v.safetensors")
    assert packed.path.read_bytes() == expected.path.read_bytes()
    assert packed.level == "model"


def test_pieces_are_read_across_the_chunks_of_two_processes(sharded: Path) -> None:
    torch.manual_seed(5)
    state = tensors(Renamed().state_dict())
    with open_set(sharded) as found:
        assert found.level == "model"
        assert found.others == {"optimizer": 1}
        assert sorted(tensor.whole for tensor in found.tensors.values()) == [False, False, False, True]
        for name, tensor in found.tensors.items():
            expected = bytes(tensor_bytes(state[name]))
            for size in (1, 7, len(expected)):
                pieces = [bytearray(len(expected[begin:][:size])) for begin in range(0, len(expected), size)]
                for place, piece in enumerate(pieces):
                    tensor.read_into(memoryview(piece), place * size)
                assert b"".join(pieces) == expected
        found.check(found.tensors)


def test_columns_are_read_some_rows_at_a_time(
    sharded: Path, renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_id(sharded, renamed, tmp_path)
    monkeypatch.setattr(dcp, "PIECE", 1)
    assert weights_id(sharded, renamed, tmp_path) == expected


def test_a_chunk_that_is_stored_transposed(renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Renamed()
    state = {key: value.detach().t().contiguous().t() for key, value in model.named_parameters()}
    folder = saved_distributed(tmp_path / "dcp", state)
    packed = pack(folder, renamed, out=tmp_path / "v.safetensors")
    assert packed.weights_id == weights_id(model, renamed, tmp_path)
    for part in (1 << 20, 0):  # larger ones are not read again and again
        monkeypatch.setattr(dcp, "PART", part)
        with open_set(folder) as found:
            whole = {name for name, tensor in found.tensors.items() if tensor.whole}
        assert whole == (set() if part else {name for name in state if name.endswith("weight")})
        assert compare_weights(folder, packed.path, artifact=renamed).level == "same"


def test_metadata_of_torch_2_0(good: Path, renamed: Artifact, tmp_path: Path) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    def age(document: Any) -> None:
        for entry in document.state_dict_metadata.values():
            entry.properties = TensorProperties(dtype=entry.properties.dtype)
        del document.storage_meta, document.version

    folder = remade(Path(shutil.copytree(good, tmp_path / "dcp")), age)
    assert weights_id(folder, renamed, tmp_path) == weights_id(good, renamed, tmp_path)


def test_ranks_for_which_no_rows_are_left(good: Path, renamed: Artifact, tmp_path: Path) -> None:
    """With more ranks than rows, several have parts of no rows, all at the end."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    def add(document: Any) -> None:
        for name, entry in document.state_dict_metadata.items():
            offsets, sizes = torch.Size([entry.size[0], *[0] * (len(entry.size) - 1)]), torch.Size([0, *entry.size[1:]])
            first = document.storage_data[MetadataIndex(name, entry.chunks[0].offsets)]
            entry.chunks += [ChunkStorageMetadata(offsets, sizes)] * 2
            document.storage_data[MetadataIndex(name, offsets)] = first

    folder = remade(Path(shutil.copytree(good, tmp_path / "dcp")), add)
    assert weights_id(folder, renamed, tmp_path) == weights_id(good, renamed, tmp_path)


def remade(folder: Path, change: Callable[[Any], None]) -> Path:
    """Return a checkpoint whose metadata are changed by `change`."""
    path = folder / ".metadata"
    document = pickle.loads(path.read_bytes())
    change(document)
    path.write_bytes(pickle.dumps(document))
    return folder


def chunk_of(document: Any, name: str) -> Any:
    return next(info for index, info in document.storage_data.items() if index.fqn == name)


def placed(name: str, **values: Any) -> Callable[[Path], Path]:
    """Return a change of where a tensor's chunk is."""
    return lambda folder: remade(folder, lambda document: vars(chunk_of(document, name)).update(values))


def described(change: Callable[[Any], object]) -> Callable[[Path], Path]:
    """Return a change of what the metadata say of `layers.0.weight`."""
    return lambda folder: remade(folder, lambda document: change(document.state_dict_metadata["layers.0.weight"]))


def sized(*sizes: int) -> Callable[[Path], Path]:
    return described(lambda entry: setattr(entry.chunks[0], "sizes", torch.Size(sizes)))


def forgotten(folder: Path) -> Path:
    def forget(document: Any) -> None:
        stored = document.storage_data.items()
        document.storage_data = {index: info for index, info in stored if index.fqn != "layers.0.weight"}

    return remade(folder, forget)


def overlap(entry: Any) -> None:
    entry.chunks[0].sizes = torch.Size([2, 3])
    entry.chunks.append(type(entry.chunks[0])(torch.Size([1, 0]), torch.Size([1, 3])))


def retype(entry: Any) -> None:
    entry.properties.dtype, entry.size = torch.int32, torch.Size([3, 3])


class Arbitrary:
    """Runs `Path.touch` when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


class Shell:
    def __reduce__(self) -> Any:
        return (os.system, ("touch executed",))


def hostile(folder: Path, value: object) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(value))
    return folder


def hidden(document: Any) -> None:
    document.planner_data["layers.0.weight"] = Shell()


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def act(folder: Path) -> Path:
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    return act


def lost(folder: Path) -> Path:
    (folder / "__0_0.distcp").unlink()
    return folder


def deflated(folder: Path) -> Path:
    """Each chunk with its description compressed, and as long as it was."""

    def change(document: Any) -> None:
        raw = (folder / "__0_0.distcp").read_bytes()
        written = b""
        for info in document.storage_data.values():
            chunk, made = io.BytesIO(raw[info.offset : info.offset + info.length]), io.BytesIO()
            with zipfile.ZipFile(chunk) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
                for name in old.namelist():
                    new.writestr(name, old.read(name))
            info.offset, info.length = len(written), len(made.getvalue())
            written += made.getvalue()
        (folder / "__0_0.distcp").write_bytes(written)

    return remade(folder, change)


def many_times() -> Any:
    """A tuple of 2 ** 40 numbers, in 41 tuples."""
    value: Any = (1, 1)
    for _ in range(40):
        value = (value, value)
    return value


def wide(document: Any) -> None:
    next(iter(document.state_dict_metadata.values())).size = many_times()


def planned(document: Any) -> None:
    document.planner_data = dict.fromkeys(document.state_dict_metadata, (many_times(), many_times()))
    wide(document)


DATA, TOO_MUCH = "__0_0.distcp", "more work or memory than its length explains"
NO_METADATA = "not the metadata of a distributed checkpoint"
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no data file": (lost, "dcp/__0_0.distcp: missing, but the metadata names it. Save the"),
    "a cut off data file": (
        changed(DATA, lambda raw: raw[:4000]),
        "dcp/__0_0.distcp: cut off: it has 4000 bytes, but the metadata places tensors beyond them. Save the",
    ),
    "a data file of something else": (changed(DATA, lambda raw: b"?" * len(raw)), "The file is damaged or cut off"),
    "cut off metadata": (changed(".metadata", lambda raw: raw[:200]), f".metadata: {NO_METADATA}"),
    "empty metadata": (changed(".metadata", lambda raw: b""), NO_METADATA),
    "another pickle": (lambda folder: hostile(folder, {"a": 1}), "is not valid metadata of a checkpoint"),
    "metadata that run something": (lambda folder: hostile(folder, Shell()), "names posix.system, which"),
    "metadata that run a method": (lambda folder: hostile(folder, Arbitrary()), "names pathlib.Path.touch, which"),
    "something that runs among good metadata": (lambda folder: remade(folder, hidden), "names posix.system, which"),
    "a chunk that is nowhere": (forgotten, "layers.0.weight: the metadata does not locate its chunk at [0, 0]"),
    "a chunk beyond the tensor": (sized(4, 3), "layers.0.weight: its chunk [4, 3] at [0, 0] extends beyond its shape"),
    "a hole": (sized(2, 3), "layers.0.weight: its chunks have 6 elements, but its shape [3, 3] has 9"),
    "an overlap": (described(overlap), "its chunks are no grid: along dimension 0 parts end at 2, and one begins at 1"),
    "another dtype": (described(retype), "expected F32[3, 3], found I32[3, 3]"),
    "a file outside": (
        placed("layers.0.weight", relative_path="../__0_0.distcp"),
        "layers.0.weight: is stored in '../__0_0.distcp', outside the checkpoint's folder",
    ),
    "an extension": (
        placed("layers.0.weight", transform_descriptors=["zstd"]),
        "was written with extensions (['zstd']); save without them",
    ),
    "another chunk": (
        placed("layers.0.bias", offset=0, length=1577),
        "the chunk of layers.0.bias at byte 0 is not the torch.float32 [3] of the metadata",
    ),
    "compressed chunks": (deflated, "is compressed, which torch.save does not do"),
    "sizes that cannot be printed": (lambda folder: remade(folder, wide), TOO_MUCH),
    "keys that cannot be printed": (lambda folder: remade(folder, planned), TOO_MUCH),
    "a place that is no number": (placed("layers.0.weight", offset="0"), "is not valid metadata of a checkpoint"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {key.replace("layer.", ""): value.detach() for key, value in Renamed().named_parameters()}
    return saved_distributed(tmp_path_factory.mktemp("good") / "dcp", dict(sorted(state.items(), reverse=True)))


@pytest.mark.parametrize(("damage", "says"), BAD.values(), ids=BAD)
def test_damaged_and_hostile_checkpoints_are_refused(
    damage: Callable[[Path], Path], says: str, good: Path, renamed: Artifact, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(good, tmp_path / "dcp"))
    weights_id(folder, renamed, tmp_path)
    error = WeightsMismatch if says.startswith("expected") else CheckpointError
    message = refuses(error, says, damage(folder), renamed, tmp_path)
    assert ("missing, but" in message) <= (len(message.splitlines()) == 1)  # a missing file is said once
    assert not (tmp_path / "executed").exists()


def test_one_file_of_it_is_no_checkpoint(good: Path, renamed: Artifact, tmp_path: Path) -> None:
    says = "one file of a distributed checkpoint; give its folder"
    refuses(CheckpointError, says, next(good.glob("*.distcp")), renamed, tmp_path)


def test_reading_the_metadata_leaves_torch_as_it_is(good: Path, tmp_path: Path) -> None:
    """A pickle can set attributes of the classes that it names."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    name = StorageMeta.__module__.encode(), StorageMeta.__qualname__.encode()
    path = tmp_path / ".metadata"
    path.write_bytes(b"c%b\n%b\n(N}S'marked'\nI1\nstb." % name)
    with pytest.raises(CheckpointError):
        read_metadata(path)
    assert not hasattr(StorageMeta, "marked")
    pickle.loads(path.read_bytes())
    assert StorageMeta.marked == 1
    del StorageMeta.marked


def test_a_record_that_chunks_share_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time to check a small checkpoint would grow with the number of its chunks times the size of a file."""

    scaled = Does(lambda m, x: x * m.w, w=nn.Parameter(torch.ones(64)))
    artifact = export(scaled, (torch.ones(64),), out=tmp_path / "a")
    folder = saved_distributed(tmp_path / "dcp", {"w": torch.arange(64.0)})

    def share(document: Any) -> None:
        ((index, info),) = document.storage_data.items()
        entry = document.state_dict_metadata["w"]
        with (folder / info.relative_path).open("wb") as file:
            torch.save(torch.zeros(1 << 20)[:1], file)
        info.length = (folder / info.relative_path).stat().st_size
        kind = type(entry.chunks[0])
        entry.chunks = [kind(torch.Size([place]), torch.Size([1])) for place in range(64)]
        document.storage_data = {type(index)("w", torch.Size([place])): info for place in range(64)}

    checked: list[int] = []
    check = dcp.is_damaged
    monkeypatch.setattr(dcp, "is_damaged", lambda *args: (checked.append(1), check(*args))[1])
    assert pack(remade(folder, share), artifact, out=tmp_path / "w.safetensors").nbytes == 256
    assert checked == [1]


def test_damage_to_what_is_not_wanted_does_not_matter(sharded: Path, renamed: Artifact, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "dcp"))
    source = placed("optimizer.exp_avg", relative_path="nowhere.distcp")(folder)
    assert pack(source, renamed, out=tmp_path / "v.safetensors").level == "model"


@given(st.data())
def test_chunks_that_do_not_cover_a_tensor_once_are_noticed(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    edges = [list(pairwise(cut)) or [(0, 0)] for cut in cuts]
    places = [tuple(zip(*place, strict=True)) or ((), ()) for place in product(*edges)]
    blocks = [(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True))) for begins, ends in places]
    assert list(dcp._gaps(shape, data.draw(st.permutations(blocks)))) == []
    moved = data.draw(st.integers(0, len(blocks) - 1))
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    blocks[moved] = offsets, blocks[moved][1]
    covered = np.zeros(shape, int)
    for begins, sizes in blocks:
        covered[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))] += 1
    over = any(begin + size > whole for begin, size, whole in zip(*blocks[moved], shape, strict=True))
    assert bool(list(dcp._gaps(shape, blocks))) == (over or not (covered == 1).all())


def test_the_metadata_of_hundreds_of_ranks_is_read(tmp_path: Path) -> None:
    """Its lists of chunks are mostly references, which cost more for each byte than anything else."""
    rows, ranks, names = 16, 1024, [f"layers.{index}.weight" for index in range(6)]
    described, stored = {}, {}
    for name in names:
        chunks = [ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, 64])) for rank in range(ranks)]
        described[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([rows * ranks, 64]), chunks)
        for index, chunk in enumerate(chunks):
            stored[MetadataIndex(name, chunk.offsets, index)] = _StorageInfo(f"__{index}_0.distcp", 0, 4096)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(described, {}, stored)))
    assert read_metadata(tmp_path / ".metadata").keys() == set(names)
