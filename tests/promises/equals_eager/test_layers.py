"""Exported equals eager, bit for bit: layers that choose their algorithm, and computations with sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.setups import Setup, equal
from weightswap_exporter import MethodSpec
from weightswap_runtime import InputMismatch, load


class Turned(nn.Module):
    """Linear layer on a transposed input: matmul chooses its algorithm by the weight's requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear on a transposed input": Turned,
    "frozen linear": lambda: Turned().requires_grad_(False),
    "GRU": lambda: nn.GRU(16, 24, batch_first=True),
    "RNN": lambda: nn.RNN(16, 24, batch_first=True),
    "LSTM": lambda: nn.LSTM(16, 24, batch_first=True, num_layers=2, bidirectional=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "attention": Attention,
    "group norm": lambda: nn.Sequential(nn.Conv1d(7, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.ConvTranspose1d(8, 4, 3)),
    "bilinear": lambda: nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.SiLU(), nn.Softmax(-1)),
}


@pytest.fixture
def _ordinary_attention() -> Any:
    """Disable eager's fused path for inference, which torch.export does not capture."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("_ordinary_attention")
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    shapes = ({0: Dim("batch", max=8)},)
    setup = Setup(tmp_path, build, {"forward": MethodSpec("forward", (torch.zeros(3, 7, 16),), {}, shapes)}, 2)
    model = load(setup.artifact, setup.files[0])
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        for batch in (2, 3, 4):
            x = torch.randn(batch, 7, 16)
            with torch.no_grad():
                assert equal(model(x), eager(x))


class Compared(nn.Module):
    """Model that branches on a relation between two dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self.linear(x).sum()
        return total + y.sum() if x.shape[0] > y.shape[0] else total * y.sum()


def test_relations_that_the_capture_relied_on_are_checked(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("rows", max=100)}, "y": {0: Dim("others", max=100)}}
    spec = MethodSpec("forward", (torch.zeros(4, 3), torch.zeros(5, 3)), {}, shapes)
    setup = Setup(tmp_path, Compared, {"forward": spec}, 1)
    assert setup.artifact.manifest.methods["forward"].signature.conditions == ("rows <= others",)
    model = load(setup.artifact, setup.files[0])
    for rows in (3, 5):
        x, y = torch.randn(rows, 3), torch.randn(5, 3)
        with torch.no_grad():
            assert equal(model(x, y), setup.models[0](x, y))
    with pytest.raises(InputMismatch, match="captured for rows <= others, got others=4, rows=6"):
        model(torch.zeros(6, 3), torch.zeros(4, 3))


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 2, 2, 3)


def test_relations_of_one_size(tmp_path: Path) -> None:
    setup = Setup(
        tmp_path, Halved, {"forward": MethodSpec("forward", (torch.zeros(8, 3),), {}, {"x": {0: Dim.AUTO}})}, 1
    )
    model = load(setup.artifact, setup.files[0])
    assert equal(model(torch.ones(12, 3)), torch.ones(6, 2, 3))
    with pytest.raises(InputMismatch, match=r"the graph was captured for .*d0.*, got d0=9"):
        model(torch.ones(9, 3))


class Computed(nn.Module):
    """Linear layer, followed by a computation with the dynamic size."""

    def __init__(self, after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x), x)


def in_bfloat16(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ y.t()


AFTER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "as many rows as are positive": lambda y, x: y[x[:, 0] > 0],
    "a float scale": lambda y, x: nn.functional.interpolate(y.t()[None], scale_factor=1.5, mode="linear"),
    "half the size": lambda y, x: nn.functional.pad(y, (0, 0, x.shape[0] // 2, 1)),
    "a root of the size": lambda y, x: y * x.shape[0] ** 0.5,
    "a range": lambda y, x: y + torch.arange(x.shape[0])[:, None],
    "attention": lambda y, x: nn.functional.scaled_dot_product_attention(y[None], x[None], x[None], is_causal=True),
    "autocast": in_bfloat16,
    "cond": lambda y, x: torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z - 1, (y,)),
}


# torch looks at gradients while it captures torch.cond
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
def test_dynamic_sizes(after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    spec = MethodSpec("forward", (torch.randn(6, 4),), {}, {"x": {0: Dim("rows", max=64)}})
    setup = Setup(tmp_path, lambda: Computed(after), {"forward": spec}, 1)
    model = load(setup.artifact, setup.files[0])
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            assert equal(model(x), setup.models[0](x))


EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
SPARSE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a product": lambda x, dense: torch.sparse.mm(dense.to_sparse(), x),
    "of edges": lambda x, _: torch.sparse_coo_tensor(EDGES, x[0], (3, 3)) @ x,
    "softmax": lambda x, dense: torch.sparse.softmax(dense.to_sparse(), 1).to_dense() @ x,
    "log_softmax": lambda x, dense: torch.sparse.log_softmax(dense.to_sparse(), 1).to_dense() @ x,
    "a sum": lambda x, dense: torch.sparse.sum(dense.to_sparse(), 0).to_dense() @ x,
    "addmm": lambda x, dense: torch.sparse.addmm(x, dense.to_sparse(), x),
    "parts": lambda x, dense: dense.to_sparse().indices().float() @ dense.to_sparse().values()[:, None] + x.sum(),
    "a sum of two": lambda x, dense: (dense.to_sparse() + dense.T.to_sparse()).coalesce().to_dense() @ x,
    "zeros": lambda x, dense: (torch.zeros(3, 3, layout=torch.sparse_coo) + dense.to_sparse()).to_dense() @ x,
}


class Sparse(nn.Module):
    """Layer whose graph has sparse tensors, which skip none of torch's autograd kernels."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), dense)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@torch.no_grad()
def test_sparse_tensors_within_a_graph(name: str, tmp_path: Path) -> None:
    dense = torch.tensor([[0.5, 0.0, 0.1], [0.0, 2.0, 0.0], [0.3, 0.0, 0.0]])
    methods = {"forward": MethodSpec("forward", (torch.rand(3, 4), dense))}
    setup = Setup(tmp_path, lambda: Sparse(SPARSE[name]), methods, 2)
    model = load(setup.artifact, setup.files[0])
    for eager, file in zip(setup.models, setup.files, strict=True):
        model.swap(file)
        x = torch.rand(3, 4)
        assert equal(model(x, dense), eager(x, dense))


class Spectra(nn.Module):
    """Magnitudes of a signal's spectrum, and the signal that comes back from it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.window, self.options = nn.Parameter(torch.rand(8) + 0.5), options

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = torch.stft(x, 8, 2, window=self.window, return_complex=True, **self.options)
        return spectrum.abs(), torch.istft(spectrum, 8, 2, window=self.window, **self.options)


@pytest.mark.parametrize("options", [{}, {"normalized": True}, {"onesided": False}], ids=str)
def test_spectra_of_any_number_and_length(options: dict[str, Any], tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("rows"), 1: Dim("length", min=16)}}
    spec = MethodSpec("forward", (torch.randn(3, 32),), {}, shapes)
    setup = Setup(tmp_path, lambda: Spectra(**options), {"forward": spec}, 1)
    model = load(setup.artifact, setup.files[0])
    for rows, length in ((1, 40), (9, 32), (3, 100)):
        x = torch.randn(rows, length)
        with torch.no_grad():
            assert equal(model(x), setup.models[0](x))
