"""`hf:DIR`: a transformers model from a local directory, of which only `config.json` is read.

No network, no code from the directory, no weights: the model is a skeleton of the architecture that the file names.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightswap_runtime import Artifact
from weightswap_runtime.errors import (
    CaptureError,
    CheckpointError,
    MissingExtra,
    RecipeError,
    Unsupported,
    WeightFileError,
)
from weightswap_runtime.tensors import torch_dtype
from weightswap_runtime.weightset import open_weights

from . import huggingface
from .exporting import export
from .hf_inputs import Sizes, fallbacks, sample_inputs
from .hollowing import restored
from .skeletons import skeleton
from .tracing import Checkpoint
from .values import dtype_of

CONFIG_NAME = "config.json"


def directory_recipe(directory: str | os.PathLike[str], *, length: int = 16, hollow: bool = True) -> dict[str, Any]:
    """What `export()` takes for the model of a directory: a skeleton, sample inputs, and every size that may vary.

    The model has the class that the configuration names, its dtype (float32 where it names none), and is in eval mode
    without a key-value cache, so that a call depends on its inputs alone. length: of the sample texts, in tokens.
    hollow: whether it is a skeleton; else it takes memory, and its weights are random. Where the directory holds
    weights in another form than this version of transformers writes, they are the `checkpoint`.

    Raises RecipeError where the directory does not say enough, Unsupported for quantised models, MissingExtra without
    transformers.
    """
    model = _build(Path(directory), hollow)
    inputs = sample_inputs(model, length)
    arguments = {"model": model, "kwargs": inputs.kwargs, "dynamic_shapes": inputs.sizes}
    form = _older_form(Path(directory), model)
    return arguments if form is None else arguments | {"checkpoint": form}


def export_directory(directory: str | os.PathLike[str], *, out: str | os.PathLike[str]) -> Artifact:
    """Export the model of a directory with as many dynamic sizes as `torch.export` can keep.

    Tried in turn: every size, the batch alone, none; a UserWarning names the sizes that had to be fixed. Raises what
    `directory_recipe` and `export` raise.
    """
    arguments = directory_recipe(directory)
    artifact, fixed = _export_first(arguments, fallbacks(arguments["dynamic_shapes"]), out)
    if fixed:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in arguments["kwargs"].items())
        warnings.warn(
            f"{directory}: torch.export cannot keep every size of this model dynamic; fixed at those of the sample "
            f"inputs: {fixed} ({shapes}). Write a recipe to choose other sizes.",
            stacklevel=2,
        )
    return artifact


def _export_first(
    arguments: Mapping[str, Any], tries: list[tuple[str, Sizes]], out: str | os.PathLike[str]
) -> tuple[Artifact, str]:
    (fixed, sizes), *rest = tries
    try:
        return export(**{**arguments, "dynamic_shapes": sizes}, out=out), fixed
    except CaptureError:
        if not rest:
            raise
    return _export_first(arguments, rest, out)


def _older_form(directory: Path, model: nn.Module) -> Checkpoint | None:
    """What the weights in the directory look like, if they load, and are not what `save_pretrained` writes today."""
    try:
        with open_weights(directory) as weights:
            found = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()}
    except WeightFileError:
        return None
    written = huggingface.checkpoint(model)
    if found == {name: (dtype_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in written.items()}:
        return None
    form = {name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, (dtype, shape) in found.items()}
    try:
        with restored(model):
            huggingface.load(model, form)
    except CheckpointError as error:
        text = f"{directory}: its weights are no example of what will be swapped in: {error}"
        warnings.warn(text, stacklevel=4)
        return None
    return form


def _build(directory: Path, hollow: bool) -> nn.Module:
    if find_spec("transformers") is None:
        raise MissingExtra("hf:DIR", "hf")
    named = _read_config(directory)
    with _quiet():
        config = _parse(directory, named)
        make = _maker(directory, named)
        _without_cache(config)
        try:
            with skeleton() if hollow else nullcontext():
                model: nn.Module = make(config, dtype=config.dtype or torch.float32)
                _keep_in_float32(model)
        except CaptureError:
            raise
        except Exception as error:
            raise RecipeError(
                *f"{directory}: the model cannot be built from {CONFIG_NAME}: {error}".splitlines()
            ) from error
    return model.eval()


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise RecipeError(f"{directory}: has no {CONFIG_NAME}; hf: takes the local directory of a transformers model")
    try:
        named = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(named, dict) or not isinstance(named.get("model_type"), str):
        raise RecipeError(f"{path}: names no model_type, so it is not the configuration of a transformers model")
    if named.get("quantization_config"):
        raise Unsupported(f"{path}: the model is quantised, which cannot be exported; give the original's directory")
    return named


def _parse(directory: Path, named: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if named["model_type"] not in CONFIG_MAPPING:
        raise _unknown(directory, f"model type {named['model_type']!r}", named)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise RecipeError(*f"{directory / CONFIG_NAME}: transformers cannot use it: {error}".splitlines()) from error


def _maker(directory: Path, named: Mapping[str, Any]) -> Callable[..., Any]:
    """What builds the class that the configuration names, else the plain model of its type."""
    import transformers

    names = named.get("architectures")
    if not names:
        return partial(transformers.AutoModel.from_config, trust_remote_code=False)
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise _unknown(directory, f"model class {names[0]!r}", named)
    make: Callable[..., Any] = kind._from_config
    return make


def _unknown(directory: Path, what: str, named: Mapping[str, Any]) -> RecipeError:
    import transformers

    code = " Code from the directory (auto_map) is never run." if named.get("auto_map") else ""
    return RecipeError(
        f"{directory}: transformers {transformers.__version__} has no {what}.{code} Write a recipe that builds it: a "
        "function that returns what export() takes, as file.py:function."
    )


def _without_cache(config: Any) -> None:
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False


def _keep_in_float32(model: Any) -> None:
    """Some models keep tensors in float32 whatever their dtype; `from_pretrained` goes by the same plan."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return
    kept, _, _ = build_glob_alternation(list(plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if kept.search(name) and tensor.is_floating_point():
            path, _, own = name.rpartition(".")
            values = tensor.detach().float()
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(
                model.get_submodule(path), own, nn.Parameter(values, tensor.requires_grad) if is_parameter else values
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers remarks on token ids, image processors and generation settings, none of which matter here."""
    from transformers.utils import logging as remarks

    previous = remarks.get_verbosity()
    remarks.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        remarks.set_verbosity(previous)
