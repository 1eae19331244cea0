"""The conversion: how a checkpoint's tensors become weights, as the model's own loading code does it.

The code is traced, and each weight is looked for in the trace. One that is a tensor of the checkpoint under another
name, or under several, needs only its keys. Others become outputs of the conversion's graph, which a server and
`pack()` run. What a weight must not depend on is refused: the values that the model has now, random numbers, numbers
that loading looks at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from msgspec import structs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, map_arg

from weightswap_exporter.modules import libraries
from weightswap_exporter.modules.stand_ins import Unrecordable, first_line, install, restored, tied, without_values
from weightswap_exporter.modules.tensors import ModelView, TieKey, dtype_name, is_fake, tie_key
from weightswap_runtime.errors import CaptureError, listed
from weightswap_runtime.format.canonical import encode_tensors
from weightswap_runtime.format.manifest import (
    CONVERSION_CONSTANTS_NAME,
    CONVERSION_NAME,
    Conversion,
    ConversionInput,
    NamedTensor,
    WeightSource,
)
from weightswap_runtime.torch_tensors import tensor_content, torch_dtype

from .archive import program_archive
from .classify import Tables
from .programs import all_inputs, is_random
from .tracing import (
    CheckpointTensors,
    Load,
    Traced,
    Untraceable,
    flattened,
    like_checkpoint,
    load_state_dict,
    load_what_fits,
    trace_loading,
)

aten = torch.ops.aten
# loading code that changes no weight: norms add a batch counter that old checkpoints lack, and check statistics
_PLAIN_LOADING = {kind._load_from_state_dict for kind in (nn.Module, nn.BatchNorm2d, nn.InstanceNorm2d)}
_SAME_VALUES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.expand.default,
}
# operators that only move elements: numbers stay the same, so that two runs show where each comes from
_MOVES = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    operator.getitem,
}
_PACK = (
    "A server takes only weight files for this model, not checkpoints: pack them on the build side, with the model "
    "(weightswap pack --recipe, pack(model=...))"
)


class Recorded(NamedTuple):
    """Conversion, with its files by name and warnings for the user."""

    conversion: Conversion
    files: dict[str, bytes]
    warnings: tuple[str, ...]


def record_conversion(
    view: ModelView, tables: Tables, *, load: Load | None = None, checkpoint: CheckpointTensors | None = None
) -> Recorded:
    """Record how `load(model, checkpoint)` computes weights from checkpoints like `checkpoint`.

    load: the model's loading code, None for its `load_state_dict`. checkpoint: tensors by key, with or without values;
    None for `model.state_dict()`. A transformers model has its library's loading and files instead of these two. If
    `load_state_dict` refuses `model.state_dict()`, the weights that it does not change are found by the identity of
    their tensors; this covers hooks that only rename keys on saving. Checkpoints of a model with variants are those of
    its base, without PEFT's layers.

    Keys from which no weight is computed (state, `_extra_state`) are recorded as ignored. Loading code that needs
    values cannot be recorded: this is a warning, and checkpoints must be packed. Raises CaptureError.
    """
    with _base(view, tables) as (base, weights):
        if libraries.is_pretrained(base.model) and not base.kinds:
            load = load or libraries.load
            checkpoint = libraries.checkpoint(base.model) if checkpoint is None else checkpoint
        recorded = _recorded(base, tables._replace(weights=tuple(weights.values())), load, checkpoint)
    names = {row.name: name for name, row in weights.items()}
    found = recorded.conversion.sources
    if tables.variants:  # a state dict of the base has none of the graph's names, under which ties are known
        ties = {row.name: WeightSource(weight=row.name, keys=row.names) for row in weights.values()}
        found = tuple(
            source if source.transform is not None else _with_copies(source, ties[source.weight]) for source in found
        )
    sources = tuple(structs.replace(source, weight=names[source.weight]) for source in found)
    return recorded._replace(conversion=structs.replace(recorded.conversion, sources=sources))


@contextmanager
def _base(view: ModelView, tables: Tables) -> Iterator[tuple[ModelView, dict[str, NamedTensor]]]:
    """Take PEFT's layers off a model with variants in the block, and give a view of the rest.

    Beside it, the weights as they are named there, by their names in the model with its layers.
    """
    if not tables.variants:
        yield view, {row.name: row for row in tables.weights}
        return
    with libraries.unwrapped_layers(view.model) as prefixes:

        def renamed(fqn: str) -> str:
            return next((new + fqn.removeprefix(old) for old, new in prefixes.items() if fqn.startswith(old)), fqn)

        rows = (
            structs.replace(r, name=renamed(r.name), aliases=tuple(map(renamed, r.aliases))) for r in tables.weights
        )
        yield ModelView(view.model), dict(zip((row.name for row in tables.weights), rows, strict=True))


def _recorded(view: ModelView, tables: Tables, load: Load | None, checkpoint: CheckpointTensors | None) -> Recorded:
    own = load is None and checkpoint is None
    identities: dict[str, WeightSource] = {}
    try:
        if checkpoint is None:
            checkpoint, identities = _state_dict(view, tables)
            # by far the most models: no trace is needed
            if own and not _has_loading_code(view.model) and all(source.keys for source in identities.values()):
                return _conversion(list(identities.values()), checkpoint)
        recording = _Recording(view, tables, load, identities)
        recorded = recording.record(checkpoint)
    except Untraceable as error:
        if not own and not error.wants_values:
            raise CaptureError(
                *f"a checkpoint like the given one does not load into the model: {error}".splitlines(),
                "export(checkpoint=...) says what checkpoints look like; without it they are like model.state_dict()",
            ) from error
        sources = tuple(WeightSource(weight=weight.name, keys=()) for weight in tables.weights)
        reason = f"how a checkpoint becomes weights cannot be recorded: {error}"
        return Recorded(Conversion(sources=sources, untraceable=str(error)), {}, (f"{reason}. {_PACK}",))
    values, known = flattened(checkpoint), tables.loaded
    ignored = (key for key in recorded.conversion.ignored if key not in known)
    if optional := [key for key in ignored if isinstance(values[key], torch.Tensor)]:
        recorded = recording.with_needed(recorded, checkpoint, optional)
    if own or recorded.warnings or not optional:
        return recorded
    text = f"no weight uses these checkpoint keys: {listed(optional, 10)}"
    return recorded._replace(warnings=(text,))


def _state_dict(view: ModelView, tables: Tables) -> tuple[dict[str, Any], dict[str, WeightSource]]:
    """Return `model.state_dict()` without values, and the keys whose tensors are weights themselves."""
    with restored(view.model):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        install(view, tied(view, without_values(view, mode, tables.loaded)))
        tensors = ModelView(view.model).tensors
        try:
            saved: dict[str, Any] = view.model.state_dict(keep_vars=True)
        except Exception as error:
            raise Untraceable("model.state_dict() fails: ", error) from error
        keys: dict[TieKey, list[str]] = {}
        for key, value in flattened(saved).items():
            if isinstance(value, torch.Tensor):
                keys.setdefault(tie_key(value), []).append(key)
        found = {row.name: tuple(keys.get(tie_key(tensors[row.name]), ())) for row in tables.weights}
        sources = {name: WeightSource(weight=name, keys=keys) for name, keys in found.items()}
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


class _Recording:
    """Recorder of one model's loading code."""

    def __init__(self, view: ModelView, tables: Tables, load: Load | None, saved: Mapping[str, WeightSource]) -> None:
        """saved: the keys under which a state dict has each weight; empty for other checkpoints."""
        self._view, self._tables, self._load, self._saved = view, tables, load, saved
        self._identities: Mapping[str, WeightSource] = {}  # the sources of weights that loading does not change

    def record(self, checkpoint: CheckpointTensors) -> Recorded:
        """Record `load`, by default `load_state_dict`, or if that refuses the checkpoint, a load that is not strict.

        Hooks that rename keys on saving only have this effect; unchanged weights are then found by their identity.
        """
        load = self._load or load_state_dict
        try:
            recorded = self._record(checkpoint, load)
        except Untraceable as error:
            if not self._saved or self._load is not None or error.wants_values:
                raise
            load, self._identities = load_what_fits, self._saved
            recorded = self._record(checkpoint, load)
        self._check_versions(recorded, checkpoint, load)
        return recorded

    def _check_versions(self, recorded: Recorded, checkpoint: CheckpointTensors, load: Load) -> None:
        """Raise Untraceable if loading code asks for a version: servers and files of tensors alone know of none."""
        if not hasattr(checkpoint, "_metadata"):
            return
        try:
            without = self._record(dict(checkpoint), load)
            is_same = (without.conversion.sources, without.files) == (recorded.conversion.sources, recorded.files)
        except Untraceable as error:
            is_same = not error.wants_values  # else the model itself refuses a file without a version
        except CaptureError:
            is_same = False
        if not is_same:
            raise _untraceable("depends on the version that a state dict has in `_metadata`, and many files lack")

    def _record(self, checkpoint: CheckpointTensors, load: Load) -> Recorded:
        traced = trace_loading(self._view, self._tables.loaded, checkpoint, load)
        search = _Search(traced, self._view.tensors)
        found = [_with_copies(search.source_of(row), self._saved.get(row.name)) for row in self._tables.weights]
        sources = [source if source.keys else self._identities.get(source.weight, source) for source in found]
        _check_whole(sources, checkpoint)
        return _conversion(sources, checkpoint, search)

    def with_needed(self, recorded: Recorded, checkpoint: CheckpointTensors, optional: Sequence[str]) -> Recorded:
        """Mark optional keys as needed if loading code, which can test for a key, does something else without them."""
        fewer = {key: value for key, value in checkpoint.items() if flattened({key: value}).keys() - optional}
        try:
            without = self._record(like_checkpoint(checkpoint, fewer), self._load or load_what_fits)
            if (without.conversion.sources, without.files) == (recorded.conversion.sources, recorded.files):
                return recorded
        except (Untraceable, CaptureError):
            pass
        return recorded._replace(conversion=structs.replace(recorded.conversion, needed=tuple(optional)))


def _with_copies(source: WeightSource, saved: WeightSource | None) -> WeightSource:
    """Return a source with all keys under which a state dict has the weight: loading keeps the last of them, but a
    checkpoint in which they differ is of no such model. Raises Untraceable if it is computed from some of them."""
    left_out = [key for key in saved.keys if key not in source.keys] if saved is not None else []
    if saved is None or not left_out or not source.keys:
        return source
    if source.transform is not None:
        raise _untraceable(f"computes {source.weight} without {listed(left_out)}, under which a state dict has it, too")
    return saved if set(source.keys) < set(saved.keys) else source


def _check_whole(sources: Sequence[WeightSource], checkpoint: CheckpointTensors) -> None:
    """Raise Untraceable if a weight is computed from parts: nothing would check that they are of the same kind."""
    parts = flattened(checkpoint).keys() - checkpoint.keys()
    for source in sources:
        if source.transform is not None and (key := next(filter(parts.__contains__, source.keys), None)):
            raise Untraceable("", Unrecordable(f"loading a checkpoint computes with {key}, a part of a tensor"))


def _conversion(
    sources: Sequence[WeightSource], checkpoint: CheckpointTensors, search: _Search | None = None
) -> Recorded:
    used = {key for source in sources for key in source.keys}
    inputs, files = search.conversion() if search else ((), {})
    conversion = Conversion(
        sources=tuple(sources),
        ignored=tuple(key for key in flattened(checkpoint) if key not in used),
        inputs=inputs,
    )
    absent = [source.weight for source in sources if not source.keys]
    warnings = [f"no checkpoint key provides the weight(s) {', '.join(absent)}. {_PACK}"] if absent else []
    if changed := search.changed if search else ():
        warnings.append(f"loading changes {', '.join(changed)}, but the graph keeps the values from the export")
    return Recorded(conversion, files, tuple(warnings))


class _Search:
    """Search for weights in a trace; those that are computed become outputs of the conversion's graph."""

    def __init__(self, traced: Traced, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: the model's tensors by FQN, whose present values must not become a part of the conversion."""
        self._traced = traced
        self._storages = {tensor.untyped_storage()._cdata: name for name, tensor in tensors.items() if tensor.numel()}
        for node in list(traced.module.graph.nodes):
            _replace_copy(node)
        self._keys, self._initial = traced.keys, traced.initial
        self._results = traced.results()
        self._outputs: list[Node] = []
        self._renamed_keys: set[str] = set()
        self.changed = traced.changed

    def source_of(self, weight: NamedTensor) -> WeightSource:
        """Return the source of a weight; without keys if loading does not change it.

        Raises Untraceable for a weight that depends on more than a checkpoint.
        """
        roots = dict.fromkeys(_root(self._results[name]) for name in weight.names)
        loaded = [root for root in roots if root not in self._initial]
        keys = [self._keys[root] for root in loaded if root in self._keys]
        cast = [root for root in loaded if _root(root, casts=True) in self._keys]
        if len(keys) == len(loaded) and all(_type(root) == (weight.dtype, weight.shape) for root in loaded):
            if not self._renamed_keys.intersection(keys):
                self._renamed_keys.update(keys)
                return WeightSource(weight=weight.name, keys=tuple(keys))
            key = loaded[-1]  # another weight has the same key
            with key.graph.inserting_after(key):
                node = _called(aten.clone.default, key, value=key.meta["val"].clone())
        elif len(cast) < len(loaded) > 1:
            raise _untraceable(f"gives {' and '.join(weight.names)}, which are one tensor, different values")
        else:
            node = self._with_type_of(loaded[-1], weight)  # names are loaded in turn, so that the last one wins
        return self._computed(weight, node)

    def _computed(self, weight: NamedTensor, node: Node) -> WeightSource:
        used = sorted(all_inputs([node]))
        initial = [root for root in used if root in self._initial]
        if initial and not _is_overwritten(node, initial):
            raise _untraceable(f"leaves old values in a part of {weight.name}")
        if any(map(is_random, used)):
            raise _untraceable(f"draws random numbers for {weight.name}")
        self._outputs.append(node)
        keys = tuple(self._keys[root] for root in used if root in self._keys)
        return WeightSource(weight=weight.name, keys=keys, transform=len(self._outputs) - 1)

    def _with_type_of(self, node: Node, weight: NamedTensor) -> Node:
        """Return the node, cast to the weight's dtype as `Tensor.copy_` would."""
        dtype, shape = _type(node)
        if shape != weight.shape:
            raise CaptureError(
                f"loading a checkpoint gives {weight.name} the shape {list(shape)}; the model has {list(weight.shape)}"
            )
        if dtype == weight.dtype:
            return node
        with node.graph.inserting_after(node):
            return _cast(node, torch_dtype(weight.dtype))

    def conversion(self) -> tuple[tuple[ConversionInput, ...], dict[str, bytes]]:
        """Return the inputs of the conversion's graph, and the files of it and its constants; empty without
        transforms."""
        if not self._outputs:
            return (), {}
        body = sorted(all_inputs(self._outputs))
        keys = [node for node in body if node in self._keys]
        constants = {node: f"constant_{index}" for index, node in enumerate(n for n in body if n.op == "get_attr")}
        inputs = [_input("key", self._keys[node], node) for node in keys]
        inputs += [_input("constant", name, node) for node, name in constants.items()]
        values = {name: getattr(self._traced.module, str(node.target)) for node, name in constants.items()}
        self._check_constants(values)
        contents = {name: tensor_content(value) for name, value in values.items()}
        files = {CONVERSION_CONSTANTS_NAME: b"".join(encode_tensors(contents))} if values else {}
        return tuple(inputs), files | {CONVERSION_NAME: self._archive(body, [*keys, *constants])}

    def _check_constants(self, values: Mapping[str, torch.Tensor]) -> None:
        for value in values.values():
            if (name := self._storages.get(value.untyped_storage()._cdata)) is not None or is_fake(value):
                raise CaptureError(
                    f"the loading code uses the model's current values of {name or 'a tensor that it keeps'}: a "
                    "checkpoint must produce the same weights whatever the model held before"
                )

    def _archive(self, body: list[Node], placeholders: list[Node]) -> bytes:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for index, node in enumerate(placeholders):
            copies[node] = graph.placeholder(f"input_{index}")
        for node in body:
            if node in self._initial:  # all of its elements are overwritten
                value = node.meta["val"]
                copies[node] = graph.call_function(aten.zeros.default, (list(value.shape),), {"dtype": value.dtype})
            elif node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[output] for output in self._outputs))
        module = GraphModule(torch.nn.Module(), graph)
        examples = tuple(node.meta["val"].detach().contiguous() for node in placeholders)
        try:
            return program_archive(torch.export.export(module, examples, strict=False))
        except Exception as error:
            raise CaptureError(f"the conversion's graph cannot be written: {first_line(error)}") from error


def _untraceable(what: str) -> Untraceable:
    return Untraceable("", Unrecordable(f"loading a checkpoint {what}"))


def _replace_copy(node: Node) -> None:
    """Replace `copy(target, source)` by the source, expanded and cast to the target's type."""
    if node.target is not aten.copy.default:
        return
    source: Any = node.args[1]
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        if source.meta["val"].shape != value.shape:
            shape = list(value.shape)
            source = _called(aten.expand.default, source, shape, value=source.meta["val"].expand(shape))
        if source.meta["val"].dtype != value.dtype:
            source = _cast(source, value.dtype)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    return _called(aten._to_copy.default, node, value=node.meta["val"].to(dtype), dtype=dtype)


def _called(target: Any, node: Node, *args: Any, value: torch.Tensor, **kwargs: Any) -> Node:
    """Insert a call on a node at the graph's present insertion point; `value` is its fake result."""
    call = node.graph.call_function(target, (node, *args), kwargs)
    call.meta["val"] = value
    return call


def _root(node: Node, *, casts: bool = False) -> Node:
    """Return the first node with the same values, order and shape as `node`; with `casts`, also of another dtype."""
    while node.target in _SAME_VALUES or _pads_nothing(node):
        source = node.args[0]
        assert isinstance(source, Node)
        (dtype, shape), (source_dtype, source_shape) = _type(node), _type(source)
        if source_shape != shape or (source_dtype != dtype and not casts):
            break
        node = source
    return node


def _pads_nothing(node: Node) -> bool:
    """Return whether a node pads by nothing, as in transformers' code for tied weights."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    widths: Any = node.args[1]
    return not any(widths)


def _type(node: Node) -> tuple[str, tuple[int, ...]]:
    value = node.meta["val"]
    return dtype_name(value.dtype, str(node)), tuple(value.shape)


def _input(kind: Literal["key", "constant"], name: str, node: Node) -> ConversionInput:
    dtype, shape = _type(node)
    return ConversionInput(kind=kind, name=name, dtype=dtype, shape=shape)


def _is_overwritten(node: Node, before: Sequence[Node]) -> bool:
    """Return whether `node` is independent of the values of the nodes in `before`.

    Only operators that move elements may be between them; then two runs with different values show it.
    """
    body = sorted(all_inputs([node]))
    dependent = set(before)
    for item in body:
        if dependent.intersection(item.all_input_nodes):
            dependent.add(item)
            if item.target not in _MOVES:
                return False
    zeros, ones = (_run(body, node, set(before), fill) for fill in (0, 1))
    return torch.equal(zeros, ones)


def _run(body: Sequence[Node], output: Node, before: set[Node], fill: int) -> torch.Tensor:
    values: dict[Node, torch.Tensor] = {}
    for node in body:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            continue
        value = node.meta["val"]
        values[node] = torch.full(value.shape, fill if node in before else 0, dtype=value.dtype)
    return values[output]
