"""Recording of the adapter, which maps the tensors of a checkpoint to the weights."""

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
    "A server takes only weight files for this model, not checkpoints: pack them on the build side, with the model "
    "(weightswap pack --recipe, pack(model=...))"
)
# loading code that changes no weight: norms add a batch counter that old checkpoints lack, and check statistics
_PLAIN_LOADING = {kind._load_from_state_dict for kind in (nn.Module, nn.BatchNorm2d, nn.InstanceNorm2d)}


class Recorded(NamedTuple):
    """Adapter, with its files by name and warnings for the user."""

    adapter: Adapter
    files: dict[str, bytes]
    warnings: tuple[str, ...]

    def renamed(self, names: Mapping[str, str]) -> Recorded:
        """Return the adapter for renamed weights (old FQN -> new FQN)."""
        sources = tuple(structs.replace(source, weight=names[source.weight]) for source in self.adapter.sources)
        return self._replace(adapter=structs.replace(self.adapter, sources=sources))


def record_adapter(
    model: nn.Module, tables: Tables, *, load: Load | None = None, checkpoint: CheckpointTensors | None = None
) -> Recorded:
    """Record how `load(model, checkpoint)` computes weights from checkpoints like `checkpoint`.

    load: the model's loading code, None for its `load_state_dict`. checkpoint: tensors by key, with or without values;
    None for `model.state_dict()`. If `load_state_dict` refuses that, the weights that it does not change are found by
    the identity of their tensors; this covers hooks that only rename keys on saving.

    Keys from which no weight is computed (state, `_extra_state`) are recorded as ignored. Loading code that needs
    values cannot be recorded: this is a warning, and checkpoints must be packed. Raises CaptureError.
    """
    own = load is None and checkpoint is None
    identities: dict[str, Loaded] = {}
    try:
        if checkpoint is None:
            checkpoint, identities = _state_dict(model, tables)
            if own and not _has_loading_code(model) and all(source.keys for source in identities.values()):
                return _adapter(identities, checkpoint)
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
    text = f"no weight uses these checkpoint keys: {listed(optional, 10)}"
    return recorded._replace(warnings=(text,))


class _AdapterRecording:
    """Recorder of one model's loading code."""

    def __init__(self, model: nn.Module, tables: Tables, identities: Mapping[str, Loaded]) -> None:
        self._model, self._tables, self._identities = model, tables, identities

    def record(self, checkpoint: CheckpointTensors, load: Load | None) -> Recorded:
        """Record `load`, by default `load_state_dict`, or if that refuses the checkpoint, a load that is not strict.

        Hooks that rename keys on saving only have this effect; unchanged weights are then found by their identity.
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
        loaded = {name: source if source.keys else identities.get(name, source) for name, source in loaded.items()}
        _check_whole(loaded, checkpoint)
        return _adapter(loaded, checkpoint, transforming)

    def with_needed(
        self, recorded: Recorded, checkpoint: CheckpointTensors, optional: Sequence[str], load: Load | None
    ) -> Recorded:
        """Mark optional keys as needed if loading code, which can test for a key, does something else without them."""
        fewer = {key: value for key, value in checkpoint.items() if flattened({key: value}).keys() - optional}
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
    """Raise Untraceable if a weight is computed from parts: nothing would check that they are of the same kind."""
    parts = flattened(checkpoint).keys() - checkpoint.keys()
    for source in loaded.values():
        if source.transform is not None and (key := next(filter(parts.__contains__, source.keys), None)):
            raise Untraceable("", Unrecordable(f"loading a checkpoint computes with {key}, a part of a tensor"))


def _adapter(
    loaded: Mapping[str, Loaded], checkpoint: CheckpointTensors, transforming: Transforming | None = None
) -> Recorded:
    used = {key for source in loaded.values() for key in source.keys}
    inputs, files = transforming.adapter() if transforming else ((), {})
    adapter = Adapter(
        sources=tuple(
            WeightSource(weight=name, keys=source.keys, transform=source.transform) for name, source in loaded.items()
        ),
        ignored=tuple(key for key in flattened(checkpoint) if key not in used),
        inputs=inputs,
    )
    absent = [name for name, source in loaded.items() if not source.keys]
    warnings = [f"no checkpoint key provides the weight(s) {', '.join(absent)}. {_PACK}"] if absent else []
    if changed := transforming.changed if transforming else ():
        warnings.append(f"loading changes {', '.join(changed)}, but the graph keeps the values from the export")
    return Recorded(adapter, files, tuple(warnings))


def _state_dict(model: nn.Module, tables: Tables) -> tuple[dict[str, Any], dict[str, Loaded]]:
    """Return `model.state_dict()` without values, and the keys whose tensors are weights themselves."""
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
        sources = {weight.name: Loaded(tuple(keys.get(tie_key(tensors[weight.name]), ()))) for weight in tables.weights}
    return saved, sources


def _has_loading_code(model: nn.Module) -> bool:
    """Return whether loading a state dict runs code other than nn.Module's own and `_PLAIN_LOADING`."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module)._load_from_state_dict not in _PLAIN_LOADING
        or "_load_from_state_dict" in vars(module)
        for module in model.modules()
    )
