"""`hf:DIR`: a transformers model from the `config.json` of a local directory.

Network, code in the directory and weights are not used: the model is a skeleton of the architecture in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightswap_exporter.capture.tracing import CheckpointTensors
from weightswap_exporter.checkpoints.tensor import dtype_of
from weightswap_exporter.engines.compiling import OnStep, ignore_step
from weightswap_exporter.exporting import export, export_decoder
from weightswap_exporter.modules import libraries as huggingface
from weightswap_exporter.modules.parallel import Parallel
from weightswap_exporter.modules.stand_ins import first_line, quiet, restored, skeleton
from weightswap_runtime import Artifact
from weightswap_runtime.errors import (
    CaptureError,
    CheckpointError,
    MissingExtra,
    Unsupported,
    WeightFileError,
    warn,
)
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.torch_tensors import torch_dtype

from .hf_inputs import InputFunction, Sizes, describe, fallbacks, inputs_of_user, sample_inputs

CONFIG_NAME = "config.json"


def directory_recipe(
    directory: str | os.PathLike[str],
    *,
    length: int = 16,
    hollow: bool = True,
    pictures: bool = False,
    inputs: InputFunction | None = None,
    on_step: OnStep = ignore_step,
) -> dict[str, Any]:
    """Return the arguments of `export()` for the model of a directory, with every size dynamic that may vary.

    The model has the class and dtype of the configuration (float32 if it names none), and is in eval mode without a
    key-value cache, so that a call depends on its inputs alone. length: tokens of the sample texts. hollow: make the
    model a skeleton; otherwise it takes memory and its weights are random. pictures: also give images to a model that
    takes text alone. inputs: a function that gets the model and returns the sample inputs of `forward`, a tuple or a
    dict, instead of a guess; the batch is dynamic if all tensors share it. The eager model is called with them once.
    on_step: a callback that gets the name of each step.
    The `checkpoint` describes the weights in the directory if this version of transformers writes them in another form.

    Raises Unsupported if the directory does not say enough, the eager model refuses the inputs, or the model is
    quantised, and MissingExtra without transformers.
    """
    model = directory_model(directory, hollow=hollow)
    on_step("trying sample inputs with the eager model")
    sample = sample_inputs(model, length, pictures=pictures) if inputs is None else inputs_of_user(model, inputs)
    arguments = {"model": model, "kwargs": sample.kwargs, "dynamic_shapes": sample.sizes}
    form = _older_form(Path(directory), model)
    return arguments if form is None else arguments | {"checkpoint": form}


def export_directory(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    pictures: bool = False,
    inputs: InputFunction | None = None,
    parallel: Parallel | None = None,
    on_step: OnStep = ignore_step,
) -> Artifact:
    """Export the model of a directory with as many dynamic sizes as `torch.export` can keep.

    Every size is tried first, then the batch alone, then none; a UserWarning names the sizes that had to be fixed.
    parallel: as for `export`. on_step: a callback that gets the name of each step.
    Raises what `directory_recipe` and `export` raise.
    """
    arguments = directory_recipe(directory, pictures=pictures, inputs=inputs, on_step=on_step)
    arguments |= {"on_step": on_step, "parallel": parallel}
    shapes = describe(arguments["kwargs"])
    try:
        artifact, fixed = _export_first(arguments, fallbacks(arguments["dynamic_shapes"]), out)
    except CaptureError as error:
        origin = "were guessed" if inputs is None else "were given"
        raise CaptureError(
            *str(error).splitlines(),
            f"The inputs {origin}, and the eager model accepts them: {shapes}. Use --inputs to give others.",
        ) from error
    if fixed:
        warn(
            f"{directory}: torch.export cannot keep every size of this model dynamic; fixed at those of the sample "
            f"inputs: {fixed} ({shapes}). Write a recipe to choose other sizes."
        )
    return artifact


def export_generating(
    directory: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    length: int,
    batch: int,
    engines: Sequence[str],
    on_step: OnStep,
) -> Artifact:
    """Export the language model of a directory with `export_decoder`, so that a server can generate with it.

    The tokens that end an answer come from generation_config.json. Raises what `directory_model` and
    `export_decoder` raise.
    """
    from transformers import GenerationConfig

    model: Any = directory_model(directory)
    if Path(directory, "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except (OSError, ValueError, TypeError) as error:
            raise Unsupported(f"{directory}: generation_config.json cannot be read ({first_line(error)})") from error
    form = _older_form(Path(directory), model)
    return export_decoder(model, out=out, length=length, batch=batch, checkpoint=form, engines=engines, on_step=on_step)


def _export_first(
    arguments: Mapping[str, Any], tries: list[tuple[str, Sizes]], out: str | os.PathLike[str]
) -> tuple[Artifact, str]:
    (fixed, sizes), *rest = tries
    try:
        return export(**{**arguments, "dynamic_shapes": sizes}, out=out), fixed
    except CaptureError:
        if not rest:
            raise
    arguments["on_step"]("trying with fewer dynamic sizes")
    return _export_first(arguments, rest, out)


def _older_form(directory: Path, model: nn.Module) -> CheckpointTensors | None:
    """Return meta tensors like the weights in the directory, if they load and `save_pretrained` would write others."""
    try:
        with open_weights(directory) as weights:
            types = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()}
    except WeightFileError:
        return None
    written = huggingface.checkpoint(model)
    if types == {name: (dtype_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in written.items()}:
        return None
    form = {name: torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for name, (dtype, shape) in types.items()}
    try:
        with restored(model):
            huggingface.load(model, form)
    except CheckpointError as error:
        text = f"{directory}: its weights cannot serve as the example checkpoint: {error}"
        warn(text)
        return None
    return form


def directory_model(directory: str | os.PathLike[str], *, hollow: bool = True) -> nn.Module:
    """Return the model of a directory, as `directory_recipe` builds it. Raises the same errors."""
    if find_spec("transformers") is None:
        raise MissingExtra("hf:DIR", "hf")
    directory = Path(directory)
    settings = _read_config(directory)
    import transformers  # noqa: F401 - sets the level of its logger

    with quiet("transformers"):  # about token ids, image processors and generation settings, which do not apply
        config = _parse(directory, settings)
        make = _maker(directory, settings)
        for each in huggingface.caching([config]):
            each.use_cache = False
        try:
            with skeleton() if hollow else nullcontext():
                model: nn.Module = make(config, dtype=config.dtype or torch.float32)
                _keep_in_float32(model)
        except CaptureError:
            raise
        except Exception as error:
            raise Unsupported(
                *f"{directory}: the model cannot be built from {CONFIG_NAME}: {error}".splitlines()
            ) from error
    return model.eval()


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise Unsupported(f"{directory}: has no {CONFIG_NAME}; hf: takes the local directory of a transformers model")
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise Unsupported(f"{path}: names no model_type, so it is not the configuration of a transformers model")
    if settings.get("quantization_config"):
        raise Unsupported(f"{path}: the model is quantised and cannot be exported; give the original's directory")
    return settings


def _parse(directory: Path, settings: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if settings["model_type"] not in CONFIG_MAPPING:
        raise _unknown(directory, f"model type {settings['model_type']!r}", settings)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise Unsupported(*f"{directory / CONFIG_NAME}: transformers cannot use it: {error}".splitlines()) from error


def _maker(directory: Path, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the constructor of the class that the configuration names, else of the plain model of its type."""
    import transformers

    names = settings.get("architectures")
    if not names:
        return partial(transformers.AutoModel.from_config, trust_remote_code=False)
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise _unknown(directory, f"model class {names[0]!r}", settings)
    make: Callable[..., Any] = kind._from_config
    return make


def _unknown(directory: Path, what: str, settings: Mapping[str, Any]) -> Unsupported:
    import transformers

    code = " Code from the directory (auto_map) is never run." if settings.get("auto_map") else ""
    return Unsupported(
        f"{directory}: transformers {transformers.__version__} has no {what}.{code} Write a recipe that builds it: a "
        "function that returns what export() takes, as file.py:function."
    )


def _keep_in_float32(model: Any) -> None:
    """Cast the tensors to float32 that a model keeps so in any dtype, by the same plan as `from_pretrained`."""
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
