"""Models of transformers and PEFT, which are never imported for it; and variants, the tensors that calls choose.

A model is one of a library only if the library is imported already. transformers' own code says what its files have and
how they are loaded; PEFT's layers are taken off where checkpoints of the base model shall fit.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from weightswap_runtime.errors import CaptureError, CheckpointError, ExportError, Unsupported, listed
from weightswap_runtime.format.manifest import METHOD_NAME, GraphInput, NamedTensor
from weightswap_runtime.format.peft import merged_problem

from .tensors import ModelView, is_fake, unwrapped

INITIALIZED = "_is_hf_initialized"  # an attribute that loading sets, and no call reads
_CALL_ARGUMENT = "variants"  # with it, a call chooses variants
_LOADED = "_hf_peft_config_loaded"  # transformers' mark of a model with adapters

_OTHER_BASE = "{name}: PEFT's {kind} at zeros is not the base alone, which calls without a variant get"
_PEFT_KIND = re.compile(r"peft\.tuners\.(\w+)\.")
_NOT_NEUTRAL = frozenset(  # they multiply by their tensors, or replace the base's
    {"boft", "ia3", "ln_tuning", "osf", "psoft", "road", "trainable_tokens"}
)
# What computes LoRA otherwise, with tensors of the same names, is refused: a server takes any plain adapter. Of these
# variants of PEFT's LoRA one is plain but for its training, and the other has other shapes.
_HARMLESS = re.compile("MiCA.*|BdLora.*")

Groups = Mapping[str, Sequence[str]]  # FQNs by group
NO_GROUPS: Groups = MappingProxyType({})
Declared = Mapping[str, str | Sequence[str]]


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, which is not imported for this."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keep the key-value caches of transformers out of the outputs of calls in the block: no graph can return one.

    A model of transformers' own classes, with PEFT's layers or not, computes without a cache. What another module
    computes, such as a subclass of its user, may depend on the caches of models in it, so that these stay: its forward
    returns None in place of each.
    """
    modules = [module for module in model.modules() if is_pretrained(module)]
    base = peft_base(model)
    own = is_pretrained(base) and type(base).__module__.startswith("transformers.")
    asking = list(caching([module.config for module in modules])) if own else []
    with ExitStack() as stack:
        if modules and not (own and base is model):
            stack.enter_context(model.register_forward_hook(lambda *call: _without_caches(call[-1])))
        try:
            for config in asking:
                config.use_cache = False
            yield
        finally:
            for config in asking:
                config.use_cache = True


def caching(configs: Sequence[Any]) -> Iterator[Any]:
    """Yield each configuration that asks for a cache, and each in these: encoders and decoders have their own."""
    every = [*configs, *(getattr(config, name, None) for config in configs for name in config.sub_configs)]
    yield from {id(config): config for config in every if getattr(config, "use_cache", False)}.values()


def _without_caches(output: Any) -> Any:
    from transformers import Cache

    return pytree.tree_map_only(Cache, lambda _: None, output)


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the keys that `model.save_pretrained()` writes, with tensors of their shape and dtype on the meta device.

    The model may be real or a skeleton; its values are not read. Raises Unsupported for a quantised model and for one
    with adapters, whose files have other content, and for one with ties that transformers does not know of.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    owner: Any = model
    _check_plain(owner)
    # transformers finds ties of meta tensors by identity, of others by address, which fake tensors lack
    state = {key: _hollow(value) for key, value in owner.state_dict().items() if isinstance(value, torch.Tensor)}
    for key in owner._keys_to_ignore_on_save or ():
        state.pop(key, None)
    try:
        state = remove_tied_weights_from_state_dict(state, owner)
    except RuntimeError as error:  # its files then cannot be written either
        raise Unsupported(
            f"{type(model).__qualname__}: has tied tensors that transformers does not know of, so that it cannot save "
            f"it ({error}). If checkpoints are state dicts: export(checkpoint=model.state_dict())"
        ) from error
    return dict(revert_weight_conversion(owner, state))


def load(model: nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Put a checkpoint's tensors into a model as `from_pretrained` does: renamed, converted, cast, tied.

    Parameters are replaced, not written to, so that a skeleton can be loaded, and a tracer sees every operation. As in
    `from_pretrained`, unexpected keys are skipped, and tied weights may be absent. Unlike it, this refuses a checkpoint
    that does not fit: CheckpointError lists the keys that are missing, have another shape, or fail to convert. The
    model is then partly loaded.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    owner: Any = model
    _check_plain(owner)
    conversions: list[Any] = get_model_conversion_mapping(owner)
    device = next((str(tensor.device) for tensor in checkpoint.values()), "cpu")
    config = LoadStateDictConfig(weight_mapping=conversions, dtype=owner.dtype, device_map={"": device})
    # transformers converts tensors in a thread pool, which a tracer does not see
    in_this_thread = mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"})
    with torch.no_grad(), in_this_thread, _silent():
        report, _ = convert_and_load_state_dict_in_model(owner, dict(checkpoint), config, None)
        owner.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
        owner._adjust_missing_and_unexpected_keys(report)
    if problems := [*_problems(report), *_unscaled(report.unexpected_keys, checkpoint)]:
        head = f"{type(model).__qualname__}: cannot load the checkpoint"
        raise CheckpointError(head, *(f"  - {problem}" for problem in problems))


def _check_plain(model: Any) -> None:
    name = type(model).__qualname__
    if getattr(model, "hf_quantizer", None) is not None:
        raise Unsupported(f"{name}: is quantised by transformers; export the original, and give its checkpoints")
    if getattr(model, _LOADED, False):
        raise Unsupported(
            f"{name}: has adapters, and its files hold only those. Export what peft.get_peft_model() returns, or "
            "merge the adapters first."
        )


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def _silent() -> Iterator[None]:
    """Disable transformers' progress bars in the block."""
    from transformers.utils import logging

    previous = logging.set_tqdm_hook(lambda _, args, __: args[0])
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _unscaled(unexpected: Collection[str], checkpoint: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield texts about skipped keys beside 8-bit floats: what `from_pretrained` casts may lack its scale."""
    coarse = {
        key.rpartition(".")[0]
        for key, value in checkpoint.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() == 1
    }
    for key in sorted(key for key in unexpected if key.rpartition(".")[0] in coarse):
        yield f"{key}: may be the scale of the 8-bit floats beside it, which this model would not apply"


def _problems(report: Any) -> Iterator[str]:
    yield from (f"{key}: missing" for key in sorted(report.missing_keys))
    for key, shape, expected in sorted(report.mismatched_keys):
        yield f"{key}: has shape {list(shape)}, the model has {list(expected)}"
    for key, text in sorted(report.conversion_errors.items()):
        yield f"{key}: cannot be converted: {text.strip().splitlines()[-1]}"


def peft_base(model: nn.Module) -> nn.Module:
    """Return the base model of a model by `get_peft_model()`, wrapped or not; any other model itself."""
    peft, plain = sys.modules.get("peft"), unwrapped(model)
    if peft is None or not isinstance(plain, peft.PeftModel):
        return model
    base: nn.Module = plain.get_base_model()
    return base


def _layers(model: nn.Module) -> dict[str, Any]:
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, tuners.BaseTunerLayer)}


def _check_layers(model: nn.Module, variable: Collection[str]) -> None:
    """Raise CaptureError unless each layer of PEFT applies exactly one set of tensors, as plain LoRA or another kind.

    All that it adds must be variable: checkpoints of the base lack it.
    """
    for name, layer in _layers(model).items():
        if layer.disable_adapters or len(layer.active_adapters) != 1:
            raise CaptureError(f"{name}: PEFT applies {len(layer.active_adapters)} sets of its tensors, expected one")
        if (kind := _kind(layer)) in _NOT_NEUTRAL:
            raise CaptureError(_OTHER_BASE.format(name=name, kind=kind))
        _check_lora(name, layer)
        own = [f"{name}.{key}" for key in layer.state_dict() if not key.startswith("base_layer.")]
        if undeclared := [fqn for fqn in own if fqn not in variable]:
            raise CaptureError(f"variants: {listed(undeclared)} would belong to the base; declare all that PEFT added")
    if copies := [fqn for fqn in variable if ".modules_to_save." in f".{fqn}"]:
        raise CaptureError(_OTHER_BASE.format(name=listed(copies), kind="modules_to_save"))


def _check_lora(name: str, layer: Any) -> None:
    """Raise CaptureError for a layer with LoRA's tensors that computes something else with them than LoRA."""
    active = layer.active_adapters[0]
    if getattr(layer, "use_dora", {}).get(active):
        raise CaptureError(f"{name}: uses DoRA, which depends on the base's values; only LoRA can be variable")
    if (other := getattr(layer, "lora_variant", {}).get(active)) is not None:
        computed = (other if isinstance(other, type) else type(other)).__name__
        if not _HARMLESS.fullmatch(computed):
            raise CaptureError(f"{name}: PEFT computes {computed} there; only plain LoRA can be variable")


def _kind(layer: Any) -> str:
    """Return the kind of a layer of PEFT, such as lora: it is the package that the layer's class is in."""
    return next((found[1] for base in type(layer).__mro__ if (found := _PEFT_KIND.match(base.__module__))), "")


@contextmanager
def unwrapped_layers(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """Remove PEFT's layers in the block, so that the base model's checkpoints and loading code fit the model.

    Gives a mapping from prefixes of FQNs with PEFT's layers to those without them.
    """
    layers = _layers(model)
    prefixes = {f"{name}.base_layer.": f"{name}." for name in layers if hasattr(layers[name], "base_layer")}
    with ExitStack() as stack:
        for prefix in prefixes:
            path, _, child = prefix.removesuffix(".base_layer.").rpartition(".")
            modules = model.get_submodule(path)._modules
            inner = layers[f"{path}.{child}" if path else child].get_base_layer()
            stack.enter_context(mock.patch.dict(modules, {child: inner}))
        if prefixes and getattr(model, _LOADED, False):
            stack.enter_context(mock.patch.object(model, _LOADED, False))
        yield prefixes


def find_groups(view: ModelView, declared: Declared | None) -> Groups:
    """Return the FQNs that match each group's patterns. Raises ExportError, and CaptureError for a merged adapter."""
    if problem := merged_problem(view.model):
        raise CaptureError(problem)
    if not declared:
        return NO_GROUPS
    names = [name for name in view.tensors if name in view.parameter_names]
    groups: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, declaration in declared.items():
        if not METHOD_NAME.fullmatch(group):
            raise ExportError(f"variants: the group {group!r} is not an identifier")
        for pattern in [declaration] if isinstance(declaration, str) else declaration:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise ExportError(f"variants: {pattern!r} matches no parameter; the parameters are {listed(names, 3)}")
            if shared := [name for name in matched if owner.setdefault(name, group) != group]:
                raise ExportError(f"variants: {shared[0]} is in the groups {owner[shared[0]]!r} and {group!r}")
            groups[group] = list(dict.fromkeys([*groups.get(group, []), *matched]))
    _check_layers(view.model, owner)
    return groups


@contextmanager
def base_alone(view: ModelView, groups: Groups) -> Iterator[None]:
    """Let the model compute, in the block, what its graph computes for calls without a variant.

    Variable tensors are zeros. The factors of LoRA, which would become constants of the graph, are 1: a runtime
    multiplies them into the tensors that it loads. Those of PEFT's other layers stay, as a runtime does not know them.
    """
    tensors = [view.tensors[name] for names in groups.values() for name in names]
    values = [(tensor.detach(), tensor.detach().clone()) for tensor in tensors if not is_fake(tensor)]
    with ExitStack() as stack:
        for layer in _layers(view.model).values() if groups else ():
            if _kind(layer) == "lora" and isinstance(scaling := getattr(layer, "scaling", None), dict):
                stack.enter_context(mock.patch.dict(scaling, dict.fromkeys(scaling, 1.0)))
        try:
            for tensor, _ in values:
                tensor.zero_()
            yield
        finally:
            for tensor, value in values:
                tensor.copy_(value)


def check_variable(fqns: Sequence[str], kind: str, groups: Groups) -> None:
    """Raise CaptureError unless the names of one tensor all belong to one group, and it is a weight."""
    if kind != "weight" or not any(set(fqns) <= set(names) for names in groups.values()):
        raise CaptureError(f"{listed(fqns)}: a variant needs all names of a tensor, and no tensor that calls change")


def with_siblings(variable: frozenset[str], names: Collection[str], composed: Collection[str]) -> frozenset[str]:
    """Add to variable tensors the other parts of the tensors that they are parts of. composed: FQNs of such tensors."""
    parts = ([name for name in names if name.startswith(f"{fqn}.")] for fqn in composed)
    return variable.union(*(each for each in parts if variable.intersection(each)))


def grouped(
    rows: Sequence[NamedTensor], groups: Groups, inputs: Mapping[str, Sequence[GraphInput]], composed: Collection[str]
) -> dict[str, tuple[NamedTensor, ...]]:
    """Return the rows by group. composed: FQNs of the parameters that are made of other tensors.

    Raises CaptureError for rows that no method reads, for only some of the parts of a tensor that methods read, and for
    inputs named `variants`.
    """
    if not groups:
        return {}
    read = {item.name for items in inputs.values() for item in items if item.kind == "variant"}
    if unread := [row.name for row in rows if not read.intersection(row.names)]:
        raise CaptureError(f"variants: no method reads {listed(unread)}; declare only what calls choose, or delete it")
    if named := [name for name, items in inputs.items() if GraphInput(kind="input", name=_CALL_ARGUMENT) in items]:
        raise CaptureError(f"method {named[0]!r}: rename the input {_CALL_ARGUMENT!r}: calls choose variants by it")
    reads = {item.name for items in inputs.values() for item in items if item.kind in ("weight", "variant")}
    for fqn in composed:
        owners: dict[str, list[str]] = {}
        for part in sorted(name for name in reads if name.startswith(f"{fqn}.")):
            owners.setdefault(next((group for group, names in groups.items() if part in names), ""), []).append(part)
        if len(owners) > 1:
            parts = "; ".join(f"{listed(names)} in {group or 'no group'}" for group, names in owners.items())
            raise CaptureError(f"variants: {fqn} is one tensor ({parts}); declare all its parts in one group")
    return {group: tuple(row for row in rows if row.name in names) for group, names in groups.items()}
