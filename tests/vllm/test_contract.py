"""Signatures that the engine is tested with, compared with those in the source of an installed vLLM."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm import contract

NAMES = {
    contract.BASE: ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
    contract.FACTORY: ("WeightTransferEngineFactory",),
    contract.RELOAD: ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    contract.WORKER: ("Worker",),
}
OWN = {"__init__"}  # of a worker, which is no part of the contract


def definitions(source: str) -> dict[str, ast.stmt]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def signature(function: ast.FunctionDef) -> tuple[list[str], list[str], list[str]]:
    """Return the names of a function's arguments, their defaults, and what decorates it."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    decorators = [ast.unparse(each) for each in function.decorator_list if "no_grad" not in ast.unparse(each)]
    return [each.arg for each in every if each], [ast.unparse(each) for each in defaults if each], decorators


def methods(node: ast.stmt) -> dict[str, tuple[list[str], list[str], list[str]]]:
    functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    return {each.name: signature(each) for each in functions if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("path", NAMES)
def test_signatures_are_those_of_vllm(path: str) -> None:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    theirs = definitions(Path(spec.submodule_search_locations[0], *Path(path).parts[1:]).read_text())
    ours = definitions(Path(contract.__file__).read_text())
    for name in NAMES[path]:
        wanted, found = methods(ours[name]), methods(theirs[name])
        for method in wanted.keys() - (OWN if path == contract.WORKER else set()):
            assert found[method] == wanted[method], f"{path}: {name}.{method}"
        abstract = {method for method, (_, _, decorators) in found.items() if "abstractmethod" in decorators}
        assert abstract <= wanted.keys(), f"{path}: {name} wants more of an engine"


def test_the_version_is_the_one_of_the_extra() -> None:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    assert found.startswith("0.33.")
