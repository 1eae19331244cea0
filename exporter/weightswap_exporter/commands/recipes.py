"""Recipes: functions of the user that return the arguments of `export()`, or directories of transformers models."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from weightswap_exporter import Parallel, compile_engines, export
from weightswap_exporter import skeleton as skeleton_context
from weightswap_exporter.engines.compiling import OnStep
from weightswap_exporter.modules.stand_ins import quiet
from weightswap_runtime import Artifact
from weightswap_runtime.errors import ExportError, Unsupported

_FORM = "give file.py:function, module:function or hf:DIR"
_HF = "hf:"
_LIBRARIES = ("torch", "torchao", "transformers")  # loggers


def export_recipe(
    recipe: str,
    *,
    out: str | os.PathLike[str],
    skeleton: bool,
    goldens: bool,
    engines: Sequence[str],
    on_step: OnStep,
    caches: Mapping[str, int] | None,
    inputs: str | None,
    pictures: bool,
    ranks: int | None = None,
) -> Artifact:
    """Export the model of a recipe. The model of `hf:DIR` is always a skeleton.

    goldens: whether to record the recipe's. engines: engines to compile the graphs for, besides the recipe's. on_step:
    as for `export()`. inputs, pictures: as for `load_recipe`. caches: `length` and `batch` for `export_generating`, if
    the model is an `hf:DIR` language model that is to generate. ranks: their number, for a model that is split: by its
    own plan, or by that of the recipe's `parallel`.

    Raises Unsupported for a recipe that cannot be used, and the errors of `export()`.
    """
    if recipe.startswith(_HF):
        with _quiet_libraries():
            from .hf_directory import export_directory, export_generating

        directory = recipe.removeprefix(_HF)
        with _quiet_libraries():
            if caches is not None and ranks is not None:
                raise Unsupported(f"{recipe}: what generates is not split over ranks; leave --task or --ranks out")
            if caches is not None:
                return export_generating(directory, out=out, engines=engines, on_step=on_step, **caches)
            parallel = None if ranks is None else Parallel(ranks)
            artifact = export_directory(
                directory, out=out, inputs=_input_fn(inputs), pictures=pictures, parallel=parallel, on_step=on_step
            )
        return compile_engines(artifact, engines, on_step=on_step) if engines else artifact
    if caches is not None:
        raise Unsupported(f"{recipe}: --task generate is for hf:DIR; elsewhere, call export_decoder() from Python")
    arguments = _with_goldens(load_recipe(recipe, skeleton=skeleton, inputs=inputs, pictures=pictures), goldens)
    if ranks is not None:
        given = arguments.get("parallel")
        arguments["parallel"] = replace(given, size=ranks) if isinstance(given, Parallel) else Parallel(ranks)
    all_engines = [*arguments.get("engines", ()), *engines]
    return export(**arguments | {"on_step": on_step, "engines": all_engines}, out=out)


def _with_goldens(arguments: dict[str, Any], goldens: bool) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if goldens or key not in ("goldens", "tolerance")}


def load_recipe(
    recipe: str, *, skeleton: bool = False, inputs: str | None = None, pictures: bool = False
) -> dict[str, Any]:
    """Run a recipe and return keyword arguments for `export()`.

    skeleton: run it under `skeleton()`; otherwise the model of `hf:DIR` has random weights. inputs, pictures: as for
    `directory_recipe`, with `inputs` as file.py:function. Raises Unsupported, which says where the recipe failed.
    """
    if recipe.startswith(_HF):
        from .hf_directory import directory_recipe

        source, function = recipe.removeprefix(_HF), _input_fn(inputs)
        with _quiet_libraries():
            return directory_recipe(source, hollow=skeleton, inputs=function, pictures=pictures)
    if inputs or pictures:
        raise Unsupported(f"{recipe}: --inputs and --pictures are for hf:DIR; a recipe returns args and kwargs itself")
    function = _load_function(recipe)
    with skeleton_context() if skeleton else nullcontext():
        result = _run(recipe, function)
    return _arguments(recipe, result)


def load_model(recipe: str, *, goldens: bool) -> dict[str, Any]:
    """Run a recipe and return arguments for `pack()`. `hf:DIR` gives the model alone. goldens: whether to keep any."""
    if not recipe.startswith(_HF):
        return _with_goldens(load_recipe(recipe), goldens)
    from .hf_directory import directory_model

    with _quiet_libraries():
        return {"model": directory_model(recipe.removeprefix(_HF), hollow=False)}


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Hide what torch, torchao and transformers log about themselves, but no errors, unless TORCH_LOGS is set."""
    with suppress(ImportError):  # reported where it is needed
        import torch  # noqa: F401
        import transformers  # noqa: F401 - both set the levels of their loggers when they are imported
    with nullcontext() if "TORCH_LOGS" in os.environ else quiet(*_LIBRARIES):
        yield


def _input_fn(inputs: str | None) -> Callable[[Any], Any] | None:
    if inputs is None:
        return None
    function = _load_function(inputs)
    return lambda model: _run(inputs, lambda: function(model))


def _load_function(recipe: str) -> Callable[..., Any]:
    source, colon, name = recipe.rpartition(":")
    if not colon or not source or not name:
        raise Unsupported(f"{recipe!r} is not a recipe: {_FORM}")
    function = getattr(_run(recipe, lambda: _import(source)), name, None)
    if not callable(function):
        raise Unsupported(f"{recipe}: {source} has no function {name!r}")
    loaded: Callable[..., Any] = function
    return loaded


def _run(recipe: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ExportError, Unsupported):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if frame.filename.startswith("<") else f" ({Path(frame.filename).name}, line {frame.lineno})"
        raise Unsupported(*f"{recipe}: raised {type(error).__name__}: {error}{where}".splitlines()) from error


def _import(source: str) -> ModuleType:
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise Unsupported(f"{source}: no such file; {_FORM}")
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
            raise Unsupported(f"{recipe}: returned `out`, which the command line sets")
        known = inspect.signature(export).parameters
        if unknown := [key for key in result if key not in known]:
            raise Unsupported(f"{recipe}: returned {unknown}; export() takes {', '.join(known)}")
        return dict(result)
    keys = f" with the keys {list(result)}" if isinstance(result, Mapping) else ""
    raise Unsupported(
        f"{recipe}: returned a {type(result).__qualname__}{keys}; expected a dict with `model` and other arguments of "
        "export(), or a tuple (model, args) or (model, args, kwargs)"
    )
