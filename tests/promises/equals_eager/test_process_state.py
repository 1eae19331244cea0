"""A graph's meaning is fixed at the export: what other code sets for the process does not change it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests import ROOT
from tests.support.graphs import Whole, compiled
from tests.support.setups import equal
from weightswap_exporter import compile_engines, export, pack, skeleton
from weightswap_exporter.capture.archive import program_archive
from weightswap_runtime import load

SHARES = 12  # of torch's list of operators
DTYPES = (torch.float64, torch.bfloat16)


class Implicit(nn.Module):
    """Model whose operators, prologue, and loading of checkpoints leave their dtypes to the default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.unit: complex = 1j
        self._register_load_state_dict_pre_hook(self._rescale)

    def _rescale(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * (torch.arange(4) / 7 + torch.ones(4) * 0.1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = torch.arange(4) * 0.1 * self.weight  # in the prologue
        mask = torch.where(ids > 1, 0.3, 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            product = x @ table[:, None]
        return x * table, ids / 3 + mask, torch.ones(x.shape[0]) * (x.shape[0] * 0.1), x * self.unit, ids > 0.7, product


@contextmanager
def setting(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.float32)


STATES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "tensor type": lambda: setting(torch.set_default_tensor_type, torch.DoubleTensor, torch.FloatTensor),
    "device": lambda: setting(torch.set_default_device, "meta", None),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "matmul precision": lambda: setting(torch.set_float32_matmul_precision, "high", "highest"),
}
INPUTS = (torch.rand(3, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2]))


class Case(NamedTuple):
    artifact: Path
    files: list[Path]
    checkpoints: list[Path]
    expected: list[Any]


@pytest.fixture(scope="module")
@torch.no_grad()
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """An artifact with two sets of weights, packed and as checkpoints, and eager's outputs."""
    folder = tmp_path_factory.mktemp("case")
    batch = Dim("batch", max=9)
    with skeleton():
        hollow = Implicit().eval()
    export(hollow, INPUTS, out=folder / "a", dynamic_shapes={"x": {0: batch}, "ids": {0: batch}})
    files = [folder / f"{index}.safetensors" for index in range(2)]
    checkpoints = [folder / f"checkpoint{index}.safetensors" for index in range(2)]
    expected = []
    for file, checkpoint in zip(files, checkpoints, strict=True):
        model = Implicit().eval()
        save_file(model.state_dict(), checkpoint)
        pack(model.state_dict(), folder / "a", out=file)
        model.load_state_dict(model.state_dict())
        expected.append(model(*INPUTS))
    return Case(folder / "a", files, checkpoints, expected)


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type")
@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_swaps_and_calls_mean_the_same(state: str, case: Case, residency: str) -> None:
    artifact, files, checkpoints, expected = case
    model = load(artifact, files[0], residency=residency)
    with STATES[state]():
        assert equal(model(*INPUTS), expected[0])
        receipt = model.swap(files[1])
        assert equal(model(*INPUTS), expected[1])
        assert equal(load(artifact, files[1], residency=residency)(*INPUTS), expected[1])
        assert model.swap(checkpoints[1], keys="checkpoint").weights_id == receipt.weights_id
    assert equal(model(*INPUTS), expected[1])
    model.swap(files[0])
    assert equal(model(*INPUTS), expected[0])


def test_goldens_are_reproduced_under_another_default(tmp_path: Path, residency: str) -> None:
    model = Implicit().eval()
    artifact = export(model, INPUTS, out=tmp_path / "a", goldens=[INPUTS])
    pack(model, artifact, out=tmp_path / "v.safetensors")
    served = load(artifact, residency=residency)
    with default_dtype(torch.bfloat16):
        assert served.swap(tmp_path / "v.safetensors").verified == "goldens"


def test_the_default_at_the_export_counts(tmp_path: Path) -> None:
    with default_dtype(torch.bfloat16):
        model = Implicit().eval()
        model.unit = 0.3  # torch 2.14 has complex numbers of bfloat16, and cannot write a graph with them
        inputs = (INPUTS[0].bfloat16(), INPUTS[1])
        artifact = export(model, inputs, out=tmp_path / "a")
        pack(model, artifact, out=tmp_path / "v.safetensors")
        with torch.no_grad():
            expected = model(*inputs)
    assert equal(load(artifact, tmp_path / "v.safetensors")(*inputs), expected)


@torch.no_grad()
def test_a_thread_that_flushes_denormals_makes_the_same_weights(tmp_path: Path, residency: str) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4) + 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.weight * 1e-40).view(torch.int32)  # in the prologue

    model = Small()
    artifact = export(model, (torch.zeros(4, dtype=torch.int32),), out=tmp_path / "a")
    pack(model, artifact, out=tmp_path / "v.safetensors")
    served = load(artifact, residency=residency)
    with setting(torch.set_flush_denormal, True, False):
        served.swap(tmp_path / "v.safetensors")
        assert torch.tensor(1e-40) * 1 == 0  # the thread is as it was
    assert equal(served(torch.zeros(4, dtype=torch.int32)), model(torch.zeros(4, dtype=torch.int32)))


def without_gradients(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ids * 0.1


def branches(x: torch.Tensor, ids: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda i: i * 0.1, lambda i: i * 0.2, (ids,))


Function = Callable[[torch.Tensor, torch.Tensor], Any]
IMPLICIT: dict[str, Function] = {
    "arange": lambda x, ids: torch.arange(0, 1, 0.3),
    "linspace": lambda x, ids: torch.linspace(0, 1, 3),
    "logspace": lambda x, ids: torch.logspace(0, 1, 3),
    "full": lambda x, ids: torch.full((3,), 0.1),
    "ones": lambda x, ids: torch.ones(x.shape[0]) * (x.shape[0] * 0.1),
    "empty": lambda x, ids: torch.empty(3).fill_(0.1),
    "eye": lambda x, ids: torch.eye(2) * 0.1,
    "scalar_tensor": lambda x, ids: torch.scalar_tensor(x.shape[0] * 0.1),
    "rand": lambda x, ids: torch.rand(3),
    "randn": lambda x, ids: torch.randn(3),
    "normal": lambda x, ids: torch.normal(0.0, 1.0, (3,)),
    "hann_window": lambda x, ids: torch.hann_window(5),
    "kaiser_window": lambda x, ids: torch.kaiser_window(4),
    "fftfreq": lambda x, ids: torch.fft.fftfreq(5),
    "add": lambda x, ids: ids + 0.1,
    "subtraction from a number": lambda x, ids: 0.1 - ids,
    "a boolean tensor": lambda x, ids: (ids > 1) * 0.1,
    "a size": lambda x, ids: ids * (x.shape[0] * 0.1),
    "div": lambda x, ids: ids / 3,
    "floor_divide": lambda x, ids: ids // 0.3,
    "remainder": lambda x, ids: ids % 0.3,
    "pow": lambda x, ids: 2.1**ids,
    "root": lambda x, ids: (ids + 1) ** -0.5,
    "sin": lambda x, ids: ids.sin(),
    "atan2": lambda x, ids: torch.atan2(ids, ids + 1),
    "clamp": lambda x, ids: ids.clamp(0.1),
    "where, two numbers": lambda x, ids: torch.where(ids > 1, 0.3, 0.1),
    "where, a number": lambda x, ids: torch.where(ids > 1, ids, 0.1),
    "where, a number first": lambda x, ids: torch.where(ids > 1, 0.1, ids),
    "logsumexp": lambda x, ids: ids.logsumexp(0),
    "fft": lambda x, ids: torch.fft.fft(ids),
    "rfft": lambda x, ids: torch.fft.rfft(ids),
    "gradient": lambda x, ids: torch.gradient(ids)[0],
    "pairwise_distance": lambda x, ids: nn.functional.pairwise_distance(ids[None], ids[None] + 1),
    "a complex number": lambda x, ids: x[:, 0] * 1j,
    "an integer and a complex number": lambda x, ids: ids * 1j,
    "gt": lambda x, ids: (ids + 256) > 256.5,
    "eq": lambda x, ids: (ids + 256) == 257.0,
    "isin": lambda x, ids: torch.isin(ids + 256, 256.0),
    "isclose": lambda x, ids: torch.isclose(ids + 256, ids + 255, rtol=0, atol=0.5),
    "vmap": lambda x, ids: torch.vmap(lambda item: item * 0.1)(ids),
    "a region": without_gradients,
    "branches": branches,
}


def seeded(call: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    torch.manual_seed(0)
    return pytree.tree_leaves(call(*inputs))


@pytest.mark.parametrize("fixed", [pytest.param(True, marks=pytest.mark.slow), False], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", IMPLICIT)
@torch.no_grad()
def test_operators_that_take_the_default_dtype(name: str, fixed: bool) -> None:
    if name == "vmap" and torch.__version__ < (2, 13):
        pytest.skip("older torch cannot write such a graph")
    shapes = None if fixed else (({0: Dim.AUTO}, {0: Dim.AUTO}),)
    program = torch.export.export(Whole(IMPLICIT[name]), INPUTS, dynamic_shapes=shapes, strict=False)
    graph = compiled(program_archive(program)).call
    expected = seeded(IMPLICIT[name], *INPUTS)
    assert equal(seeded(graph, *INPUTS), expected)
    for dtype in DTYPES:
        with default_dtype(dtype):
            assert equal(seeded(graph, *INPUTS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_none_of_torch_s_operators_depends_on_the_default_dtype(share: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.every_operator", str(share), str(SHARES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ran, changed = json.loads(done.stdout.splitlines()[-1])
    assert not changed
    assert ran > 50


@pytest.mark.parametrize("engine", ["onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_an_engine_is_compiled_alike_under_another_default(engine: str, tmp_path: Path) -> None:
    class Real(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * torch.arange(4) * 0.1, ids / 3 + torch.where(ids > 1, 0.3, 0.1), ids > 0.7, ids.clamp(0.5)

    contents = []
    for dtype in (torch.float32, torch.float64):
        folder = tmp_path / str(dtype)
        export(Real(), INPUTS, out=folder)
        with default_dtype(dtype):
            compile_engines(folder, [engine])
        contents.append([path.read_bytes() for path in sorted((folder / "engines").rglob("*")) if path.is_file()])
    assert contents[0]
    assert contents[0] == contents[1]
