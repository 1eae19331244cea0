"""Methods of one artifact with engines of their own: those without a file of the engine run on `torch` beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.runtime.live.test_variants import WIDTH, Tuned, X
from tests.support.accelerators import on_every_device
from tests.support.compiled import needs_compiler
from tests.support.decoding import ENGINES, ROW, ROWS, Caller, Files, near
from tests.support.sessions import live
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_exporter.engines.compiling import with_files
from weightswap_runtime import InputMismatch, Unsupported, load
from weightswap_runtime.engines.aoti_package import machine_targets, package_file
from weightswap_runtime.engines.choosing import available_engines, choose_engine
from weightswap_runtime.format.manifest import MANIFEST_NAME, encode_manifest


@pytest.fixture(scope="module", params=ENGINES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp(request.param), request.param)


@on_every_device
@torch.no_grad()
def test_methods_of_two_engines_share_weights_and_contexts(files: Files, device: str, residency: Any) -> None:
    call = Caller(files.load(device=device, residency=residency))
    assert (call.model.engine, call.model.engines) == (
        files.engine,
        {"prefill": "torch", "decode": files.engine, "plain": "torch"},
    )
    for seed in (0, 1, 2, 0):
        call.model.swap(files.weights[seed])
        context, eager = call.model.new_context(), deepcopy(files.models[seed])
        for step in (1, 2):
            near(call("prefill", ROWS * step, context=context), eager.prefill(ROWS * step))
            for _ in range(3):
                near(call("decode", ROW * step, context=context), eager.decode(ROW * step))
        near(call("decode", ROW), deepcopy(files.models[seed]).decode(ROW))  # the initial state, and no trace
        near(call("plain", ROW), files.models[seed].plain(ROW))


def test_the_prologue_runs_once_for_each_staging(files: Files, residency: Any) -> None:
    with torch.no_grad():
        expected = [model.prefill(ROWS) for model in map(deepcopy, files.models)]
    for prologue in (True, False):
        call = Caller(files.load(residency=residency, prologue=prologue, keep_previous="host"))
        assert {bound.has_prologue for bound in live(call.model).session.bound.values()} == {prologue}
        near(call("prefill", ROWS), expected[0])
        with call.model.stage(files.weights[1]) as staged:
            staged.commit()
        near(call("prefill", ROWS), expected[1])
        call.model.rollback()
        near(call("prefill", ROWS), expected[0])


def test_auto_takes_the_engine_of_some_methods(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = files.artifact
    assert available_engines(artifact) == ("torch", files.engine)
    assert choose_engine("auto", artifact) == ("aoti" if files.engine == "aoti" else "torch")
    monkeypatch.setattr("weightswap_runtime.engines.choosing._has_torch", lambda: False)
    assert choose_engine("auto", artifact) == ("onnx" if files.engine == "onnx" else "torch")
    assert available_engines(artifact) == ()


@pytest.mark.slow
def test_without_torch_a_server_says_why_it_is_needed(tmp_path: Path) -> None:
    files = Files(tmp_path, "onnx")
    code = (
        "import sys; sys.modules['torch'] = None; from weightswap_runtime import load; load(sys.argv[1], engine='onnx')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, files.artifact.path], capture_output=True, text=True, check=False
    )
    assert (
        "an artifact that lacks ONNX graphs of some methods, on the engine `onnx`, needs the extra `torch`"
        in done.stderr
    )


@needs_compiler
@pytest.mark.slow
def test_packages_of_one_method_for_another_machine_are_refused_by_name(tmp_path: Path) -> None:
    artifact = compile_engines(Files(tmp_path, "aoti").artifact, ["aoti"], methods=["plain"], trial=False)
    mine, other = (package_file(target, "plain") for target in (machine_targets()[0], "cpu-other"))
    raw = artifact.read(mine)
    (artifact.folder / other).parent.mkdir()
    shutil.move(artifact.folder / mine, artifact.folder / other)
    kept = {name: digest for name, digest in artifact.manifest.files.items() if name != mine}
    manifest = with_files(msgspec.structs.replace(artifact.manifest, files=kept), {other: raw})
    (artifact.folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    says = r"plain was compiled for cpu-other; this machine is .*--engine aoti --method plain$"
    with pytest.raises(Unsupported, match=says):
        load(artifact.path, engine="aoti")
    assert load(artifact.path, engine="auto").engine == "torch"


class Turned(nn.Module):
    """A module whose weight is in another order than row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 4).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned

    def flat(self) -> torch.Tensor:
        return self.turned.T.view(-1) * 1  # a view that only this order allows


class Writer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def write(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


def test_a_weight_in_another_order_than_row_major_is_refused(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (ROW,), engines=["onnx"]), "flat": MethodSpec("flat")}
    says = "flat was not compiled for the engine 'onnx', and 'torch' cannot run it alongside: turned was captured"
    with pytest.warns(UserWarning, match=f"could not be tried: {says}") as caught:
        artifact = export(Turned(), methods=methods, out=tmp_path / "a")
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.raises(Unsupported, match=says):
        load(artifact, engine="onnx")
    assert load(compile_engines(artifact, ["onnx"], methods=["flat"]), engine="onnx").engines["flat"] == "onnx"


def test_methods_that_onnx_cannot_express_run_on_torch(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (ROW,), engines=["onnx"]), "write": MethodSpec("write", (ROW,))}
    artifact = export(Writer(), methods=methods, out=tmp_path / "a")
    model = load(artifact, pack(Writer(), artifact, out=tmp_path / "v.safetensors").path, engine="onnx")
    given = np.zeros((4, 2), np.float32)[:, 0]  # not contiguous
    np.testing.assert_array_equal(model.write(given), np.full(4, 2, np.float32))
    np.testing.assert_array_equal(given, np.ones(4, np.float32))
    with pytest.raises(InputMismatch, match=r"expected a numpy\.ndarray, got Tensor"):
        model.write(ROW)
    with torch.autocast("cpu"):
        assert model.forward(given).dtype == model.write(given).dtype == np.float32


class TunedTwice(Tuned):
    """With a second method over the same variants and state."""

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(2 * x)


@pytest.mark.parametrize("engine", ENGINES)
@torch.no_grad()
def test_variants_apply_on_both_engines(engine: Any, tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (X,)), "twice": MethodSpec("twice", (X,), engines=["torch"])}
    variants = {"low": "low_*", "shift": ["shift"]}
    artifact = export(TunedTwice(0), methods=methods, out=tmp_path / "a", variants=variants, engines=[engine])
    model = load(artifact, pack(TunedTwice(0), artifact, out=tmp_path / "v.safetensors").path, engine=engine)
    assert model.engines == {"forward": engine, "twice": "torch"}
    call, eager = Caller(model), TunedTwice(0)
    chosen = {"low_a": torch.randn(WIDTH, 2), "low_b": torch.randn(2, WIDTH), "shift": torch.randn(WIDTH)}
    for group, prefix in (("low", "low_"), ("shift", "shift")):
        tensors = {name: value for name, value in chosen.items() if name.startswith(prefix)}
        save_file(tensors, tmp_path / f"{group}.safetensors")
        model.add_variant(group, "a", tmp_path / f"{group}.safetensors")
    context = model.new_context(on_swap="keep")
    for names in (set(), {"shift"}, {"low", "shift"}, {"low"}):
        zeros = {name: value * any(name.startswith(group) for group in names) for name, value in chosen.items()}
        eager.load_state_dict(zeros, strict=False)
        for method in ("forward", "twice", "forward"):
            found = call(method, X, context=context, variants=dict.fromkeys(names, "a"))
            near(found, getattr(eager, method)(X))
