"""Broken and hostile pickles in every reader of them: each is refused, soon, and nothing is packed."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.exporter.checkpoints import bombs
from tests.support import warm
from tests.support.checkpoints import (
    refuses,
    saved,
    saved_before_zip,
    saved_distributed,
    saved_shards,
    tensors,
    weights_id,
)
from tests.support.models import Renamed
from tests.support.program import said
from weightswap_runtime import Artifact, CheckpointError, WeightFileError, WeightsMismatch, WeightswapError
from weightswap_tools.diff import compare_weights

Edit = Callable[[bytes], bytes]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return tensors(Renamed().state_dict())


def rezipped(raw: bytes, edit: Callable[[str, bytes], bytes | None], **options: Any) -> bytes:
    """Return a zip whose records are changed, with checksums that fit; None leaves a record out."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(made, "w", **options) as new:
        for name in old.namelist():
            if (record := edit(name.partition("/")[2], old.read(name))) is not None:
                new.writestr(name, record)
    return made.getvalue()


def record(wanted: str, change: Callable[[bytes], bytes | None]) -> Edit:
    return lambda raw: rezipped(raw, lambda name, content: change(content) if name == wanted else content)


def described(old: bytes, new: bytes) -> Edit:
    """Return a change of the pickle that describes the tensors."""

    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return record("data.pkl", change)


def directory(wanted: str, place: int, form: str, value: Callable[[bytes], int]) -> Edit:
    """Return a change of a field of a record's entry in the zip's directory."""

    def change(raw: bytes) -> bytes:
        raw = rezipped(raw, lambda name, content: content)
        found = [place for place in range(len(raw)) if raw.startswith(b"PK\1\2", place)]
        entry = next(each for each in found if raw[each + 46 :].partition(b"PK")[0].endswith(wanted.encode()))
        changed = bytearray(raw)
        struct.pack_into(form, changed, entry + place, value(raw))
        struct.pack_into("<I", changed, entry + 16, 0)  # no checksum
        return bytes(changed)

    return change


def twice(raw: bytes) -> bytes:
    made = io.BytesIO(rezipped(raw, lambda name, content: content))
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr(archive.namelist()[0].partition("/")[0] + "/DATA/0", bytes(4))
    return made.getvalue()


# Of a tensor of 9 numbers; the first storage has its values.
BROKEN: dict[str, tuple[Edit, str]] = {
    "a storage that is shorter than its tensor": (record("data/0", lambda content: content[:8]), "data/0 has 8 bytes"),
    "a storage without bytes": (record("data/0", lambda content: b""), "data/0 has 0 bytes, its tensors need 36"),
    "a storage that is longer": (record("data/0", lambda content: content * 2), "data/0 has 72 bytes"),
    "no storage": (record("data/0", lambda content: None), ""),
    "a storage whose elements are larger": (described(b"FloatStorage", b"DoubleStorage"), "its tensors need 72"),
    "a tensor that is larger than its storage": (described(b"QK\x00K\x03K\x03", b"QK\x00K\x04K\x03"), ""),
    "a tensor that ends beyond its storage": (described(b"QK\x00K\x03K\x03", b"QK\x01K\x03K\x03"), ""),
    "a tensor that begins before its storage": (described(b"QK\x00K\x03K\x03", b"QJ\xff\xff\xff\xffK\x03K\x03"), ""),
    "steps beyond the storage": (described(b"K\x03K\x01\x86", b"K\x7fK\x01\x86"), ""),
    "another byte order": (record("byteorder", lambda content: b"big"), "another byte order"),
    "a record that is there twice": (twice, "a name is there twice"),
    "a record that is said to be longer than what is stored": (
        directory("data/0", 24, "<I", lambda raw: 1 << 30),
        "is compressed",
    ),
    "a record beyond the zip": (directory("data/0", 42, "<I", lambda raw: len(raw) + 9), ""),
    "a record where another is": (directory("data/0", 42, "<I", lambda raw: raw.index(b"PK\3\4", 1)), ""),
    "no description": (record("data.pkl", lambda content: None), ""),
    "an empty description": (record("data.pkl", lambda content: b""), ""),
    "half a description": (record("data.pkl", lambda content: content[: len(content) // 2]), ""),
}


def in_pt(folder: Path, edit: Edit) -> Path:
    path = saved(folder / "c.pt", state() | {"layers.0.weight": torch.arange(9.0).view(3, 3)})
    path.write_bytes(edit(path.read_bytes()))
    return path


def in_shard(folder: Path, edit: Edit) -> Path:
    saved_shards(folder / "hf", state(), ".bin")
    for path in (folder / "hf").glob("*.bin"):
        with zipfile.ZipFile(path) as archive:
            sizes = {name.partition("/")[2]: archive.getinfo(name).file_size for name in archive.namelist()}
        if sizes["data/0"] == 36:
            path.write_bytes(edit(path.read_bytes()))
            return folder / "hf"
    raise AssertionError("no shard begins with nine numbers")


def in_chunk(folder: Path, edit: Edit) -> Path:
    """Change the chunk of a distributed checkpoint, and its place in the metadata."""
    saved_distributed(folder / "dcp", state())
    metadata = pickle.loads((folder / "dcp" / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "layers.0.weight")
    file = folder / "dcp" / info.relative_path
    raw = file.read_bytes()
    changed = edit(raw[info.offset : info.offset + info.length])
    info.offset, info.length = len(raw), len(changed)
    file.write_bytes(raw + changed)
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder / "dcp"


READERS: dict[str, Callable[[Path, Edit], Path]] = {"a .pt": in_pt, "a shard": in_shard, "a chunk": in_chunk}


def fill(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name.replace(".layer.", ".")])


@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_what_is_not_broken_is_packed(make: Callable[[Path, Edit], Path], renamed: Artifact, tmp_path: Path) -> None:
    path = make(tmp_path, lambda raw: rezipped(raw, lambda name, content: content))
    weights_id(path, renamed, tmp_path)
    assert compare_weights(path, path).level == "same"


@pytest.mark.parametrize(("edit", "says"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_every_extent_is_checked_against_its_record(
    make: Callable[[Path, Edit], Path], edit: Edit, says: str, renamed: Artifact, tmp_path: Path
) -> None:
    path = make(tmp_path, edit)
    for code in ({}, {"model": Renamed(), "load": fill}):
        refuses(WeightswapError, says, path, renamed, tmp_path, **code)
    with pytest.raises(WeightswapError):
        compare_weights(path, path)


def pickles_of(raw: bytes) -> tuple[list[bytes], bytes]:
    """Return the five pickles of an old file, and what follows them."""
    file = io.BytesIO(raw)
    found = []
    for _ in range(5):
        begin = file.tell()
        list(pickletools.genops(file))
        found.append(raw[begin : file.tell()])
    return found, raw[file.tell() :]


def relisted(change: Callable[[list[bytes], bytes], bytes]) -> Edit:
    """Return a change of the five pickles of an old file, of which the last lists the storages, and of the rest."""
    return lambda raw: change(*pickles_of(raw))


OLD: dict[str, Edit] = {
    "storages that are not listed": relisted(lambda found, rest: b"".join(found[:4]) + pickle.dumps([], 2)),
    "storages of which one is listed": relisted(
        lambda found, rest: b"".join(found[:4]) + pickle.dumps(pickle.loads(found[4])[:1], 2) + rest
    ),
    "a storage that is said to be larger": relisted(
        lambda found, rest: b"".join(found) + struct.pack("<q", 10**12) + rest[8:]
    ),
    "values that are cut off": lambda raw: raw[:-9],
    "no list of storages": relisted(lambda found, rest: b"".join(found[:4])),
    "a description that is cut off": relisted(lambda found, rest: b"".join(found[:4])[:-9]),
    "a tensor that is larger than its storage": lambda raw: raw.replace(b"QK\x00K\x03K\x03", b"QK\x00K\x04K\x03"),
}


@pytest.mark.parametrize("edit", OLD.values(), ids=OLD)
def test_storages_of_files_before_torch_1_6_are_all_there(edit: Edit, renamed: Artifact, tmp_path: Path) -> None:
    path = saved_before_zip(tmp_path / "c.pth", state())
    assert weights_id(path, renamed, tmp_path) == weights_id(state(), renamed, tmp_path)
    changed = edit(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    refuses(CheckpointError, "", path, renamed, tmp_path)
    with pytest.raises(CheckpointError):
        compare_weights(path, path)
    assert "c.pth" in said("inspect", path, status=1)


def test_views_that_repeat_some_values_are_read(tmp_path: Path) -> None:
    """As tied layers, windows, and masks do: a few times what is stored, and up to 64 MiB beyond it."""
    weight = torch.randn(100, 100)
    state = {f"layers.{index}": weight for index in range(50)} | {"half": weight[50:], "t": weight.t()}
    state |= {"mask": torch.zeros(1).expand(1 << 20), "windows": weight.view(-1).unfold(0, 100, 50)}
    path = saved(tmp_path / "c.pt", state)
    assert compare_weights(path, path).level == "same"


SHORT = [name for name, pickled in bombs.PICKLES.items() if len(pickled) < 20_000]
MEMORY = 200 << 20


@pytest.mark.parametrize(
    ("reader", "names"),
    [
        *((reader, SHORT) for reader in bombs.READERS if reader in ("a .pt", "before torch 1.6", "metadata")),
        ("files", [*bombs.FILES]),
        *(pytest.param(reader, [], marks=pytest.mark.slow) for reader in bombs.READERS),
    ],
)
def test_no_small_file_takes_much_time_or_memory(reader: str, names: list[str], tmp_path: Path) -> None:
    command = [warm.python(), "-m", bombs.__name__, reader, str(tmp_path), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["name"] for each in found} == set(names or bombs.PICKLES), "what is missing took too long"
    family = {"accepted", *(error.__name__ for error in (CheckpointError, WeightFileError, WeightsMismatch))}
    assert [each for each in found if not family.issuperset(each["outcomes"]) or each["grown"] > MEMORY] == []
