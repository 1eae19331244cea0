"""Documents of an artifact's graph: torch gets nothing that it would execute."""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forged import replace_file, with_document
from tests.support.graphs import Document
from weightswap_exporter import export
from weightswap_exporter.capture.archive import open_program
from weightswap_exporter.capture.document_check import is_size
from weightswap_runtime import Artifact, ArtifactError
from weightswap_runtime.engines.graph_archive import check_records

CODE = "__import__('os').mkdir('executed')"
FORWARD = "graphs/forward.pt2"


class Branching(nn.Module):
    """An unused input, a size, a text, a branch with graphs of its own, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> Any:
        self.seen.add_(1)
        y = torch.cond(x.sum() > 1, torch.sin, torch.cos, (x,))
        return {"y": nn.functional.gelu(self.linear(y), approximate="tanh"), "rows": [x.shape[0] * 2]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("branching") / "a"
    dynamic = {"x": {0: torch.export.Dim("rows", max=64)}, "unused": None}
    return export(Branching().eval(), (torch.ones(2, 3), torch.ones(1)), out=path, dynamic_shapes=dynamic).read(FORWARD)


@pytest.fixture
def opened(exported: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Function that changes the graph and opens it, as compilers do."""
    path = tmp_path / "b"
    export(Branching().eval(), (torch.ones(2, 3), torch.ones(1)), out=path)
    monkeypatch.chdir(tmp_path)

    def change(alter: Callable[[Document], object]) -> Any:
        replace_file(path, FORWARD, with_document(exported, alter))
        return open_program(Artifact.open(path), FORWARD)

    return change


def graph(document: Document) -> Any:
    return document["graph_module"]["graph"]


def calls(document: Document, name: str) -> Any:
    return next(node for node in graph(document)["nodes"] if name in node["target"])


def rename(document: Document, old: str, new: str) -> None:
    """Rename every mention of a value."""
    for spec in (*graph(document)["inputs"], *document["graph_module"]["signature"]["input_specs"]):
        found = spec.get("user_input", {}).get("arg", spec).get("as_tensor", {})
        if found.get("name") == old:
            found["name"] = new
    graph(document)["tensor_values"][new] = graph(document)["tensor_values"].pop(old)


KEYWORD = json.dumps([f"y): return\r{CODE}\r#"])
LEAF = {"type": None, "context": None, "children_spec": []}


def spec(kind: str, children: list[Any], context: str = "null") -> Document:
    """Containers as torch writes them."""
    return {"type": f"builtins.{kind}", "context": context, "children_spec": children}


def parameter(document: Document, name: str) -> None:
    document["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = name


HOSTILE: dict[str, tuple[Callable[[Document], object], str]] = {
    "an input": (lambda d: rename(d, "unused", f"unused={CODE}"), "is not allowed there"),
    "the name of a call": (
        lambda d: calls(d, "linear").update(name=f"x = {CODE}\n"),
        "Node.name: .* is not allowed there",
    ),
    "an attribute of Python": (lambda d: calls(d, "linear").update(name="__class__"), "Node.name: '__class__' is not"),
    "a keyword": (
        lambda d: calls(d, "gelu")["inputs"][-1].update(name=f"approximate={CODE}, x", kind=1),
        "NamedArgument.name: .* is not allowed there",
    ),
    "a subgraph": (
        lambda d: calls(d, "cond")["inputs"][1]["arg"]["as_graph"].update(name=f"f={CODE}"),
        "GraphArgument.name: .* is not allowed there",
    ),
    "a path of attributes": (
        lambda d: parameter(d, "linear.__class__.forward"),
        "parameter_name: 'linear.__class__.forward' is not allowed there",
    ),
    "quotes in a path": (
        lambda d: parameter(d, "x\")\rexec(\"__import__('os')\\x2emkdir('executed')\")\rdef zz(self):\r z = (\""),
        "parameter_name: .* is not allowed there",
    ),
    "full-width letters": (
        lambda d: parameter(d, "linear.\uff3f\uff3fclass\uff3f\uff3f.x"),
        "parameter_name: .* is not allowed there",
    ),
    "a keyword of the call": (
        lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec=json.dumps([1, spec("tuple", [spec("tuple", [LEAF]), spec("dict", [LEAF], KEYWORD)])]),
            forward_arg_names=None,
        ),
        "ModuleCallSignature.in_spec: .* is not allowed there",
    ),
    "a size": (
        lambda d: graph(d)["sym_int_values"].update(more={"as_expr": {"expr_str": f"{CODE} or Symbol('s1')"}}),
        "SymExpr.expr_str: .* is not allowed there",
    ),
    "a range": (lambda d: d["range_constraints"].update({CODE: {"min_val": 0, "max_val": 1}}), "range_constraints"),
    "a container that imports": (
        lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec='[1, {"type": "collections.defaultdict", "context": "{\\"default_factory_module\\": \\"os\\", '
            '\\"default_factory_name\\": \\"mkdir\\", \\"dict_context\\": []}", "children_spec": []}]'
        ),
        "ModuleCallSignature.in_spec: .* is not allowed there",
    ),
    "metadata": (lambda d: calls(d, "linear")["metadata"].update(source_fn_stack=f"{CODE};"), "keys of Node.metadata"),
    "lines in metadata": (
        lambda d: calls(d, "linear")["metadata"].update(nn_module_stack=f"a,b,c\n{CODE}"),
        "Node.metadata: .* is not allowed there",
    ),
    "an object": (
        lambda d: graph(d)["custom_obj_values"].update(x={"name": "x", "class_fqn": "os.mkdir"}),
        "is not allowed in a graph",
    ),
    "an operator as an argument": (
        lambda d: calls(d, "gelu")["inputs"].append({"name": "x", "arg": {"as_operator": "torch.os.mkdir"}, "kind": 2}),
        "as_operator",
    ),
    "something new": (lambda d: d.update(hooks=[CODE]), "ExportedProgram has no 'hooks'"),
    "another device": (
        lambda d: graph(d)["tensor_values"]["x"]["device"].update(type=CODE),
        "Device.type: .* is not allowed there",
    ),
    "a number that is a text": (
        lambda d: graph(d)["tensor_values"]["x"].update(dtype=CODE),
        "dtype: .* is not allowed there",
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("alter", "says"), HOSTILE.values(), ids=HOSTILE)
def test_torch_sees_nothing_that_it_would_run(
    alter: Callable[[Document], object], says: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=says) as refused:
        opened(alter)
    assert str(refused.value).startswith(str(tmp_path / "b" / FORWARD))
    assert len(str(refused.value)) < 2000
    assert not (tmp_path / "executed").exists()


def test_torch_says_nothing_in_words_of_the_file(opened: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    def plant(document: Document) -> None:
        call = calls(document, "gelu")
        call["inputs"][-1]["arg"] = {"as_string": "\x1b[2K\rall agree"}
        del graph(document)["tensor_values"][call["outputs"][0]["as_tensor"]["name"]]

    with caplog.at_level(logging.DEBUG), pytest.raises(ArtifactError) as refused:
        opened(plant)
    assert "all agree" not in caplog.text
    assert str(refused.value).isprintable()
    assert not logging.getLogger("torch.export").disabled


def test_records_on_top_of_each_other_are_refused(exported: bytes, tmp_path: Path) -> None:
    """Each record would be read with all that follow it: a small file could expand to gigabytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(exported)) as source, zipfile.ZipFile(written, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        target.writestr("archive/.data/serialization_id", bytes(10_000))
        for info in target.infolist():
            if info.filename.endswith(("byteorder", "archive_version")):
                info.header_offset = target.getinfo("archive/.data/serialization_id").header_offset
                info.file_size = info.compress_size = 10_000
    with pytest.raises(ArtifactError, match="its records overlap"):
        check_records(written.getvalue(), "x")


def test_guards_are_left_out(opened: Callable[..., Any], tmp_path: Path) -> None:
    program = opened(lambda document: document.update(guards_code=[f"{CODE} or True"]))
    program.module()
    assert not (tmp_path / "executed").exists()


def test_without_malice_it_is_the_program_that_was_exported(opened: Callable[..., Any]) -> None:
    program = opened(lambda document: None)
    assert [str(node.target) for node in program.graph.nodes if "linear" in node.name and node.op != "placeholder"] == [
        "aten.linear.default"
    ]


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("Symbol('s77', positive=True, integer=True)", True),
        ("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))", True),
        ("FloorDiv(s0, 2) + u1", True),
        ("Float('0.5', precision=53)", True),
        ("Float('1.4142135623730951454746218587388284504413604736328125', precision=53)", True),
        ("And(Le(Symbol('s0', integer=True), int_oo), true)", True),
        ("~(s0 < 3) & (2*s1 >= s0 // 2)", True),
        ("Piecewise((s0, Ge(s0, 2)), (2, True))", True),
        ("__import__('os').system('true')", False),
        ("Symbol('__import__')", False),
        ("Symbol('s0', __class__=True)", False),
        ("Symbol(*[1])", False),
        ("().__class__", False),
        ("open('x')", False),
        ("s0.evalf", False),
        ("eval(s0)", False),
        ("lambda: 1", False),
        ("[s0 for s0 in s1]", False),
        ("f'{s0}'", False),
        ("s0[0]", False),
        ("s0 @ s1", False),
        ("(" * 500, False),
        ("1" * 5000, False),
        ("2*s0**2 + 1", True),
        ("Mul(Integer(2), Pow(Symbol('s7', positive=True, integer=True), Integer(2)))", True),
        ("Pow(s0, Integer(-1))", True),
        ("9**9**9", False),
        ("9**(9**9)", False),
        ("Pow(9, Pow(9, 9))", False),
        ("Pow(Pow(9, 99), 99)", False),
        ("Pow(Add(Symbol('s0'), Symbol('s1')), Integer(99))", False),
        ("Pow(Symbol('s0'), Rational(1, 2))", True),
        ("Mul(Pow(Max(Integer(1), Symbol('u6', integer=True)), Integer(2)), FloorDiv(u2, u6))", True),
        ("Pow(Max(Integer(1), Add(u0, u1)), Integer(2))", False),
        ("Pow(Max(Integer(1), u0, evaluate=False), Integer(2))", False),
        (f"Max({', '.join(f'Add(s{n}, u{n})' for n in range(120))})", False),
        ("Max(Integer(1), Symbol('s0'), Min(s1, s2))", True),
        ("Float('0.1', precision=Integer(4000000000))", False),
        ("Float('0.1', precision=4000000000)", False),
        ("'1'*100000000000", False),
        ("(1,2)*1000000000", False),
        ("Add('1', '2')", False),
        ("Pow(b=9, e=999)", False),
        ("Pow(9, s0)", False),
        ("1 << 99999", False),
    ],
)
def test_texts_that_torch_evaluates_are_sizes_only(text: str, harmless: bool) -> None:
    assert is_size(text) is harmless
