"""Inputs are checked against the signature; messages name the input, the dimension, the expected and actual values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime import InputMismatch
from weightswap_runtime.format.signature import (
    CallCheck,
    Dict,
    Dimension,
    Integer,
    Items,
    Literal,
    Node,
    Signature,
    Tensor,
    Tuple,
    flatten,
    in_range,
    leaves,
    parse_size,
    unflatten,
)
from weightswap_runtime.tensors import TORCH_NAMES

DTYPES = {getattr(torch, name): dtype for name, dtype in TORCH_NAMES.items()}
SIGNATURE = Signature(
    args=(
        ("x", Tensor("x", "F32", ("batch", 3))),
        ("pair", Tuple((Tensor("pair.0", "I64", ("2*batch",)), Tensor("pair.1", "F32", ("batch+1", "time"))))),
    ),
    kwargs=(
        ("more", Dict((("mask", Tensor("more.mask", "BOOL", ("time",))), (7, Items((Literal("more.7.0", "a"),)))))),
        ("count", Integer("count", "time")),
        ("mode", Literal("mode", None)),
    ),
    output=Tensor("output", "F32", ()),
    dims={"batch": Dimension(1, 4), "time": Dimension(0, None)},
)
INPUTS = CallCheck("forward", SIGNATURE, torch.Tensor, DTYPES, lambda value: None, lambda value: value.shape)


def good(batch: int = 2, time: int = 5) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.zeros(batch, 3)
    pair = (torch.zeros(2 * batch, dtype=torch.int64), torch.zeros(batch + 1, time))
    more = {"mask": torch.zeros(time, dtype=torch.bool), 7: ["a"]}
    return (x, pair), {"more": more, "count": time, "mode": None}


@pytest.mark.parametrize(("batch", "time"), [(1, 0), (2, 5), (4, 1000)])
def test_good_inputs_come_flat_and_in_order(batch: int, time: int) -> None:
    args, kwargs = good(batch, time)
    flat = INPUTS.flatten(args, kwargs)
    assert flat[0] is args[0]
    assert flat[1] is args[1][0]
    assert flat[3] is kwargs["more"]["mask"]
    assert flat[4:] == ["a", time, None]


def test_keywords_in_any_order_and_for_positional_arguments() -> None:
    args, kwargs = good()
    reversed_kwargs = dict(reversed(kwargs.items()))
    assert INPUTS.flatten((), {"pair": args[1], **reversed_kwargs, "x": args[0]}) == INPUTS.flatten(args, kwargs)


def test_accepted_kinds_are_cached_and_others_are_checked() -> None:
    plain = Signature(
        args=(("x", Tensor("x", "F32", ("n", 3))),), kwargs=(), output=Literal("o"), dims={"n": Dimension(1, 2)}
    )
    inputs = CallCheck(
        "forward", plain, torch.Tensor, DTYPES, lambda value: None, lambda value: (value.dtype, value.shape)
    )
    for _ in range(3):
        x = torch.zeros(2, 3)
        assert inputs.flatten((x,), {})[0] is x
        for bad in ((torch.zeros(2, 3).double(),), (torch.zeros(3, 3),), (x, x), (), ([1.0],)):
            with pytest.raises(InputMismatch):
                inputs.flatten(bad, {})


def test_literals_may_be_left_out() -> None:
    args, kwargs = good()
    del kwargs["mode"]
    assert INPUTS.flatten(args, kwargs)[-1] is None


F32 = torch.zeros(2, 3)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"x": F32.double()}, "x: expected dtype F32, got F64"),
    "complex dtype": ({"x": F32.to(torch.complex128)}, "x: expected dtype F32, got torch.complex128"),
    "rank": ({"x": F32[0]}, "x: expected 2 dimensions [batch, 3], got [3]"),
    "fixed size": ({"x": torch.zeros(2, 4)}, "x: dimension 1 expected 3, got 4"),
    "below the range": ({"x": F32[:0]}, "x: dimension 0 expected batch with batch in 1..4, got 0"),
    "above the range": ({"x": torch.zeros(5, 3)}, "x: dimension 0 expected batch with batch in 1..4, got 5"),
    "not a tensor": ({"x": [1.0]}, "x: expected a torch.Tensor, got list"),
    "equality": ({"count": 6}, "count: expected time with time=5 (from pair.1 dimension 1), got 6"),
    "derived size": (
        {"pair": (torch.zeros(5, dtype=torch.int64), torch.zeros(3, 5))},
        "pair.0: dimension 0 expected 2*batch, got 5, for which no batch exists",
    ),
    "derived equality": (
        {"pair": (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 5))},
        "pair.1: dimension 0 expected batch+1 with batch=2 (from x dimension 0), got 4",
    ),
    "not a tuple": ({"pair": 3}, "pair: expected a tuple of 2, got int 3"),
    "tuple too short": ({"pair": (F32,)}, "pair: expected a tuple of 2, got tuple"),
    "list for tuple": ({"pair": [F32, F32]}, "pair: expected a tuple of 2, got list"),
    "other keys": ({"more": {"mask": F32}}, "more: expected a dict with the keys ['mask', 7], got dict ['mask']"),
    "not a dict": ({"more": 3}, "more: expected a dict with the keys ['mask', 7], got int 3"),
    "integer for boolean": ({"count": True}, "count: expected an int, got bool"),
    "another literal": ({"mode": 3}, "mode: the graph was exported with None, got int 3"),
    "unknown argument": ({"what": 1}, "what: not an argument it was exported with (count, mode, more, pair, x)"),
    "missing": ({"x": ...}, "x: missing"),
}


@pytest.mark.parametrize(("changes", "says"), BAD.values(), ids=BAD)
def test_bad_inputs_are_refused_with_a_reason(changes: dict[str, Any], says: str) -> None:
    args, kwargs = good()
    values = {"x": args[0], "pair": args[1], **kwargs, **changes}
    given_values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(InputMismatch) as refused:
        INPUTS.flatten((), given_values)
    assert says in refused.value.problems[0]
    assert str(refused.value).startswith("forward: ")
    assert isinstance(refused.value, TypeError)


@pytest.mark.parametrize("value", [0.1, 1e-5, float("inf"), float("nan"), -0.0, 3, True, "text", None])
def test_literals_are_compared_by_type_and_bits(value: Any) -> None:
    node = msgspec.json.decode(msgspec.json.encode(Literal.of("k", value)), type=Literal)
    assert repr(node.content) == repr(value)
    fixed = Signature(args=(("k", node),), kwargs=(), output=Literal("o"), dims={})
    inputs = CallCheck("forward", fixed, torch.Tensor, DTYPES, lambda value: None, lambda value: value.shape)
    assert repr(inputs.flatten((value,), {})) == repr([value])
    for other in (0.2, 0.0, 1, False, "other", [], torch.zeros(1)):
        with pytest.raises(InputMismatch, match="the graph was exported with"):
            inputs.flatten((other,), {})


def test_all_problems_are_reported_at_once() -> None:
    args, kwargs = good()
    with pytest.raises(InputMismatch) as refused:
        INPUTS.flatten((args[0].double(), args[1], 3), {**kwargs, "mode": 1, "x": args[0]})
    assert len(refused.value.problems) == 4


@pytest.mark.parametrize(
    ("sizes", "is_in"),
    [
        ({"batch": 1, "time": 0}, True),
        ({"batch": 4, "time": 1 << 40}, True),
        ({"batch": 0, "time": 0}, False),
        ({"batch": 5, "time": 0}, False),
        ({"batch": 1}, False),
        ({"batch": 1, "time": 0, "width": 1}, False),
    ],
)
def test_sizes_are_in_range_if_each_dimension_has_one_that_it_allows(sizes: dict[str, int], is_in: bool) -> None:
    assert in_range(sizes, SIGNATURE.dims) == is_in


@pytest.mark.parametrize("text", ["", "2*", "batch*2", "a+b", "2*batch+x", "-batch", "__import__('os')", "1"])
def test_invalid_size_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size expression"):
        parse_size(text)


LEAVES = st.just(Tensor("x", "F32", ()))
KEYS = st.text(max_size=3) | st.integers(0, 9)
NODES: st.SearchStrategy[Node] = st.recursive(
    LEAVES,
    lambda node: (
        st.lists(node, max_size=3).map(lambda items: Items(tuple(items)))
        | st.lists(node, max_size=3).map(lambda items: Tuple(tuple(items)))
        | st.dictionaries(KEYS, node, max_size=3).map(lambda items: Dict(tuple(items.items())))
    ),
    max_leaves=12,
)


@given(NODES)
def test_flatten_undoes_unflatten(node: Node) -> None:
    values = list(range(len(leaves(node))))
    assert flatten(node, unflatten(node, values)) == values
