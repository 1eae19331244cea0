"""Graphs by module for reports: equal modules form runs, and no module is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightswap_runtime.format.manifest import Conversion, Manifest, NamedTensor, Producer
from weightswap_tools.inspect.graph import ModuleOutline, Outline, module_nodes
from weightswap_tools.reports.blocks import ModuleNode, ModuleRun


def manifest(*weights: NamedTensor) -> Manifest:
    """A manifest of which only the weights matter."""
    return Manifest(
        format_version=1,
        graph_id="",
        producer=Producer(weightswap="0", torch="0"),
        device="cpu",
        methods={},
        weights=weights,
        state=(),
        constants=(),
        conversion=Conversion(sources=(), ignored=()),
        files={},
    )


def outlined(modules: Mapping[str, tuple[str, dict[str, int]]]) -> Outline:
    """Modules by path: their class, and their calls."""
    found = {path: ModuleOutline(path, kind, Counter(calls)) for path, (kind, calls) in modules.items()}
    return {"": ModuleOutline("", "Net"), **found}


def layer(number: int, calls: int = 1, kind: str = "Block") -> dict[str, tuple[str, dict[str, int]]]:
    return {
        f"layers.{number}": (kind, {"aten.add": 1}),
        f"layers.{number}.attention": ("Attention", {"aten.mm": 4, "aten.relu": 1}),
        f"layers.{number}.mlp": ("Linear", {"aten.linear": calls}),
    }


def shape(node: ModuleNode | ModuleRun) -> str:
    """`name(children)`, a run as `[first-last]`."""
    if isinstance(node, ModuleRun):
        return f"[{node.modules[0].name}-{node.modules[-1].name}]"
    return f"{node.name}({' '.join(map(shape, node.children))})" if node.children else node.name


def paths(node: ModuleNode | ModuleRun, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every module, through runs as well."""
    inside = node.modules if isinstance(node, ModuleRun) else node.children
    here = above if isinstance(node, ModuleRun) else (*above, node.name)
    if isinstance(node, ModuleNode):
        yield here
    for child in inside:
        yield from paths(child, here)


def test_layers_of_one_structure_are_a_run() -> None:
    layers = {path: what for number in range(32) for path, what in layer(number).items()}
    found = module_nodes(outlined({"embed": ("Embedding", {}), **layers, "head": ("Linear", {})}), manifest())
    assert shape(found) == "(embed layers([0-31]) head)"
    (run,) = found.children[1].children if isinstance(found.children[1], ModuleNode) else ()
    assert isinstance(run, ModuleRun)
    assert [module.name for module in run.modules] == [str(number) for number in range(32)]
    assert {shape(module).partition("(")[2] for module in run.modules} == {"attention mlp)"}


def test_arithmetic_on_sizes_makes_no_difference() -> None:
    first = {"layers.0": ("Block", {"aten.add": 1, "aten.sym_size.int": 2, "_operator.mul": 1})}
    assert shape(module_nodes(outlined({**layer(0), **first, **layer(1), **layer(2)}), manifest())) == "(layers([0-2]))"


UNLIKE = {
    "another number of calls in a module below": layer(2, calls=2),
    "another class": layer(2, kind="Last"),
    "another module below": {**layer(2), "layers.2.drop": ("Dropout", {})},
    "one module less": {"layers.2": ("Block", {"aten.add": 1}), "layers.2.mlp": ("Linear", {"aten.linear": 1})},
    "another operator of its own": {**layer(2), "layers.2": ("Block", {"aten.sub": 1})},
    "a gap in the numbers": layer(4),
}


@pytest.mark.parametrize("other", UNLIKE.values(), ids=UNLIKE)
def test_different_neighbours_stay_separate(other: dict[str, tuple[str, dict[str, int]]]) -> None:
    (layers,) = module_nodes(outlined({**layer(0), **layer(1), **other}), manifest()).children
    assert isinstance(layers, ModuleNode)
    assert [type(child) for child in layers.children][:2] == [ModuleRun, ModuleNode]
    assert shape(layers).startswith("layers([0-1] ")


def test_modules_with_other_weights_are_not_equal() -> None:
    rows = [NamedTensor(name=f"layers.{place}.w", dtype="F32", shape=(size,)) for place, size in enumerate((2, 2, 3))]
    found = module_nodes(outlined(layer(0) | layer(1) | layer(2)), manifest(*rows))
    assert shape(found).startswith("(layers([0-1] 2(")


def test_runs_are_inside_of_runs() -> None:
    modules = {f"{outer}.{inner}": ("Linear", {"aten.linear": 1}) for outer in range(3) for inner in range(4)}
    found = module_nodes(outlined(modules), manifest())
    assert shape(found) == "([0-2])"
    assert {shape(module) for run in found.children if isinstance(run, ModuleRun) for module in run.modules} == {
        "0([0-3])",
        "1([0-3])",
        "2([0-3])",
    }


NAMES = st.lists(st.sampled_from(["a", "0", "1", "2", "3"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(NAMES, unique=True, max_size=30))
def test_every_module_is_there_once(names: list[str]) -> None:
    found = module_nodes(outlined({name: ("Module", {}) for name in names}), manifest())
    wanted = {tuple(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2)}
    every = [path[1:] for path in paths(found)]
    assert sorted(every) == sorted([(), *wanted])
