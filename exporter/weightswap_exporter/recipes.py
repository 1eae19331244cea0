"""Recipes: the user's function that builds what `export()` takes, or the directory of a transformers model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from weightswap_exporter import (  # from the package, which names the extra where torch is missing
    compile_engines,
    export,
)
from weightswap_exporter import skeleton as skeleton_context
from weightswap_runtime import Artifact
from weightswap_runtime.errors import ExportError, RecipeError

_FORM = "give file.py:function, module:function or hf:DIR"
_HF = "hf:"


def export_recipe(
    recipe: str,
    *,
    out: str | os.PathLike[str],
    skeleton: bool = False,
    goldens: bool = True,
    engines: Sequence[str] = (),
) -> Artifact:
    """Export what a recipe builds. The model of `hf:DIR` is always a skeleton. goldens: whether to record the recipe's.
    engines: what to compile the graphs for, beside the engines that the recipe names.

    Raises RecipeError, and what `export()` raises.
    """
    if recipe.startswith(_HF):
        from .hf_models import export_directory

        artifact = export_directory(recipe.removeprefix(_HF), out=out)
        return compile_engines(artifact, engines) if engines else artifact
    arguments = load_recipe(recipe, skeleton=skeleton)
    wanted = {"engines": [*arguments.get("engines", ()), *engines]}
    return export(**(arguments if goldens else without_goldens(arguments)) | wanted, out=out)


def without_goldens(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe has returned, but for the goldens."""
    return {key: value for key, value in arguments.items() if key not in ("goldens", "tolerance")}


def load_recipe(recipe: str, *, skeleton: bool = False) -> dict[str, Any]:
    """Run a recipe, under `skeleton()` if asked for, and return keyword arguments for `export()`.

    The model of `hf:DIR` has the directory's configuration, and random weights if it is no skeleton. Raises
    RecipeError, which says where the recipe failed.
    """
    if recipe.startswith(_HF):
        from .hf_models import directory_recipe

        return directory_recipe(recipe.removeprefix(_HF), hollow=skeleton)
    place, colon, name = recipe.rpartition(":")
    if not colon or not place or not name:
        raise RecipeError(f"{recipe!r} is not a recipe: {_FORM}")
    module = _run(recipe, lambda: _import(place))
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"{recipe}: {place} has no function {name!r}")
    with skeleton_context() if skeleton else nullcontext():
        result = _run(recipe, function)
    return _arguments(recipe, result)


def _run(recipe: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except ExportError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if frame.filename.startswith("<") else f" ({Path(frame.filename).name}, line {frame.lineno})"
        raise RecipeError(*f"{recipe}: raised {type(error).__name__}: {error}{where}".splitlines()) from error


def _import(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise RecipeError(f"{place}: no such file; {_FORM}")
    sys.path.insert(0, str(path.parent))  # a recipe may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _arguments(recipe: str, result: Any) -> dict[str, Any]:
    if isinstance(result, tuple) and 2 <= len(result) <= 3:
        return dict(zip(("model", "args", "kwargs"), result, strict=False))
    if isinstance(result, Mapping) and "model" in result:
        if "out" in result:
            raise RecipeError(f"{recipe}: returned `out`, which the command line gives")
        known = inspect.signature(export).parameters
        if unknown := [key for key in result if key not in known]:
            raise RecipeError(f"{recipe}: returned {unknown}; export() takes {', '.join(known)}")
        return dict(result)
    keys = f" with the keys {list(result)}" if isinstance(result, Mapping) else ""
    raise RecipeError(
        f"{recipe}: returned a {type(result).__qualname__}{keys}; expected a dict with `model` and other arguments of "
        "export(), or a tuple (model, args) or (model, args, kwargs)"
    )
