"""The module hierarchy of names, compared with that of torch's modules; and hostile names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.models import Everything
from weightswap_tools.tensor_set import (
    MOST_LEVELS,
    Branch,
    fingerprints,
    follows,
    grow,
    natural,
    runs,
    sizes_below,
    split_name,
)

PARTS = st.sampled_from(["a", "b", "0", "1", "2", "", "weight"])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=5).map(".".join), unique=True, max_size=30)


def test_the_modules_are_those_of_torch() -> None:
    model = nn.Sequential(Everything(), nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    root = grow(model.state_dict())
    owners = {path for path, module in model.named_modules() if module.state_dict()}
    assert {branch.path for branch in root.walk()} == owners
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    sums = {branch.path: size for branch, size in sizes_below(root, sizes).items()}
    for path in owners:
        assert sums[path] == sum(tensor.nbytes for tensor in model.get_submodule(path).state_dict().values())


@given(NAMES)
def test_every_name_is_in_one_module(names: list[str]) -> None:
    root = grow(names)
    assert sorted(root.every_name()) == sorted(names)
    for branch in root.walk():
        assert all(split_name(name)[0] == list(branch.parts) for name in branch.names)
    assert sizes_below(root, dict.fromkeys(names, 1))[root] == len(names)


def test_a_name_of_very_many_parts_ends_in_one_long_name() -> None:
    name = ".".join(["a"] * 100_000)
    root = grow([name])
    assert list(root.every_name()) == [name]
    assert sum(1 for _ in root.walk()) == MOST_LEVELS + 1


def grouped(names: list[str], types: dict[str, str] | None = None, kinds: dict[str, str] | None = None) -> list[str]:
    """The groups of the modules in `layers`, each as its first and last name."""
    root = grow(names)
    marks = fingerprints(root, (types or {}).get, lambda path: (kinds or {}).get(path, ""))
    groups = runs(root.branches["layers"].branches.values(), marks)
    return [f"{group[0].name}-{group[-1].name}" for group in groups]


LAYERS = [f"layers.{place}.{name}" for place in range(12) for name in ("attention.weight", "bias")]


def test_equal_layers_are_one_group() -> None:
    assert grouped(LAYERS) == ["0-11"]


def test_a_different_layer_splits_a_group() -> None:
    assert grouped(LAYERS, {"layers.4.attention.weight": "F16"}) == ["0-3", "4-4", "5-11"]
    assert grouped(LAYERS, kinds={"layers.5.attention": "Sliding"}) == ["0-4", "5-5", "6-11"]
    assert grouped([*LAYERS, "layers.3.extra"]) == ["0-2", "3-3", "4-11"]
    assert grouped([name for name in LAYERS if not name.startswith("layers.7.")]) == ["0-6", "8-11"]


def test_a_group_has_consecutive_numbers() -> None:
    assert follows("9", "10")
    assert not any(follows(*pair) for pair in [("1", "3"), ("1", "1"), ("a", "b"), ("", "1"), ("²", "3"), ("1", "a")])
    assert not follows("9" * 5000, "9" * 5000)


def test_names_are_sorted_by_the_numbers_in_them() -> None:
    names = ["a.2.w", "a.10.w", "a.10.b", "a.x", "b", "a.9" + "9" * 5000, "a.007"]
    assert sorted(names, key=natural) == ["a.2.w", "a.007", "a.10.b", "a.10.w", "a.9" + "9" * 5000, "a.x", "b"]
    ordered = ["", "007", "7", "9" * 40, "b", "b02", "b2", "b10", "layer", "layer9", "layer.9.w", "layer.10.w", "ü²"]
    assert sorted(set(ordered), key=natural) == ordered


def test_branches_are_reached_once() -> None:
    root = Branch()
    assert root.reach(["a", "b"]) is root.reach(["a", "b"])
    assert root.reach(["a", "b"]).path == "a.b"
    assert root.reach([]) is root
