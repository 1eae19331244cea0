"""Export: what is captured, how it is classified, and what the folder holds."""

from __future__ import annotations

import getpass
import io
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.torch_version import TorchVersion

from tests import ROOT
from tests.support import warm
from tests.support.models import Counter, Does, Everything, Nested, Views, doing
from tests.support.setups import loaded, served
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_runtime import Artifact, CaptureError, ExportError, Unsupported, load
from weightswap_tools.terminal import signature_text

IMAGE = torch.zeros(2, 1, 5, 5)
DYNAMIC = {"x": {0: Dim("batch", max=16)}, "scale": None}
BOTH = {
    "forward": MethodSpec("forward", (IMAGE, 2.0), dynamic_shapes=DYNAMIC),
    "encode": MethodSpec("encode", (torch.arange(4),)),
}


def everything(tmp_path: Path, **options: Any) -> Artifact:
    return export(Everything().eval(), (IMAGE, 2.0), out=tmp_path / "a.artifact", dynamic_shapes=DYNAMIC, **options)


def test_tensors_are_classified(tmp_path: Path) -> None:
    manifest = everything(tmp_path).manifest
    rows = {weight.name: weight.aliases for weight in manifest.weights}
    assert rows["embed.weight"] == ("head.weight",)
    assert {"unused", "offset", "norm.running_mean", "norm.num_batches_tracked"} <= rows.keys()
    assert not manifest.state
    constants = [tensor.name for tensor in manifest.constants]
    assert constants == ["table", "forward/plain", "forward/lifted_tensor_0"]  # no graph reads `idle`
    sources = {source.weight: source.keys for source in manifest.conversion.sources}
    assert sources["embed.weight"] == ("embed.weight", "head.weight")


def test_mutated_buffers_are_state(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (torch.zeros(2, 3),)), "peek": MethodSpec("peek")}
    manifest = export(Counter(), methods=methods, out=tmp_path / "a.artifact").manifest
    assert {tensor.name for tensor in manifest.state} == {"steps", "mean"}
    assert {tensor.name for tensor in manifest.weights} == {"linear.weight", "linear.bias"}
    assert manifest.conversion.ignored == ("steps",)
    assert {item.kind for item in manifest.methods["peek"].inputs} == {"weight", "state"}


def test_the_signature_in_words(tmp_path: Path) -> None:
    batch, x, part = {0: Dim("batch", max=9)}, torch.zeros(2, 4), torch.zeros(4)
    shapes = {"x": batch, "parts": [None, {"deep": batch}], "rest": (None,), "options": {"gain": None}, "flag": None}
    given = (x, [part, {"deep": x}], part), {"options": {"gain": part}, "flag": True}
    artifact = export(Nested().eval(), *given, out=tmp_path / "a.artifact", dynamic_shapes=shapes)
    assert signature_text("forward", artifact.manifest.methods["forward"].signature) == (
        "forward(x: F32[batch, 4], parts: [F32[4], {deep: F32[batch, 4]}], rest.0: F32[4], *, "
        "options: {gain: F32[4]}, flag: True) -> "
        "((F32[batch, 4], F32[]), [int batch, None, 2.5, 'text', True], {z: (F32[batch, 4],), 3: F32[4]}), "
        "batch in 0..9"
    )


def test_derived_and_unnamed_dimensions(tmp_path: Path) -> None:
    class Concatenated(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
            return torch.cat([x, x])[: y.shape[0]] * y * n

    rows = Dim("rows", min=2, max=7)
    shapes = {"x": {0: rows, 1: Dim.AUTO}, "y": {0: 2 * rows, 1: Dim.AUTO}, "n": Dim.DYNAMIC}
    given = (torch.zeros(3, 4), torch.zeros(6, 4), 5)
    artifact = export(Concatenated().eval(), given, out=tmp_path / "a.artifact", dynamic_shapes=shapes)
    assert signature_text("forward", artifact.manifest.methods["forward"].signature).startswith(
        "forward(x: F32[rows, d0], y: F32[2*rows, d0], n: int d1) -> F32[2*rows, d0], rows in 2..7, d0 in"
    )


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tests.exporter.test_export import *\nfrom weightswap_exporter import skeleton\n"
        "with skeleton():\n    model = Everything().eval()\n"
        "export(model, methods=BOTH, out=sys.argv[1])\nprint(hash('weight'))\n"
    )
    command = [warm.python(), "-c", script, str(tmp_path / "one")]
    said = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert said.split()[-1] != str(hash("weight"))  # sets have other orders here, where more was exported before, too
    export(Everything().eval(), methods=BOTH, out=tmp_path / "two")
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_nothing_of_the_build_machine_and_no_pickle_inside(tmp_path: Path) -> None:
    artifact = everything(tmp_path)
    content = b"".join(path.read_bytes() for path in artifact.path.rglob("*") if path.is_file())
    traces = (str(tmp_path), str(Path(__file__).parent), sys.prefix, "stack_trace", "test_export", "site-packages")
    for trace in (*traces, f"/{getpass.getuser()}/"):
        assert trace.encode() not in content
    with zipfile.ZipFile(artifact.path / "graphs/forward.pt2") as archive:
        assert not any(archive.read(name).startswith((b"PK", b"\x80")) for name in archive.namelist())


def test_the_graph_is_a_standard_archive_without_weights(tmp_path: Path) -> None:
    artifact = everything(tmp_path)
    program = torch.export.load(io.BytesIO(artifact.read("graphs/forward.pt2")))
    shapes = {name: tensor.shape for name, tensor in Everything().state_dict().items()}
    assert {name: tensor.shape for name, tensor in program.state_dict.items()} == shapes
    assert all(tensor.is_meta for tensor in program.state_dict.values())
    with zipfile.ZipFile(artifact.path / "graphs/forward.pt2") as archive:
        data = {info.filename: info.file_size for info in archive.infolist() if "/data/" in info.filename}
    assert {size for name, size in data.items() if not name.endswith(".json")} == {0}


def test_an_artifact_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    first = everything(tmp_path).graph_id
    with pytest.warns(UserWarning, match=r"behaves as in training .*batch_norm") as caught:
        artifact = export(Everything(), (IMAGE,), out=tmp_path / "a.artifact")
    assert {warning.filename for warning in caught} == {__file__}  # the line that calls export()
    assert artifact.graph_id != first
    assert [path.name for path in tmp_path.iterdir()] == ["a.artifact"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    for name in ("notes", "file"):
        with pytest.raises(ExportError, match="exists and is not an artifact"):
            export(Everything().eval(), (IMAGE,), out=tmp_path / name)


class Quantised(nn.Module):
    """Quantisation-aware training at its end: the observer is off, and the scale is what it was trained to."""

    def __init__(self, scale: float, *, observed: bool) -> None:
        super().__init__()
        self.observed = observed
        zero, off, on = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.ones(1).long()
        tensors = {
            "least": torch.zeros(1),
            "most": torch.tensor([255 * scale]),
            "scale": torch.tensor([scale]),
            "zero": zero,
        }
        for name, tensor in {**tensors, "off": off, "on": on}.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.observed:
            return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, 0, 255)
        observer = self.off, self.on, self.least, self.most, self.scale, self.zero
        return torch.fused_moving_avg_obs_fake_quant(x, *observer, 0.01, 0, 255, -1)


def test_scales_that_an_observer_may_change_are_named(tmp_path: Path) -> None:
    x, trained = torch.rand(4), Quantised(0.25, observed=True)
    with pytest.warns(UserWarning, match=r"may change scale: these are state.*fake_quantize_per_tensor_affine"):
        artifact = export(Quantised(0.125, observed=True), (x,), out=tmp_path / "observed.artifact")
    assert "scale" in pack(trained, artifact, out=tmp_path / "v1.safetensors").ignored
    advised = export(Quantised(0.125, observed=False), (x,), out=tmp_path / "advised.artifact")
    file = pack(Quantised(0.25, observed=False), advised, out=tmp_path / "v2.safetensors").path
    assert torch.equal(load(advised, file)(x), trained(x))


def test_scales_that_are_numbers_of_the_code_are_named(tmp_path: Path) -> None:
    """PT2E's conversion writes those of activations so."""
    pytest.importorskip("torchao.quantization.pt2e")
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 (it registers the operators)

    class Converted(nn.Module):
        def __init__(self, scale: float | None) -> None:
            super().__init__()
            self.number = scale
            self.scale, self.zero = nn.Buffer(torch.tensor(0.5)), nn.Buffer(torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale, zero = (self.scale, self.zero) if self.number is None else (self.number, 3)
            options = scale, zero, 0, 255, torch.uint8
            operators = torch.ops.quantized_decomposed
            return operators.dequantize_per_tensor(operators.quantize_per_tensor(x, *options), *options)

    x = torch.rand(4)
    with pytest.warns(UserWarning, match=r"scales that are numbers of the model's code.*Export the model again"):
        artifact = export(Converted(0.25), (x,), out=tmp_path / "numbers.artifact")
    assert torch.equal(load(artifact, Converted(0.25))(x), Converted(0.25)(x))
    model = load(export(Converted(None), (x,), out=tmp_path / "tensors.artifact"), Converted(None))
    assert torch.equal(model(x), Converted(None)(x))


def test_tensors_of_inference_mode_are_refused_with_advice(tmp_path: Path) -> None:
    advice = r"Make the model and its inputs outside of torch.inference_mode\(\)"
    made = nn.Linear(8, 4), torch.zeros(2, 8)
    with torch.inference_mode():
        within = nn.Linear(8, 4), torch.zeros(2, 8)
        for model, x in ((within[0], made[1]), (made[0], within[1])):
            with pytest.raises(CaptureError, match=advice):
                export(model, (x,), out=tmp_path / "a.artifact")
        export(made[0], (made[1],), out=tmp_path / "a.artifact")


def test_a_failed_export_leaves_the_old_artifact_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(tmp_path).manifest
    monkeypatch.setattr("weightswap_exporter.exporting.encode_manifest", lambda manifest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(Views(), (torch.zeros(4),), out=tmp_path / "a.artifact")
    assert [path.name for path in tmp_path.iterdir()] == ["a.artifact"]
    assert Artifact.open(tmp_path / "a.artifact").manifest == before


def graded(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = model.linear(x)
    with torch.no_grad():
        return y * 2


def test_the_graph_does_not_depend_on_the_mode_of_the_caller(tmp_path: Path) -> None:
    model = Does(graded, linear=nn.Linear(3, 3)).eval()
    one = export(model, (torch.zeros(3),), out=tmp_path / "a.artifact")
    with torch.no_grad():
        assert export(model, (torch.zeros(3),), out=tmp_path / "b.artifact").graph_id == one.graph_id


def test_weights_that_share_memory_are_named(tmp_path: Path) -> None:
    whole = nn.Parameter(torch.arange(12.0).view(3, 4))
    first, second = (nn.Parameter(part) for part in torch.zeros(8).split(4))  # neighbours share nothing
    held = {"whole": whole, "turned": nn.Parameter(whole.data.t()), "first": first, "second": second}
    model = Does(lambda m, x: x @ m.whole @ m.turned + m.first.sum() + m.second.sum(), **held)
    with pytest.warns(UserWarning, match="after a swap they do not share it: (whole and turned|turned and whole)$"):
        export(model, (torch.ones(3),), out=tmp_path / "a.artifact")


def moving_mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        model.state.mul_(0.5).add_(x.detach())
    with torch.enable_grad():
        y = x * model.weight
    return y + model.state


def test_a_graph_that_torch_cannot_read_is_served(tmp_path: Path) -> None:
    """torch 2.13 writes this and cannot read it; the runtime can."""
    eager = Does(moving_mean, weight=nn.Parameter(torch.ones(3)), state=nn.Buffer(torch.zeros(3))).eval()
    model = served(tmp_path, eager, torch.ones(3))
    context = model.new_context()
    for step in range(3):
        x = torch.full((3,), 1.0 + step)
        with torch.no_grad():
            assert torch.equal(model(x, context=context), eager(x))


def unwritable(model: Any, x: torch.Tensor) -> torch.Tensor:
    """torch 2.13 captures this and cannot write it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Lazy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3.0))
        return x + self.table


def view_of_a_weight() -> nn.Module:
    weight = nn.Parameter(torch.ones(3, 3))
    return Does(lambda m, x: m.turned @ x, weight=weight, turned=nn.Buffer(weight.data.t(), persistent=False))


def adjacent() -> nn.Module:
    """Embeddings that are passed along the edges of a graph, as in LightGCN."""
    act = lambda m, ids: torch.sparse.mm(m.edges, m.nodes.weight)[ids]  # noqa: E731
    return Does(act, nodes=nn.Embedding(3, 2), edges=torch.eye(3).to_sparse())


def named(key: str) -> nn.Module:
    return Does(lambda m, x: x * m.held[key], held=nn.ParameterDict({key: nn.Parameter(torch.ones(3))}))


def weighing(value: torch.Tensor) -> nn.Module:
    return Does(lambda m, x: x * m.weight.real, weight=nn.Parameter(value, requires_grad=False))


CHANGES_WEIGHT = Does(lambda m, x: x * m.weight.add_(1), weight=nn.Parameter(torch.ones(3), requires_grad=False))
NO_NAME = r"a tensor cannot have this name in a graph.*rename it in the model"
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "data-dependent control flow": (Does(lambda m, x: x + 1 if x.sum() > 0 else x), "torch.export cannot capture it"),
    "a graph that torch cannot write": (Does(unwritable), "cannot (write the graph|capture it)"),
    "a changed parameter": (CHANGES_WEIGHT, r"a call changes the parameter\(s\) weight"),
    "rows that a lookup scales": (nn.Embedding(9, 3, max_norm=1.0), "a call changes the parameter.*max_norm=None"),
    "a changed attribute": (Does(lambda m, x: m.cache.add_(x) * 1, cache=torch.zeros(3)), "register it as buffer"),
    "an assigned attribute": (
        Does(lambda m, x: doing(setattr(m, "cache", m.cache + 1), x + m.cache), cache=torch.zeros(3)),
        "'forward': a call stores tensors in self.cache that a later call reads",
    ),
    "a buffer that a call makes": (
        nn.Sequential(Lazy()),
        "a call creates 0.table, which the model did not have before",
    ),
    "a view of a weight": (
        view_of_a_weight(),
        "turned: is a view of the weight weight, and would keep its current val",
    ),
    "the data of a weight": (
        Does(lambda m, x: x * m.weight.data, weight=nn.Parameter(torch.ones(3))),
        r"cannot capture it: .*It may read a weight's `.data`, which no graph can: use `.detach\(\)`",
    ),
    "an error without words": (Does(lambda m, x: next(iter(()))), "torch.export cannot capture it: StopIteration"),
    "overlapping elements": (weighing(torch.ones(1).expand(3)), "weight: its elements overlap"),
    "a dtype without a name": (
        weighing(torch.ones(3).cdouble()),
        "weight: torch.complex128 is not a .*Make it complex64",
    ),
    "an offset in a larger tensor": (
        Does(lambda m, x: m.part[1:].as_strided((3,), (1,), 4) * x, part=nn.Buffer(torch.ones(9)[2:])),
        "as_strided counts elements of the memory that 'part' is a part of",
    ),
    "a reach beyond a part": (
        Does(lambda m, x: m.part.as_strided((3,), (3,)) * x, part=nn.Buffer(torch.ones(9)[:3])),
        "as_strided counts elements of the memory that 'part' is a part of",
    ),
    "a sparse attribute": (adjacent(), r"method 'forward': edges is a torch\.sparse_coo tensor"),
    "a name with underscores": (named("__w__"), NO_NAME),
    "a name with an apostrophe": (named("a'b"), NO_NAME),
    "a name with quotes": (named('w"x'), NO_NAME),
}
TORCHS = (
    "data-dependent control flow",
    "a graph that torch cannot write",
    "a changed attribute",
    "the data of a weight",
    "an error without words",
)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_captured_are_named(name: str, tmp_path: Path) -> None:
    model, says = REFUSED[name]
    before = dict(model.named_buffers())
    x = (
        torch.zeros(1, dtype=torch.int64)
        if any(isinstance(m, nn.Embedding) for m in model.modules())
        else torch.ones(3)
    )
    with pytest.raises(CaptureError, match=says) as refused:
        export(model.eval(), (x,), out=tmp_path / "a.artifact")
    assert name in TORCHS or "torch.export cannot" not in str(refused.value)  # it is not blamed on torch
    assert dict(model.named_buffers()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [lambda model: torch.jit.trace(model, torch.ones(3)), torch.jit.script])
def test_a_torchscript_module_is_refused(compiled: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"a TorchScript module \(Linear\), expected an eager one"):
        export(compiled(nn.Linear(3, 3)), (torch.ones(3),), out=tmp_path / "a.artifact")


WRONG: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "Everything has no method 'decode'": (CaptureError, {"methods": {"decode": MethodSpec("decode")}}),
    r"input: torch\.sparse_coo tensors cannot be inputs, only dense ones": (
        CaptureError,
        {"args": (IMAGE.to_sparse(),), "model": nn.Identity()},
    ),
    "args must be a tuple, got a Tensor": (CaptureError, {"args": IMAGE}),
    "fn_name must be a str, got a tuple": (CaptureError, {"methods": {"forward": MethodSpec((IMAGE,))}}),  # type: ignore[arg-type]
    "must be identifiers": (CaptureError, {"methods": {"../x": MethodSpec("forward")}}),
    "at least one": (CaptureError, {"methods": {}}),
    "not both": (ExportError, {"args": (IMAGE,), "methods": {"forward": MethodSpec("forward")}}),
    "tensorrt": (Unsupported, {"args": (IMAGE,), "engines": ("torch", "tensorrt")}),
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_requests_are_refused(says: str, tmp_path: Path) -> None:
    error, arguments = WRONG[says]
    with pytest.raises(error, match=says):
        export(**{"model": Everything().eval(), "out": tmp_path / "a.artifact"} | arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "reason", "is_advised"), [("2.11.0", "n <= 5", False), ("2.11.0", "", True), ("2.13.0", "", False)]
)
def test_what_an_older_torch_cannot_prove_comes_with_advice(
    version: str, reason: str, is_advised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = reason or "Not all values satisfy the generated guard min(8*n, 16*n) == (8*n)."

    def refusing(*_: object, **__: object) -> None:
        raise ValueError(f"Constraints violated (length)! {reason}")

    monkeypatch.setattr(torch.export, "export", refusing)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(CaptureError, match="Constraints violated") as refused:
        export(nn.Linear(3, 3), (torch.ones(3),), out=tmp_path / "a")
    assert ("export with torch 2.13" in str(refused.value)) == is_advised


def upsampling(act: Any) -> nn.Module:
    """In-place write, for which mutations are searched, before an operator that reads its input's sizes."""
    return Does(act, conv=nn.Conv2d(2, 2, 3, padding=1), act_in_place=nn.ReLU(inplace=True)).eval()


def upsampled() -> nn.Module:
    return upsampling(lambda m, x: nn.functional.interpolate(m.act_in_place(m.conv(x)), scale_factor=2.0))


DIMS = {"named": Dim("batch", max=32), "dynamic": Dim.DYNAMIC, "bounded": Dim.DYNAMIC(max=32), "auto": Dim.AUTO}


@torch.no_grad()
@pytest.mark.parametrize("dim", DIMS.values(), ids=DIMS)
def test_a_dynamic_dimension_stays_dynamic(dim: Any, tmp_path: Path) -> None:
    eager, x = upsampled(), torch.randn(5, 2, 4, 4)
    model = served(tmp_path, eager, torch.ones(2, 2, 4, 4), dynamic_shapes={"x": {0: dim}})
    assert torch.equal(model(x), eager(x))


@torch.no_grad()
def test_a_write_in_place_before_a_dynamic_size(tmp_path: Path) -> None:
    """As in decoders of segmentation models."""
    eager = upsampling(
        lambda m, x: nn.functional.interpolate(m.act_in_place(m.conv(x)), size=x.shape[2:], mode="bilinear")
    )
    sizes = {0: Dim("batch", max=8), 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)}
    model, x = served(tmp_path, eager, torch.ones(2, 2, 8, 8), dynamic_shapes={"x": sizes}), torch.randn(1, 2, 17, 12)
    assert torch.equal(model(x), eager(x))


def with_a_later_table(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Like ALiBi's slopes: the name exists from the beginning, but has no value."""
    if model.table is None:
        model.register_buffer("table", torch.arange(3.0), persistent=False)
    return x + model.table * model.weight


def later_table() -> nn.Module:
    model = Does(with_a_later_table, weight=nn.Parameter(torch.ones(3)))
    model.register_buffer("table", None, persistent=False)
    return model.eval()


@pytest.mark.parametrize("hollow", [False, True])
def test_a_buffer_that_the_first_call_makes(hollow: bool, tmp_path: Path) -> None:
    with skeleton() if hollow else nullcontext():
        model = later_table()
    with pytest.raises(CaptureError, match=r"a call creates table.*call the model once, then export"):
        export(model, (torch.ones(3),), out=tmp_path / "a")
    assert model.table is None
    model(torch.ones(3))
    artifact, real = export(model, (torch.ones(3),), out=tmp_path / "a"), later_table()
    assert torch.equal(loaded(artifact, tmp_path, real)(torch.ones(3)), real(torch.ones(3)))


@pytest.mark.parametrize("name", DIMS)
def test_a_dynamic_dimension_that_became_fixed_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fix(program: torch.export.ExportedProgram) -> frozenset[str]:
        for node in program.graph.find_nodes(op="placeholder"):
            list(map(int, node.meta["val"].shape))
        return frozenset()

    monkeypatch.setattr("weightswap_exporter.capture.capture.mutated_buffers", fix)
    fixed = pytest.raises(CaptureError, match="x: dimension 0 was declared dynamic, but the capture fixed it at 2")
    with nullcontext() if name == "auto" else fixed:
        export(upsampled(), (torch.ones(2, 2, 4, 4),), out=tmp_path / name, dynamic_shapes={"x": {0: DIMS[name]}})
