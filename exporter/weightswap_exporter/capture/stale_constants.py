"""Constants that follow from weights: after a swap they would still be what followed from the old ones.

A call may cache what it computes from weights, in attributes or non-persistent buffers. Once the cache is filled, a
capture sees a constant. To find such a cache, it is emptied, and the model is called with its own weights and with
others: what the calls fill it with differs. The model is left as it was.

A constant that nothing in the model holds cannot be emptied; neither can one that was computed in a constructor. Where
the values show that they come from a weight, a warning names them.

Two kinds are no constants at all, and are settled in the program itself: scratch memory, and tables that are made of
weights, which a graph can put together from these.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from weightswap_exporter.modules.libraries import INITIALIZED
from weightswap_exporter.modules.stand_ins import attributes_of, replaced_by, tied, within
from weightswap_exporter.modules.tensors import ModelView, is_fake
from weightswap_runtime.errors import CaptureError, listed

from .programs import arguments, graph_inputs, memory
from .trials import SECOND, are_close, bits, filling, has_fractions, in_a_trial, other_integers

_ABSENT = object()
_NO_PLACES = {*vars(nn.Module()), INITIALIZED}
_LITERAL = torch.ops.aten.lift_fresh_copy.default  # of the numbers in a `torch.tensor([...])`
_WRITTEN = 9  # characters of the longest number that people write down, such as 0.0883883
_TELLING = 8  # different values from which the origin of a tensor can be told
_SEARCHED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_INTEGERS = {torch.int64, torch.int32}
_AT_ONCE = 1 << 22  # values of a weight that are compared at a time, in double precision
_Constants = dict[str, tuple[Node, torch.Tensor]]


def stale_constants(view: ModelView, inputs: Any, program: ExportedProgram, mutated: Collection[str]) -> list[str]:
    """Return texts about constants that may follow from weights. Raises CaptureError for those that do.

    inputs: args and kwargs of a call. mutated: buffers that a call changes, which are state. Nothing follows from the
    parameters of a skeleton, which have no values; from its persistent buffers something may.
    """
    weights = {name: tensor for name, tensor in view.tensors.items() if name in view.saved_names}
    real = {name: tensor for name, tensor in weights.items() if not is_fake(tensor)}
    if not real:
        return []
    state = (tensor for name, tensor in view.tensors.items() if name in mutated)
    changing = {item for tensor in (*weights.values(), *state) for item in memory(tensor)}
    constants = _constants(program, {*changing, *(key[0] for key, _ in replaced_by(view))})
    trials = _Trials(view, inputs, weights, program, constants)
    places = list(trials.places())
    # the places of each class and name together: one module may read the cache that another fills
    groups: dict[Any, list[_Place]] = {}
    for place in places:
        groups.setdefault((type(place.module), place.key), []).append(place)
    if found := {path for group in groups.values() for path in trials.followers(group)}:
        raise CaptureError(
            f"{listed(sorted(found))}: computed from weights before the export, and would stay the same when a swap "
            "changes them. Compute it in each call; or, if calls keep it, empty that cache, or export a model that has "
            "not been called"
        )
    held = {item for place in places for _, value in place.values() for item in memory(value)}
    held |= memory(list(_of_modules_in_lists(view.model)))
    return [*_outside(type(view.model).__qualname__, constants, held), *_alike(constants, real)]


def _constants(program: ExportedProgram, changing: Collection[object]) -> _Constants:
    """Return the constants that a program reads, with their placeholders, except numbers in the code.

    changing: storages of weights and state.
    """
    constants = {}
    for node, spec in graph_inputs(program):
        name = str(spec.target)
        value = program.constants.get(name)
        is_literal = {user.target for user in node.users} <= {_LITERAL}
        has_values = isinstance(value, torch.Tensor) and not is_fake(value)
        if has_values and memory(value).isdisjoint(changing) and not is_literal:
            constants[name] = (node, value)
    return constants


class _Place(NamedTuple):
    """An attribute or buffer of a module."""

    owner: dict[str, Any]  # the module's dict that has it
    key: str
    path: str
    module: nn.Module

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield what is there, and the values nested in it, by path from here."""
        return within("", self.owner.get(self.key))


class _Trial(NamedTuple):
    """What a call has left in places, by path, and what it has returned."""

    left: dict[str, Any]
    returned: list[Any]


class _Trials:
    """Calls of a model whose caches have been emptied."""

    def __init__(
        self,
        view: ModelView,
        inputs: Any,
        weights: Mapping[str, torch.Tensor],
        program: ExportedProgram,
        constants: _Constants,
    ) -> None:
        self._view, self._inputs, self._weights, self._program = view, inputs, weights, program
        self._storages = memory([value for _, value in constants.values()])

    def places(self) -> Iterator[_Place]:
        """Yield what holds constants, or numbers that nobody has written down."""
        for path, module in self._view.model.named_modules():
            prefix = f"self.{path}." if path else "self."
            buffers, attributes = module._buffers, vars(module)
            for owner, keys in (
                (buffers, module._non_persistent_buffers_set),
                (attributes, attributes.keys() - _NO_PLACES),
            ):
                for key in sorted(keys):
                    place = _Place(owner, key, prefix + key, module)
                    if any(self._is_suspect(value) for _, value in place.values()):
                        yield place

    def _is_suspect(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return not memory(value).isdisjoint(self._storages) and not _is_table(value)
        return type(value) is float and not _is_written(value)

    def followers(self, places: list[_Place]) -> list[str]:
        """Return the paths of what calls fill with values that follow from weights."""
        held = [(place.path + path, value) for place in places for path, value in place.values()]
        suspects = [path for path, value in held if self._is_suspect(value)]
        if graded := [path for path, value in held if self._is_suspect(value) and getattr(value, "grad_fn", None)]:
            return graded
        # code asks in one of these ways whether its cache is filled; the first one that it answers by filling it counts
        ways = [(empty, "") for empty in (self._none, self._absent, self._all_none, self._no_elements, None)]
        ways += [(self._zeros, flag) for flag in _flags(places, self._weights.values())]
        for empty, flag in ways:
            filled = self._run(places, {}, empty, flag)
            if filled is None:
                continue
            if not any(map(_is_filled, filled.left.values())):
                if not flag and self._stands_in(places, filled, empty):
                    return suspects
                continue
            refilled = self._run_otherwise(places, empty, flag)
            if refilled is None:
                continue
            paths = [path for path, value in filled.left.items() if refilled.left.get(path) != value]
            if flag and not paths:  # another flag may be the one that says whether the place is filled
                continue
            numbers = [path for path in paths if isinstance(filled.left[path], float)]
            changed = self._run(places, {}, self._moved) if numbers else None
            # a number may only be noted by calls, and read by none
            is_noted = changed is not None and are_close(changed.returned, filled.returned)
            return sorted({*paths} - {*numbers}) if is_noted else paths
        return []

    def _stands_in(self, places: list[_Place], without: _Trial, empty: Callable[[Any], Any] | None) -> bool:
        """Return whether places stand in for weights: the call computes the same without them, until weights change."""
        now = self._run(places, {}, _unchanged)
        if now is None or not are_close(now.returned, without.returned):
            return False
        later, later_without = self._run_otherwise(places, _unchanged), self._run_otherwise(places, empty)
        return later is not None and later_without is not None and not are_close(later.returned, later_without.returned)

    @functools.cached_property
    def _filling(self) -> dict[str, torch.Tensor] | None:
        """Values for the parameters of a skeleton; None if it is too large for a trial."""
        return filling(self._view, self._hollow)

    @property
    def _hollow(self) -> list[str]:
        return [name for name, value in self._weights.items() if is_fake(value)]

    def _run_otherwise(
        self, places: list[_Place], change: Callable[[Any], Any] | None, flag: str = ""
    ) -> _Trial | None:
        """Call the model with other weights; those that are integers stay as they are if the call fails with others."""
        real = {name: value for name, value in self._weights.items() if not is_fake(value)}
        others = {name: _others(value) for name, value in real.items() if has_fractions(value)}
        integers = {name: other_integers(real[name]) for name in real.keys() - others.keys()}
        hollow = filling(self._view, self._hollow, SECOND) or {}
        for weights in (others | integers, others):
            if trial := self._run(places, tied(self._view, weights) | hollow, change, flag):
                return trial
        return None

    def _run(
        self,
        places: list[_Place],
        tensors: Mapping[str, torch.Tensor],
        change: Callable[[Any], Any] | None,
        flag: str = "",
    ) -> _Trial | None:
        """Call the model with other tensors after a change of the leaves in places; None if the call fails.

        change: None puts None into the places. flag: attribute of their modules that may say that a place is filled,
        to invert; None instead of an integer.
        """
        root, own = self._view.model, self._view.buffers
        buffers = {name: value.detach().clone() for name, value in own.items() if not self._is_suspect(value)}
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, self._inputs)
        paths = [(place, path) for place in places for path, value in place.values() if self._is_suspect(value)]
        if self._filling is None:
            return None
        with in_a_trial(self._view, {**buffers, **self._filling, **tensors}, self._program):
            copies: dict[int, Any] = {}
            for place in places:
                value = _changed(place.owner[place.key], change, copies) if change else None
                _put(place.owner, place.key, value)
            for attributes in (vars(module) for module in {place.module for place in places}):
                if isinstance(value := attributes.get(flag), int):
                    attributes[flag] = not value if isinstance(value, bool) else None
            try:
                returned = root(*args, **kwargs)
            except Exception:  # it was no cache
                return None
            returned = pytree.tree_leaves(pytree.tree_map_only(torch.Tensor, torch.clone, returned))
            left = {place.path + path: bits(dict(place.values()).get(path)) for place, path in paths}
        left = {path: value for path, value in left.items() if value is not None}
        return _Trial(left, returned)

    def _none(self, value: Any) -> Any:
        return None if self._is_suspect(value) else value

    def _absent(self, value: Any) -> Any:
        return _ABSENT if self._is_suspect(value) else value

    def _no_elements(self, value: Any) -> Any:
        return value.new_empty(0) if isinstance(value, torch.Tensor) and self._is_suspect(value) else value

    def _zeros(self, value: Any) -> Any:
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) and self._is_suspect(value) else value

    def _all_none(self, value: Any) -> Any:
        return None if isinstance(value, torch.Tensor | int | float | str) else value

    def _moved(self, value: Any) -> Any:
        return value * 1.5 + 1 if isinstance(value, float) and self._is_suspect(value) else value


def _flags(places: list[_Place], weights: Iterable[torch.Tensor]) -> list[str]:
    """Return the attributes of the places' modules that may say which weights a place was filled with, or whether."""
    attributes = {key: value for place in places for key, value in vars(place.module).items() if key not in _NO_PLACES}
    marks: set[int] = set()
    for tensor in weights:
        marks.add(id(tensor))
        if not is_fake(tensor):
            marks.add(tensor.data_ptr())
        if not tensor.is_inference():  # else it counts no changes
            marks.add(tensor._version)
    integers = {key: value for key, value in attributes.items() if isinstance(value, int)}
    return sorted(key for key, value in integers.items() if isinstance(value, bool) or value in marks)


def _is_table(value: torch.Tensor) -> bool:
    """Return whether a tensor has positions, or other integers in order, that follow from no weight."""
    numbers = value.detach().flatten()
    return value.dtype in _INTEGERS and len(numbers) > 1 and _is_sorted(numbers)


def _is_written(number: float) -> bool:
    """Return whether people may write down a number, or compute it from such a number, as in `size ** -0.5`."""
    powers = (number, 1 / number, number**2, number**-2) if number else (number,)
    return any(len(repr(round(power, 9))) <= _WRITTEN for power in powers)


def _changed(value: Any, change: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """Return a copy of a value with its leaves changed. copies: by id, as containers and objects may be shared."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        items = [item for item in (_changed(item, change, copies) for item in value) if item is not _ABSENT]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    attributes = attributes_of(value)
    if attributes is None and not isinstance(value, dict | list | deque):
        return change(value)
    copies[id(value)] = new = copy.copy(value)
    if isinstance(value, list | deque):
        new.clear()
        new.extend(item for item in (_changed(item, change, copies) for item in value) if item is not _ABSENT)
        return new
    for key, item in (value if attributes is None else attributes).items():
        _put(new if attributes is None else vars(new), key, _changed(item, change, copies))
    return new


def _put(owner: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(key, None)
    else:
        owner[key] = value


def _others(value: torch.Tensor) -> torch.Tensor:
    """Return other values of a weight that has fractions."""
    # torch promotes no dtypes of one byte
    single = torch.float32 if value.itemsize == 1 else torch.promote_types(value.dtype, torch.float32)
    wide = value.detach().to(single)
    random = torch.rand(value.shape, generator=torch.Generator().manual_seed(SECOND))
    return (wide * (1 + random) + random / 8).to(value.dtype)


def _unchanged(value: Any) -> Any:
    return value


def _is_filled(value: Any) -> bool:
    """Return whether a call has left something other than the zeros that were there before."""
    return not isinstance(value, tuple) or value[2].count(0) < len(value[2])


def _of_modules_in_lists(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules that a plain list, dict or object holds: those are none of the model's modules."""
    attributes = [value for module in model.modules() for key, value in vars(module).items() if key not in _NO_PLACES]
    hidden = [item for value in attributes for _, item in within("", value) if isinstance(item, nn.Module)]
    for part in (part for module in hidden for part in module.modules()):
        for table in (vars(part), part._parameters, part._buffers):
            yield from (item for item in table.values() if isinstance(item, torch.Tensor))


def _outside(model: str, constants: _Constants, held: Collection[int]) -> Iterator[str]:
    """Yield texts about constants that are held by nothing that the model has. model: the name of its class."""
    for name, (node, value) in constants.items():
        free = value.numel() and memory(value).isdisjoint(held)
        if name.rpartition(".")[2].startswith("lifted_tensor") and free and not _is_table(value):
            stack = next(iter(node.users)).meta.get("nn_module_stack") or {"": ("", "")}
            module = next(reversed(stack.values()))[0] or model
            yield (
                f"{module} reads a tensor of the shape {list(value.shape)} that is in no attribute, but in a global, a "
                "closure or a function's cache, and a swap does not change it. If it was computed from weights, empty "
                "that cache before the export"
            )


def _alike(constants: _Constants, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield texts about constants whose values are those of a weight, or ordered as those are."""
    for name, (_, value) in constants.items():
        if _tells(value) and (weight := next((key for key, other in weights.items() if _is_alike(value, other)), None)):
            yield (
                f"{name} has values that follow from the weight {weight}, it seems, and a swap does not change them. "
                "Compute it in the call, or register it as a persistent buffer"
            )


def _tells(value: torch.Tensor) -> bool:
    """Return whether values are many, and not in an order that tables have."""
    flat = value.detach().flatten()
    return value.dtype in _SEARCHED and not _is_sorted(flat) and len(torch.unique(flat)) >= _TELLING


def _is_sorted(flat: torch.Tensor) -> bool:
    return bool((flat.diff() >= 0).all() or (flat.diff() <= 0).all())


def _is_alike(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a value is a monotone function of a weight, or has elements of it alone, as a part or a copy."""
    if weight.dtype not in _SEARCHED:
        return False
    one, other = value.detach().flatten(), weight.detach().flatten()
    if len(one) == len(other) and _is_sorted(one[other.argsort()]):
        return True
    values = torch.unique(one)
    # a weight that also has the next number after each of them has about all numbers: that tells nothing
    return _all_among(values, other) and not _all_among(torch.nextafter(values, values + 1), other)


def _all_among(values: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a weight has all of these sorted values."""
    sought, found = values.double(), torch.zeros(len(values), dtype=torch.bool)
    for part in torch.split(weight, _AT_ONCE):
        numbers = part.double()
        index = torch.searchsorted(sought, numbers).clamp(max=len(sought) - 1)
        found[index[sought[index] == numbers]] = True
    return bool(found.all())


# What torch lifts out of a call, and is no constant. fbgemm keeps quantised tables in one piece of memory, with gaps
# between them, and registers views of it as buffers. Its operator takes the whole: the graph puts it together from the
# weights, once for each set of them (the prologue).

_aten = torch.ops.aten
# arguments that count what was wrong with inputs; nothing that is returned depends on them
_SCRATCH = {("fbgemm::bounds_check_indices", "warning")}


def settle_constants(program: ExportedProgram) -> None:
    """Give each call scratch memory of its own, and compute constants that are made of weights from these."""
    constants = {
        node: str(spec.target) for node, spec in graph_inputs(program) if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node, name in constants.items():
        for user in [user for user in node.users if _is_scratch(user, node)]:
            with program.graph.inserting_before(user):
                # a counter beyond its first warning, which eager prints once: not once for each call
                shape, dtype = list(node.meta["val"].shape), node.meta["val"].dtype
                user.replace_input_with(node, _call(program, _aten.ones.default, shape, **_plain_memory(dtype)))
        if parts := _parts(program, program.constants[name]):
            first_call = next(node for node in program.graph.nodes if node.op != "placeholder")
            with program.graph.inserting_before(first_call):
                node.replace_all_uses_with(_joined(program, parts))
        if not node.users:
            _remove(program, node, name)
    program.graph_module.recompile()


def _is_scratch(user: Node, node: Node) -> bool:
    return user.op == "call_function" and any(
        value is node and (user.target.name(), argument.name) in _SCRATCH  # type: ignore[union-attr]
        for argument, value in (arguments(user) if isinstance(user.target, torch._ops.OpOverload) else ())
    )


def _parts(program: ExportedProgram, value: Any) -> list[Node | int]:
    """Return the weights that a constant's memory consists of, in order, and the numbers of zeros between them.

    Empty if it is made of no weights, or if there is more in it: what is in a weight's memory is refused later.
    """
    if not isinstance(value, torch.Tensor) or is_fake(value) or value.dim() != 1 or not value.is_contiguous():
        return []
    parts: list[Node | int] = []
    end = 0
    for begin, node, size in sorted(_within(program, value), key=lambda part: part[0]):
        if begin < end:  # tables that overlap
            return []
        parts += [begin - end, node] if begin > end else [node]
        if value[end:begin].any():
            return []
        end = begin + size
    whole = len(parts) == 1 and isinstance(parts[0], Node) and parts[0].meta["val"].shape == value.shape
    if not parts or whole or value[end:].any():  # a weight itself, as lists hold them, is found by `classify`
        return []
    return [*parts, len(value) - end] if end < len(value) else parts


def _within(program: ExportedProgram, value: torch.Tensor) -> Iterator[tuple[int, Node, int]]:
    """Yield the weights that lie in a vector's memory: place, node and number of elements."""
    seen: set[int] = set()
    for node, spec in graph_inputs(program):
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            continue
        weight = program.state_dict.get(str(spec.target), program.constants.get(str(spec.target)))
        if (
            isinstance(weight, torch.Tensor)
            and weight.numel()
            and weight.dtype == value.dtype
            and weight.is_contiguous()
            and weight.untyped_storage()._cdata == value.untyped_storage()._cdata
        ):
            begin = int(weight.storage_offset()) - int(value.storage_offset())
            if begin >= 0 and begin + weight.numel() <= len(value) and begin not in seen:
                seen.add(begin)
                yield begin, node, weight.numel()


def _joined(program: ExportedProgram, parts: list[Node | int]) -> Node:
    """Add nodes that put weights and zeros together. One weight alone is viewed, and not copied."""
    nodes: list[Node] = []
    (dtype,) = {part.meta["val"].dtype for part in parts if isinstance(part, Node)}
    for part in parts:
        if isinstance(part, Node):
            nodes.append(_call(program, _aten.view.default, part, [-1]))
        else:
            nodes.append(_call(program, _aten.zeros.default, [part], **_plain_memory(dtype)))
    return nodes[0] if len(nodes) == 1 else _call(program, _aten.cat.default, nodes)


def _plain_memory(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}


def _remove(program: ExportedProgram, node: Node, name: str) -> None:
    program.graph.erase_node(node)
    signature = program.graph_signature
    signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name != node.name]
    del program.constants[name]


def _call(program: ExportedProgram, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Add a call of an operator, with the fake result that nodes of a capture have."""
    node: Node = program.graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
    with detect_fake_mode([value.meta["val"] for value, _ in graph_inputs(program)]) or nullcontext():
        node.meta["val"] = target(*values[0], **values[1])
    return node
