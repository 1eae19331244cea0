"""Compilation for the engine `aoti`: unsupported graphs are refused by name."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import Dim

from tests.support.compiled import WIDTH, needs_compiler
from tests.support.models import Does
from tests.support.setups import different, loaded
from weightswap_exporter import compile_engines, export
from weightswap_exporter.engines import aoti
from weightswap_runtime import Artifact, CaptureError, ExportError, Unsupported

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


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("machine_targets", lambda: (), "compiles for x86_64 with AVX2 on Linux; this machine is"),
        ("config", SimpleNamespace(cpp=object()), r"lacks AOTInductorGetLastError and .*torch>=2.13 .* and on GPUs"),
    ],
    ids=["a machine without a target", "torch 2.11"],
)
def test_where_machine_code_cannot_be_made_it_is_refused(
    name: str, value: Any, says: str, linear: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"weightswap_exporter.engines.aoti.{name}", value)
    with pytest.raises(Unsupported, match=says):
        compile_engines(linear, ["aoti"])


def test_an_error_of_code_for_one_thread_is_reported_as_itself(
    linear: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(where: str, *_: Any) -> bytes:
        if not tried:
            tried.append(where)
            raise aoti._ParallelChecks("checks in parallel regions")
        with aoti._compiling(where, aoti.TARGETS["cpu-x86_64-avx2"], False, str(linear.path)):
            raise ValueError("what failed")

    tried: list[str] = []
    monkeypatch.setattr(aoti, "_compile", compiled)
    with pytest.raises(CaptureError, match="what failed"):
        compile_engines(linear, ["aoti"])


def test_samples_in_another_order_are_refused(tmp_path: Path) -> None:
    turned = torch.zeros(3, WIDTH).t()
    artifact = export(nn.Linear(3, 3), (turned,), out=tmp_path / "turned.artifact")
    with pytest.raises(CaptureError, match=r"'input' of shape \[16, 3\] with strides \[1, 16\].*contiguous sample"):
        compile_engines(artifact, ["aoti"])


@pytest.mark.slow
def test_operators_without_a_c_function_are_refused_by_name(tmp_path: Path) -> None:
    twice = torch.library.custom_op(
        "weightswap_aoti_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_fake(torch.empty_like)
    cache = tmp_path / "cache"
    own = Does(lambda m, x: torch.ops.weightswap_aoti_tests.twice(x))
    artifact = export(own, (torch.zeros(3),), out=tmp_path / "own.artifact")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        says = r"'forward'.*calls weightswap_aoti_tests::twice. Use the engine 'torch'"
        with pytest.raises(CaptureError, match=says):
            compile_engines(artifact, ["aoti"])
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache)
    assert not cache.exists()


@pytest.mark.slow
def test_a_weight_without_elements_may_be_left_out(tmp_path: Path) -> None:
    def build() -> nn.Module:
        rows = nn.Parameter(torch.ones(0, 2))
        return Does(lambda m, x: torch.cat([m.linear(x), m.rows]), linear=nn.Linear(3, 2), rows=rows).eval()

    x, models = torch.randn(2, 3), [build() for _ in range(2)]
    artifact = export(build(), (x,), out=tmp_path / "empty.artifact", engines=["aoti"])
    model = loaded(artifact, tmp_path, models[0], engine="aoti")
    model.swap(models[1])
    torch.testing.assert_close(model(x), models[1](x), rtol=1e-5, atol=1e-5)


def products(width: int) -> nn.Module:
    """One row by matrices: as linear layers keep them, with a bias and without one, and the other way round."""

    def act(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = model.second(nn.functional.gelu(model.first(x)))
        return found @ model.third, torch.addmm(x, found, model.third, beta=0.5, alpha=2)

    layers = {"first": nn.Linear(width, width), "second": nn.Linear(width, width, bias=False)}
    return Does(act, **layers, third=nn.Parameter(torch.randn(width, width))).eval()


@pytest.mark.parametrize(("width", "calls"), [(8, False), (363, True)])
@pytest.mark.slow
def test_a_row_by_a_small_matrix_calls_no_library(tmp_path: Path, width: int, calls: bool) -> None:
    torch.manual_seed(0)
    module, x = products(width), torch.randn(1, width)
    artifact = export(module, (x,), out=tmp_path / "products.artifact", engines=["aoti"])
    model = loaded(artifact, tmp_path, module, engine="aoti")
    for found, expected in zip(model(x), module(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (package,) = artifact.path.glob("engines/**/*.pt2")
    with zipfile.ZipFile(package) as archive:
        (library,) = (archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    assert (b"aoti_torch_cpu_addmm_out" in library) == calls
    assert (b"aoti_torch_cpu_mm_out" in library) == calls


class Exact(nn.Module):
    """What AOTInductor computes otherwise: extremes of bytes (pytorch#191499), and divisions that are rounded down."""

    def __init__(self, some: bool = True) -> None:
        super().__init__()
        self.some = some  # else all
        for dtype, least in ((torch.uint8, 90), (torch.int8, -120), (torch.int8, 20)):
            values = torch.randint(least, least + 70, (3, 100)).to(dtype)
            self.register_buffer(f"bytes_{least + 120}", values)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        low, high, *rest = self.buffers()
        found = [x % y, low.amin(1), low.argmin(1), *high.max(1), *([x // y] if x.dtype.itemsize > 2 else [])]
        if self.some:
            return found
        found += [x % (2 * torch.pi), torch.remainder(x, -0.1), torch.remainder(7.5, y), x.clone().remainder_(y)]
        if x.dtype.itemsize > 2:  # eager rounds each step of a quotient of half precision
            down = torch.div(x, y, rounding_mode="floor")
            found += [x // 0.1, x // -0.1, down, 3.0 // y, x.clone().floor_divide_(y), x // 0.0]
        computed = (torch.nan_to_num(x).sigmoid() * 100 + 50).to(torch.uint8)[None]
        for each in (low, low[:, :16], high, *rest, computed):
            found += [each.amin(1), each.amax(0), each.min(), each.max(), each.argmin(1), each.argmax()]
            found += [*each.min(1), *each.max(0, keepdim=True), *torch.aminmax(each, dim=1), each.cummin(1).values]
        return found


@pytest.mark.parametrize(
    ("dtype", "some"),
    [
        (torch.float32, True),
        pytest.param(torch.float32, False, marks=pytest.mark.slow),
        pytest.param(torch.float64, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_and_the_last_digits_are_those_of_eager(dtype: torch.dtype, some: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    special = [1e4, -3e4, 0.0, -0.0, 1.0, 0.7, torch.inf, -torch.inf, torch.nan, 5.0, 2.0**31]
    divisors = [6.25, 0.1, 3.0, 2.0, 0.1, 0.1, 3.0, 3.0, 3.0, torch.nan, 3.0]
    x = torch.cat([torch.tensor(special), 1000 * torch.randn(90)]).to(dtype)
    y = torch.cat([torch.tensor(divisors), torch.randn(90)]).to(dtype)
    artifact = compile_engines(export(Exact(some), (x, y), out=tmp_path / "a"), ["aoti"], trial=False)
    for seed in range(2):
        eager = different(lambda: Exact(some), seed)
        model = loaded(artifact, tmp_path, eager, engine="aoti")
        for found, expected in zip(model(x, y), eager(x, y), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_small_integers_wrap_around_in_machine_code(tmp_path: Path) -> None:
    def act(m: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [each.abs() for each in (*given, m.short, m.byte)]
        quotient = torch.div(given[0], m.divisor, rounding_mode="trunc")
        found = [each.to(torch.int32) for each in (*sizes, quotient)]
        return [*found, sizes[0] > 0, sizes[1] + sizes[2], sizes[2] / 3, sizes[3] * m.short, quotient / 3]

    x, y = torch.tensor([-(2**15), 7, -8], dtype=torch.int16), torch.tensor([-128, 100, -3], dtype=torch.int8)
    divisor = torch.tensor([-1, -2, 3], dtype=torch.int16)
    eager = Does(act, short=nn.Buffer(x.flip(0)), byte=nn.Buffer(y.flip(0)), divisor=nn.Buffer(divisor))
    artifact = export(eager, ([x, y],), out=tmp_path / "a")
    model = loaded(compile_engines(artifact, ["aoti"], trial=False), tmp_path, eager, engine="aoti")
    for found, expected in zip(model([x, y]), eager([x, y]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_operators_that_the_compiler_replaces_compute_what_they_did(tmp_path: Path) -> None:
    """One graph for all, as each takes seconds to compile."""

    def act(m: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, tall, ids = given["x"], given["tall"], given["ids"]
        ones, zeros = torch.ones(3, 5, dtype=torch.int64), torch.zeros(4, 6, dtype=torch.float64)
        tiny, keys = torch.arange(1.0, 42) * m.tiny, x.transpose(-2, -1)
        tenths = [m.tenths, m.tenths.half()]
        product = [x[0, 0] @ each for each in (m.first, m.second)]
        functions = {f.__name__: f for f in (torch.expm1, torch.erf, torch.atanh, nn.functional.elu)}
        return {
            **{f"{name} of {each.dtype}": f(each) for name, f in functions.items() for each in (tiny, tiny.double())},
            **{f"acosh of {each.dtype}": torch.acosh(each * -1e38) for each in (tiny, tiny.double())},
            "alpha of a product": torch.add(m.bias, product[0], alpha=3),
            "alpha of what is added to one": torch.add(product[1], m.bias, alpha=2),
            "the dtype of a constant's sums": ones.cumsum(0, dtype=torch.float32) * m.bias[:5],
            **{f"{n} in float64": zeros.scatter(1, ids[:, None], n) * m.wide for n in (0.1, 1e300, 1e-50)},
            **{f"0.3 among {each.dtype}": torch.searchsorted(each, 0.3) for each in tenths},
            **{f"0.7 among {each.dtype}": torch.bucketize(0.7, each, right=True) for each in tenths},
            "a mask of one dimension": torch.softmax(x @ keys / 2.0 + m.mask, -1) @ x,
            "attention over queries": ((x @ keys) * 0.5).softmax(-2) @ x,
            "attention over heads": (x @ keys / 2).softmax(1) @ x,
            "attention of matrices": torch.bmm(torch.bmm(x[0], keys[0]).softmax(1), x[0]),
            "an average of a dynamic size": nn.functional.adaptive_avg_pool2d(tall, (2, 5)) * m.tiny,
            "an average along a dynamic size": nn.functional.adaptive_avg_pool1d(tall[:, 0], 3) * m.tiny,
            "a maximum of a dynamic size": nn.functional.adaptive_max_pool2d(tall, (2, 4)) * m.tiny,
            "a maximum of another one": nn.functional.adaptive_max_pool2d(tall, (3, 5)) * m.tiny,
        }

    tensors = {"first": (4, 6), "second": (4, 6), "bias": (6,), "mask": (5,), "wide": (6,)}
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in tensors.items()}
    weights["wide"] = nn.Parameter(torch.rand(6).double())
    values = {"tiny": torch.tensor(-1e-8), "tenths": torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)}
    eager = Does(act, **weights, **{name: nn.Buffer(value) for name, value in values.items()})
    x, (height, width) = torch.rand(2, 3, 5, 4), (Dim(name, min=4, max=64) for name in ("height", "width"))
    ids = torch.tensor([5, 0, 3, 2])
    shapes = ({"x": None, "ids": None, "tall": {2: height, 3: width}},)
    sample = {"x": x, "ids": ids, "tall": torch.rand(2, 3, 8, 8)}
    artifact = export(eager, (sample,), out=tmp_path / "a", dynamic_shapes=shapes)
    model = loaded(compile_engines(artifact, ["aoti"], trial=False), tmp_path, eager, engine="aoti")
    for sizes in ((8, 8), (9, 7), (15, 32), (4, 64)):
        given = {"x": x, "ids": ids, "tall": torch.rand(2, 3, *sizes)}
        found = model(given)
        for name, expected in eager(given).items():
            tolerance = 1e-9 if expected.dtype == torch.float64 else 2e-6
            assert found[name].dtype == expected.dtype, name
            torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=0, msg=f"{name} of {sizes}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_16_bit_tensors_are_rounded_as_eager_rounds_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """0.3 in the tensor's dtype, minus 0.3, is 0."""

    def act(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x * m.one
        filled = torch.full_like(x, 0.3), torch.scalar_tensor(0.3, dtype=dtype), x.new_full((8,), 0.3)
        return {
            "sums": torch.stack([x + 0.3, x - 0.3, 0.3 - x, torch.add(x, 0.3, alpha=0.7), torch.sub(x, x, alpha=0.3)]),
            "in place": x.clone().add_(0.3).sub_(0.1),
            "powers": torch.stack([0.3**x, x.abs() ** 0.3, x**2]),
            "remainders": torch.stack([torch.fmod(x, 0.3), x % 0.3]),
            "products": torch.stack([x * 0.3, x / 0.3, 0.3 / x]),  # eager does not round these
            "filled": torch.stack([each - x for each in filled]),
            "chosen": torch.where(x > 0.3, x, 0.3) - 0.3 + x.clamp(0.1, 0.3),
            "between": torch.lerp(x, x * 2, 0.3),
            "wide": x.float() + 0.3,
        }

    eager = Does(act, one=nn.Parameter(torch.ones(1, dtype=dtype))).eval()
    x = torch.cat([torch.tensor([0.3, -0.3, 0.1, 0.7]), torch.randn(252)]).to(dtype).reshape(32, 8)
    artifact = compile_engines(export(eager, (x,), out=tmp_path / "a"), ["aoti"], trial=False)
    found = loaded(artifact, tmp_path, eager, engine="aoti")(x)
    for name, expected in eager(x).items():
        assert torch.equal(found[name], expected), name


@pytest.mark.slow
def test_state_changes_once_in_each_call_whatever_the_threads_of_the_build(tmp_path: Path) -> None:
    def build() -> nn.Module:
        def count(m: Any, x: torch.Tensor) -> torch.Tensor:
            m.calls.add_(1)
            return m.scale * m.calls + x

        module = Does(count, scale=nn.Parameter(torch.randn(64, 1)))
        module.register_buffer("calls", torch.ones(1))
        return module.eval()

    def code_of(artifact: Artifact) -> list[bytes]:
        return [file.read_bytes() for file in sorted((artifact.path / "engines").rglob("*.pt2"))]

    torch.manual_seed(0)
    x, module, threads = torch.randn(2, 64, 64), build(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as on a build machine with one processor
        artifact = export(build(), (x,), out=tmp_path / "counter.artifact")
        # the trial is a process with threads of its own: where it has one, too, it would find nothing
        artifact = compile_engines(artifact, ["aoti"], trial=False)
        torch.set_num_threads(4)  # as on a server
        again = compile_engines(export(build(), (x,), out=tmp_path / "again"), ["aoti"], trial=False)
        assert code_of(again) == code_of(artifact)
        model = loaded(artifact, tmp_path, module, engine="aoti")
        with model.new_context() as context:
            for _ in range(3):
                torch.testing.assert_close(model(x, context=context), module(x))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_code_does_not_depend_on_what_the_building_process_has_set(tmp_path: Path) -> None:
    def act(m: Any, given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, ids = given
        found = ids.nonzero()
        torch._check(found.shape[0] > 1)
        return {
            "product": x @ m.w,
            "lost digits": (x + 1e8) - 1e8,
            "rows": m.w.gather(0, ids[:, None].expand(-1, 4)),
            "checked": found,
            "rewritten": torch.relu(x - 0.5),
        }

    class Rewrite(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
                node.target = torch.ops.aten.neg.default

        def uuid(self) -> str:
            return "a pass of the user's"

    eager = Does(act, w=nn.Parameter(torch.rand(4, 4)))
    given = [torch.rand(3, 4), torch.tensor([0, 3, 1])]
    artifact = export(eager, (given,), out=tmp_path / "a")
    users = config.patch(
        {
            "assert_indirect_indexing": False,
            "do_not_emit_runtime_assertions": True,
            "cpp.enable_unsafe_math_opt_flag": True,
            "post_grad_custom_post_pass": Rewrite(),
        }
    )
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode(), users:
        artifact = compile_engines(artifact, ["aoti"], trial=False)
    model = loaded(artifact, tmp_path, eager, engine="aoti")
    found = model(given)
    for name, expected in eager(given).items():
        torch.testing.assert_close(found[name], expected, rtol=2e-6, atol=0, msg=name)
    for wrong in ([0, -1, 1], [0, 4, 1], [0, 1000, 1], [0, 0, 1]):  # the last with one that is not zero
        with pytest.raises((RuntimeError, IndexError)):
            model([given[0], torch.tensor(wrong)])


@pytest.mark.slow
def test_the_smaller_of_two_sizes_is_that_of_each_call(tmp_path: Path) -> None:
    """AOTInductor takes the one that is smaller for the sample."""

    def act(m: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        (x,) = given
        return [x.diagonal(1) * m.w, x[:, :2].diagonal().sum()]

    rows, eager = Dim("rows", min=2, max=64), Does(act, w=nn.Parameter(torch.rand(1)))
    shapes = {"x": [{0: rows}]}
    artifact = export(eager, ([torch.rand(4, 5)],), out=tmp_path / "a", dynamic_shapes=shapes)
    model = loaded(compile_engines(artifact, ["aoti"], trial=False), tmp_path, eager, engine="aoti")
    for count in (2, 3, 4, 17, 64):
        given = [torch.rand(count, 5)]
        torch.testing.assert_close(model(given), eager(given))


@pytest.mark.slow
def test_copies_keep_what_a_call_then_changes(tmp_path: Path) -> None:
    """AOTInductor takes state and inputs themselves for copies of them, which it makes after the changes."""

    def act(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {"state": m.state.clone(), "a part": m.parts[:1].clone(), "last": m.last + 0}
        found |= {"another form": m.flat.clone().view(-1), "input": x.clone(), "second": m.second + 0}
        m.state.add_(x[0])
        m.parts[0] = x[1] * m.weight
        m.flat.index_copy_(0, torch.tensor([1]), x[:1])
        m.last.copy_(m.current)
        m.current.copy_(x)
        first = m.first.clone()
        m.first.copy_(m.second)
        m.second.copy_(first)
        row = torch.tensor([1])
        found["scattered"] = m.scattered.index_put((row,), x[:1])
        m.scattered.copy_(x + 1)
        found["twice"] = m.twice.index_put((row,), x[:1]).index_put((row - 1,), x[1:]).view(-1)
        m.twice.mul_(2)
        x.mul_(2)
        return found

    names = ("state", "parts", "flat", "current", "last", "first", "second", "scattered", "twice")
    state = {name: nn.Buffer(torch.rand(2, 3)) for name in names}
    eager = Does(act, weight=nn.Parameter(torch.rand(3)), **state).requires_grad_(False)
    artifact = export(eager, (torch.rand(2, 3),), out=tmp_path / "a")
    model = loaded(compile_engines(artifact, ["aoti"], trial=False), tmp_path, eager, engine="aoti")
    with model.new_context() as context:
        for _ in range(3):
            x = torch.rand(2, 3)
            found = model(x.clone(), context=context)
            for name, expected in eager(x).items():
                torch.testing.assert_close(found[name], expected, msg=name)


def test_code_for_the_sample_alone_is_refused(tmp_path: Path) -> None:
    width = Dim("width", max=64)
    halves = Does(lambda m, x: nn.functional.glu(x * m.scale), scale=nn.Parameter(torch.ones(1)))
    artifact = export(halves, (torch.rand(2, 8),), out=tmp_path / "a", dynamic_shapes=({1: 2 * width},))
    with pytest.raises(CaptureError, match="for the sizes of the sample alone"):
        compile_engines(artifact, ["aoti"], trial=False)


@pytest.mark.slow
def test_fused_code_rounds_to_16_bits_where_eager_does(tmp_path: Path) -> None:
    def act(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for narrow, weight in zip((torch.float16, torch.bfloat16), m.buffers(), strict=True):
            rounded = x.to(narrow)
            found += [x - rounded.float(), rounded.float() == x, weight.float() - m.wide, rounded.float().sum(1)]
            found += [(x * 1e6).to(narrow).float(), rounded + 1000 - 1000, (rounded * weight).float() / 3]
        return [*found, (m.wide - m.wide.half().float()) * 1e3]

    x, wide = (torch.rand(3, 40, generator=torch.Generator().manual_seed(seed)) + 0.5 for seed in range(2))
    eager = Does(act, f16=nn.Buffer(wide.half()), bf16=nn.Buffer(wide.bfloat16()), wide=nn.Parameter(wide, False))
    artifact = export(eager, (x,), out=tmp_path / "a")
    model = loaded(compile_engines(artifact, ["aoti"], trial=False), tmp_path, eager, engine="aoti")
    for found, expected in zip(model(x), eager(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("engine", ["onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_divisions_by_sizes(engine: str, tmp_path: Path) -> None:
    def act(m: Any, x: torch.Tensor) -> list[torch.Tensor]:
        n = x.shape[0]
        return [x % n, x // n, n // x, n % x, torch.div(x, n, rounding_mode="floor"), x % (n + 0.5), x.sum() % n]

    eager, x = Does(act), torch.randn(6, 3) * 10
    artifact = export(eager, (x,), out=tmp_path / "a", dynamic_shapes=({0: Dim("n", min=2)},))
    model = loaded(compile_engines(artifact, [engine], trial=False), tmp_path, eager, engine=engine)
    for rows in (6, 11):
        x = torch.randn(rows, 3) * 10
        answers = model(x if engine == "aoti" else x.numpy())
        for found, expected in zip(answers, eager(x), strict=True):
            torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-6, atol=1e-5)
