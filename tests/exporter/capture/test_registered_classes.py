"""Objects of classes that are registered with pytree, as inputs and outputs: by their fields, or as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from tests.support.setups import equal, served
from weightswap_exporter import export
from weightswap_runtime import CaptureError, InputMismatch, Model
from weightswap_runtime.format.signature import Dict, input_leaves


class Jagged:
    """Rows of several features. Its context is three strings, as many as it has fields, and it checks its fields."""

    def __init__(self, names: list[str], values: Any, lengths: Any = None, offsets: Any = None) -> None:
        if not isinstance(values, torch.Tensor) or values.dim() != 2:
            raise ValueError("not a table")
        self.names, self.values, self._lengths, self._offsets = names, values, lengths, offsets

    def lengths(self) -> torch.Tensor:
        if self._lengths is None:
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> torch.Tensor:
        if self._offsets is None:
            self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self._lengths.cumsum(0)])
        return self._offsets


def jagged_fields(value: Jagged) -> tuple[list[Any], list[str]]:
    return [value.values, value._lengths, value._offsets], value.names


pytree.register_pytree_node(
    Jagged,
    jagged_fields,
    lambda fields, names: Jagged(names, *fields),
    flatten_with_keys_fn=lambda value: (
        list(zip(map(pytree.GetAttrKey, ("values", "_lengths", "_offsets")), jagged_fields(value)[0], strict=True)),
        value.names,
    ),
)


class Pair:
    """A class without key paths: its attributes tell which is which."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.right, pair.left], "rl"), lambda found, _: Pair(found[1], found[0])
)


class Slots:
    """A class with neither."""

    __slots__ = ("one", "two")

    def __init__(self, one: torch.Tensor, two: torch.Tensor) -> None:
        self.one, self.two = one, two


pytree.register_pytree_node(Slots, lambda it: ([it.one, it.two], None), lambda found, _: Slots(*found))


@dataclass
class Batch:
    x: torch.Tensor
    weight: torch.Tensor | None = None


torch.export.register_dataclass(Batch)


class Odd:
    def __init__(self, x: torch.Tensor, what: object) -> None:
        self.x, self.what = x, what


pytree.register_pytree_node(Odd, lambda odd: ([odd.x], odd.what), lambda found, what: Odd(found[0], what))


class Shift:
    """One of the names of a jagged tensor's fields, which here follows from nothing."""

    def __init__(self, x: torch.Tensor, offsets: Any) -> None:
        self.x, self._offsets = x, offsets

    def offsets(self) -> Any:
        return self._offsets


pytree.register_pytree_node(Shift, lambda it: ([it.x, it._offsets], None), lambda found, _: Shift(*found))

NAMES = ["a", "b", "c"]


def jagged(count: int = 5, names: list[str] = NAMES, *, offsets: bool = False) -> Jagged:
    lengths = torch.tensor([1, count - 3, 2])
    value = Jagged(names, torch.randn(count, 4), lengths)
    return Jagged(names, value.values, None, value.offsets()) if offsets else value


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, rows: Jagged) -> torch.Tensor:
        ends = rows.offsets()[1:]
        sums = torch.cat([torch.zeros(1, 4), rows.values.cumsum(0)])
        return self.linear(sums[ends] - sums[ends - rows.lengths()])


class Taking(nn.Module):
    """Computes with what `read` takes out of its input."""

    def __init__(self, read: Callable[[Any], torch.Tensor], make: Callable[[torch.Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.linear, self.read, self.make = nn.Linear(4, 2), read, make

    def forward(self, value: Any) -> Any:
        return self.make(self.linear(self.read(value)))


def names_of(model: Model) -> list[str]:
    return [leaf.name for leaf in input_leaves(model.signatures["forward"])]


@pytest.mark.parametrize("offsets", [False, True])
def test_an_object_means_the_same_whichever_field_it_has_computed(tmp_path: Path, offsets: bool) -> None:
    eager = Pooling()
    rows = Dim("rows", min=4, max=99)
    model = served(tmp_path, eager, jagged(offsets=offsets), dynamic_shapes=([{0: rows}, None, None],))
    assert names_of(model) == ["rows.values", "rows._lengths", "rows._offsets"]
    assert list(model.signatures["forward"].dims) == ["rows"]
    both = jagged(9)
    both.offsets()
    for value in (jagged(), jagged(offsets=True), jagged(7), both):
        with torch.no_grad():
            assert torch.equal(model(value), eager(Jagged(NAMES, value.values, value._lengths, value._offsets)))
    given = {"values": both.values} | ({"_offsets": both.offsets()} if offsets else {"_lengths": both.lengths()})
    assert torch.equal(model(given), model(both))


@pytest.mark.parametrize("exported", [5, None])
def test_a_field_that_follows_from_no_other_is_checked(tmp_path: Path, exported: int | None) -> None:
    x = torch.randn(3, 4)
    model = served(tmp_path, Taking(lambda value: value.x + (value.offsets() or 0)), Shift(x, exported))
    assert model(Shift(x, exported)).shape == (3, 2)
    for other in (6, torch.ones(1)):
        with pytest.raises(InputMismatch, match=r"value\._offsets: the graph was exported with"):
            model(Shift(x, other))


def test_what_an_object_keeps_beside_its_fields_is_checked(tmp_path: Path) -> None:
    model = served(tmp_path, Taking(lambda value: value["in"][0].values), {"in": [jagged()]})
    node = model.signatures["forward"].args[0][1]
    assert isinstance(node, Dict)
    assert not node.kind
    inner = node.items[0][1].items[0]  # type: ignore[union-attr]
    assert (inner.kind, inner.context) == (f"{__name__}.Jagged", '["a", "b", "c"]')  # type: ignore[union-attr]
    value = jagged()
    fields = {"values": value.values, "_lengths": value._lengths}
    assert torch.equal(model({"in": [value]}), model({"in": [fields]}))
    wrong = [jagged(names=["b", "a", "c"]), jagged(names=["a"]), Batch(value.values), {"values": value.values}]
    for other in (*wrong, {**fields, "more": value.values}, value.values):
        with pytest.raises(InputMismatch, match=r"value\.in\.0: expected a "):
            model({"in": [other]})


@pytest.mark.parametrize("as_list", [True, False])
def test_dimensions_keep_their_names(tmp_path: Path, as_list: bool) -> None:
    class Several(Taking):
        def forward(self, *values: Any) -> Any:
            return [self.linear(value.values) for value in values]

    given = (jagged(), jagged(6))
    first, second = Dim("first", max=99), Dim("second", max=99)
    if as_list:
        shapes: Any = {"values": ([{0: first}, None, None], [{0: second}, None, None])}
    else:
        shapes = ShapesCollection()
        shapes[given[0].values], shapes[given[1].values] = {0: first}, {0: second}
    model = served(tmp_path, Several(lambda value: value), *given, dynamic_shapes=shapes)
    assert list(model.signatures["forward"].dims) == ["first", "second"]
    assert [len(out) for out in model(jagged(8), jagged(9))] == [8, 9]


def test_fields_of_classes_without_key_paths(tmp_path: Path) -> None:
    pair = Pair(torch.randn(3, 4), torch.randn(3, 4))
    eager = Taking(lambda value: value.left * 2 + value.right, lambda y: Pair(y, y + 1))
    model = served(tmp_path, eager, pair)
    assert names_of(model) == ["value.right", "value.left"]
    with torch.no_grad():
        expected = eager(pair)
    assert equal(model(pair), {"left": expected.left, "right": expected.right})
    assert equal(model({"right": pair.right, "left": pair.left}), model(pair))


def test_fields_without_any_name_are_numbered(tmp_path: Path) -> None:
    slots = Slots(torch.randn(3, 4), torch.randn(3, 4))
    model = served(tmp_path, Taking(lambda value: value.one * 2 + value.two), slots)
    assert names_of(model) == ["value.0", "value.1"]
    assert torch.equal(model(slots), model({0: slots.one, 1: slots.two}))


def test_absent_fields_of_a_dataclass_stay_absent(tmp_path: Path) -> None:
    model = served(tmp_path, Taking(lambda value: value.x), Batch(torch.randn(3, 4)))
    assert model(Batch(torch.zeros(3, 4))).shape == (3, 2)
    with pytest.raises(InputMismatch):
        model(Batch(torch.zeros(3, 4), torch.zeros(3)))


def test_goldens_are_recorded_of_objects(tmp_path: Path) -> None:
    eager = Pooling()
    model = served(tmp_path, eager, jagged(), goldens=[(jagged(),), (jagged(offsets=True),)])
    assert model.swap(tmp_path / "w.safetensors").verified


def test_a_context_that_json_cannot_express_is_refused(tmp_path: Path) -> None:
    odd = Odd(torch.randn(3, 4), object())
    with pytest.raises(CaptureError, match=r"value: .*Odd keeps what JSON cannot express"):
        export(Taking(lambda value: value.x), (odd,), out=tmp_path / "a")


def test_a_call_with_a_context_that_json_cannot_express_is_refused(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    model = served(tmp_path, Taking(lambda value: value.x), Odd(x, "a"))
    assert model(Odd(x, "a")).shape == (3, 2)
    with pytest.raises(InputMismatch, match=r'value: expected a .*Odd with "a", got one without that: '):
        model(Odd(x, object()))
