"""Recording of goldens: a server must reproduce the eager outputs, and the model is left unchanged."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.support.goldens import (
    LINEAR,
    ROWS,
    SETTINGS,
    Setting,
    every,
    everything_in,
    goldens_at,
    goldens_of,
    recorded,
    same,
    verified,
)
from tests.support.models import Does
from tests.support.setups import different, loaded
from weightswap_exporter import export, pack
from weightswap_runtime import GoldenMismatch, load


@pytest.mark.sampled(5)
@every
def test_a_server_reproduces_what_was_recorded_bit_for_bit(setting: Setting, tmp_path: Path) -> None:
    artifact, model, found = recorded(setting, tmp_path)
    artifact.verify()
    packed = pack(model, artifact, out=tmp_path / "v1.safetensors")
    assert (found.weights_id, len(found.cases)) == (packed.weights_id, setting.count)
    served = load(artifact, packed.path)
    assert verified(found, served) == "goldens"
    assert verified(found, served) == "goldens"  # the state was put back


@pytest.mark.sampled(5)
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
    with pytest.raises(AssertionError):
        goldens_of(plain)


def test_state_starts_from_that_of_the_artifact(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["counters"], tmp_path)
    with torch.no_grad():
        model(ROWS)  # a trainer has counted on
    packed = pack(model, artifact, out=tmp_path / "v1.safetensors", goldens={"forward": [(ROWS,)]})
    beside = goldens_at(packed.path, artifact)
    assert bytes(beside.tensors["0.output.0"].data) == bytes(found.tensors["0.output.0"].data)
    assert int(model.get_buffer("steps")) == 1


def test_batch_norm_that_trains_is_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="behaves as in training"):
        artifact = export(model, (ROWS,), out=tmp_path / "m.artifact", goldens=[(ROWS,), (ROWS * 2,)])
    assert verified(goldens_of(artifact), loaded(artifact, tmp_path, model)) == "goldens"
    assert int(model.get_buffer("1.num_batches_tracked")) == 0


def test_integers_are_compared(tmp_path: Path) -> None:
    artifact, model, found = recorded(SETTINGS["integers"], tmp_path)
    case = msgspec.structs.replace(found.cases[0], outputs=(found.cases[0].outputs[0], 5))
    altered = found._replace(record=msgspec.structs.replace(found.record, cases=(case,), tolerance=(1.0, 1.0)))
    with pytest.raises(GoldenMismatch) as refused:
        verified(altered, loaded(artifact, tmp_path, model))
    assert refused.value.problems == ("case 0, forward, 1: expected 5, found 2",)


@dataclasses.dataclass
class Answer:
    score: torch.Tensor
    parts: list[torch.Tensor]


torch.export.register_dataclass(Answer, serialized_type_name="tests.exporter.test_goldens_recording.Answer")


def answered(model: Any, before: Answer) -> Answer:
    y = model.linear(before.score)
    return Answer(y.sum(), [y, *before.parts])


def test_classes_of_the_model_go_in_and_come_out(tmp_path: Path) -> None:
    call = (Answer(ROWS, [torch.ones(2)]),)
    model = Does(answered, linear=nn.Linear(3, 3)).eval()
    artifact = export(model, call, out=tmp_path / "m.artifact", goldens=[call])
    found = goldens_of(artifact)
    assert (found.cases[0].inputs, len(found.cases[0].outputs)) == (("0.input.0", "0.input.1"), 3)
    assert verified(found, loaded(artifact, tmp_path, model)) == "goldens"


def test_random_inputs_of_random_sizes(tmp_path: Path) -> None:
    calls = [(torch.randn(random.randrange(9), 3),) for _ in range(8)]
    setting = Setting(lambda: nn.Linear(3, 2), LINEAR, calls, 8)
    artifact, model, found = recorded(setting, tmp_path)
    with torch.no_grad():
        for number, (x,) in enumerate(calls):
            assert bytes(found.tensors[f"{number}.output.0"].data) == model(x).numpy().tobytes()
    assert verified(found, loaded(artifact, tmp_path, model)) == "goldens"
