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
from tests.support.models import Counter, Everything, Nested, Renamed, Views
from weightswap_exporter import MethodSpec, export, pack, skeleton
from weightswap_exporter.capture import capture
from weightswap_exporter.modules.tensors import is_fake
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
    assert [tensor.name for tensor in manifest.constants] == [
        "table",
        "idle",
        "forward/plain",
        "forward/lifted_tensor_0",
    ]
    sources = {source.weight: source.keys for source in manifest.conversion.sources}
    assert sources["embed.weight"] == ("embed.weight", "head.weight")


def test_mutated_buffers_are_state(tmp_path: Path) -> None:
    methods = {"forward": MethodSpec("forward", (torch.zeros(2, 3),)), "peek": MethodSpec("peek")}
    manifest = export(Counter(), methods=methods, out=tmp_path / "a.artifact").manifest
    assert {tensor.name for tensor in manifest.state} == {"steps", "mean"}
    assert {tensor.name for tensor in manifest.weights} == {"linear.weight", "linear.bias"}
    assert manifest.conversion.ignored == ("steps",)
    assert {item.kind for item in manifest.methods["peek"].inputs} == {"weight", "state"}


def test_renaming_hooks_are_recorded_and_extra_state_is_left_out(tmp_path: Path) -> None:
    manifest = export(Renamed().eval(), (torch.zeros(1, 3),), out=tmp_path / "a.artifact").manifest
    assert {source.weight: source.keys for source in manifest.conversion.sources} == {
        f"layers.{index}.layer.{name}": (f"layers.{index}.{name}",) for index in (0, 1) for name in ("weight", "bias")
    }
    assert manifest.conversion.ignored == ("_extra_state",)


def test_the_signature_in_words(tmp_path: Path) -> None:
    batch = Dim("batch", max=9)
    x, part = torch.zeros(2, 4), torch.zeros(4)
    shapes = {
        "x": {0: batch},
        "parts": [None, {"deep": {0: batch}}],
        "rest": (None,),
        "options": {"gain": None},
        "flag": None,
    }
    model = Nested().eval()
    artifact = export(
        model,
        (x, [part, {"deep": x}], part),
        {"options": {"gain": part}, "flag": True},
        out=tmp_path / "a.artifact",
        dynamic_shapes=shapes,
    )
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
    artifact = export(
        Concatenated().eval(),
        (torch.zeros(3, 4), torch.zeros(6, 4), 5),
        out=tmp_path / "a.artifact",
        dynamic_shapes=shapes,
    )
    signature = artifact.manifest.methods["forward"].signature
    assert signature_text("forward", signature).startswith(
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
    for trace in (str(tmp_path), str(Path(__file__).parent), sys.prefix, "stack_trace", "test_export", "site-packages"):
        assert trace.encode() not in content
    assert f"/{getpass.getuser()}/".encode() not in content
    with zipfile.ZipFile(artifact.path / "graphs/forward.pt2") as archive:
        pickles = [name for name in archive.namelist() if archive.read(name).startswith((b"PK", b"\x80"))]
    assert pickles == []


def test_the_graph_is_a_standard_archive_without_weights(tmp_path: Path) -> None:
    artifact = everything(tmp_path)
    program = torch.export.load(io.BytesIO(artifact.read("graphs/forward.pt2")))
    model = Everything()
    assert {name: tensor.shape for name, tensor in program.state_dict.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in program.state_dict.values())
    with zipfile.ZipFile(artifact.path / "graphs/forward.pt2") as archive:
        data = [
            info for info in archive.infolist() if "/data/" in info.filename and not info.filename.endswith(".json")
        ]
    assert data
    assert sum(info.file_size for info in data) == 0


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


def test_a_failed_export_leaves_the_old_artifact_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(tmp_path).manifest
    monkeypatch.setattr("weightswap_exporter.exporting.encode_manifest", lambda manifest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(Views(), (torch.zeros(4),), out=tmp_path / "a.artifact")
    assert [path.name for path in tmp_path.iterdir()] == ["a.artifact"]
    assert Artifact.open(tmp_path / "a.artifact").manifest == before


class Graded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.linear(x)
        with torch.no_grad():
            return y * 2


def test_the_graph_does_not_depend_on_the_mode_of_the_caller(tmp_path: Path) -> None:
    model = Graded().eval()
    ids = {export(model, (torch.zeros(3),), out=tmp_path / "a.artifact").graph_id}
    with torch.no_grad():
        ids.add(export(model, (torch.zeros(3),), out=tmp_path / "b.artifact").graph_id)
    assert len(ids) == 1


class Data(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class ChangesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.add_(1)
        return x * self.weight


class ChangesAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x)
        return self.cache * 1


class AssignsAttribute(ChangesAttribute):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = self.cache + 1
        return x + self.cache


class ViewOfWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("turned", self.weight.data.t(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.turned @ x


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.turned = nn.Parameter(self.whole.data.t())
        self.first, self.second = (nn.Parameter(part) for part in torch.zeros(8).split(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.whole @ self.turned + self.first.sum() + self.second.sum()


def test_weights_that_share_memory_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="after a swap they do not share it: (whole and turned|turned and whole)$"):
        export(Overlapping().eval(), (torch.ones(3),), out=tmp_path / "a.artifact")


class Unreadable(nn.Module):
    """torch 2.13 writes this and cannot read it; the runtime can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            self.state.mul_(0.5).add_(x.detach())
        with torch.enable_grad():
            y = x * self.weight
        return y + self.state


class Unwritable(nn.Module):
    """torch 2.13 captures this and cannot write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1).expand(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.real


def test_a_graph_that_torch_cannot_read_is_served(tmp_path: Path) -> None:
    eager = Unreadable().eval()
    pack(eager, export(eager, (torch.ones(3),), out=tmp_path / "a"), out=tmp_path / "w.safetensors")
    model = load(tmp_path / "a", tmp_path / "w.safetensors")
    context = model.new_context()
    for step in range(3):
        x = torch.full((3,), 1.0 + step)
        with torch.no_grad():
            assert torch.equal(model(x, context=context), eager(x))


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "data-dependent control flow": (Data(), "torch.export cannot capture it"),
    "a changed parameter": (ChangesWeight(), r"a call changes the parameter\(s\) weight"),
    "a changed attribute": (ChangesAttribute(), "register it as buffer"),
    "an assigned attribute": (AssignsAttribute(), "a call stores tensors in self.cache"),
    "a view of a weight": (ViewOfWeight(), "turned: is a view of the weight weight, and would keep its current values"),
    "a graph that torch cannot write": (
        Unwritable(),
        "cannot (write the graph|capture it)",
    ),
    "overlapping elements": (Expanded(), "weight: its elements overlap"),
    "a dtype without a name": (
        Complex(),
        "weight: torch.complex128 is not a dtype of the safetensors format. Make it complex64",
    ),
}


@pytest.mark.parametrize(("model", "says"), REFUSED.values(), ids=REFUSED)
def test_models_that_cannot_be_captured_are_named(model: nn.Module, says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export(model.eval(), (torch.ones(3),), out=tmp_path / "a.artifact")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [lambda model: torch.jit.trace(model, torch.ones(3)), torch.jit.script])
def test_a_torchscript_module_is_refused(compiled: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"a TorchScript module \(Linear\), expected an eager one"):
        export(compiled(nn.Linear(3, 3)), (torch.ones(3),), out=tmp_path / "a.artifact")


class Adjacent(nn.Module):
    """Embeddings that are passed along the edges of a graph, as in LightGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(3, 2)
        self.edges = torch.eye(3).to_sparse()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.edges, self.nodes.weight)[ids]


def test_a_sparse_attribute_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"method 'forward': edges is a torch\.sparse_coo tensor"):
        export(Adjacent(), (torch.tensor([0]),), out=tmp_path / "a")


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    model, out = Everything().eval(), tmp_path / "a.artifact"
    with pytest.raises(CaptureError, match="Everything has no method 'decode'"):
        export(model, methods={"decode": MethodSpec("decode")}, out=out)
    with pytest.raises(CaptureError, match=r"input: torch\.sparse_coo tensors cannot be inputs, only dense ones"):
        export(nn.Linear(3, 2), (torch.ones(2, 3).to_sparse(),), out=out)
    with pytest.raises(CaptureError, match="args must be a tuple, got a Tensor"):
        export(model, IMAGE, out=out)
    with pytest.raises(CaptureError, match="fn_name must be a str, got a tuple"):
        export(model, methods={"forward": MethodSpec((IMAGE,))}, out=out)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="must be identifiers"):
        export(model, methods={"../x": MethodSpec("forward")}, out=out)
    with pytest.raises(CaptureError, match="at least one"):
        export(model, methods={}, out=out)
    with pytest.raises(ExportError, match="not both"):
        export(model, (IMAGE,), methods={"forward": MethodSpec("forward")}, out=out)
    with pytest.raises(Unsupported, match="tensorrt"):
        export(model, (IMAGE,), out=out, engines=("torch", "tensorrt"))
    assert list(tmp_path.iterdir()) == []


def test_what_an_older_torch_cannot_prove_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Constraints violated (length)! Not all values satisfy the generated guard min(8*n, 16*n) == (8*n)."
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    assert "export with torch 2.13" in capture._advice(said)
    assert capture._advice("Constraints violated (length)! n <= 5") == ""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    assert capture._advice(said) == ""


class Upsampled(nn.Module):
    """In-place write, for which mutations are searched, before an operator that reads its input's sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.act(self.conv(x)), scale_factor=2.0)


DIMS = {"named": Dim("batch", max=32), "dynamic": Dim.DYNAMIC, "bounded": Dim.DYNAMIC(max=32), "auto": Dim.AUTO}


@pytest.mark.parametrize("dim", DIMS.values(), ids=DIMS)
def test_a_dynamic_dimension_stays_dynamic(dim: Any, tmp_path: Path) -> None:
    eager = Upsampled().eval()
    artifact = export(eager, (torch.ones(2, 2, 4, 4),), out=tmp_path / "a", dynamic_shapes={"x": {0: dim}})
    model = load(artifact, pack(eager, artifact, out=tmp_path / "w.safetensors").path)
    x = torch.randn(5, 2, 4, 4)
    with torch.no_grad():
        assert torch.equal(model(x), eager(x))


class Resized(Upsampled):
    """As in decoders of segmentation models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.act(self.conv(x)), size=x.shape[2:], mode="bilinear")


def test_a_write_in_place_before_a_dynamic_size(tmp_path: Path) -> None:
    eager = Resized().eval()
    sizes = {0: Dim("batch", max=8), 2: Dim("height", min=4, max=64), 3: Dim("width", min=4, max=64)}
    artifact = export(eager, (torch.ones(2, 2, 8, 8),), out=tmp_path / "a", dynamic_shapes={"x": sizes})
    model = load(artifact, pack(eager, artifact, out=tmp_path / "w.safetensors").path)
    x = torch.randn(1, 2, 17, 12)
    with torch.no_grad():
        assert torch.equal(model(x), eager(x))


class Storing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x) + self.last
        return self.last.relu()


class Lazy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3.0))
        return x + self.table


def test_what_weightswap_refuses_is_not_blamed_on_torch(tmp_path: Path) -> None:
    cases = {
        "method 'forward': a call stores tensors in self.last that a later call reads": Storing(),
        "method 'forward': a call changes the parameter.*max_norm=None": nn.Embedding(9, 3, max_norm=1.0),
        "a call creates 0.table, which the model did not have before": nn.Sequential(Lazy()),
    }
    for says, model in cases.items():
        x = torch.ones(3, dtype=torch.int64 if isinstance(model, nn.Embedding) else torch.float32)
        with pytest.raises(CaptureError, match=says) as refused:
            export(model.eval(), (x,), out=tmp_path / "a")
        assert "torch.export cannot" not in str(refused.value)
        assert not any(map(is_fake, model.buffers()))
    called = nn.Sequential(Lazy()).eval()
    called(torch.ones(3))
    export(called, (torch.ones(3),), out=tmp_path / "a")


class LaterTable(Lazy):
    """Like ALiBi's slopes: the name exists from the beginning, but has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.register_buffer("table", torch.arange(3.0), persistent=False)
        return x + self.table * self.weight


@pytest.mark.parametrize("hollow", [False, True])
def test_a_buffer_that_the_first_call_makes(hollow: bool, tmp_path: Path) -> None:
    with skeleton() if hollow else nullcontext():
        model = LaterTable().eval()
    with pytest.raises(CaptureError, match=r"a call creates table.*call the model once, then export"):
        export(model, (torch.ones(3),), out=tmp_path / "a")
    assert model.table is None
    model(torch.ones(3))
    artifact = export(model, (torch.ones(3),), out=tmp_path / "a")
    real = LaterTable().eval()
    served = load(artifact, pack(real, artifact, out=tmp_path / "w.safetensors").path)
    assert torch.equal(served(torch.ones(3)), real(torch.ones(3)))


@pytest.mark.parametrize("key", ["__w__", "a'b", 'w"x'])
def test_names_that_no_graph_can_have_are_refused(key: str, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ParameterDict({key: nn.Parameter(torch.ones(3))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.held[key]

    with pytest.raises(CaptureError, match=r"a tensor cannot have this name in a graph.*rename it in the model"):
        export(Named(), (torch.ones(3),), out=tmp_path / "a")


def test_a_dynamic_dimension_that_became_fixed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fix(program: torch.export.ExportedProgram) -> frozenset[str]:
        for node in program.graph.find_nodes(op="placeholder"):
            list(map(int, node.meta["val"].shape))
        return frozenset()

    monkeypatch.setattr(capture, "mutated_buffers", fix)
    for name, dim in DIMS.items():
        arguments = {"out": tmp_path / name, "dynamic_shapes": {"x": {0: dim}}}
        if name == "auto":
            assert export(Upsampled().eval(), (torch.ones(2, 2, 4, 4),), **arguments).path.is_dir()
            continue
        with pytest.raises(CaptureError, match="x: dimension 0 was declared dynamic, but the capture fixed it at 2"):
            export(Upsampled().eval(), (torch.ones(2, 2, 4, 4),), **arguments)
