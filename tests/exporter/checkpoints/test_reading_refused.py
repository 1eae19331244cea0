"""What pack, inspect and diff say of checkpoints that cannot be read, are damaged, or change."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.checkpoints import flipped, refuses, saved, saved_before_zip, saved_distributed
from tests.support.program import document, said
from tests.support.reading import FORMS, State, some_state, written
from weightswap_runtime import Artifact, CheckpointError, WeightswapError
from weightswap_tools.diff import compare_weights


class Arbitrary:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def scripted(path: Path) -> Path:
    layer = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    torch.jit.save(layer, path)
    return path


def cut(path: Path, keep: int) -> Path:
    return written(path, path.read_bytes()[:keep])


def cut_dcp(folder: Path) -> Path:
    return cut(saved_distributed(folder / "dcp", some_state()) / "__0_0.distcp", 900).parent


def another_zip(path: Path) -> Path:
    np.savez(path / "c", a=np.ones(1))
    return (path / "c.npz").rename(path / "c.pt")


def folder_of(path: Path, *names: str) -> Path:
    (path / "f").mkdir()
    for name in names:
        (path / "f" / name).write_text("?")
    return path / "f"


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}


IN_PARTS = {"optimizer": {"state": {"w": {"exp_avg": torch.ones(3)}}}}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a zip that is cut off": (
        lambda path: cut(saved(path / "c.pt", some_state()), -100),
        "c.pt: cut off: the end of the zip file is missing. Save it again, or copy it again.",
    ),
    "an old file that is cut off": (
        lambda path: cut(saved_before_zip(path / "c.pth", some_state()), -20),
        "c.pth: not a checkpoint that torch.load can open: cut off, damaged, or something else (unexpected EOF",
    ),
    "an old file that is cut off before its values": (
        lambda path: cut(saved_before_zip(path / "c.pth", some_state()), 200),
        "c.pth: not a checkpoint that torch.load can open: cut off, damaged, or something else (the end is missing)",
    ),
    "a global that is not allowed": (
        lambda path: saved(path / "c.pt", {"a": Arbitrary()}),
        "c.pt: holds more than tensors (it names posix.system), and unpickling it could run any code, so it was not "
        "opened. Save only model.state_dict()",
    ),
    "an old file with a global that is not allowed": (
        lambda path: saved_before_zip(path / "c.pt", {"a": Arbitrary()}),
        "c.pt: holds more than tensors (it names posix.system)",
    ),
    "TorchScript": (
        lambda path: scripted(path / "c.pt"),
        "c.pt: a TorchScript archive, expected a state dict. Save one where the model's source code is",
    ),
    "another zip": (another_zip, "c.pt: a zip file without the data.pkl that torch.save writes"),
    "no tensors": (
        lambda path: saved(path / "c.pt", {"epoch": 3}),
        "c.pt: holds no tensors with names; give a state dict",
    ),
    "weights where nobody looks": (
        lambda path: saved(path / "c.pt", {"net": {"w": torch.ones(1)}}),
        "c.pt: holds no tensors where a state dict is expected. It has 'net' (1 tensor): pass level='net' (--level)",
    ),
    "a list": (lambda path: saved(path / "c.pt", [1]), "c.pt: holds a list, expected a state dict"),
    "a sparse tensor": (
        lambda path: saved(path / "c.pt", {"w": torch.eye(3).to_sparse()}),
        "c.pt: w: torch.float32 torch.sparse_coo cannot be written as safetensors",
    ),
    "an empty file": (lambda path: written(path / "c.pt", b""), "c.pt: the file is empty. Save it again"),
    "an empty folder": (folder_of, "f: no checkpoint in this folder (it is empty); expected"),
    "a folder of something else": (
        lambda path: folder_of(path, "a.txt", "b.txt"),
        "f: no checkpoint in this folder (it holds a.txt, b.txt); expected .metadata",
    ),
}
BY_TOOLS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "chunks that are cut off": (cut_dcp, "__0_0.distcp: cut off: it has 900 bytes, but the metadata places tensors"),
    "an optimizer": (
        lambda path: saved(path / "c.pt", OPTIMIZER),
        "c.pt: holds the state of an optimizer, not weights; give the model's state dict",
    ),
    "an optimizer in a trainer's dict": (
        lambda path: saved(path / "c.pt", {"optimizer": OPTIMIZER, "epoch": 3}),
        "c.pt: holds the state of an optimizer, not weights",
    ),
    "a distributed optimizer": (
        lambda path: saved_distributed(path / "dcp", IN_PARTS),
        "dcp: holds the state of an optimizer, not weights",
    ),
    "a file of something else": (
        lambda path: written(path / "a.txt", b"nothing of interest"),
        "a.txt: damaged, or not a safetensors file",
    ),
    "nothing": (lambda path: path / "nowhere.pt", "nowhere.pt: cannot be opened (No such file or directory)"),
}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": torch.Tensor.conj,
    "negative": lambda value: value.conj().imag,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_bit_of_a_view_that_computes(view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    values = torch.randn(50, dtype=torch.complex64)
    path = saved(tmp_path / "c.pt", {"w": view(values)})
    assert compare_weights(path, path).level == "same"
    flipped(path, values)
    with pytest.raises(CheckpointError):
        compare_weights(path, path)


def test_a_name_that_some_take_for_several_lines(tmp_path: Path) -> None:
    path = saved(tmp_path / "a\fb\u2028c.pt", some_state())
    assert compare_weights(path, path).level == "same"


def test_a_tensor_that_is_more_than_there_is_memory(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"w": torch.zeros(1).expand(1 << 31, 1 << 30)})
    says = "c.pt: a tensor that can only be read whole takes 9223372036854775808 bytes"
    assert says in said("diff", path, path, status=1)


@pytest.mark.parametrize(("level", "named"), [("", "top level"), ("epoch_state", "level 'epoch_state'")])
def test_a_level_without_tensors_of_its_own(level: str, named: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"model": some_state(), "epoch_state": {"best": 3}})
    says = f"its {named} holds no tensors of its own; run without --level"
    assert says in said("inspect", path, "--level", level, status=1)


@pytest.mark.parametrize("name", [*REFUSED, *BY_TOOLS])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_refusals(name: str, renamed: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, says = (REFUSED | BY_TOOLS)[name]
    good, path = saved(tmp_path / "good.pt", {"w": torch.ones(1)}), make(tmp_path)
    for arguments in (("inspect", path), ("diff", good, path), ("diff", path, good)):
        assert says in said(*arguments, status=1)
        assert says in document(*arguments, status=1)["message"]
    if name in REFUSED:
        refuses(CheckpointError, says, path, renamed, tmp_path)
    assert not (tmp_path / "executed").exists()


def test_mappings_that_are_in_each_other(tmp_path: Path) -> None:
    """A few hundred bytes of pickle, and more paths than anybody can walk."""
    state: dict[str, Any] = {"w": torch.ones(2)}
    state |= {f"self{index}": state for index in range(30)}
    for _ in range(8):
        state = {"model": state} | {f"again{index}": state for index in range(30)}
    path = saved(tmp_path / "c.pt", state)
    level = ".".join(["model"] * 8)
    says = f"It has '{level}' (1 tensor), '{level.removesuffix('model')}again0' (1 tensor), "
    assert says in said("inspect", path, status=1)
    assert list(document("inspect", path, "--level", level)["tensors"]) == ["w"]


FUZZED = {
    "pt": "c.pt",
    "before torch 1.6": "c.pth",
    "bin shards": "shards/*.json",
    "distributed": "dcp/.metadata",
    "distributed, below model": "dcp/*.distcp",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "name"), FUZZED.items())
def test_whatever_a_file_holds_it_is_read_or_refused(form: str, name: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path, some_state())
    (part,) = tmp_path.glob(name)
    raw, chosen = part.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(60):
        mutated = bytearray(raw)
        for place in chosen.sample(range(len(raw)), chosen.randrange(4)):
            mutated[place] = chosen.randrange(256)
        part.write_bytes(mutated[: chosen.choice([len(raw), chosen.randrange(len(raw))])])
        try:
            compare_weights(path, path)
        except WeightswapError:
            refused += 1
    assert refused > 30


DAMAGED: dict[str, tuple[Callable[[Path, State], Path], str]] = {
    "a .pt": (FORMS["pt"], "c.pt"),
    "shards": (FORMS["bin shards"], "shards/*-00001-*"),
    "distributed": (FORMS["distributed"], "dcp/*.distcp"),
}


@pytest.mark.parametrize(("make", "name"), DAMAGED.values(), ids=DAMAGED)
def test_a_bit_that_is_not_as_it_was_written_is_found(
    make: Callable[[Path, State], Path], name: str, tmp_path: Path
) -> None:
    state = some_state()
    path = make(tmp_path, state)
    assert compare_weights(path, path).level == "same"
    flipped(next(tmp_path.glob(name)), state["embed.weight"])
    with pytest.raises(CheckpointError):
        compare_weights(path, path)
    assert "CRC-32" in said("diff", path, path, status=1)
    said("inspect", path)  # reads no values


@pytest.mark.parametrize("form", ["pt", "distributed"])
def test_a_checkpoint_that_changes_while_it_is_compared(form: str, tmp_path: Path) -> None:
    state = some_state()
    path = FORMS[form](tmp_path, state)

    def overwrite(done: int, total: int) -> None:
        if done == total:
            FORMS[form](tmp_path, state | {"longer": torch.zeros(100)})

    with pytest.raises(CheckpointError):
        compare_weights(path, path, progress=overwrite)
