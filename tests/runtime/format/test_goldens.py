"""Goldens: a hand-made file, a table of broken ones, and the check of a staged session's outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from tests.support.handmade import Probe, Stage, Y, written
from tests.support.sessions import bound_of
from tests.support.tiny import X
from weightswap_runtime import (
    Artifact,
    GoldenMismatch,
    Unsupported,
    WeightFileError,
    WeightsMismatch,
    load,
)
from weightswap_runtime.engines.torch_cpu import TorchEngine, environment_here
from weightswap_runtime.format.goldens import encode_goldens, goldens_beside, open_goldens
from weightswap_runtime.format.weight_set import goldens_path
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.staging.golden_check import verify
from weightswap_runtime.tensors import TensorBytes


def test_goldens_have_the_name_of_their_weight_file() -> None:
    for weights, goldens in {
        "a/v1.safetensors": "a/v1.goldens.safetensors",
        "model.safetensors.index.json": "model.goldens.safetensors",
        "weights": "weights.goldens.safetensors",
    }.items():
        assert goldens_path(weights) == Path(goldens)


def test_a_hand_made_file_is_read_and_reproduced(stage: Stage) -> None:
    goldens = stage.open()
    assert goldens.weights_id == stage.document["weights_id"]
    assert (goldens.record.environment, goldens.record.tolerance) == (environment_here(), None)
    assert bytes(goldens.tensors["0.output.0"].data) == Y.numpy().tobytes()
    assert goldens_beside(stage.folder / "v1.safetensors", stage.tiny.manifest) == goldens
    assert goldens_beside(stage.folder / "v2.safetensors", stage.tiny.manifest) is None
    assert stage.verify(goldens) == "goldens"


def test_written_goldens_are_read_by_others_and_by_us(stage: Stage) -> None:
    read = stage.open()
    record = read.record
    contents = {name: (tensor.dtype, tensor.shape, read.tensors[name].data) for name, tensor in read.tensors.items()}
    options = {"graph_id": record.graph_id, "weights_id": record.weights_id, "environment": record.environment}
    raw = encode_goldens(
        record.cases,
        {name: TensorBytes(*content) for name, content in contents.items()},
        tolerance=(0.0, 0.5),
        **options,
    )
    stage.path.write_bytes(raw)
    for name, tensor in safetensors.torch.load_file(stage.path).items():
        assert torch.equal(tensor, stage.tensors[name])
    again = open_goldens(stage.path, stage.tiny.manifest)
    assert again.record == msgspec.structs.replace(record, tolerance=(0.0, 0.5), digests=again.record.digests)
    assert int.from_bytes(raw[:8], "little") % 4096 == 4096 - 8


def test_goldens_that_no_reader_would_take_are_neither_read_nor_written(stage: Stage) -> None:
    stage.open()
    os.truncate(stage.path, (4 << 30) + 1)  # sparse
    with pytest.raises(WeightFileError, match="has 4294967297 bytes, expected at most 4294967296"):
        open_goldens(stage.path, stage.tiny.manifest)
    tensor = TensorBytes("U8", (1 << 30,), memoryview(bytearray(1 << 30)))
    options = {"graph_id": "a", "weights_id": None, "environment": None, "tolerance": None}
    with pytest.raises(Unsupported, match="goldens of 4294967296 bytes, expected at most 4 GiB"):
        encode_goldens([], {str(number): tensor for number in range(4)}, **options)


def test_a_wrong_weight_is_refused_with_the_worst_element(stage: Stage) -> None:
    values = stage.tiny.values(1)
    values["weight"][1, 3] += 0.5
    path = stage.tiny.write(stage.folder / "wrong.safetensors", values)
    model = load(stage.tiny.path, path)
    with pytest.raises(GoldenMismatch) as refused:
        verify(
            stage.open(),
            bound_of(model),
            engine_of(model),
            stage.tiny.manifest,
            stage.document["weights_id"],
        )
    output = model(X)
    row = int((output - Y)[:, 3].abs().argmax())
    expected, got = Y[row, 3].item(), output[row, 3].item()
    assert refused.value.problems == (
        f"case 0, forward, output[{row}, 3]: expected {expected}, found {got}, absolute difference "
        f"{got - expected:.6g}, relative {(got - expected) / abs(expected):.6g}; 2 of 10 elements differ, compared bit "
        "for bit",
    )


class Tolerant(TorchEngine):
    """Engine without an environment, of which eager's last bits are not expected."""

    @staticmethod
    def environment() -> None:  # type: ignore[override]
        return None


def test_the_last_bit_counts_where_it_was_recorded_and_not_elsewhere(stage: Stage) -> None:
    near = torch.nextafter(Y, torch.tensor(torch.inf))
    assert "10 of 10 elements differ, compared bit for bit" in stage.refusal(stage.open(**{"0.output.0": near}))[0]
    for key, other in {"torch": "1.0", "device": "cuda", "capability": "NONE", "threads": 99}.items():
        before = stage.document["environment"][key]
        stage.document["environment"][key] = other
        assert stage.verify(stage.open(**{"0.output.0": near})) == "goldens"
        far = stage.open(**{"0.output.0": Y * 1.001})
        tolerance = "rtol=1.3e-05, atol=0.0001" if key == "device" else "rtol=1.3e-06, atol=1e-05"
        assert f"differ by more than {tolerance}" in stage.refusal(far)[0]
        stage.document["environment"][key] = before
    another = Tolerant(Artifact.open(stage.tiny.path))
    assert stage.verify(stage.open(**{"0.output.0": near}), engine=another) == "goldens"


def test_a_stated_tolerance_is_the_limit(stage: Stage) -> None:
    stage.document["tolerance"] = [0.0, 0.25]
    assert stage.verify(stage.open(**{"0.output.0": Y + 0.2})) == "goldens"
    beyond = Y.clone()
    beyond[1, 2] += 0.3
    (problem,) = stage.refusal(stage.open(**{"0.output.0": beyond}))
    assert problem.startswith("case 0, forward, output[1, 2]: ")
    assert problem.endswith("1 of 10 elements differ by more than rtol=0, atol=0.25")


def test_outputs_of_another_shape_are_a_mismatch(stage: Stage) -> None:
    (problem,) = stage.refusal(stage.open(**{"0.output.0": Y[:1]}))
    assert problem == "case 0, forward, output: expected F32[1, 5], found F32[2, 5]"


def test_goldens_of_other_weights(stage: Stage) -> None:
    goldens = stage.open()
    with pytest.raises(
        WeightFileError, match=r"v1.goldens.safetensors: recorded for the weights [0-9a-f]{12}, but those"
    ):
        stage.verify(goldens, seed=2)
    assert stage.verify(goldens, seed=2, mode="finite") == "finite"
    assert stage.verify(goldens._replace(bundled=True), seed=2) == "finite"


def test_goldens_of_another_graph_only_give_inputs(stage: Stage) -> None:
    stage.document["graph_id"] = "0" * 64
    path = written(stage.path, stage.tensors, stage.document)
    goldens = open_goldens(path, stage.tiny.manifest)
    assert stage.verify(goldens, seed=2) == "finite"


def test_values_that_are_not_finite_are_refused_unless_eager_has_them(stage: Stage) -> None:
    bad = X.clone()
    bad[1, 0] = torch.inf
    recorded = Y.clone()
    recorded[1] = torch.inf
    assert stage.verify(stage.open(**{"0.input.0": bad, "0.output.0": recorded}), mode="finite") == "finite"
    recorded[1, 4] = 0
    (problem,) = stage.refusal(stage.open(**{"0.input.0": bad, "0.output.0": recorded}), mode="finite")
    assert problem.startswith("case 0, forward, output[1, 4]: expected a finite value, found ")
    assert problem.endswith("inf; 1 of 10 are not")
    assert stage.verify(stage.open(**{"0.input.0": bad}), mode="off") == "off"


def test_every_case_begins_with_the_initial_state_and_a_cancel_ends_it(stage: Stage) -> None:
    stage.document["cases"] *= 2
    probe = Probe(lambda: [Y.clone()])
    stage.judge(probe, check=lambda: probe.done.append("check"))
    assert probe.done == ["check", "run without a state"] * 2

    def cancel() -> None:
        if probe.done:
            raise KeyboardInterrupt

    probe = Probe(lambda: [Y.clone()])
    with pytest.raises(KeyboardInterrupt):
        stage.judge(probe, check=cancel)
    assert probe.done == ["run without a state"]


def test_inputs_are_where_torch_allocates_tensors(stage: Stage) -> None:
    probe = Probe(lambda: [Y.clone()])
    inputs = []
    for _ in range(16):
        stage.judge(probe)
        inputs.append(probe.inputs[0])
    assert all(torch.equal(tensor, X) and tensor.data_ptr() % 64 == 0 for tensor in inputs)


def test_every_case_is_reported_and_what_an_operator_raises_is_a_mismatch(stage: Stage) -> None:
    stage.document["cases"] *= 2
    with pytest.raises(GoldenMismatch) as refused:
        stage.judge(Probe(lambda: list(Y[2])))
    text = "forward: the graph raised IndexError: index 2 is out of bounds for dimension 0 with size 2"
    assert refused.value.problems == (f"case 0, {text}", f"case 1, {text}")


def test_an_output_of_a_dtype_that_no_file_has_is_a_mismatch(stage: Stage) -> None:
    with pytest.raises(GoldenMismatch) as refused:
        stage.judge(Probe(lambda: [Y.to(torch.complex128)]))
    assert refused.value.problems == (
        "case 0, forward, output: expected F32[2, 5], but torch.complex128 is not a dtype of the safetensors format",
    )


WITHOUT_TORCH = """
import contextlib, sys
sys.modules["torch"] = None
import numpy as np
from weightswap_runtime import Artifact, GoldenMismatch
from weightswap_runtime.tensors import array_content, as_array
from weightswap_runtime.format.goldens import open_goldens
from weightswap_runtime.staging.golden_check import verify

manifest = Artifact.open(sys.argv[1]).manifest
goldens = open_goldens(sys.argv[2], manifest)

class Engine:
    tensor, content = staticmethod(as_array), staticmethod(array_content)
    environment, default_torch_modes = staticmethod(lambda: None), staticmethod(contextlib.nullcontext)

class Bound:
    def __init__(self, output):
        self.output = output

    def run(self, method, inputs):
        assert [(type(value), value.shape) for value in inputs] == [(np.ndarray, (2, 3))]
        return [self.output]

recorded = as_array(goldens.tensors["0.output.0"])
print(verify(goldens, Bound(np.nextafter(recorded, np.inf)), Engine, manifest, goldens.weights_id))
try:
    verify(goldens, Bound(recorded.astype(np.float16)), Engine, manifest, goldens.weights_id)
except GoldenMismatch as error:
    print(*error.problems)
"""


def test_without_torch_goldens_are_opened_and_compared(stage: Stage) -> None:
    stage.open()
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(stage.tiny.path), str(stage.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "goldens\ncase 0, forward, output: expected F32[2, 5], found F16[2, 5]\n"


def test_goldens_are_no_weights(stage: Stage) -> None:
    stage.open()
    with pytest.raises(WeightsMismatch, match=r"holds recorded calls, not weights\s*Give the weight file beside it"):
        load(stage.tiny.path, stage.path)
