"""The engine `onnx` over torch's memory: on a GPU if there is one, and its calls alone over host memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.accelerators import ACCELERATOR, moved, on_accelerator, use_own_stream
from tests.support.models import Counter, Everything, Nested
from tests.support.packages import needs
from tests.support.sessions import bound_of
from tests.support.setups import different
from tests.support.storm import storm
from weightswap_exporter import MethodSpec, compile_engines, export, pack
from weightswap_runtime import Artifact, InputMismatch, Model, Unsupported, load
from weightswap_runtime.engines import onnx_torch as onnx_accelerated
from weightswap_runtime.engines import torch_cpu as torch_engine
from weightswap_runtime.engines.choosing import open_engine
from weightswap_runtime.engines.engine import EngineOptions
from weightswap_runtime.engines.onnx import OnnxGraph
from weightswap_runtime.engines.onnx_torch import OnnxCall
from weightswap_runtime.engines.torch_cpu import TorchEngine
from weightswap_runtime.format.manifest import Method

ON_THE_HOST = ("CPUExecutionProvider", "cpu", {})
PROVIDER = "CUDAExecutionProvider"
pytestmark = needs("onnxruntime", "onnxscript")


def _lacks_provider() -> bool:
    if ACCELERATOR != "cuda":
        return False
    onnxruntime = pytest.importorskip("onnxruntime")
    return PROVIDER not in onnxruntime.get_available_providers()


needs_provider = pytest.mark.skipif(_lacks_provider(), reason=f"this build of onnxruntime has no {PROVIDER}")
ON_DEVICES = [
    "cpu",
    *(pytest.param(*each.values, id=each.id, marks=[*each.marks, needs_provider]) for each in on_accelerator.args[1]),
]


class Host:
    """A device whose memory the host sees. `log` records waits for it, and `runs` the work in between."""

    torch = torch.device("cpu")
    index = 0

    def __init__(self) -> None:
        self.log: list[str] = []

    def current(self) -> str:
        return "stream"

    def mark(self, stream: str) -> str:
        return f"mark of {stream}"

    def finish(self, mark: str) -> None:
        self.log.append(mark)


class OnTheHost(TorchEngine):
    """The engine of accelerators, on the CPU."""

    host = Host()

    def _open(self, artifact: Artifact, prologue: bool) -> Mapping[str, Any]:
        return {name: OnnxGraph(artifact, name, None) for name in artifact.methods}

    def _call(self, name: str, method: Method, tensors: Any) -> Any:
        return OnnxCall(self._graphs[name], tensors, self.host, "cpu")  # type: ignore[arg-type]


@pytest.fixture(params=ON_DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(torch_engine, "TorchEngine", OnTheHost)
    elif ACCELERATOR != "cuda":
        monkeypatch.setitem(onnx_accelerated.PROVIDERS, ACCELERATOR, ON_THE_HOST)
    return str(request.param)


def served(model: nn.Module, args: tuple[Any, ...], folder: Path, device: str, **options: Any) -> Model:
    settings = {key: options.pop(key) for key in ("methods", "dynamic_shapes", "kwargs") if key in options}
    artifact = export(model.eval(), *([] if "methods" in settings else [args]), out=folder / "a", **settings)
    artifact = compile_engines(artifact, ["onnx"], trial=False)
    packed = pack(model, artifact, out=folder / "v.safetensors")
    if device == "cpu":
        return load(artifact.row_major(), packed.path, **options)
    return load(artifact, packed.path, device=device, engine="onnx", **options)


def near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(moved(found, "cpu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_are_those_of_eager_before_and_after_a_swap(
    device: str, layout: torch.memory_format, residency: str, tmp_path: Path
) -> None:
    models = [different(Everything, seed).to(memory_format=layout) for seed in range(2)]
    methods = {
        "forward": MethodSpec("forward", (torch.randn(2, 1, 5, 5),)),
        "encode": MethodSpec("encode", (torch.tensor([0, 3]),)),
    }
    x, ids = torch.randn(2, 1, 5, 5), torch.tensor([5, 1])
    found = served(models[0], (), tmp_path, device, methods=methods, residency=residency)
    other = pack(models[1], found.artifact, out=tmp_path / "w.safetensors").path
    for number, model in enumerate([*models, models[0]]):
        if number:
            found.swap(other if number == 1 else tmp_path / "v.safetensors")
        with torch.no_grad():
            near(found(x.to(device)), model(x))
            near(found.encode(ids.to(device)), model.encode(ids))


@pytest.mark.sampled(1)
def test_state_is_kept_between_calls_with_a_context(device: str, residency: str, tmp_path: Path) -> None:
    model = Counter()
    methods = {"forward": MethodSpec("forward", (torch.ones(2, 3),)), "peek": MethodSpec("peek")}
    found = served(model, (), tmp_path, device, methods=methods, residency=residency)
    x, context = torch.randn(2, 3), found.new_context()
    with torch.no_grad():
        for _ in range(3):
            near(found(x.to(device), context=context), model(x))
    steps, mean = found.peek(context=context)
    assert int(steps) == 3
    near(mean, model.mean)
    steps += 10
    assert int(found.peek(context=context)[0]) == 3
    found.swap(tmp_path / "v.safetensors")
    assert int(found.peek()[0]) == 0


def test_nested_inputs_literals_and_integers(device: str, tmp_path: Path) -> None:
    model = Nested()
    one = torch.randn(2, 4)
    args, kwargs = (one, [one, {"deep": one}], one), {"options": {"gain": torch.tensor(2.0)}}
    found = served(model, args, tmp_path, device, kwargs=kwargs)
    (first, second), items, more = found(*moved(args, device), **moved(kwargs, device))
    with torch.no_grad():
        expected = model(*args, **kwargs)
    near([first, second, more["z"][0]], [expected[0].first, expected[0].second, expected[2]["z"][0]])
    assert items == expected[1]


class Kinds(nn.Module):
    """Outputs of several dtypes, an integer, a size, and the weight and an input themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, count: int) -> tuple[Any, ...]:
        y = torch.where(mask, x * self.weight.float(), 0.0)
        return y.half(), y > 0, self.weight, x, y.sum(0), count, x.shape[0]


SHAPES = {"x": {0: Dim("rows", max=8)}, "mask": {0: Dim("rows", max=8)}, "count": Dim.DYNAMIC}


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.sampled(2)
def test_dtypes_sizes_and_inputs_in_any_order(device: str, rows: int, tmp_path: Path) -> None:
    model = Kinds()
    found = served(model, (torch.ones(2, 3), torch.ones(2, 3) > 0, 4), tmp_path, device, dynamic_shapes=SHAPES)
    x, mask = torch.randn(3, rows).t(), (torch.randn(rows, 6) > 0)[:, ::2]
    if not rows:
        with pytest.raises(InputMismatch, match="x: is empty"):
            found(x.to(device), mask.to(device), 7)
        return
    values = found(x.to(device), mask.to(device), 7)
    with torch.no_grad():
        expected = model(x, mask, 7)
    near(values[:5], expected[:5])
    assert values[5:] == (7, rows)
    weight, own = values[2], values[3]
    weight += 1
    own += 1
    near(found(x.to(device), mask.to(device), 7)[2:4], expected[2:4])


def test_the_device_is_waited_for_before_a_call_and_before_its_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "TorchEngine", OnTheHost)
    monkeypatch.setattr(OnTheHost, "host", Host())
    found = served(Kinds(), (torch.ones(2, 3), torch.ones(2, 3) > 0, 4), tmp_path, "cpu", dynamic_shapes=SHAPES)
    log, bound = OnTheHost.host.log, bound_of(found)
    call: OnnxCall = bound._calls["forward"]  # type: ignore[attr-defined]
    opened = call._graph.session

    class Session:
        def io_binding(self) -> Any:
            return opened.io_binding()

        def run_with_iobinding(self, binding: Any) -> None:
            log.append("run")
            opened.run_with_iobinding(binding)

    monkeypatch.setattr(call._graph, "_session", Session())
    for _ in range(2):
        found(torch.ones(1, 3), torch.ones(1, 3) > 0, 7)
    assert log == ["mark of stream", "run", "mark of stream"] * 2
    assert len(call._pool) == 1


@pytest.mark.sampled(2)
def test_threads_see_one_set_of_weights_in_each_call(device: str, residency: str, tmp_path: Path) -> None:
    class Many(nn.Module):
        """Each output is the number that all weights have."""

        def __init__(self, number: float) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.full((64, 64), float(number))) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x @ part).mean(-1) for part in self.parts])

    found = served(Many(0), (torch.eye(64),), tmp_path, device, residency=residency)
    files = [pack(Many(seed), found.artifact, out=tmp_path / f"{seed}.safetensors").path for seed in range(1, 4)]

    def call(_: int) -> frozenset[float]:
        return frozenset(found(torch.full((64, 64), 1 / 64, device=device)).flatten().tolist())

    with storm(call, 3, lambda _: use_own_stream(device)) as seen:
        for number in range(30):
            found.swap(files[number % 3])
    assert {len(values) for values in chain(*seen)} == {1}


def test_an_error_leaves_the_model_able_to_serve(device: str, tmp_path: Path) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

    if device == "cuda":
        pytest.skip("CUDA's lookups do not check their indices")
    model = Looks()
    found = served(model, (torch.tensor([1]),), tmp_path, device)
    with pytest.raises(Exception, match="indices element out of data bounds"):
        found(torch.tensor([4]).to(device))
    with torch.no_grad():
        near(found(torch.tensor([3]).to(device)), model(torch.tensor([3])))


def test_outputs_that_cannot_be_handed_over_are_refused_by_name(device: str, tmp_path: Path) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).to(torch.float8_e4m3fn)

    with pytest.raises(Unsupported, match="cannot return outputs of type F8_E4M3"):
        served(Casts(), (torch.ones(3),), tmp_path, device)


def test_cuda_graphs_and_threads_are_refused(tmp_path: Path) -> None:
    artifact = export(Counter(), (torch.ones(2, 3),), out=tmp_path / "a")
    with pytest.raises(Unsupported, match="cuda_graphs with the engine 'onnx'"):
        open_engine("onnx", artifact, "cuda", EngineOptions(cuda_graphs="auto"))
    with pytest.raises(Unsupported, match=r"threads=2: .* a positive number with the engine 'onnx' on the CPU"):
        open_engine("onnx", artifact, "cuda", EngineOptions(threads=2))


@on_accelerator
@needs_provider
def test_a_device_that_onnx_runtime_does_not_serve_is_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(onnx_accelerated.PROVIDERS, device, raising=False)
    with pytest.raises(Unsupported, match="engine 'onnx' on the device"):
        served(Counter(), (torch.ones(2, 3),), tmp_path, device)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so that the provider may come")
def test_a_missing_provider_is_reported(tmp_path: Path) -> None:
    artifact = compile_engines(export(Counter(), (torch.ones(2, 3),), out=tmp_path / "a"), ["onnx"], trial=False)
    with pytest.raises(Unsupported, match=r"needs CUDAExecutionProvider, but ONNX Runtime .* offers CPUExecution"):
        OnnxGraph(artifact, "forward", None, (PROVIDER, {}))
