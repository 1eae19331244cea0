"""The reader of graphs, against `torch.export.load` of the same archives; and archives that nobody should trust."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import random
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from tests.setups import equal
from weightswap_exporter import export
from weightswap_runtime import ArtifactError, load
from weightswap_runtime.arena import ArenaLayout, HostArena
from weightswap_runtime.graphs import opening
from weightswap_runtime.graphs.compiling import Compiled, DamagedGraph, compile_graph
from weightswap_runtime.graphs.operators import ForeignFunction, MissingOperator
from weightswap_runtime.graphs.schema import UnknownPart, read_program

CPU = torch.device("cpu")
Document = dict[str, Any]


def archived(program: ExportedProgram) -> bytes:
    saved = io.BytesIO()
    torch.export.save(program, saved)
    return saved.getvalue()


def compiled(raw: bytes, device: torch.device = CPU) -> Compiled:
    return compile_graph(read_program(raw).graph_module.graph, device)


class Case(NamedTuple):
    """A function to capture, the sample inputs, further inputs, and dynamic shapes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    others: tuple[tuple[Any, ...], ...] = ()
    dynamic: Any = None


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 1, lambda y: y.sin() + 1, lambda y: y.cos(), (x,))


def counted(x: torch.Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64)
    return torch._higher_order_ops.while_loop(lambda n, y: n < 5, lambda n, y: (n + 1, y * 2), (start, x))


def mapped(x: torch.Tensor) -> torch.Tensor:
    return torch._higher_order_ops.map(lambda row, y: row.sin() + y, x, x[0].clone())


def scanned(x: torch.Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(3), x)


def modes(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        y = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = y @ y.T
    return z.float() + y.sum()


def kinds(x: torch.Tensor) -> Any:
    """Arguments of many kinds: infinities, dtypes, devices, formats, texts, lists with nothing in them, keywords."""
    y = x.masked_fill(x > 0.5, -math.inf).clamp(min=-1e30)
    z = torch.zeros(x.shape[0], 2, dtype=torch.float64, device="cpu") + torch.full((2,), math.nan).nan_to_num(7.0)
    w = torch.einsum("ij,kj->ik", x, x).to(memory_format=torch.contiguous_format)
    gathered = w[:, torch.tensor([0])] + w[torch.tensor([0]), :1]
    complex_numbers = (x[0] * (1 + 2j)).abs()
    return {"y": y, "z": [z, (gathered, complex_numbers)], "gelu": nn.functional.gelu(x, approximate="tanh")}


def sizes(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows, columns = x.shape
    merged = torch.cat([x, y.reshape(-1, columns)]).view(-1, columns)
    halves = merged.split([rows, merged.shape[0] - rows])
    padded = nn.functional.pad(x, (0, rows % 3, 1, max(rows, 4) // 2))
    return halves[1] * math.sqrt(columns), padded, rows * columns - 1, merged.numel()


def many_results(x: torch.Tensor) -> Any:
    values, places = x.topk(2, dim=1)
    first, *_ = x.unbind(1)
    normal = torch.nn.functional.layer_norm(x, (3,), None, None)
    return values, places, first, normal, x.chunk(2)[0], torch.var_mean(x, dim=0)[1], x.max()


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0.5).sum().item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return torch.zeros(count) + 1


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = 3.0
    y.add_(1).mul_(2)
    y[:, 1:].fill_(0.5)
    return y


def heads(x: torch.Tensor) -> torch.Tensor:
    y = x.view(x.shape[0], 2, -1, 4).transpose(1, 2).permute(0, 2, 1, 3).contiguous()
    y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
    y = nn.functional.softmax(y.unsqueeze(1).select(1, 0) / 2.0 - 1, dim=-1, dtype=torch.float64)
    y = nn.functional.silu(y.tanh().sigmoid() * 3 - y).relu().neg().flatten(0, 1)
    return nn.functional.dropout(y.abs().add(1, alpha=2).rsqrt().bmm(y.mT).sub(y.mT.mT.sum(), alpha=0.5), 0.5, False)


CASES = {
    "branches": Case(branches, (numbers(3, 4),), ((numbers(3, 4) / 100,),)),
    "a loop": Case(counted, (numbers(3),)),
    "a map": Case(mapped, (numbers(3, 4),)),
    "a scan": Case(scanned, (numbers(5, 3),)),
    "modes": Case(modes, (numbers(3, 4),)),
    "kinds": Case(kinds, (numbers(3, 4),)),
    "sizes": Case(
        sizes,
        (numbers(3, 4), numbers(2, 8)),
        ((numbers(5, 4, seed=1), numbers(6, 8, seed=2)),),
        ({0: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO}),
    ),
    "many results": Case(many_results, (numbers(4, 3),)),
    "a size from data": Case(data_dependent, (numbers(9),), ((numbers(9, seed=3),), (torch.zeros(9),))),
    "in place": Case(in_place, (numbers(3, 4),)),
    "heads": Case(heads, (numbers(2, 2, 3, 4),)),
}


class Whole(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def captured(case: Case) -> ExportedProgram:
    dynamic = None if case.dynamic is None else (case.dynamic,)
    return torch.export.export(Whole(case.function), case.args, dynamic_shapes=dynamic, strict=False)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.11's own archives
@torch.no_grad()
def test_a_graph_does_what_torch_makes_of_it(case: Case) -> None:
    raw = archived(captured(case))
    ours, theirs = compiled(raw), torch.export.load(io.BytesIO(raw))
    for args in (case.args, *case.others):
        flat = theirs._graph_module_flat_inputs(args, {})
        expected = theirs.graph_module(*(value.clone() if isinstance(value, torch.Tensor) else value for value in flat))
        assert len(flat) == ours.inputs
        assert len(expected) == ours.outputs
        assert equal(list(ours.call(*flat)), list(expected))
        assert equal(theirs.module()(*args), case.function(*args))


def test_autograd_is_left_out_where_nothing_needs_it() -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    def on(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * 2

    x = numbers(3)
    parts = archived(torch.export.export(Whole(off), (x,)))
    with torch.no_grad():
        gradients = archived(torch.export.export(Whole(on), (x,)))
    for raw, expected in ((archived(captured(CASES["heads"])), True), (parts, True), (gradients, False)):
        assert compiled(raw).past_autograd == expected
    for raw in (parts, gradients):
        assert b"wrap_with_set_grad_enabled" in json.dumps(documented(raw)).encode()
        assert torch.equal(compiled(raw).call(x)[0], x * 2)


def test_outputs_are_ordinary_tensors(small: Path) -> None:
    first, _ = load(small)._member.engine.bind(HostArena(ArenaLayout(()))).run("forward", [numbers(4, 3)])
    assert not first.is_inference()
    assert not first.requires_grad
    first.add_(1)
    (first * torch.ones(3, requires_grad=True)).sum().backward()


def test_assertions_on_data_are_kept() -> None:
    ours = compiled(archived(captured(CASES["a size from data"])))
    with pytest.raises(RuntimeError):
        ours.call(torch.ones(200))


def test_tensors_are_made_on_the_device_of_the_session() -> None:
    program = torch.export.export(Whole(lambda x: x + torch.arange(3, device="cpu")), (torch.ones(3),))
    ours = compiled(archived(program), torch.device("meta"))
    (made,) = ours.call(torch.ones(3, device="meta"))
    assert made.device.type == "meta"


@torch.no_grad()
def test_what_is_not_needed_any_more_is_freed() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    @torch.library.custom_op("weightswap_tests::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        result = x + 1
        alive.append(weakref.ref(result))
        return result

    watched.register_fake(torch.empty_like)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            x = torch.ops.weightswap_tests.watched(x)
        return x

    compiled(archived(torch.export.export(Whole(chain), (torch.ones(3),)))).call(torch.ones(3))
    assert len(alive) == 9
    assert most <= 2


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with sizes, texts, a subgraph and a loop of results."""

    def forward(x: torch.Tensor) -> Any:
        y = torch.cond(x.sum() > 1, lambda z: z.sin(), lambda z: z.cos(), (x,))
        first, second = y.split([1, y.shape[0] - 1])
        return nn.functional.gelu(first, approximate="tanh"), second * math.inf

    path = tmp_path_factory.mktemp("small") / "small.artifact"
    export(Whole(forward), (numbers(4, 3),), out=path, dynamic_shapes=(({0: Dim("rows", min=3, max=9)},),))
    return path


class Opened(NamedTuple):
    """What `open_graph` asks of an artifact."""

    raw: bytes
    path: Path = Path("x.artifact")
    manifest: Any = SimpleNamespace(producer=SimpleNamespace(torch="2.0"))

    def read(self, name: str) -> bytes:
        return self.raw


def documented(raw: bytes) -> Document:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("models/model.json"))
        document: Document = json.loads(archive.read(name))
    return document


def changed(raw: bytes, change: Callable[[Document], object]) -> Opened:
    """The archive with its document changed."""
    written = io.BytesIO()
    document = documented(raw)
    change(document)
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            content = json.dumps(document).encode() if name.endswith("models/model.json") else source.read(name)
            target.writestr(name, content)
    return Opened(written.getvalue())


def nodes(document: Document) -> list[Document]:
    found: list[Document] = document["graph_module"]["graph"]["nodes"]
    return found


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a document: what holds it, and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from parts(value[key])


PLANTED = "__import__('os').mkdir('executed')"
FOREIGN = [
    "torch.os.mkdir",
    "torch.load",
    "torch.ops.load_library",
    "torch.ops.aten.__class__.mro",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.add.__init__",
    "torch.ops.__class__.__init__.__globals__",
    "torch.ops.higher_order.__class__",
    "torch.ops.higher_order.print",
    "math.__loader__.load_module",
    "_operator.attrgetter",
    "builtins.exec",
    "exec",
    "",
    PLANTED,
    f"torch.ops.aten.add.Tensor); {PLANTED}; (",
    "#weightswap",
]


@pytest.fixture
def _nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("target", FOREIGN)
def test_nothing_but_operators_is_called(target: str, small: Path) -> None:
    def plant(document: Document) -> None:
        nodes(document)[-1] |= {
            "target": target,
            "inputs": [{"name": "", "arg": {"as_string": "executed"}, "kind": 1}],
        }

    with pytest.raises(ArtifactError):
        opening.open_graph(changed((small / "graphs/forward.pt2").read_bytes(), plant), "x.pt2", CPU)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_nothing_runs")
def test_names_and_texts_never_become_source(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    names = {place[key] for place, key in parts(documented(raw)) if key in ("name", "as_name")}

    def plant(document: Document) -> None:
        for place, key in parts(document["graph_module"]["graph"]):
            if key in ("name", "as_name") and place[key] in names and "arg" not in place:
                place[key] = f"{place[key]}={PLANTED}\n{PLANTED}"
            if key == "as_string":
                place[key] = f"'+{PLANTED}+'"

    ours = opening.open_graph(changed(raw, plant), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        ours.call(numbers(4, 3))


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch may not be able to write such a graph")
@torch.no_grad()
def test_what_is_not_known_is_left_to_torch_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sin() + 1)(x)

    artifact = export(Whole(rows), (numbers(4, 3),), out=tmp_path / "rows.artifact")
    with caplog.at_level(logging.INFO, "weightswap.graphs"):
        opened = opening.open_graph(artifact, "graphs/forward.pt2", CPU)
    assert "has the function 'torch._functorch.predispatch" in caplog.text
    assert "so torch.export.load opens it, which takes longer" in caplog.text
    assert (opened.inputs, opened.outputs, opened.past_autograd) == (1, 1, False)
    assert torch.equal(opened.call(numbers(4, 3))[0], rows(numbers(4, 3)))


def test_another_major_version_of_the_schema_is_left_to_torch(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    with pytest.raises(UnknownPart, match="schema version 9"):
        read_program(changed(raw, lambda document: document["schema_version"].update(major=9)).raw)


ODD = [None, True, -1, 2**70, 1e400, "", "x", PLANTED, [], {}, [[]], {"as_none": True}, {"as_tensor": {"name": "x"}}]


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("seed", range(10))
def test_mutated_documents_are_refused_by_name_or_run_nothing(seed: int, small: Path) -> None:
    chance = random.Random(seed)
    raw = (small / "graphs/forward.pt2").read_bytes()

    def mutate(document: Document) -> None:
        for _ in range(chance.randrange(1, 4)):
            place, key = chance.choice(list(parts(document["graph_module"]["graph"])))
            other, source = chance.choice(list(parts(document["graph_module"]["graph"])))
            place[key] = chance.choice([*ODD, json.loads(json.dumps(other[source]))])

    refused = 0
    for _ in range(100):
        try:
            found = compiled(changed(raw, mutate).raw)
        except (UnknownPart, MissingOperator, ForeignFunction, *opening.DAMAGED):
            refused += 1
            continue
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            found.call(*[numbers(4, 3)] * found.inputs)
    assert 0 < refused < 100


def test_an_artifact_that_contradicts_itself_is_refused_with_a_reason(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    for change, says in (
        (lambda document: nodes(document).reverse(), "is used before it is defined"),
        (lambda document: nodes(document).append(nodes(document)[0]), "is defined twice"),
        (lambda document: nodes(document)[0].pop("target"), "missing required field `target`"),
        (lambda document: document.pop("graph_module"), "missing required field `graph_module`"),
    ):
        with pytest.raises(ArtifactError, match=says):
            opening.open_graph(changed(raw, change), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(DamagedGraph):
        compiled(changed(raw, lambda document: nodes(document).reverse()).raw)


LIBRARY = """
import torch

@torch.library.custom_op("weightswap_graphs::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@doubled.register_fake
def _(x):
    return torch.empty_like(x)
"""
EXPORTS = """
import torch, weightswap_doubled
from torch import nn
from weightswap_exporter import export, pack

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.ops.weightswap_graphs.doubled(x) * self.scale

model = Model()
pack(model, export(model, (torch.ones(3),), out="own.artifact"), out="own.safetensors")
"""
SERVES = """
import torch
from weightswap_runtime import ArtifactError, Unsupported, load

try:
    load("own.artifact")
except ArtifactError as error:
    print(error)
try:
    load("own.artifact", op_libraries=["weightswap_nowhere"])
except Unsupported as error:
    print(error)
model = load("own.artifact", "own.safetensors", op_libraries=["weightswap_doubled"])
print(model(torch.ones(3)).tolist())
"""


def test_operators_of_a_package_are_found_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "weightswap_doubled.py").write_text(LIBRARY)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def python(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    python(EXPORTS)
    missing, nowhere, result = python(SERVES).splitlines()
    assert "needs torch.ops.weightswap_graphs.doubled.default, which this process lacks" in missing
    assert "registers the operators of weightswap_graphs" in missing
    assert "'weightswap_nowhere' cannot be loaded (ModuleNotFoundError" in nowhere
    assert result == "[2.0, 2.0, 2.0]"
    run = "from weightswap_runtime.cli.swap import swap_command\nswap_command()"
    said = python(run, "own.artifact", "own.safetensors", "--op-library", "weightswap_doubled")
    assert "generation  0" in said
