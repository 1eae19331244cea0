"""Recording goldens: what eager gives is what a server is asked for, and the model is left as it was."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn
from torch.export import Dim
from typer.testing import CliRunner

from tests.checkpoints import saved
from tests.models import Counter, Everything, Nested, Views
from tests.sessions import bound_of
from tests.setups import different
from tests.zoo.entries import GROUPED, hf
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_exporter.commands import export_command, pack_command
from weightswap_runtime import (
    Artifact,
    CheckpointError,
    ExportError,
    GoldenMismatch,
    Model,
    RecordingError,
    WeightFile,
    WeightsMismatch,
    load,
)
from weightswap_runtime.cli.inspect import inspect_command
from weightswap_runtime.goldens import Goldens, artifact_goldens, goldens_beside
from weightswap_runtime.model import engine_of
from weightswap_runtime.verifying import verify

IMAGE = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
LINEAR = {"forward": MethodSpec("forward", (torch.zeros(2, 3),), {}, {"input": {0: Dim("batch", max=8)}})}


class Masked(nn.Module):
    """An output that is minus infinity where the input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_fill(x < 0, float("-inf"))


class Cached(nn.Module):
    """A cache of keys that calls write to, at a place that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("keys", torch.zeros(4, 3))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> dict[str, torch.Tensor]:
        self.keys.index_copy_(0, place, self.linear(x))
        self.written = self.written + x.shape[0]  # assigned, not written to
        return {"keys": self.keys, "written": self.written}


class Sized(nn.Module):
    """Integers go in and come out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, int]:
        return self.linear(x) * times, x.shape[0]


class Scaled(nn.Module):
    """A literal whose default is not what it was exported with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return self.linear(x) * scale


class Changing(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.linear(x)


class Setting(NamedTuple):
    """A model, its methods, and goldens to record."""

    build: Callable[[], nn.Module]
    methods: dict[str, MethodSpec]
    goldens: Any
    count: int


NESTED = (
    (ROWS[:, :1].repeat(1, 4), [torch.ones(4), {"deep": torch.ones(2, 4)}], torch.ones(4)),
    {"options": {"gain": torch.ones(4)}, "flag": True},
)
TOKENS = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}


def caching() -> nn.Module:
    """A model of transformers that would give its key-value cache, too."""
    model: Any = hf("LlamaForCausalLM", "LlamaConfig", **GROUPED)()
    model.config.use_cache = True
    return model


SETTINGS: dict[str, Setting] = {
    "several methods": Setting(
        Everything,
        {
            "forward": MethodSpec("forward", (IMAGE, 2.0), dynamic_shapes={"x": {0: Dim("n", max=9)}, "scale": None}),
            "code": MethodSpec("encode", (torch.arange(4),)),
        },
        {"forward": [(IMAGE, 2.0), ((IMAGE[:1],), {"scale": 2.0})], "code": [(torch.tensor([5, 0, 0, 1]),)]},
        3,
    ),
    "counters": Setting(
        Counter,
        {"forward": MethodSpec("forward", (ROWS,)), "peek": MethodSpec("peek")},
        {"forward": [(ROWS,), (ROWS + 1,)], "peek": [()]},
        3,
    ),
    "a cache": Setting(
        Cached,
        {"forward": MethodSpec("forward", (ROWS, torch.tensor([1, 2])))},
        [(ROWS, torch.tensor([3, 0])), (ROWS, torch.tensor([1, 0]))],
        2,
    ),
    "nested trees": Setting(Nested, {"forward": MethodSpec("forward", *NESTED)}, [NESTED], 1),
    "integers": Setting(
        Sized,
        {"forward": MethodSpec("forward", (ROWS, 5), {}, {"x": {0: Dim("n", max=9)}, "times": Dim.DYNAMIC})},
        [(ROWS, 7), (torch.cat([ROWS, ROWS]), 2)],
        2,
    ),
    "a literal that is left out": Setting(Scaled, {"forward": MethodSpec("forward", (ROWS, 2.0))}, [(ROWS,)], 1),
    "views of weights": Setting(Views, {"only": MethodSpec("forward", (torch.ones(4),))}, [(torch.ones(4),)], 1),
    "minus infinity": Setting(Masked, {"forward": MethodSpec("forward", (ROWS,))}, [(ROWS,)], 1),
    "bfloat16": Setting(
        lambda: nn.Linear(3, 3).bfloat16(),
        {"forward": MethodSpec("forward", (ROWS.bfloat16(),))},
        [((ROWS.bfloat16(),), {})],
        1,
    ),
    "inputs in another order": Setting(
        lambda: nn.Linear(64, 48),
        {"forward": MethodSpec("forward", (torch.zeros(7, 64),))},
        [(torch.linspace(-1, 1, 448).sin().view(64, 7).t(),)],
        1,
    ),
    "inputs that are written to": Setting(Changing, {"forward": MethodSpec("forward", (ROWS,))}, [(ROWS,)], 1),
    "an encoder layer, which has a fused path": Setting(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        {"forward": MethodSpec("forward", (torch.zeros(2, 3, 16),))},
        [(torch.linspace(-1, 1, 96).view(2, 3, 16),)],
        1,
    ),
    "a model of transformers": Setting(
        caching,
        {"forward": MethodSpec("forward", (), TOKENS)},
        [((), TOKENS)],
        1,
    ),
}
every = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def recorded(setting: Setting, folder: Path, **options: Any) -> tuple[Artifact, nn.Module, Goldens]:
    model = different(setting.build, 1)
    artifact = export(model, methods=setting.methods, out=folder / "m.artifact", goldens=setting.goldens, **options)
    found = artifact_goldens(artifact)
    assert found is not None
    return artifact, model, found


def verified(found: Goldens, model: Model) -> str:
    return verify(found, bound_of(model), engine_of(model), model.artifact.manifest, str(model.weights_id))


def everything_in(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors}
    return values, [module.training for module in model.modules()], torch.get_rng_state()


def same(one: Any, other: Any) -> bool:
    (values, modes, numbers), (others, other_modes, other_numbers) = one, other
    kept = all(key == others[name][0] and torch.equal(value, others[name][1]) for name, (key, value) in values.items())
    return kept and values.keys() == others.keys() and modes == other_modes and torch.equal(numbers, other_numbers)


@every
def test_a_server_reproduces_what_was_recorded_bit_for_bit(setting: Setting, tmp_path: Path) -> None:
    artifact, model, found = recorded(setting, tmp_path)
    artifact.verify()
    packed = pack(model, artifact, out=tmp_path / "v1.safetensors")
    assert (found.weights_id, len(found.cases)) == (packed.weights_id, setting.count)
    served = load(artifact, packed.path)
    assert verified(found, served) == "goldens"
    assert verified(found, served) == "goldens"  # the state was put back


@every
def test_the_model_and_the_random_numbers_are_left_as_they_were(setting: Setting, tmp_path: Path) -> None:
    model = different(setting.build, 1)
    artifact = export(model, methods=setting.methods, out=tmp_path / "m.artifact")
    for row in artifact.manifest.state:
        model.get_buffer(row.name).fill_(7)  # a trainer's state is not the artifact's
    for name, spec in setting.methods.items():
        setattr(model, name, getattr(model, spec.fn_name))
    before = everything_in(model)
    pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=setting.goldens)
    assert same(before, everything_in(model))


def test_goldens_are_no_part_of_the_graph_and_always_the_same_bytes(tmp_path: Path) -> None:
    setting = SETTINGS["several methods"]
    artifact, model, _ = recorded(setting, tmp_path)
    raw = artifact.read("goldens.safetensors")
    assert recorded(setting, tmp_path)[0].read("goldens.safetensors") == raw
    plain = export(model, methods=setting.methods, out=tmp_path / "plain.artifact")
    assert plain.graph_id == artifact.graph_id
    assert "goldens.safetensors" not in plain.manifest.files
    assert artifact_goldens(plain) is None


def test_other_weights_are_refused_for_every_output(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["several methods"], tmp_path)
    with torch.no_grad():
        model.get_parameter("embed.weight")[0, 0] += 1
    served = load(artifact, pack(model, artifact, out=tmp_path / "v2.safetensors").path)
    assert verified(found, served) == "finite"  # the artifact's own goldens are of other weights
    with pytest.raises(GoldenMismatch) as refused:
        verify(found, bound_of(served), engine_of(served), artifact.manifest, found.weights_id)
    names = [problem.partition("[")[0] for problem in refused.value.problems]
    assert names == [
        "case 0, forward, logits",
        "case 0, forward, scaled",
        "case 1, forward, logits",
        "case 1, forward, scaled",
        "case 2, code, output",
    ]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["minus infinity"], tmp_path)
    with torch.no_grad():
        model.get_parameter("linear.bias")[1] = torch.nan
    served = load(artifact, pack(model, artifact, out=tmp_path / "v2.safetensors").path, verify="off")
    with pytest.raises(GoldenMismatch, match=r"output\[\d, 1\]: expected a finite value, found nan"):
        verified(found, served)


def test_state_starts_from_that_of_the_artifact(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["counters"], tmp_path)
    with torch.no_grad():
        model(ROWS)  # a trainer has counted on
    pack(model, artifact, out=tmp_path / "v1.safetensors", goldens={"forward": [(ROWS,)]})
    beside = goldens_beside(tmp_path / "v1.safetensors", artifact.manifest)
    assert beside is not None
    assert bytes(beside.bytes_of("0.output.0")) == bytes(found.bytes_of("0.output.0"))
    assert int(model.get_buffer("steps")) == 1


def test_batch_norm_that_trains_is_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="behaves as in training"):
        artifact = export(model, (ROWS,), out=tmp_path / "m.artifact", goldens=[(ROWS,), (ROWS * 2,)])
    found = artifact_goldens(artifact)
    assert found is not None
    assert verified(found, load(artifact, pack(model, artifact, out=tmp_path / "v1.safetensors").path)) == "goldens"
    assert int(model.get_buffer("1.num_batches_tracked")) == 0


def test_a_tolerance_is_recorded(tmp_path: Path) -> None:
    found = recorded(SETTINGS["minus infinity"], tmp_path, tolerance=(1, 0.5))[2]
    assert found.record.tolerance == (1.0, 0.5)


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"plain": y, "noisy": y + torch.rand_like(y)}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:the exported graph behaves as in training")
@pytest.mark.parametrize(("build", "output"), [(Random, "noisy"), (Dropping, "output")])
def test_a_model_that_is_not_deterministic_is_refused_by_name(
    build: Callable[[], nn.Module], output: str, tmp_path: Path
) -> None:
    model = build()
    before = everything_in(model)
    with pytest.raises(RecordingError) as refused:
        export(model, (ROWS,), out=tmp_path / "m.artifact", goldens=[(ROWS,)])
    (problem,) = refused.value.problems
    assert problem.startswith(f"case 0, forward, {output} is not deterministic: two runs of the eager model differ[")
    assert str(refused.value).endswith("call model.eval().")
    assert same(before, everything_in(model))
    assert list(tmp_path.iterdir()) == []


class Failing(nn.Module):
    """Counts, and then looks up what may not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.embed(ids)


def test_what_the_model_raises_is_told_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    model = Failing().eval()
    before = everything_in(model)
    with pytest.raises(RecordingError) as refused:
        export(
            model,
            (torch.arange(2),),
            out=tmp_path / "m.artifact",
            goldens=[(torch.tensor([0, 9]),), (torch.arange(2),)],
        )
    (problem,) = refused.value.problems
    assert problem.startswith("case 0, forward: the model raised forward (test_goldens.py, line ")
    assert "IndexError: index out of range" in problem
    assert same(before, everything_in(model))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype and size": (
        {"goldens": [(torch.zeros(2, 4, dtype=torch.int64),), (ROWS[:, :2],)]},
        "case 0, forward: input: expected dtype F32, got I64\n"
        "  - case 0, forward: input: dimension 1 expected 3, got 4\n"
        "  - case 1, forward: input: dimension 1 expected 3, got 2\nGive inputs",
    ),
    "nothing given": ({"goldens": [()]}, "case 0, forward: input: missing"),
    "a tensor for a call": (
        {"goldens": [ROWS]},
        "forward, call 0: expected (args, kwargs), got a Tensor",
    ),
    "a call for a list": ({"goldens": (ROWS,)}, "forward: expected a list of calls, got a tuple"),
    "no calls": ({"goldens": []}, "no calls to record"),
    "another method": ({"goldens": {"encode": [(ROWS,)]}}, "no method 'encode'; there are forward"),
    "half a tolerance": ({"goldens": [(ROWS,)], "tolerance": (0.1,)}, "expected (rtol, atol), finite and not negative"),
    "a negative tolerance": ({"goldens": [(ROWS,)], "tolerance": (0.1, -1)}, "got (0.1, -1)"),
    "no number": ({"goldens": [(ROWS,)], "tolerance": (float("nan"), 0)}, "got (nan, 0)"),
    "a tolerance of nothing": (
        {"tolerance": (0.1, 0.1)},
        "tolerance: says how goldens are compared, and there are none",
    ),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_wrong_requests_are_refused_by_export_and_by_pack(options: Any, says: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2).eval()
    with pytest.raises(RecordingError) as refused:
        export(model, methods=LINEAR, out=tmp_path / "m.artifact", **options)
    assert says in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    artifact = export(model, methods=LINEAR, out=tmp_path / "m.artifact")
    with pytest.raises(RecordingError) as refused:
        pack(model, artifact, out=tmp_path / "v1.safetensors", **options)
    assert says in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.artifact"]


def test_a_skeleton_is_refused_before_it_is_captured(tmp_path: Path) -> None:
    with skeleton():
        model = nn.Linear(3, 2).eval()
    with pytest.raises(ExportError, match=r"2 tensors of the model have no values, the first is weight(.|\n)*outside"):
        export(model, (ROWS,), out=tmp_path / "m.artifact", goldens=[(ROWS,)])


class Packing:
    """An artifact, its model, and weights with goldens that are there already."""

    def __init__(self, folder: Path) -> None:
        self.model = different(Everything, 1)
        self.artifact = export(self.model, (IMAGE,), out=folder / "m.artifact")
        self.out = folder / "v1.safetensors"
        self.beside = folder / "v1.goldens.safetensors"
        self.pack(goldens=[(IMAGE,)])
        self.before = self.files()
        self.newer = different(Everything, 2)

    def pack(self, source: Any = None, **options: Any) -> Any:
        return pack(self.model if source is None else source, self.artifact, out=self.out, **options)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.parent.iterdir() if path.is_file()}


@pytest.fixture
def packing(tmp_path: Path) -> Packing:
    return Packing(tmp_path)


def test_a_module_or_a_checkpoint_with_its_model(packing: Packing, tmp_path: Path) -> None:
    first = packing.files()
    assert sorted(first) == ["v1.goldens.safetensors", "v1.safetensors"]
    source = saved(tmp_path / "c.pt", packing.model.state_dict())
    packed = packing.pack(source, model=different(Everything, 2), goldens=[(IMAGE,)])
    assert packed.goldens == 1
    source.unlink()
    assert packing.files() == first
    found = goldens_beside(packed.path, packing.artifact.manifest)
    assert found is not None
    assert verified(found, load(packing.artifact, packed.path)) == "goldens"


def test_a_pack_without_goldens_removes_those_of_the_file_before(packing: Packing) -> None:
    assert packing.pack().goldens == 0
    assert sorted(packing.files()) == ["v1.safetensors"]


def renames(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path, Path], None]) -> None:
    """Let `act(temporary, target)` see every rename, just before it."""
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        act(self, target)
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)


@pytest.mark.parametrize("calls", [[(IMAGE,)], None], ids=["goldens", "none"])
def test_whoever_finds_the_weight_file_finds_its_goldens(
    calls: Any, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[str] = []

    def act(temporary: Path, target: Path) -> None:
        renamed.append(target.name)
        if target == packing.out:
            with WeightFile(temporary) as file:
                assert file.stamp is not None
                found = goldens_beside(target, packing.artifact.manifest)
                assert (found and found.weights_id) == (file.stamp.weights_id if calls else None)

    renames(monkeypatch, act)
    packing.pack(different(Everything, 2), goldens=calls)
    assert renamed == (["v1.goldens.safetensors"] if calls else []) + ["v1.safetensors"]


def failing_rename(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Renaming a file to `name` fails once."""

    def act(temporary: Path, target: Path) -> None:
        if target.name == name:
            monkeypatch.undo()
            raise OSError(28, "No space left on device")

    renames(monkeypatch, act)


def random_outputs(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    packing.newer.train()


def full_disk(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*args: Any) -> Iterator[memoryview]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("weightswap_exporter.packing.pieces", write)


CALLS = [(IMAGE,)]
Prepare = Callable[[Packing, pytest.MonkeyPatch], None]
FAILURES: dict[str, tuple[Prepare, Any, type[Exception]]] = {
    "recording": (random_outputs, CALLS, RecordingError),
    "writing the weights": (full_disk, CALLS, CheckpointError),
    "writing the weights alone": (full_disk, None, CheckpointError),
    "renaming the goldens": (lambda packing, patch: failing_rename(patch, packing.beside.name), CALLS, CheckpointError),
    "renaming the weights": (lambda packing, patch: failing_rename(patch, packing.out.name), CALLS, CheckpointError),
    "renaming the weights alone": (
        lambda packing, patch: failing_rename(patch, packing.out.name),
        None,
        CheckpointError,
    ),
}


@pytest.mark.parametrize(("prepare", "calls", "error"), FAILURES.values(), ids=FAILURES)
def test_a_pack_that_fails_leaves_both_files_as_they_were(
    prepare: Prepare, calls: Any, error: type[Exception], packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(packing, monkeypatch)
    with pytest.raises(error):
        packing.pack(packing.newer, goldens=calls)
    assert packing.files() == packing.before


def test_a_checkpoint_is_no_model(packing: Packing) -> None:
    for source in (packing.model.state_dict(), packing.out):
        with pytest.raises(CheckpointError, match="recorded with the eager model, and a checkpoint is none"):
            packing.pack(source, goldens=[(IMAGE,)])
    with pytest.raises(CheckpointError, match=r"\*.goldens.safetensors are names of goldens"):
        pack(packing.model, packing.artifact, out=packing.beside)
    with pytest.raises(WeightsMismatch):
        packing.pack({"conv.weight": torch.zeros(1)}, goldens=None)
    assert packing.files() == packing.before


def refusal(packing: Packing, model: nn.Module, **options: Any) -> str:
    with pytest.raises(RecordingError) as refused:
        packing.pack(model, goldens=[(IMAGE,)], **options)
    assert packing.files() == packing.before
    return str(refused.value)


def test_a_model_that_is_not_the_exported_one_is_refused(packing: Packing) -> None:
    assert "conv.weight: the artifact has F32[6, 1, 3, 3] on the CPU, the model F64[6, 1, 3, 3] on cpu" in refusal(
        packing, different(lambda: Everything().double(), 1), dtype="float32"
    )
    assert "embed.weight: the artifact has F32[6, 6], the model no such tensor" in refusal(packing, nn.Linear(3, 3))
    other = different(Everything, 1)
    other.get_buffer("table")[2] += 1
    assert "table is not the artifact's constant[2]: expected 0.4" in refusal(packing, other)


def test_a_model_that_trains_is_refused_and_its_statistics_are_put_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    artifact = export(model, (ROWS,), out=tmp_path / "m.artifact")
    model.train()
    before = everything_in(model)
    with pytest.raises(RecordingError) as refused:
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=[(ROWS,)])
    assert "a call has changed 1.running_mean, which is no state" in refused.value.problems
    assert same(before, everything_in(model))


def test_a_call_that_changes_a_weight_is_refused_by_name(packing: Packing) -> None:
    def double(module: nn.Module, inputs: Any) -> None:
        module.get_parameter("weight").mul_(1)

    packing.model.get_submodule("conv").register_forward_pre_hook(double)
    assert "a call has changed conv.weight, which is no state" in refusal(packing, packing.model)


def test_a_model_of_inference_mode_can_be_recorded(packing: Packing) -> None:
    with torch.inference_mode():
        model = different(Everything, 1)
        packing.pack(model, goldens=[(IMAGE,)])
    assert packing.files() == packing.before


def test_integers_are_compared(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["integers"], tmp_path)
    case = msgspec.structs.replace(found.cases[0], outputs=(found.cases[0].outputs[0], 5))
    altered = found._replace(record=msgspec.structs.replace(found.record, cases=(case,), tolerance=(1.0, 1.0)))
    served = load(artifact, pack(model, artifact, out=tmp_path / "v1.safetensors").path)
    with pytest.raises(GoldenMismatch) as refused:
        verified(altered, served)
    assert refused.value.problems == ("case 0, forward, 1: expected 5, found 2",)


def test_a_method_that_the_model_calls_otherwise_is_named(tmp_path: Path) -> None:
    setting = SETTINGS["several methods"]
    artifact, model, found = recorded(setting, tmp_path)
    with pytest.raises(RecordingError, match="the model has no attribute 'code' to call for the method 'code'"):
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=setting.goldens)
    model.code = model.encode
    pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=setting.goldens)
    assert (tmp_path / "v1.goldens.safetensors").read_bytes() == artifact.read("goldens.safetensors")
    assert found.cases[2].method == "code"


@dataclasses.dataclass
class Answer:
    score: torch.Tensor
    parts: list[torch.Tensor]


torch.export.register_dataclass(Answer, serialized_type_name="tests.exporter.test_goldens.Answer")


class Answering(nn.Module):
    """A class of the model's goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, before: Answer) -> Answer:
        y = self.linear(before.score)
        return Answer(y.sum(), [y, *before.parts])


def test_classes_of_the_model_go_in_and_come_out(tmp_path: Path) -> None:
    call = (Answer(ROWS, [torch.ones(2)]),)
    model = Answering().eval()
    artifact = export(model, call, out=tmp_path / "m.artifact", goldens=[call])
    found = artifact_goldens(artifact)
    assert found is not None
    assert (found.cases[0].inputs, len(found.cases[0].outputs)) == (("0.input.0", "0.input.1"), 3)
    assert verified(found, load(artifact, pack(model, artifact, out=tmp_path / "v1.safetensors").path)) == "goldens"


class Choosing(nn.Module):
    """Gives another tree for other inputs, which the capture cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.more = False

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return {"y": y, "more": y} if self.more else {"y": y}


def test_a_model_with_other_outputs_is_refused(tmp_path: Path) -> None:
    model = Choosing().eval()
    artifact = export(model, (ROWS,), out=tmp_path / "m.artifact")
    model.more = True
    with pytest.raises(RecordingError, match="expected the outputs y, the model gives y, more"):
        pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=[(ROWS,)])


def test_random_inputs_of_random_sizes(tmp_path: Path) -> None:
    calls = [(torch.randn(random.randrange(9), 3),) for _ in range(8)]
    setting = Setting(lambda: nn.Linear(3, 2), LINEAR, calls, 8)
    artifact, model, found = recorded(setting, tmp_path)
    with torch.no_grad():
        for number, (x,) in enumerate(calls):
            assert bytes(found.bytes_of(f"{number}.output.0")) == model(x).numpy().tobytes()
    assert verified(found, load(artifact, pack(model, artifact, out=tmp_path / "v.safetensors").path)) == "goldens"


RECIPE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 6).view(2, 3)
    return {"model": nn.Linear(3, 2).eval(), "args": (x,), "goldens": [(x,), (x + 1,)], "tolerance": (0.0, 0.5)}
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "goldens_recipe.py").write_text(RECIPE)
    saved(tmp_path / "c.pt", nn.Linear(3, 2).state_dict())

    def run(command: Any, *arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(command, list(arguments))
        assert result.exit_code == status, result.output
        return result.output

    return run


def test_the_commands_record_what_a_recipe_asks_for(shell: Callable[..., str], tmp_path: Path) -> None:
    recipe = "goldens_recipe.py:build"
    assert "goldens    2 cases\n" in shell(export_command, recipe, "-o", "m.artifact")
    found = artifact_goldens(Artifact.open("m.artifact"))
    assert found is not None
    assert found.record.tolerance == (0.0, 0.5)
    arguments = ["c.pt", "m.artifact", "-o", "v1.safetensors"]
    assert "goldens     2 cases\n" in shell(pack_command, *arguments, "--recipe", recipe)
    beside = goldens_beside("v1.safetensors", Artifact.open("m.artifact").manifest)
    assert beside is not None
    assert verified(beside, load("m.artifact", "v1.safetensors")) == "goldens"
    assert json.loads(shell(pack_command, *arguments, "--recipe", recipe, "--json"))["goldens"] == 2


def test_goldens_are_inspected_with_what_they_lie_in(shell: Callable[..., str]) -> None:
    recipe = "goldens_recipe.py:build"
    shell(export_command, recipe, "-o", "m.artifact")
    packed = json.loads(shell(pack_command, "c.pt", "m.artifact", "-o", "v.safetensors", "--recipe", recipe, "--json"))
    weights_id = packed["weights_id"]
    line = f"goldens    2 of forward; of the weights {weights_id[:12]}; within rtol 0, atol 0.5\n"
    assert line in shell(inspect_command, "v.safetensors")
    assert "2 of forward" in shell(inspect_command, "m.artifact")
    told = json.loads(shell(inspect_command, "v.safetensors", "--json"))["goldens"]
    assert (told["weights_id"], told["tolerance"], told["cases"]) == (weights_id, [0.0, 0.5], {"forward": 2})
    assert told["environment"]["torch"] == torch.__version__
    Path("v.goldens.safetensors").unlink()
    assert "goldens" not in shell(inspect_command, "v.safetensors")
    assert json.loads(shell(inspect_command, "v.safetensors", "--json"))["goldens"] is None


def test_the_commands_leave_goldens_out(shell: Callable[..., str], tmp_path: Path) -> None:
    recipe = "goldens_recipe.py:build"
    assert "have no values" in shell(export_command, recipe, "-o", "m.artifact", "--skeleton", status=1)
    for more in ((), ("--skeleton",)):
        said = shell(export_command, recipe, "-o", "m.artifact", "--no-goldens", "--json", *more)
        assert json.loads(said)["goldens"] == 0
    arguments = ["c.pt", "m.artifact", "-o", "v1.safetensors"]
    assert "goldens" not in shell(pack_command, *arguments, "--recipe", recipe, "--no-goldens")
    assert json.loads(shell(pack_command, *arguments, "--json"))["goldens"] == 0
    assert not Path("v1.goldens.safetensors").exists()
