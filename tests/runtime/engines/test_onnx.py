"""The engine `onnx`: inputs, outputs, state, dtypes, and graphs that contradict the manifest."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.export import Dim

from tests.support.forks import in_a_child
from tests.support.models import Does, Everything, Nested
from tests.support.sessions import bound_of
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_exporter.engines.compiling import with_files
from weightswap_exporter.parity import compare
from weightswap_runtime import Artifact, ArtifactError, CaptureError, InputMismatch, Model, Unsupported, load
from weightswap_runtime.engines.choosing import choose_engine
from weightswap_runtime.format.manifest import encode_manifest

Array = np.ndarray[Any, Any]
FILE = "engines/onnx/forward.onnx"


class Scaled(nn.Module):
    """`x * weight`, the weight itself, and the input itself."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 4).to(dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * self.weight
        return y, y, self.weight, x


def served(model: nn.Module, args: tuple[Any, ...], folder: Path, **options: Any) -> Model:
    """A model on the engine, with the weights of `model`."""
    settings = {key: options.pop(key) for key in ("methods", "dynamic_shapes", "kwargs") if key in options}
    artifact = export(model.eval(), *([] if "methods" in settings else [args]), out=folder / "a", **settings)
    packed = pack(model, artifact, out=folder / "v.safetensors")
    return load(compile_engines(artifact, ["onnx"], trial=False), packed.path, engine="onnx", **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact and weights of `Scaled`, which tests copy."""
    folder = tmp_path_factory.mktemp("scaled")
    served(Scaled(), (torch.ones(2, 3),), folder, dynamic_shapes={"x": {0: Dim("batch", max=64)}})
    return folder


@pytest.fixture
def scaled(made: Path, tmp_path: Path) -> Model:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return load(tmp_path / "a", tmp_path / "v.safetensors", engine="onnx")


X = np.arange(6, dtype=np.float32).reshape(2, 3)
TRIPLE = np.array([1, 2, 3], np.float32)


def test_outputs_are_arrays_of_their_own(scaled: Model) -> None:
    for _ in range(2):
        outputs = scaled(X)
        for found, expected in zip(outputs, (X * TRIPLE, X * TRIPLE, TRIPLE, X), strict=True):
            np.testing.assert_array_equal(found, expected)
            assert found.flags.writeable
        assert not any(np.shares_memory(one, X) for one in outputs)
        for found in outputs:
            found[...] = -1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1).reshape(x.shape),
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: x[::-1],
    ],
    ids=["fortran", "strided", "misaligned", "broadcast", "reversed"],
)
def test_arrays_of_any_layout_are_taken(scaled: Model, change: Callable[[Array], Array]) -> None:
    x = change(X)
    np.testing.assert_array_equal(scaled(x)[0], x * TRIPLE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(2, 3), r"x: expected a numpy\.ndarray, got Tensor"),
        (X.astype(np.float64), "x: expected dtype F32, got F64"),
        (X.astype(">f4"), "x: expected dtype F32, got >f4"),
        (X[:, :2], "x: dimension 1 expected 3, got 2"),
        (np.ma.masked_array(X, X > 2), "expected a plain array, got a masked one"),
        (X.tolist(), r"expected a numpy\.ndarray, got list"),
        (np.zeros((65, 3), np.float32), r"batch in 0\.\.64, got 65"),
    ],
)
def test_other_inputs_are_refused(scaled: Model, wrong: Any, message: str) -> None:
    scaled(X)
    with pytest.raises(InputMismatch, match=message):
        scaled(wrong)


def test_no_rows_at_all(scaled: Model) -> None:
    """ONNX Runtime could do this, but with an LSTM it ends the process."""
    with pytest.raises(InputMismatch, match="x: is empty, which the engine 'onnx' does not accept; 'torch' does"):
        scaled(X[:0])
    np.testing.assert_array_equal(scaled(X)[0], X * TRIPLE)


class Recurrent(nn.Module):
    """ONNX Runtime aborts the process at an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: torch.Tensor, fixed: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.rnn(x)[0] + fixed.sum(), x.shape[0]


def test_an_empty_batch_ends_no_process(tmp_path: Path) -> None:
    """Neither in a call nor in a verification. Inputs that the signature says are empty are accepted."""
    eager = Recurrent().eval()
    args = torch.ones(2, 5, 3), torch.ones(0)
    dynamic = {"x": {0: Dim("batch", max=8)}, "fixed": None}
    model = served(eager, args, tmp_path, dynamic_shapes=dynamic)
    for size in (1, 3):
        np.testing.assert_allclose(
            model(np.ones((size, 5, 3), np.float32), np.ones(0, np.float32))[0],
            eager(torch.ones(size, 5, 3), torch.ones(0))[0].detach(),
            rtol=1e-5,
        )
    report = compare(eager, tmp_path / "a", tmp_path / "v.safetensors", engines=["torch", "onnx"])
    assert report.same
    refused = [any(case.refused for case in found.cases) for found in report.engines]
    assert refused == [False, True]


class Divides(nn.Module):
    """Quotients and remainders of integers, rounded to zero and down."""

    def forward(self, n: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        modes = [torch.div(n, by, rounding_mode=mode) for by in (60, k, n.shape[0]) for mode in ("trunc", "floor")]
        rests = [torch.fmod(n, by) for by in (3, k, k.to(torch.int16))]
        return [*modes, *rests, n.clone().div_(7, rounding_mode="trunc"), n.clone().fmod_(k), n // k, n % k]


DIVIDED = [(dtype, below) for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) for below in (-7, 3)]


@pytest.mark.parametrize(
    ("dtype", "below"), [DIVIDED[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in DIVIDED[1:])], ids=str
)
@pytest.mark.slow
def test_integers_are_divided_exactly(dtype: torch.dtype, below: int, tmp_path: Path) -> None:
    limits = torch.iinfo(dtype)
    n = torch.tensor([1, -1, -61, limits.max, limits.min + 1, 1790000000, 2**53 + 7, -(2**53) - 7]).to(dtype)
    k = torch.tensor([below]).to(dtype).repeat(len(n))
    sizes = {name: {0: Dim("batch", max=64)} for name in "nk"}
    model = served(Divides(), (n, k), tmp_path, dynamic_shapes=sizes)
    for found, wanted in zip(model(n.numpy(), k.numpy()), Divides()(n, k), strict=True):
        assert np.array_equal(found, wanted.numpy())


def test_integers_are_divided_by_sizes(tmp_path: Path) -> None:
    def act(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        rows = x.shape[0]
        return [x % rows * m.one, x % -rows, x.int().remainder_(rows), x.to(torch.int8) % rows]

    eager = Does(act, one=nn.Buffer(torch.ones(1)))
    numbers = torch.tensor([-128, -7, -1, 0, 5, 13, 127])
    model = served(eager, (numbers,), tmp_path, dynamic_shapes={"x": {0: Dim("rows", min=2, max=64)}})
    for x in (numbers, numbers[:2], numbers[1:6]):
        for found, expected in zip(map(torch.as_tensor, model(x.numpy())), eager(x), strict=True):
            assert torch.equal(found, expected)


class Orders(nn.Module):
    """Int64 that are far apart, beside others of their own."""

    def forward(self, n: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        table = n.reshape(2, -1)
        bounds = [n.clamp(0, 10**12), n.clamp(max=7), n.clamp_min(7), n.clamp(k, k + 9), n.clone().clamp_(-(2**35), 9)]
        pairs = [torch.minimum(n, k), torch.maximum(n, k.int()), torch.min(n, k[:1]), n.sign()]
        along = [table.amin(1), table.amax((0, 1), keepdim=True), n.min(), n.max(), *table.min(-1), *table.max(1, True)]
        return [*bounds, *pairs, *along, n[0].clamp(max=5)]


def test_integers_that_are_far_apart_are_ordered(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    n = random.integers(-(2**33), 2**33, 40)
    near = np.where(random.random(40) < 0.5, n + random.integers(-(2**32), 2**32, 40), n[::-1])
    model = served(Orders(), (torch.from_numpy(n), torch.from_numpy(near)), tmp_path)
    wanted = Orders()(torch.from_numpy(n), torch.from_numpy(near))
    for index, (found, each) in enumerate(zip(model(n, near), wanted, strict=True)):
        np.testing.assert_array_equal(found, each.numpy(), err_msg=str(index))


class Remainders(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x % y, x % (2 * torch.pi), torch.remainder(x, -0.1), torch.remainder(7.5, y), x.clone().remainder_(y)]


class Fractions(Remainders):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        down = torch.div(x, y, rounding_mode="floor")
        quotients = [x // y, x // 0.1, x // -0.1, down, 3.0 // y, x.clone().floor_divide_(y), x // 0.0]
        return super().forward(x, y) + quotients


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(Fractions, torch.float32), pytest.param(Remainders, torch.float16, marks=pytest.mark.slow)],
    ids=str,
)
def test_fractions_are_divided_with_all_their_digits(
    model: Callable[[], nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    x = torch.tensor([1e4, -3e4, 1000.25, -0.5, 6e4, 0.0, -7.0, 1.0, 0.7, 12.0]).to(dtype)
    y = torch.tensor([6.25, 0.1, -0.1, 3.0, -7.0, 2.0, 7.0, 0.1, 0.1, -0.1]).to(dtype)
    answers = served(model(), (x, y), tmp_path)(x.numpy(), y.numpy())
    for found, wanted in zip(answers, model()(x, y), strict=True):
        np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_angles_are_those_of_eager_in_every_quadrant(dtype: torch.dtype, tmp_path: Path) -> None:
    def act(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        angles = [torch.atan2(x, m.other), torch.atan2(x[:, None], x), torch.atan2(m.other[0], x)]
        return [*angles, x.clone().atan2_(m.other)] if x.is_floating_point() else angles

    some = [0.0, -0.0, 1.0, -1.0, 3.0, -100.0]
    some += [torch.inf, -torch.inf, torch.nan, 1e-4, -6e4] if dtype.is_floating_point else []
    x = torch.tensor(some).to(dtype)
    eager = Does(act, other=nn.Buffer(x.flip(0)))
    model = served(eager, (x,), tmp_path)
    tolerance = 1e-3 if dtype is torch.float16 else 1e-6
    for found, expected in zip(map(torch.as_tensor, model(x.numpy())), eager(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_bounds_may_be_an_integer_and_a_fraction(dtype: torch.dtype, tmp_path: Path) -> None:
    def act(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clamp(0, 2.5) + m.one, torch.clip(x, -1.5, 2), nn.functional.hardtanh(x.float(), 0, 1.5)]

    x = torch.tensor([-3, -1, 0, 1, 2, 3, 9]).to(dtype)
    eager = Does(act, one=nn.Buffer(torch.ones(7)))
    model = served(eager, (x,), tmp_path)
    for found, expected in zip(map(torch.as_tensor, model(x.numpy())), eager(x), strict=True):
        assert torch.equal(found, expected)


def test_the_nearest_elements_are_those_of_eager(tmp_path: Path) -> None:
    """Also where the ratio of the sizes is whole, but its reciprocal is not one of float32."""

    def act(m: Any, inputs: Any) -> list[torch.Tensor]:
        x, mask = inputs
        resize = nn.functional.interpolate
        modes = [resize(x, size=(5, 7), mode=mode) for mode in ("nearest", "nearest-exact")]
        return [*modes, resize(mask, size=7), resize(x[None], size=(2, 3, 7)) * m.one]

    def inputs(size: int) -> list[torch.Tensor]:
        return [torch.rand(1, 3, size, 8), (torch.rand(1, 2, size) * 256).to(torch.uint8)]

    eager = Does(act, one=nn.Buffer(torch.ones(1)))
    sizes = {2: Dim("n", min=4, max=64)}
    model = served(eager, (inputs(8),), tmp_path, dynamic_shapes=([sizes, sizes],))
    for size in range(4, 65):
        given = inputs(size)
        for found, expected in zip(model([each.numpy() for each in given]), eager(given), strict=True):
            np.testing.assert_array_equal(found, expected.numpy(), err_msg=str(size))


def test_pools_of_dynamic_sizes_are_those_of_eager(tmp_path: Path) -> None:
    def act(m: Any, inputs: Any) -> list[torch.Tensor]:
        x, pool = inputs[0], nn.functional
        averages = [pool.adaptive_avg_pool2d(x, size) for size in ((3, 2), (1, 5), (None, 4), (x.shape[3], 7))]
        averages += [pool.adaptive_avg_pool1d(x[0], 5), pool.adaptive_avg_pool3d(x[None], (2, 3, 1))]
        maxima = [pool.adaptive_max_pool2d(x, size) for size in ((3, 2), (4, 1))]
        maxima += [pool.adaptive_max_pool1d(x[0], 3), pool.adaptive_max_pool2d(averages[3] * 2, (3, 5))]
        areas = [pool.interpolate(x, size=size, mode="area") for size in ((4, 9), (x.shape[3] + 1, x.shape[2] + 2))]
        return [*averages, *maxima, *areas, pool.adaptive_avg_pool2d(x.half(), (2, 3)) * m.one]

    eager = Does(act, one=nn.Buffer(torch.ones(1, dtype=torch.float16)))
    sizes = {2: Dim("height", min=2, max=64), 3: Dim("width", max=64)}
    model = served(eager, ([torch.rand(2, 3, 6, 8)],), tmp_path, dynamic_shapes=([sizes],))
    for height, width in ((6, 8), (2, 2), (2, 5), (3, 7), (5, 2), (7, 64), (13, 12), (64, 33)):
        x = torch.rand(2, 3, height, width)
        for found, expected in zip(model([x.numpy()]), eager([x]), strict=True):
            tolerance = 1e-3 if expected.dtype == torch.float16 else 1e-6
            torch.testing.assert_close(torch.as_tensor(found), expected, rtol=tolerance, atol=tolerance)


def test_places_of_maxima_in_pools_of_dynamic_sizes_are_refused(tmp_path: Path) -> None:
    def act(m: Any, inputs: Any) -> list[torch.Tensor]:
        return list(nn.functional.adaptive_max_pool2d(inputs[0] * m.one, 2, return_indices=True))

    eager = Does(act, one=nn.Buffer(torch.ones(1)))
    with pytest.raises(CaptureError, match="no places of maxima in pools of dynamic sizes"):
        served(eager, ([torch.rand(1, 2, 6, 6)],), tmp_path, dynamic_shapes=([{2: Dim("n", min=2, max=64)}],))


def test_an_operator_after_one_that_is_rewritten_is_rewritten_too(tmp_path: Path) -> None:
    def act(m: Any, x: list[torch.Tensor]) -> list[torch.Tensor]:
        floor = torch.div(x[0], m.three, rounding_mode="floor")
        least, (most, _) = floor.amin(1), floor.max(1)
        attended = nn.functional.scaled_dot_product_attention(x[1], x[1], x[1])
        angle = torch.atan2(x[1], x[1].flip(1)).remainder(1.0)
        return [least, most.sign(), torch.fmod(floor, 2).clamp(min=-1), angle // 0.25, attended % 0.5]

    eager = Does(act, three=nn.Buffer(torch.tensor(3)))
    x = [torch.randint(-50, 50, (4, 3)), torch.randn(2, 4, 3)]
    model = served(eager, (x,), tmp_path)
    for found, expected in zip(model([each.numpy() for each in x]), eager(x), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected)


def test_integers_of_more_than_64_bits_are_refused(tmp_path: Path) -> None:
    def act(m: Any, x: Any) -> list[Any]:
        return [x[0] * m.one, x[1]]

    eager = Does(act, one=nn.Buffer(torch.ones(1)))
    model = served(eager, ([torch.ones(2), 3],), tmp_path, dynamic_shapes=([{}, Dim.DYNAMIC],))
    assert model([np.ones(2, np.float32), (1 << 63) - 1])[1] == (1 << 63) - 1
    for size in (1 << 63, 1 << 64):
        with pytest.raises(InputMismatch, match=f"{size} is beyond the 64 bits"):
            model([np.ones(2, np.float32), size])


def test_means_of_scattered_elements(tmp_path: Path) -> None:
    def act(m: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        x, ids = inputs
        found = [m.three.scatter_reduce(0, ids, x, "mean", include_self=others) for others in (True, False)]
        within = m.three.clone().scatter_reduce_(0, ids, x, reduce="mean")
        whole = (m.three * 4).long().scatter_reduce(0, ids, (x * 9).long(), "mean")
        return [*found, within, whole]

    eager = Does(act, three=nn.Buffer(torch.randn(5, 4)))
    x = [torch.randn(6, 4), torch.randint(0, 3, (6, 4))]
    model = served(eager, (x,), tmp_path, dynamic_shapes=([{0: Dim("n", max=64)}] * 2,))
    for size in (1, 6, 20):
        x = [torch.randn(size, 4), torch.randint(0, 3, (size, 4))]
        for found, expected in zip(model([each.numpy() for each in x]), eager(x), strict=True):
            torch.testing.assert_close(torch.as_tensor(found), expected)
    with pytest.raises(Exception, match="out of data bounds"):
        model([x[0].numpy(), -x[1].numpy() - 1])


@pytest.mark.parametrize("has_last", [False, True])
def test_means_of_bags(has_last: bool, tmp_path: Path) -> None:
    eager = nn.EmbeddingBag(8, 4, mode="mean", include_last_offset=has_last)
    sizes = {0: Dim("ids", min=1, max=50)}, {0: Dim("bags", min=3, max=50)}
    sample = torch.arange(6), torch.tensor([0, 2, 6])
    model = served(eager, sample, tmp_path, dynamic_shapes=sizes)
    last = [5] if has_last else []
    for offsets in ([0, 3, 4], [0, 0, 5], [0, 1, 1, 4, 5]):
        given = torch.tensor([3, 1, 7, 0, 2]), torch.tensor(offsets + last)
        torch.testing.assert_close(torch.as_tensor(model(*(each.numpy() for each in given))), eager(*given))


def test_outputs_outlive_the_model(made: Path) -> None:
    model = load(made / "a", made / "v.safetensors", engine="onnx")
    kept = model(X)[0]
    del model
    np.testing.assert_array_equal(kept, X * TRIPLE)


@pytest.mark.slow
def test_every_kind_of_weight_and_constant(tmp_path: Path) -> None:
    model = Everything()
    methods = {
        "forward": MethodSpec("forward", (torch.randn(2, 1, 5, 5),)),
        "encode": MethodSpec("encode", (torch.tensor([0, 3]),)),
    }
    x, ids = torch.randn(2, 1, 5, 5), torch.tensor([5, 1])
    found = served(model, (), tmp_path, methods=methods)
    with torch.no_grad():
        for name, value in model(x).items():
            np.testing.assert_allclose(found(x.numpy())[name], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.encode(ids.numpy()), model.encode(ids), rtol=1e-5, atol=1e-6)


def test_nested_inputs_literals_and_integers(tmp_path: Path) -> None:
    model = Nested()
    one = torch.randn(2, 4)
    kwargs = {"options": {"gain": torch.tensor(2.0)}}
    args = (one, [one, {"deep": one}], one)
    found = served(model, args, tmp_path, kwargs=kwargs)
    array = one.numpy()
    (first, second), items, more = found(
        array, [array, {"deep": array}], array, options={"gain": np.array(2.0, np.float32)}
    )
    with torch.no_grad():
        expected = model(*args, **kwargs)
    np.testing.assert_allclose(first, expected[0].first, rtol=1e-5)
    np.testing.assert_allclose(second, expected[0].second, rtol=1e-5)
    assert items == expected[1]
    np.testing.assert_allclose(more["z"][0], expected[2]["z"][0], rtol=1e-5)
    assert more[3].shape == ()


class Sized(nn.Module):
    """Takes a dynamic integer and returns sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, int, int]:
        return (x * self.weight * count), x.shape[0], count


def test_integers_vary(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("batch", max=64)}, "count": Dim.DYNAMIC}
    model = served(Sized(), (torch.ones(2, 3), 5), tmp_path, dynamic_shapes=shapes)
    y, rows, count = model(np.ones((4, 3), np.float32), 7)
    np.testing.assert_array_equal(y, np.full((4, 3), 7, np.float32))
    assert (rows, count) == (4, 7)
    assert type(rows) is type(count) is int


class Late(nn.Module):
    """A module whose state is changed after its last use, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("counted", "assigned", "returned"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + self.counted + self.assigned * 10 + self.returned * 100 + self.kept
        self.counted.add_(x.shape[0])
        self.kept.copy_(x.sum(0))
        self.assigned += 1
        self.returned.add_(1)
        return y, self.returned


def test_state_that_is_changed_after_its_last_use_is_kept(tmp_path: Path) -> None:
    model, eager = served(Late(), (torch.ones(2, 3),), tmp_path), Late()
    context = model.new_context()
    for factor in range(3):
        x = torch.full((2, 3), float(factor))
        for expected, found in zip(eager(x), model(x.numpy(), context=context), strict=True):
            assert np.array_equal(expected.numpy(), found)


class Doubles(nn.Module):
    """A weight of each dtype, and inputs of them."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"weight{number}", torch.arange(1, 4).to(dtype))

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [x * weight for x, weight in zip(inputs, self.buffers(), strict=True)]


def test_dtypes(tmp_path: Path) -> None:
    dtypes = [torch.float16, torch.float64, torch.int32, torch.int64]
    found = served(Doubles(dtypes), tuple(torch.ones(2, 3).to(dtype) for dtype in dtypes), tmp_path)
    inputs = [X.astype(numpy) for numpy in (np.float16, np.float64, np.int32, np.int64)]
    for x, y in zip(inputs, found(*inputs), strict=True):
        np.testing.assert_array_equal(y, x * np.arange(1, 4, dtype=x.dtype))
        assert y.dtype == x.dtype


class Casting(nn.Module):
    """Weights, inputs and outputs of one dtype, with arithmetic in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * self.weight.float()).to(x.dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_dtypes_that_numpy_lacks_are_those_of_ml_dtypes(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    model = Casting(kind)
    found = served(model, (torch.ones(2, 3).to(kind),), tmp_path)
    x = np.array([[0.5, 1, 1.5], [2, 4, 3]]).astype(getattr(ml_dtypes, dtype))
    expected = model(torch.tensor(x.astype(np.float32)).to(kind))
    y = found(x)
    assert y.dtype == x.dtype
    assert y.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_dtypes_that_onnx_runtime_lacks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="weight: ONNX Runtime has no C64"):
        served(Scaled(torch.complex64), (torch.ones(2, 3).cfloat(),), tmp_path)


def test_an_artifact_that_was_not_compiled_says_how(tmp_path: Path) -> None:
    artifact = export(Scaled(), (torch.ones(2, 3),), out=tmp_path / "a")
    with pytest.raises(Unsupported, match=r"was not compiled for the engine 'onnx'\. Run: weightswap compile"):
        load(artifact, engine="onnx")
    assert load(artifact, engine="auto").engine == "torch"
    with pytest.raises(Unsupported, match="engine 'tensorrt': expected 'torch', "):
        load(artifact, engine="tensorrt")  # type: ignore[arg-type]


def test_auto_takes_onnx_where_torch_is_absent(scaled: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_engine("auto", scaled.artifact) == "torch"
    for broken in (None, ImportError("libtorch_cpu.so: cannot open shared object file")):
        monkeypatch.setattr("weightswap_runtime.engines.choosing.import_module", partial(fail, broken))
        assert choose_engine("auto", scaled.artifact) == "onnx"


def fail(error: Exception | None, name: str) -> None:
    raise error or ModuleNotFoundError(name)


def test_the_number_of_threads_is_for_onnx_alone(scaled: Model) -> None:
    one = load(scaled.artifact.path, scaled.artifact.path.with_name("v.safetensors"), engine="onnx", threads=1)
    np.testing.assert_array_equal(one(X)[0], X * TRIPLE)
    for engine, threads in (("torch", 1), ("onnx", 0), ("onnx", True), ("onnx", "2")):
        with pytest.raises(Unsupported, match=f"threads={threads!r}: expected"):
            load(scaled.artifact.path, engine=engine, threads=threads)  # type: ignore[arg-type]


def test_one_swap_changes_models_of_both_engines(scaled: Model, tmp_path: Path) -> None:
    other = load(scaled.artifact.path, share=scaled)
    changed = Scaled()
    with torch.no_grad():
        changed.weight.mul_(10)
    pack(changed, scaled.artifact.path, out=tmp_path / "w.safetensors")
    scaled.swap(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(scaled(X)[0], X * TRIPLE * 10)
    np.testing.assert_array_equal(other(torch.from_numpy(X))[0], X * TRIPLE * 10)


def test_a_forked_child_can_call(scaled: Model) -> None:
    scaled(X)
    assert in_a_child(lambda: bool((scaled(X)[0] == X * TRIPLE).all()))
    np.testing.assert_array_equal(scaled(X)[0], X * TRIPLE)


def graph(
    inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, tuple[int, list[Any]]], **more: Any
) -> onnx.ModelProto:
    """Build a model whose outputs are twice its last input."""
    infos = [[helper.make_tensor_value_info(name, *row) for name, row in part.items()] for part in (inputs, outputs)]
    names = list(inputs)
    nodes = [helper.make_node("Add", [names[-1], names[-1]], [name]) for name in outputs]
    made = helper.make_graph(nodes, "graph", *infos, **more)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


WEIGHT = {"weight": (TensorProto.FLOAT, [3])}
INPUT = {"x": (TensorProto.FLOAT, ["batch", 3])}
OUTPUTS = {name: (TensorProto.FLOAT, ["batch", 3]) for name in ("0", "1", "2", "3")}


def external(place: str) -> onnx.ModelProto:
    """Build a model with a constant in another file."""
    tensor = TensorProto(name="constant", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", place), ("offset", "0"), ("length", "12")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    model = graph(WEIGHT | INPUT, OUTPUTS, initializer=[tensor])
    model.graph.node[0].input[0] = "constant"
    return model


BFLOAT = (
    {"weight": (TensorProto.BFLOAT16, [3]), "x": (TensorProto.BFLOAT16, ["batch", 3])},
    {name: (TensorProto.BFLOAT16, ["batch", 3]) for name in OUTPUTS},
)
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "an operator without a kernel": (
        lambda: graph(*BFLOAT).SerializeToString(),
        r"cannot run it: .*Could not find an implementation",
    ),
    "no graph at all": (lambda: b"not a graph", "cannot open it"),
    "nothing": (lambda: b"", "cannot open it|is not the graph"),
    "a weight of another dtype": (
        lambda: graph({"weight": (TensorProto.DOUBLE, [3])} | INPUT, OUTPUTS).SerializeToString(),
        r"takes 'weight' as tensor\(double\)\[3\], expected F32",
    ),
    "a weight of another shape": (
        lambda: graph({"weight": (TensorProto.FLOAT, [1])} | INPUT, OUTPUTS).SerializeToString(),
        r"takes 'weight' as tensor\(float\)\[1\]",
    ),
    "a weight that nobody knows": (
        lambda: graph({"other": (TensorProto.FLOAT, [3])} | INPUT, OUTPUTS).SerializeToString(),
        "takes 'other', which the manifest does not list",
    ),
    "an input that is missing": (lambda: graph(WEIGHT, OUTPUTS).SerializeToString(), "it lacks the input 'x'"),
    "other outputs": (
        lambda: graph(WEIGHT | INPUT, {"y": (TensorProto.FLOAT, ["n", 3])}).SerializeToString(),
        r"its outputs are \['y'\], expected \['0'",
    ),
    "data in another file": (lambda: external("secret.bin").SerializeToString(), "cannot open it"),
    "data anywhere": (lambda: external("/etc/passwd").SerializeToString(), "cannot open it"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_graph_that_is_not_the_method_s_is_refused(
    case: str, scaled: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make, message = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    raw = make()
    path = scaled.artifact.path
    (path / FILE).write_bytes(raw)
    with pytest.raises(ArtifactError, match="altered since the export"):
        load(path, engine="onnx")
    manifest = with_files(Artifact.open(path).manifest, {FILE: raw})
    (path / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(Unsupported if "kernel" in case else ArtifactError, match=message):
        load(path, engine="onnx")
    assert capfd.readouterr().err == ""  # nothing but the error


def test_bindings_are_made_once_for_each_thread(scaled: Model, tmp_path: Path) -> None:
    call = bound_of(scaled)._calls["forward"]
    (binding,) = call._pool
    for _ in range(20):
        scaled(X)
        scaled.swap(tmp_path / "v.safetensors")
    assert call._pool == [binding]


def test_a_call_keeps_neither_its_inputs_nor_its_outputs(scaled: Model) -> None:
    x = X.copy()
    references = [weakref.ref(x)]
    outputs = scaled(x)
    references += [weakref.ref(output) for output in outputs]
    del x, outputs
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
