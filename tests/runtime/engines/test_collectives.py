"""Calls of all ranks in a graph: which there are, by which group, and that none is left out or moved."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.graphs import CPU, Document, Whole, archived, numbers
from tests.support.tiny import TinyArtifact
from weightswap_runtime import Artifact
from weightswap_runtime.engines.choosing import open_engine
from weightswap_runtime.engines.engine import EngineOptions
from weightswap_runtime.engines.graph import compile_graph
from weightswap_runtime.engines.graph_archive import Graph, read_program
from weightswap_runtime.engines.operators import ForeignFunction, check_strings, find_operator
from weightswap_runtime.errors import Unsupported

functional = torch.ops._c10d_functional
ALONE = "a group of one"


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of this process alone, which is not torch's default."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=20))
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(ALONE)
    torch._C._distributed_c10d._register_process_group(ALONE, group)
    yield
    torch._C._distributed_c10d._unregister_process_group(ALONE)


def graph_of(function: Any, *inputs: torch.Tensor) -> Graph:
    return read_program(archived(torch.export.export(Whole(function), inputs, strict=False))).graph_module.graph


def summed(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", "ranks"))


def with_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two calls of all ranks whose results nobody reads, one over the weight alone whose result is read."""
    functional.wait_tensor(functional.broadcast(x, 0, "ranks"))
    functional.wait_tensor(functional.all_gather_into_tensor(weight, 1, "ranks"))
    return x @ (summed(weight.t()) + 1)


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func._schema.name.partition("::")[2]] if func.namespace == "_c10d_functional" else []
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("_alone")
@torch.no_grad()
def test_none_is_left_out_or_moved_to_the_prologue() -> None:
    x, weight = numbers(2, 3), numbers(4, 3)
    ours = compile_graph(graph_of(with_weight, x, weight), CPU, [False, True], ALONE)
    assert ours.prologue
    with Calls() as early:
        hoisted = ours.prologue(weight)
    with Calls() as late:
        (found,) = ours.call(*hoisted, x, weight)
    assert early.names == []
    names = ("broadcast", "all_gather_into_tensor", "all_reduce")
    assert late.names == [name for call in names for name in (call, "wait_tensor")]
    torch.testing.assert_close(found, x @ (weight.t() + 1))  # torch's layout is another one: another order of sums


@pytest.mark.usefixtures("_alone")
@torch.no_grad()
def test_each_model_has_its_own_group() -> None:
    graph = graph_of(summed, numbers(3))
    here, elsewhere = (compile_graph(graph, CPU, group=name) for name in (ALONE, "another group"))
    assert torch.equal(here.call(numbers(3))[0], numbers(3))
    with pytest.raises(RuntimeError, match="another group"):
        elsewhere.call(numbers(3))
    assert torch.equal(here.call(numbers(3))[0], numbers(3))


def test_a_model_for_one_process_has_none() -> None:
    with pytest.raises(ForeignFunction, match="in a model for one process"):
        compile_graph(graph_of(summed, numbers(3)), CPU)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("all_reduce", ["sum", "0"]),
        ("all_reduce", ["premul_sum", "ranks"]),
        ("all_reduce", ["ranks"]),
        ("all_reduce", ["ranks", "sum"]),
        ("all_reduce", ["sum", "sum", "ranks"]),
        ("broadcast", []),
        ("broadcast", ["default_pg"]),
        ("all_gather_into_tensor", ["sum", "ranks"]),
        ("wait_tensor", ["ranks"]),
    ],
)
def test_texts_are_the_ranks_and_a_reduction(name: str, texts: list[str]) -> None:
    operator = find_operator(f"torch.ops._c10d_functional.{name}.default")
    arguments: list[Document] = [{"as_tensor": {"name": "x"}}, *({"as_string": text} for text in texts)]
    with pytest.raises(ForeignFunction, match="expected the group 'ranks'"):
        check_strings(operator, arguments)
    with pytest.raises(ForeignFunction):
        check_strings(operator, [{"as_strings": ["sum", "ranks"]}])


def test_all_that_exports_have_is_allowed() -> None:
    def every(x: torch.Tensor) -> list[torch.Tensor]:
        results = [functional.all_reduce(x, name, "ranks") for name in ("sum", "avg", "min", "max", "product")]
        results.append(functional.reduce_scatter_tensor(x, "sum", 2, "ranks"))
        results.append(functional.all_to_all_single(x, [2, 2], [2, 2], "ranks"))
        return [functional.wait_tensor(value) for value in results]

    graph = graph_of(every, numbers(4))
    compile_graph(graph, CPU, group=ALONE)
    calls = {find_operator(node.target) for node in graph.nodes}
    assert all(call.collective and not (call.pure or call.repeatable or call.fresh) for call in calls)


def test_parts_are_not_less_than_none() -> None:
    """A graph that no torch has exported may say so: gloo would read and write beyond the ends of the tensors."""
    exchange = find_operator("torch.ops._c10d_functional.all_to_all_single.default").call
    with pytest.raises(IndexError, match="all_to_all_single: parts of"):
        exchange(numbers(4), [-2, 6], [-2, 6], ALONE)


@pytest.mark.parametrize(
    "name",
    [
        *("all_reduce_.default", "all_reduce_coalesced.default", "all_reduce_coalesced_.default", "broadcast_.default"),
        *("all_gather_into_tensor_out.default", "all_gather_into_tensor_coalesced.default", "isend.default"),
        *("reduce_scatter_tensor_coalesced.default", "reduce_scatter_tensor_out.default", "irecv.default"),
    ],
)
def test_other_operators_of_process_groups_are_refused(name: str) -> None:
    with pytest.raises(ForeignFunction, match="internal to torch"):
        find_operator(f"torch.ops._c10d_functional.{name}")
    for other in ("_c10d_functional_autograd", "c10d"):
        with pytest.raises(ForeignFunction):
            find_operator(f"torch.ops.{other}.{name}")


def test_a_model_for_one_process_is_given_no_group(tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match="is for one process"):
        open_engine("torch", Artifact.open(tiny.path), "cpu", EngineOptions(group=ALONE))
