"""Checkpoints by torch in inspect and diff: results, ways of reading, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.checkpoints import saved, saved_distributed, saved_safetensors, tensors
from tests.support.loading import Fused
from tests.support.models import Does, Renamed
from tests.support.peaks import MEMORY
from tests.support.program import document, said
from tests.support.reading import FORMS, HOSTILE, State, some_state, written
from tests.support.setups import different
from tests.support.tiny import TinyArtifact
from weightswap_exporter import export, pack
from weightswap_runtime import Artifact, MissingExtra, WeightsMismatch
from weightswap_runtime.torch_tensors import tensor_bytes
from weightswap_tools import tensor_set as tensorsets
from weightswap_tools.diff import compare_weights
from weightswap_tools.tensor_set import SetRequest, TensorSet, open_set


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def plain(state: State) -> State:
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_what_is_in_a_checkpoint(make: Callable[[Path, State], Path], tmp_path: Path) -> None:
    state = some_state()
    path = make(tmp_path, state)
    told = document("inspect", path)
    assert (told["kind"], told["total_bytes"]) == ("checkpoint", 482)
    dtypes = dict.fromkeys(state, "F32") | {"layers.0.b": "BF16", "layers.1.w": "I64", "steps": "I64"}
    found = {name: (row["shape"], row["nbytes"], row["dtype"]) for name, row in told["tensors"].items()}
    assert found == {name: (list(tensor.shape), tensor.nbytes, dtypes[name]) for name, tensor in state.items()}
    ties = {name: row["tied_to"] for name, row in told["tensors"].items() if row["tied_to"]}
    distributed = path.name == "dcp"  # which stores what is tied twice
    assert ties == ({} if distributed else {"embed.weight": ["head.weight"], "head.weight": ["embed.weight"]})
    tree = said("inspect", path, "--tree")
    assert "── w  F32[6, 4]  96 B" in tree
    assert ("tied to head.weight" in tree) is not distributed
    text = said("inspect", path)
    assert f"level      {told['level'] or 'the top'}\n" in text
    assert "7 tensors, 482 B" in text
    assert said("inspect", path, "--html", tmp_path / "r.html").startswith("report")
    assert "Checkpoint: 7 tensors, 482 B" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("form", ["pt", "distributed"])
def test_the_level_that_is_shown_and_what_is_beside_it(form: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "b": torch.ones(1)}
    tree = {"epoch": torch.tensor(1), "state_dict": {"model": state}, "ema": {"w": torch.ones(2)}, "lr": 0.1}
    path = FORMS[form](tmp_path, tree)
    text = said("inspect", path)
    assert "level      state_dict.model\n" in text
    assert "beside it  the top (1 tensor), ema (1 tensor)\n" in text
    told = document("inspect", path, "--level", "ema")
    assert (told["level"], list(told["tensors"]), told["other_levels"]) == ("ema", ["w"], {})
    assert "no level 'emo'" in said("inspect", path, "--level", "emo", status=1)


def test_names_with_dots_are_no_levels(tmp_path: Path) -> None:
    """`model.` may be a part of each name, and not a key that a trainer has put around the state dict."""
    path = saved_distributed(tmp_path / "dcp", {"model.w": torch.ones(2), "model.b": torch.ones(1)})
    told = document("inspect", path)
    assert (told["level"], sorted(told["tensors"])) == ("", ["model.b", "model.w"])


def test_names_cannot_reach_a_terminal_or_a_browser(tmp_path: Path) -> None:
    path, page = (
        saved(tmp_path / "c.pt", {"state_dict": {HOSTILE: torch.ones(2)}, HOSTILE: {"x": torch.ones(1)}}),
        tmp_path / "r.html",
    )
    for command in (["inspect", path], ["inspect", path, "--tree"], ["inspect", path, "--html", page]):
        assert "\x1b" not in said(*command)
    assert "<img src=x" not in page.read_text()
    assert HOSTILE in document("inspect", path)["tensors"]
    refused = saved(tmp_path / "d.pt", {HOSTILE: torch.eye(3).to_sparse()})
    assert "<img src=x onerror=alert(1)>.\\x1b[31m[red]: torch" in said("inspect", refused, status=1)
    assert "\x1b" not in said("diff", path, path, "--html", page, "--all")
    assert "<img src=x" not in page.read_text()


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "columns": lambda tensor: tensor[:, ::2],
    "rows": lambda tensor: tensor[1:],
    "repeated": lambda tensor: tensor[:1].expand(3, -1),
    "row": lambda tensor: tensor[:1].t().contiguous().t(),
}


@settings(max_examples=25)
@given(data=st.data())
def test_every_piece_of_every_layout(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    form = data.draw(st.sampled_from(sorted(FORMS)))
    shape = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    dtype = data.draw(st.sampled_from(DTYPES))
    assume(form != "before torch 1.6" or dtype != torch.float8_e4m3fn)  # torch cannot read what it has written
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensor = layout(torch.randint(0, 2, shape, generator=generator).to(dtype))
    with open_set(FORMS[form](folder, {"other": torch.ones(3), "w": tensor})) as found:
        stored, expected = found.tensors["w"], bytes(tensor_bytes(tensor))
        assert stored.nbytes == len(expected)
        begin = data.draw(st.integers(0, len(expected)))
        end = data.draw(st.integers(begin, len(expected)))
        memory = bytearray(end - begin)
        stored.read_into(memoryview(memory), begin)
        assert memory == expected[begin:end]
        found.check(["w"])


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_the_same_tensors_in_another_form(make: Callable[[Path, State], Path], tmp_path: Path) -> None:
    state = some_state()
    other = saved_safetensors(tmp_path / "c.safetensors", plain(state))
    diff = compare_weights(make(new_folder(tmp_path / "made"), state), other)
    assert {tensor.name: tensor.status for tensor in diff.tensors} == dict.fromkeys(state, "same")
    assert (diff.overall.tensors, diff.overall.rel_change) == (0, 0.0)


@pytest.mark.parametrize("turned", [False, True])
def test_a_tied_tensor_of_which_the_other_has_one_name(turned: bool, tmp_path: Path) -> None:
    tied = torch.rand(4, 3)
    state = {"embed": tied, "head": tied, "gone": torch.ones(2), "also gone": torch.ones(2)}
    state["gone"] = state["also gone"]
    paths = [saved(tmp_path / "c.pt", state), tmp_path / "one.safetensors"]
    safetensors.torch.save_file({"embed": tied}, paths[1])
    diff = compare_weights(*(reversed(paths) if turned else paths))
    left = "added" if turned else "removed"
    assert {found.name: found.status for found in diff.tensors} == {"embed": "same", "gone": left, "also gone": left}
    assert diff.notices == (f"In {paths[0]} head is embed; the other set has only one of the names.",)
    names = {f"n{number}": tied for number in range(9)}
    diff = compare_weights(saved(tmp_path / "many.pt", state | names), paths[1])
    assert "head is embed, n0 is embed, n1 is embed, n2 is embed, n3 is embed and 5 more; the other" in diff.notices[0]


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_what_changed_is_told_as_of_safetensors_files(make: Callable[[Path, State], Path], tmp_path: Path) -> None:
    before, after = some_state(), some_state()
    after["old"] = before["older"] = torch.randn(3, 5).t()
    after["layers.0.w"] = before["layers.0.w"].clone()
    after["layers.0.w"][2, 3] = float("nan")
    expected, found = [], []
    for place, state in enumerate((before, after)):
        expected.append(saved_safetensors(tmp_path / f"{place}.safetensors", plain(state)))
        found.append(make(new_folder(tmp_path / f"{place}"), state))
    told = compare_weights(*found)
    assert told.tensors == compare_weights(*expected).tensors
    assert {"renamed", "changed", "same"} == set(told.counts)


def test_a_level_for_either_side(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 4), "b": torch.zeros(4)}
    ema = {name: tensor + 1 for name, tensor in state.items()}
    path = saved(tmp_path / "c.pt", {"model": state, "ema": ema})
    plain = saved_safetensors(tmp_path / "c.safetensors", ema)
    told = document("diff", path, path, "--level", "model", "--level", "ema")
    assert (told["before"]["level"], told["after"]["level"], told["counts"]) == ("model", "ema", {"changed": 2})
    text = said("diff", plain, path, "--level", "ema")
    assert "2 the same" in text
    assert f"{path}, level ema (2 tensors" in text
    assert "changed" in said("diff", plain, path)
    assert "leave --level out" in said("diff", plain, plain, "--level", "ema", status=2)
    assert "leave --level out" in said("inspect", plain, "--level", "ema", status=2)
    assert "or twice" in said("diff", path, path, *("--level", "a") * 3, status=2)


def test_two_levels_that_may_be_meant(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    path = saved(tmp_path / "c.pt", {"model": state, "state_dict": {"w": torch.zeros(2)}})
    says = "'state_dict' and 'model' have 1 tensor each, with different values. Say which is meant"
    for arguments in (("inspect", path), ("diff", path, path)):
        assert says in said(*arguments, status=1)
    same = saved(tmp_path / "d.pt", {"model": state, "state_dict": state})
    assert document("inspect", same)["level"] == "state_dict"


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_names_of_an_artifact(make: Callable[[Path, State], Path], renamed: Artifact, tmp_path: Path) -> None:
    models = [different(Renamed, seed) for seed in range(2)]
    packed = pack(models[0], renamed, out=tmp_path / "v.safetensors").path
    path = make(tmp_path, tensors(models[1].state_dict()))
    expected = compare_weights(packed, pack(path, renamed, out=tmp_path / "w.safetensors").path).tensors
    assert compare_weights(packed, path, artifact=renamed).tensors == expected
    assert "layers.0.layer.weight" in said("diff", packed, path, "--artifact", renamed.path)


def test_an_artifact_chooses_the_level_that_fits_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    artifact = export(model, (torch.zeros(1, 3),), out=tmp_path / "a.artifact")
    more = {f"teacher.{index}": torch.ones(1) for index in range(5)}
    path = saved(tmp_path / "c.pt", {"state_dict": more, "model": model.state_dict()})
    diff = compare_weights(path, pack(model, artifact, out=tmp_path / "v.safetensors").path, artifact=artifact)
    assert (diff.before.level, diff.level) == ("model", "same")
    assert document("inspect", path)["level"] == "state_dict"
    with pytest.raises(WeightsMismatch):
        compare_weights(path, path, artifact=artifact, levels=("state_dict", None))


@torch.no_grad()
def test_weights_that_the_conversion_computes(tmp_path: Path) -> None:
    model = different(lambda: Fused(4), 1)
    artifact = export(model, (torch.zeros(2, 4),), out=tmp_path / "a.artifact")
    packed = pack(model, artifact, out=tmp_path / "v.safetensors").path
    for path in (saved(tmp_path / "c.pt", model.state_dict()), saved_distributed(tmp_path / "d", model.state_dict())):
        assert compare_weights(path, packed, artifact=artifact).level == "same"
    moved = saved(tmp_path / "moved.pt", {name: value + 1 for name, value in model.state_dict().items()})
    assert compare_weights(moved, packed, artifact=artifact).level != "same"


TIED: dict[str, tuple[tuple[str, ...], str]] = {
    "the first name": (("tied",), "same"),
    "the second name": (("again",), "same"),
    "both": (("tied", "again"), "same"),
    "another value, under the second name": (("again+",), "changed"),
}


WAYS: dict[str, Callable[[Path, State], Path]] = {
    ".safetensors": lambda folder, state: saved_safetensors(folder / "c.safetensors", state),
    ".pt": lambda folder, state: saved(folder / "c.pt", {"model": state}),
    "distributed": lambda folder, state: saved_distributed(folder / "dcp", dict(state)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("names", "status"), TIED.values(), ids=TIED)
def test_a_tied_weight_under_any_of_its_names(
    names: tuple[str, ...], status: str, way: Callable[[Path, State], Path], tiny: TinyArtifact, tmp_path: Path
) -> None:
    state = tiny.values(1)
    packed = tiny.write(tmp_path / "v.safetensors", state)
    tied = state.pop("tied")
    state |= {name.removesuffix("+"): tied + 1.0 * name.endswith("+") for name in names}
    diff = compare_weights(packed, way(tmp_path, state), artifact=tiny.path)
    expected = {"weight": "same", "bias": "same", "steps": "same", "tied": status}
    assert {tensor.name: tensor.status for tensor in diff.tensors} == expected


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_tied_weight_with_two_values_is_refused_as_pack_refuses_it(
    swapped: bool, way: Callable[[Path, State], Path], tmp_path: Path
) -> None:
    model = Does(lambda m, x: m.head(m.embed(x)), embed=nn.Embedding(3, 3), head=nn.Linear(3, 3, bias=False))
    model.head.weight = model.embed.weight
    artifact = export(model, (torch.zeros(2, dtype=torch.int64),), out=tmp_path / "a.artifact")
    packed = pack(model, artifact, out=tmp_path / "v.safetensors").path
    weight = model.embed.weight.detach()
    path = way(tmp_path, {"embed.weight": weight, "head.weight": weight + 1})
    with pytest.raises(WeightsMismatch) as by_pack:
        pack(path, artifact, out=tmp_path / "w.safetensors")
    paths = (path, packed) if swapped else (packed, path)
    with pytest.raises(WeightsMismatch) as refused:
        compare_weights(*paths, artifact=artifact)
    assert refused.value.problems == by_pack.value.problems
    assert "embed.weight and head.weight are one tensor in the graph" in refused.value.problems[0]
    assert "are one tensor in the graph" in said("diff", *paths, "--artifact", artifact.path, status=1)


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_where_no_reader_is_installed(
    make: Callable[[Path, State], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, some_state())
    monkeypatch.setattr(tensorsets, "entry_points", lambda group: ())
    for arguments in (("inspect", path), ("diff", path, path)):
        says = "reading a checkpoint that torch wrote needs the extra `export`: pip install"
        assert says in said(*arguments, status=2)
    with pytest.raises(MissingExtra), open_set(path):
        pass


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from weightswap_tools.program import main
main()
"""


@pytest.mark.slow
def test_where_torch_is_not_installed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", some_state())
    plain = tmp_path / "c.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, plain)
    for arguments, status in (((path,), 2), ((plain,), 0)):
        command = [sys.executable, "-c", WITHOUT_TORCH, "inspect", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert ("pip install 'weightswap[export]'" in done.stderr) == bool(status)


def test_a_reader_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "weights.own", b"own")
    asked: list[object] = []

    class Point(EntryPoint):
        def load(self) -> Any:
            return self._reader

        def _reader(self, place: Path) -> Any:
            asked.append((self.name, place))
            return None if self.name == "a" else self._open

        def _open(self, request: SetRequest) -> Any:
            from contextlib import nullcontext

            asked.append(request)
            return nullcontext(TensorSet(str(path), {}, {}, lambda names: None, level=""))

    points = [Point(name, "unused", tensorsets.GROUP) for name in "ab"]
    monkeypatch.setattr(tensorsets, "entry_points", lambda group: points)
    with open_set(path, SetRequest("net")) as found:
        assert found.where == str(path)
    assert asked == [("a", path), ("b", path), SetRequest("net")]
    saved_safetensors(tmp_path / "c.safetensors", {"w": torch.ones(1)})
    with open_set(tmp_path / "c.safetensors") as ours:
        assert list(ours.tensors) == ["w"]
    assert len(asked) == 3  # a file that the runtime knows is offered to nobody


LOADED = "import weightswap_exporter.checkpoints.reading\n"
ALLOWED = 64 << 20


@pytest.mark.parametrize("form", [pytest.param("pt", marks=pytest.mark.slow), "distributed"])
@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_tensors(form: str, tmp_path: Path) -> None:
    paths = [
        FORMS[form](new_folder(tmp_path / str(value)), {"w": torch.full((1 << 10, 24 << 10), value)})  # 96 MiB
        for value in (1.0, 1.01)
    ]
    command = [sys.executable, "-c", LOADED + MEMORY, *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    level, grown = done.stdout.split()
    assert level == "changed"
    assert int(grown) < ALLOWED
