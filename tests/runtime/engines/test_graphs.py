"""The reader of graphs, compared with `torch.export.load` of the same archives, and given untrusted archives."""

from __future__ import annotations

import io
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from tests.support.graphs import Whole, archived, compiled, documented, numbers
from tests.support.setups import equal
from weightswap_runtime import load
from weightswap_runtime.memory.arena import ArenaLayout, HostArena


class Case(NamedTuple):
    """A function to capture, the sample inputs, further inputs, and dynamic shapes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    others: tuple[tuple[Any, ...], ...] = ()
    dynamic: Any = None


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
    """Arguments of many kinds: infinities, dtypes, devices, formats, strings, empty lists, keywords."""
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


def data_dependent(x: torch.Tensor) -> torch.Tensor:
    count = (x > 0.5).sum().item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return torch.zeros(count) + 1


def casts(x: torch.Tensor) -> Any:
    """Casts that change nothing, whose results are their arguments, and others."""
    y = (x * 2).float()
    z = y.to("cpu", torch.float32)
    z.add_(1)
    copied = y.to(torch.float32, copy=True).mul_(3)
    ordered = x.mT.to(torch.float32, memory_format=torch.contiguous_format)
    laid = torch.ops.aten.to.dtype_layout(x, dtype=torch.float32, layout=torch.strided)
    return y, z, copied, ordered, laid * 2, x.matmul(x.mT).float() + y


def long_list(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.split([1, 2] * 501)[::-1])


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
    "a size from data": Case(data_dependent, (numbers(9),), ((numbers(9, seed=3),), (torch.zeros(9),))),
    "casts": Case(casts, (numbers(3, 3),)),
    "a long list": Case(long_list, (numbers(3 * 501),)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def captured(case: Case) -> ExportedProgram:
    dynamic = None if case.dynamic is None else (case.dynamic,)
    return torch.export.export(Whole(case.function), case.args, dynamic_shapes=dynamic, strict=False)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.11's own archives
@torch.no_grad()
@pytest.mark.sampled(6)
def test_a_graph_does_what_torch_makes_of_it(case: Case) -> None:
    raw = archived(captured(case))
    ours, theirs = compiled(raw), torch.export.load(io.BytesIO(raw))
    for args in (case.args, *case.others):
        flat = theirs._graph_module_flat_inputs(args, {})
        expected = theirs.graph_module(*(value.clone() if isinstance(value, torch.Tensor) else value for value in flat))
        assert len(flat) == len(ours.kinds)
        assert len(expected) == ours.outputs
        assert equal(list(ours.call(*flat)), list(expected))
        assert equal(theirs.module()(*args), case.function(*args))


@torch.no_grad()
def test_casts_that_change_nothing_are_not_called() -> None:
    def floats(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).float().neg()

    raw = archived(torch.export.export(Whole(floats), (numbers(3, 3),)))
    call = compiled(raw).call
    assert b"aten.to.dtype" in json.dumps(documented(raw)).encode()
    for autocast, asked in ((False, False), (True, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.autograd.profiler.profile() as seen:
            (found,) = call(numbers(3, 3))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert equal(found, floats(numbers(3, 3)))
        assert ("aten::to" in {each.name for each in seen.function_events or ()}) == asked


def test_autograd_is_skipped_where_nothing_needs_it() -> None:
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
    for raw, expected in ((archived(captured(CASES["sizes"])), True), (parts, True), (gradients, False)):
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
def test_memory_is_freed_after_the_last_use() -> None:
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


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_that_end_early_leave_zeros_and_no_old_memory(transposed: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        left, right = (y.mT, x.mT) if transposed else (x, y)
        return torch._grouped_mm(left, right, offs=ends)

    x, y = numbers(16, 32).bfloat16(), numbers(3, 64, 32, seed=1).bfloat16().mT
    ends = torch.tensor([4, 8, 16], dtype=torch.int32)
    call = compiled(archived(torch.export.export(Whole(function), (x, y, ends)))).call
    expected = function(x, y, ends)
    assert equal(call(x, y, ends)[0], expected)
    part = call(x, y, torch.tensor([4, 8, 8], dtype=torch.int32))[0]
    part, expected = (part.mT, expected.mT) if transposed else (part, expected)
    assert equal(part[:8], expected[:8])
    assert not part[8:].any()
    for wrong in ([4, 2, 16], [-4, 8, 16], [4, 8, 17]):
        with pytest.raises(IndexError, match="offs out of range"):
            call(x, y, torch.tensor(wrong, dtype=torch.int32))
