"""Altered documents of graphs: nothing but operators runs, and refusals say why."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support.forged import replace_file, with_document
from tests.support.graphs import CPU, Document, Whole, archived, compiled, documented, numbers, parts
from weightswap_exporter import export
from weightswap_runtime import ArtifactError, load
from weightswap_runtime.engines import graph as graph_opening
from weightswap_runtime.engines.graph import DamagedGraph
from weightswap_runtime.engines.graph_archive import UnknownPart
from weightswap_runtime.engines.operators import ForeignFunction, MissingOperator, find_operator


class Opened(NamedTuple):
    """The part of an artifact that `open_graph` uses."""

    raw: bytes
    path: Path = Path("x.artifact")
    manifest: Any = SimpleNamespace(producer=SimpleNamespace(torch="2.0"), ranks=None)

    def read(self, name: str) -> bytes:
        return self.raw


def changed(raw: bytes, change: Callable[[Document], object]) -> Opened:
    """Return the archive with its document changed."""
    return Opened(with_document(raw, change))


def nodes(document: Document) -> list[Document]:
    found: list[Document] = document["graph_module"]["graph"]["nodes"]
    return found


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
        graph_opening.open_graph(changed((small / "graphs/forward.pt2").read_bytes(), plant), "x.pt2", CPU)  # type: ignore[arg-type]


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

    ours = graph_opening.open_graph(changed(raw, plant), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        ours.call(numbers(4, 3))


@torch.no_grad()
def test_unknown_parts_are_refused_by_name(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    for target, says in (
        (
            "torch.ops.higher_order.out_dtype",
            "has the operator 'torch.ops.higher_order.out_dtype', which weightswap does",
        ),
        ("torch._functorch.predispatch._make_dual", "has the function 'torch._functorch.predispatch._make_dual'"),
        ("torch._functorch.predispatch.torch.ops.aten.from_file.default", "which weightswap does not run"),
        ("torch.ops.aten.save.default", r"needs torch.ops.aten.save.default, which torch .* lacks"),
        ("torch.ops.aten.add_scalar.default", r"needs torch.ops.aten.add_scalar.default, which torch .* lacks"),
        ("torch.ops.aten._print.default", "which is internal to torch"),
        ("torch.ops.inductor._reinterpret_tensor.default", "which is internal to torch"),
        ("torch.ops.debugprims.load_tensor.default", "which is internal to torch"),
    ):
        with pytest.raises(ArtifactError, match=says):
            graph_opening.open_graph(
                changed(raw, lambda document, to=target: nodes(document)[-1].update(target=to)), "x", CPU
            )  # type: ignore[arg-type, misc]


REFUSED = [
    "set_data.default",
    *(f"set_.{each}" for each in ("default", "source_Tensor", "source_Storage", "source_Tensor_storage_offset")),
    *(f"set.{each}" for each in ("default", "source_Tensor", "source_Storage", "source_Storage_out")),
    *("from_file.default", "_resize_output_.default", "requires_grad_.default", "retain_grad.default"),
    *("record_stream.default", "_test_warn_in_autograd.default", "_test_string_default.default"),
    # tensors whose indices or sizes nobody checks
    *("_sparse_coo_tensor_unsafe.default", "_sparse_coo_tensor_with_dims_and_tensors.default", "_coalesced_.default"),
    *("_sparse_csr_tensor_unsafe.default", "sparse_csr_tensor.crow_col_value_size", "to_sparse_csr.default"),
    *("_sparse_compressed_tensor_unsafe.default", "sparse_compressed_tensor.comp_plain_value_size"),
    *(
        "_sparse_bsc_tensor_unsafe.default",
        "crow_indices.default",
        "sparse_resize_.default",
        "resize_as_sparse_.default",
    ),
    *("sparse_resize_and_clear_.default", "_nested_view_from_buffer.default", "_nested_tensor_from_mask.default"),
    *("_nested_view_from_jagged.default", "_jagged_to_padded_dense_forward.default", "_reshape_alias.default"),
    *("_make_per_tensor_quantized_tensor.default", "_empty_affine_quantized.default", "to_mkldnn.default"),
    *("_unsafe_index.Tensor", "_unsafe_index_put.default", "_index_put_impl_.default", "_unsafe_masked_index.default"),
    # operators that take indices or lengths as they are
    *("ctc_loss.Tensor", "_ctc_loss.Tensor", "segment_reduce.default", "max_pool2d_with_indices_backward.default"),
    *("embedding_dense_backward.default", "_pack_padded_sequence.default", "add.out", "arange.start_out"),
]


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_reach_behind_tensors_are_refused(name: str) -> None:
    with pytest.raises(ForeignFunction):
        find_operator(f"torch.ops.aten.{name}")


def test_every_operator_allowed_takes_tensors_and_numbers_alone() -> None:
    """By torch's own list: none is of another kind of tensor, writes to a result, or is a gradient's."""
    allowed = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in ("aten", "prims"):
            with suppress(ForeignFunction, MissingOperator, AttributeError):
                allowed.add(find_operator(f"torch.ops.{namespace}.{name}.{schema.overload_name or 'default'}").name)
    assert len(allowed) > 900
    forbidden = re.compile(
        r"unsafe_(?!view|split|chunk)|csr|nested|backward|mkldnn|storage$|_out$|^aten::set|file|print"
    )
    assert [name for name in sorted(allowed) if forbidden.search(name)] == []


@pytest.mark.parametrize("name", ["resize_", "resize_as_", "detach_", "add_.Tensor"])
def test_operators_that_models_write_with_are_allowed(name: str) -> None:
    assert find_operator(f"torch.ops.aten.{name if '.' in name else f'{name}.default'}").mutable


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch may not be able to write such a graph")
@torch.no_grad()
def test_an_error_within_a_vmap_ends_the_vmap() -> None:
    def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sin() + y)(x)

    ours = compiled(archived(torch.export.export(Whole(rows), (numbers(4, 3), numbers(3)))))
    assert not ours.past_autograd
    for _ in range(2):
        assert torch.equal(ours.call(numbers(4, 3), numbers(3))[0], rows(numbers(4, 3), numbers(3)))
        with pytest.raises(RuntimeError):
            ours.call(numbers(4, 3), numbers(2))
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="older torch may not be able to write such a graph")
@torch.no_grad()
def test_a_vmap_that_does_not_end_is_an_error_and_ends() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.sin)(x)

    def forget(document: Document) -> None:
        nodes(document)[:] = [node for node in nodes(document) if "_decrement_nesting" not in node["target"]]

    raw = with_document(archived(torch.export.export(Whole(rows), (numbers(4, 3),))), forget)
    with pytest.raises(DamagedGraph, match="a vmap begins but never ends"):
        compiled(raw).call(numbers(4, 3))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_a_literal_is_no_tensor_of_the_graph(tmp_path: Path) -> None:
    """Otherwise its string would reach operators that must get none."""

    class Moded(nn.Module):
        def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
            return x + 1 if mode == "sum" else x

    artifact = export(Moded(), (numbers(3), "sum"), out=tmp_path / "a").path

    def plant(document: Document) -> None:
        document["graph_module"]["graph"]["inputs"][1] = {"as_tensor": {"name": "text"}}

    load(artifact)
    replace_file(artifact, "graphs/forward.pt2", with_document((artifact / "graphs/forward.pt2").read_bytes(), plant))
    with pytest.raises(ArtifactError, match="its inputs and outputs are not those of the method 'forward'"):
        load(artifact)


@torch.library.custom_op("weightswap_tests::noted", mutates_args=())
def noted(x: torch.Tensor, mode: str = "plain") -> torch.Tensor:
    """A third-party operator, which could do anything with a string."""
    return x.clone()


noted.register_fake(lambda x, mode="plain": torch.empty_like(x))


def test_operators_of_other_packages_get_no_strings() -> None:
    def named(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weightswap_tests.noted(x, "a/path")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.weightswap_tests.noted(x)

    with pytest.raises(ForeignFunction, match="with a string, which could be the name of a file"):
        compiled(archived(torch.export.export(Whole(named), (numbers(3),))))
    assert torch.equal(
        compiled(archived(torch.export.export(Whole(plain), (numbers(3),)))).call(numbers(3))[0], numbers(3)
    )


def test_another_major_version_of_the_schema_is_refused(small: Path) -> None:
    raw = (small / "graphs/forward.pt2").read_bytes()
    with pytest.raises(ArtifactError, match="has schema version 9, which weightswap does not run"):
        graph_opening.open_graph(changed(raw, lambda document: document["schema_version"].update(major=9)), "x", CPU)  # type: ignore[arg-type]


ODD = [None, True, -1, 2**70, 1e400, "", "x", PLANTED, [], {}, [[]], {"as_none": True}, {"as_tensor": {"name": "x"}}]


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.sampled(3)
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
        except (UnknownPart, MissingOperator, ForeignFunction, *graph_opening.DAMAGED):
            refused += 1
            continue
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
            found.call(*[numbers(4, 3)] * len(found.kinds))
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
            graph_opening.open_graph(changed(raw, change), "x.pt2", CPU)  # type: ignore[arg-type]
    with pytest.raises(DamagedGraph):
        compiled(changed(raw, lambda document: nodes(document).reverse()).raw)
