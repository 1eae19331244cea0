"""Recording the adapter: how the tensors of a checkpoint become the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weightswap_exporter.capture.classify import Tables
from weightswap_exporter.models.stand_ins import install, restored, tied, without_values
from weightswap_exporter.models.tensors import TieKey, named_tensors, tie_key
from weightswap_exporter.models.user_errors import Unrecordable
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.manifest import Adapter, WeightSource
from weightswap_runtime.messages import listed

from .tracing import (
    CheckpointTensors,
    Load,
    Untraceable,
    flattened,
    like_checkpoint,
    load_state_dict,
    load_what_fits,
    trace_loading,
)
from .transforming import Loaded, Transforming

_PACK = (
    "A server takes weight files for this model, no checkpoints: pack them on the build side, with the model "
    "(weightswap pack --recipe, pack(model=...))"
)
# norms count batches that old checkpoints have not counted, and check running statistics: neither changes a weight
_PLAIN_LOADING = {kind._load_from_state_dict for kind in (nn.Module, nn.BatchNorm2d, nn.InstanceNorm2d)}


class Recorded(NamedTuple):
    """The adapter, its files by name, and what the user should be told."""

    adapter: Adapter
    files: dict[str, bytes]
    warnings: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> Recorded:
        """The same for weights of other names."""
        sources = tuple(structs.replace(source, weight=names[source.weight]) for source in self.adapter.sources)
        return self._replace(adapter=structs.replace(self.adapter, sources=sources))


def record_adapter(
    model: nn.Module, tables: Tables, *, load: Load | None = None, checkpoint: CheckpointTensors | None = None
) -> Recorded:
    """Record how `load(model, checkpoint)` makes weights of a checkpoint like `checkpoint`.

    load: the model's loading code, None for its `load_state_dict`. checkpoint: tensors with or without values by key,
    None for `model.state_dict()`. Where `load_state_dict` refuses that, the weights that it does not touch are found by
    the identity of their tensors, so that hooks which only rename on saving are covered.

    Keys that no weight comes from (state, `_extra_state`) are recorded as ignored. Loading code that needs values
    cannot be recorded: that is a warning, and checkpoints have to be packed. Raises CaptureError.
    """
    own = load is None and checkpoint is None
    identities: dict[str, Loaded] = {}
    try:
        if checkpoint is None:
            checkpoint, identities = _saved(model, tables)
            if own and not _has_loading_code(model) and all(found.keys for found in identities.values()):
                return _recorded(identities, checkpoint)
        recording = _AdapterRecording(model, tables, identities)
        recorded = recording.record(checkpoint, load)
    except Untraceable as error:
        if not own and not error.wants_values:
            raise CaptureError(
                *f"a checkpoint like the given one does not load into the model: {error}".splitlines(),
                "export(checkpoint=...) says what checkpoints look like; without it they are like model.state_dict()",
            ) from error
        sources = tuple(WeightSource(weight=weight.name, keys=()) for weight in tables.weights)
        reason = f"how a checkpoint becomes weights cannot be recorded: {error}"
        return Recorded(Adapter(sources=sources, untraceable=str(error)), {}, (f"{reason}. {_PACK}",))
    values, known = flattened(checkpoint), tables.loaded
    ignored = (key for key in recorded.adapter.ignored if key not in known)
    if optional := [key for key in ignored if isinstance(values[key], torch.Tensor)]:
        recorded = recording.with_needed(recorded, checkpoint, optional, load)
    if own or recorded.warnings or not optional:
        return recorded
    text = f"no weight comes from these keys of a checkpoint: {listed(optional, 10)}"
    return recorded._replace(warnings=(text,))


class _AdapterRecording:
    """Traces of one model's loading code."""

    def __init__(self, model: nn.Module, tables: Tables, identities: Mapping[str, Loaded]) -> None:
        self._model, self._tables, self._identities = model, tables, identities

    def record(self, checkpoint: CheckpointTensors, load: Load | None) -> Recorded:
        """Without `load` by `load_state_dict`, or where that refuses the checkpoint by what of it fits.

        That happens after hooks that only rename on saving; what is not touched is then found by its identity.
        """
        try:
            recorded = self._record(checkpoint, load or load_state_dict, {})
        except Untraceable as error:
            if not self._identities or load is not None or error.wants_values:
                raise
            return self._record(checkpoint, load_what_fits, self._identities)
        self._identities = {}
        return recorded

    def _record(self, checkpoint: CheckpointTensors, load: Load, identities: Mapping[str, Loaded]) -> Recorded:
        traced = trace_loading(self._model, self._tables.loaded, checkpoint, load)
        transforming = Transforming(traced, named_tensors(self._model))
        loaded = {weight.name: transforming.weight(weight) for weight in self._tables.weights}
        loaded = {name: found if found.keys else identities.get(name, found) for name, found in loaded.items()}
        _check_whole(loaded, checkpoint)
        return _recorded(loaded, checkpoint, transforming)

    def with_needed(
        self, recorded: Recorded, checkpoint: CheckpointTensors, optional: Sequence[str], load: Load | None
    ) -> Recorded:
        """Loading code may ask whether a key is there: if it does something else without them, they are needed."""
        fewer = {key: each for key, each in checkpoint.items() if flattened({key: each}).keys() - optional}
        try:
            without = self._record(like_checkpoint(checkpoint, fewer), load or load_what_fits, self._identities)
        except (Untraceable, CaptureError):
            same = False
        else:
            same = (without.adapter.sources, without.files) == (recorded.adapter.sources, recorded.files)
        if same:
            return recorded
        return recorded._replace(adapter=structs.replace(recorded.adapter, needed=tuple(optional)))


def _check_whole(loaded: Mapping[str, Loaded], checkpoint: CheckpointTensors) -> None:
    """Raise Untraceable where a weight is computed from parts: nothing would tell whether they are of the same kind."""
    parts = flattened(checkpoint).keys() - checkpoint.keys()
    for found in loaded.values():
        if found.transform is not None and (key := next(filter(parts.__contains__, found.keys), None)):
            raise Untraceable("", Unrecordable(f"loading a checkpoint computes with {key}, a part of a tensor"))


def _recorded(
    loaded: Mapping[str, Loaded], checkpoint: CheckpointTensors, transforming: Transforming | None = None
) -> Recorded:
    used = {key for found in loaded.values() for key in found.keys}
    inputs, files = transforming.adapter() if transforming else ((), {})
    adapter = Adapter(
        sources=tuple(
            WeightSource(weight=name, keys=found.keys, transform=found.transform) for name, found in loaded.items()
        ),
        ignored=tuple(key for key in flattened(checkpoint) if key not in used),
        inputs=inputs,
    )
    absent = [name for name, found in loaded.items() if not found.keys]
    warnings = [f"no key of a checkpoint gives the weight(s) {', '.join(absent)}. {_PACK}"] if absent else []
    if changed := transforming.changed if transforming else ():
        warnings.append(f"loading changes {', '.join(changed)}; the graph keeps what it is at the export")
    return Recorded(adapter, files, tuple(warnings))


def _saved(model: nn.Module, tables: Tables) -> tuple[dict[str, Any], dict[str, Loaded]]:
    """What `model.state_dict()` holds, without values, and the keys whose tensors are weights themselves."""
    with restored(model):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        install(model, tied(model, without_values(model, mode, tables.loaded)))
        tensors = named_tensors(model)
        try:
            saved: dict[str, Any] = model.state_dict(keep_vars=True)
        except Exception as error:
            raise Untraceable("model.state_dict() fails: ", error) from error
        keys: dict[TieKey, list[str]] = {}
        for key, value in flattened(saved).items():
            if isinstance(value, torch.Tensor):
                keys.setdefault(tie_key(value), []).append(key)
        found = {weight.name: Loaded(tuple(keys.get(tie_key(tensors[weight.name]), ()))) for weight in tables.weights}
    return saved, found


def _has_loading_code(model: nn.Module) -> bool:
    """Whether loading a state dict runs anything but nn.Module's own code, and what norms add to it."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict not in _PLAIN_LOADING
        or "_load_from_state_dict" in vars(module)
        for module in model.modules()
    )
