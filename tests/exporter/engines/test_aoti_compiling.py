"""Compilation for the engine `aoti`: unsupported graphs are refused by name."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.compiled import WIDTH, needs_compiler
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_exporter.parity import verify
from weightswap_runtime import Artifact, CaptureError, ExportError, Unsupported, load

pytestmark = needs_compiler


@pytest.fixture
def linear(tmp_path: Path) -> Artifact:
    return export(nn.Linear(2, 2), (torch.zeros(1, 2),), out=tmp_path / "linear.artifact")


def test_without_a_compiler_nothing_is_written(linear: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(linear.path.rglob("*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExportError, match=r"cannot find 'no-such-compiler'. Install g\+\+"):
        compile_engines(linear, ["aoti"])
    assert sorted(linear.path.rglob("*")) == before


def test_a_machine_without_a_target_is_refused(linear: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightswap_exporter.engines import aoti as aoti_packages

    monkeypatch.setattr(aoti_packages, "machine_targets", lambda: ())
    with pytest.raises(Unsupported, match="compiles for x86_64 with AVX2 on Linux; this machine is"):
        compile_engines(linear, ["aoti"])


def test_a_torch_whose_interface_lacks_what_is_called_is_refused(
    linear: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightswap_exporter.engines import aoti as aoti_compiler

    monkeypatch.setattr(aoti_compiler, "config", SimpleNamespace(cpp=object()))  # as torch 2.11 has it
    with pytest.raises(Unsupported, match=r"lacks AOTInductorGetLastError and .*Install torch>=2.13 .* and on GPUs"):
        compile_engines(linear, ["aoti"])


def test_samples_in_another_order_are_refused(tmp_path: Path) -> None:
    turned = torch.zeros(3, WIDTH).t()
    artifact = export(nn.Linear(3, 3), (turned,), out=tmp_path / "turned.artifact")
    with pytest.raises(CaptureError, match=r"'input' of shape \[16, 3\] with strides \[1, 16\].*contiguous sample"):
        compile_engines(artifact, ["aoti"])


class Own(nn.Module):
    """A model that calls an operator of a Python package."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.weightswap_aoti_tests.twice(x)
        return result


@pytest.mark.slow
def test_operators_without_a_c_function_are_refused_by_name(tmp_path: Path) -> None:
    twice = torch.library.custom_op(
        "weightswap_aoti_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_fake(torch.empty_like)
    cache = tmp_path / "cache"
    artifact = export(
        Own(), methods={"forward": MethodSpec("forward", (torch.zeros(3),))}, out=tmp_path / "own.artifact"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        with pytest.raises(
            CaptureError, match=r"'forward'.*calls weightswap_aoti_tests::twice. Use the engine 'torch'"
        ):
            compile_engines(artifact, ["aoti"])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
    assert not cache.exists()


class WithoutElements(nn.Module):
    """A weight of no elements, which AOTInductor leaves out of machine code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.rows = nn.Parameter(torch.ones(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x), self.rows])


@pytest.mark.slow
def test_a_weight_without_elements_may_be_left_out(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    artifact = export(WithoutElements().eval(), (x,), out=tmp_path / "empty.artifact", engines=["aoti"])
    modules = [WithoutElements().eval() for _ in range(2)]
    files = [pack(module, artifact, out=tmp_path / f"{index}.safetensors").path for index, module in enumerate(modules)]
    model = load(artifact, files[0], engine="aoti")
    model.swap(files[1])
    torch.testing.assert_close(model(x), modules[1](x), rtol=1e-5, atol=1e-5)


class Products(nn.Module):
    """One row by matrices: as linear layers keep them, with a bias and without one, and the other way round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.third = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.second(nn.functional.gelu(self.first(x)))
        return found @ self.third, torch.addmm(x, found, self.third, beta=0.5, alpha=2)


@pytest.mark.parametrize(("width", "calls"), [(8, False), (363, True)])
@pytest.mark.slow
def test_a_row_by_a_small_matrix_calls_no_library(tmp_path: Path, width: int, calls: bool) -> None:
    torch.manual_seed(0)
    module, x = Products(width).eval(), torch.randn(1, width)
    artifact = export(module, (x,), out=tmp_path / "products.artifact", engines=["aoti"])
    model = load(artifact, pack(module, artifact, out=tmp_path / "v.safetensors").path, engine="aoti")
    for found, expected in zip(model(x), module(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (package,) = artifact.path.glob("engines/**/*.pt2")
    with zipfile.ZipFile(package) as archive:
        (library,) = (archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    assert (b"aoti_torch_cpu_addmm_out" in library) == calls
    assert (b"aoti_torch_cpu_mm_out" in library) == calls


class Darkest(nn.Module):
    """The least byte of each image, which torch 2.13 compiles to 0 on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).amin(1)


@pytest.mark.slow
def test_reductions_of_bytes_that_begin_with_zero_are_refused(tmp_path: Path) -> None:
    images = torch.randint(60, 200, (2, 3, 4, 4), dtype=torch.uint8)
    methods = {"forward": MethodSpec("forward", (images,))}
    artifact = export(Darkest(), methods=methods, out=tmp_path / "a")
    with pytest.raises(CaptureError, match="forward with positive values: output: other integers"):
        compile_engines(artifact, ["aoti"])
    made = compile_engines(artifact, ["aoti"], trial=False)
    weights = pack(Darkest(), made, out=tmp_path / "w.safetensors").path
    found = verify(made, weights, engines=["aoti"]).problems
    assert ["random with positive values" in problem for problem in found] == [True]
