"""Weights that a swap gets as tensors of this process instead of a path: a mapping, a module, or an iterator."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import numpy as np

from weightswap_runtime.errors import BaseMismatch, Unsupported, WeightFileError, WeightsMismatch, listed
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.model_config import config_of, config_problems
from weightswap_runtime.format.names import EXTRA_STATE, Keys, extra_state_of
from weightswap_runtime.format.peft import merged_problem
from weightswap_runtime.format.safetensors import WeightFile
from weightswap_runtime.format.weight_set import FileSet, StoredTensor, WeightSet
from weightswap_runtime.native import Offsets
from weightswap_runtime.sources.arriving import Arriving, Receive
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.location import Url
from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.tensors import TensorBytes, as_float64, describe, difference, has_fractions, same_type

from .golden_check import default_tolerance

if TYPE_CHECKING:
    import torch
    from torch import nn

    Array = torch.Tensor | np.ndarray
    Given: TypeAlias = (
        "str | os.PathLike[str] | Mapping[str, Array] | nn.Module | Iterable[tuple[str, Array]] | GivenWeights"
    )

MEMORY = "memory"  # what messages and receipts call these weights, a module's with its class
_PLAIN = "Give plain tensors by name."
OTHER_CONSTANTS = (
    "A server computes with the artifact's: export this model, or register what checkpoints set as a persistent "
    "buffer, and export again. If they change nothing in what it computes, give the module's state dict."
)


class GivenWeights(NamedTuple):
    """Weights that are in no file which others could open.

    keys: "fqn" where their names are those of a module; None where that is open. can_change: whether their owner may
    write to them while they are read. has_rows: whether `open` returns `GivenRows`. led_to: called with the weights id
    once they are served. module: that has the tensors, whose constants have to be those of the graph.
    """

    where: str
    keys: Keys | None
    open: Callable[[Check, int], WeightSet]  # takes the arguments of `open_weights`; raises what is wrong with them
    can_change: bool = True
    has_rows: bool = False
    led_to: Callable[[str], object] = lambda _: None
    module: nn.Module | None = None

    def __str__(self) -> str:
        return self.where


class ChangedRows(NamedTuple):
    """Rows of a table that may have changed."""

    name: str  # as the tracker, or the caller, knows the table
    tensor: Any  # the table; None: the one that has the name
    ids: Offsets  # ascending


class LentRows(Protocol):
    """What a tracker says of its tables for one try. base: the weights id since which `rows` are all that has changed;
    empty if that is not known."""

    @property
    def base(self) -> str: ...

    @property
    def rows(self) -> Sequence[ChangedRows]: ...

    def led_to(self, weights_id: str) -> None:
        """Called once the rows are served, with all else; without it they are lent again."""
        ...


class Tracker(Protocol):
    """Knows which rows have changed, as `weightswap_exporter.RowTracker` does."""

    def lend(self) -> LentRows: ...


Ids: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[int]"
Rows = Mapping[str, Ids] | Tracker


class GivenRows(WeightSet):
    """Tensors of this process, of which the changed rows are known: those of all others are found by comparison."""

    def __init__(self, weights: WeightSet, rows: Sequence[ChangedRows], base: str | None, is_tracked: bool) -> None:
        """base: the weights id that the rows start from; None: whichever is served."""
        super().__init__(weights.where, weights.tensors, weights.sources)
        self.rows, self._base, self._is_tracked = rows, base, is_tracked

    def start_from(self, served: str | None) -> bool:
        """Return whether the rows are those since the served weights; else all tensors have to be read.

        Raises BaseMismatch where the caller has named other weights.
        """
        if self._base in (None, served) or self._is_tracked:
            return self._base in (None, served)
        raise BaseMismatch(
            f"{self.where}: rows that have changed since the weights {self._base!s:.12}, but "
            f"{f'{served[:12]} are' if served else 'none are'} served. Give all tensors: leave out rows= and base="
        )


class Stream(WeightSet):
    """Tensors that come one by one, in an order that is not ours; `tensors` are those that have come so far."""

    tensors: dict[str, StoredTensor]

    def __init__(self, items: Iterator[object]) -> None:
        super().__init__(MEMORY, {}, ())
        self.has_ended = False
        self._items = items

    def __iter__(self) -> Iterator[tuple[str, MemorySource]]:
        """Yield each name with its tensor. Raises WeightsMismatch for anything else, and what the iterator raises."""
        for number, item in enumerate(self._items):
            if not (isinstance(item, tuple | list) and len(item) == 2):
                text = f"item {number} is a {type(item).__qualname__}, not a name with a tensor"
                raise WeightsMismatch(self.where, [text], _PLAIN)
            name, value = item
            _finish(_work_on([value]))
            source = _source_of(name, value)
            if isinstance(source, str):
                raise WeightsMismatch(self.where, [source], _PLAIN)
            yield name, source
        self.has_ended = True


def as_given(weights: object) -> str | os.PathLike[str] | Url | GivenWeights:
    """Return a path or URL as it is, and tensors as what can be opened. Raises WeightFileError for anything else."""
    torch = sys.modules.get("torch")
    if isinstance(weights, str | os.PathLike | Url | GivenWeights):
        return weights
    if is_module(weights):
        return _at_once(f"{MEMORY}:{type(weights).__qualname__}", "fqn", _of_module(weights), weights)
    if isinstance(weights, Mapping):
        return _at_once(MEMORY, None, dict(weights))
    is_one = isinstance(weights, bytes | bytearray | memoryview | np.ndarray) or (
        torch is not None and isinstance(weights, torch.Tensor)
    )
    if is_one or not isinstance(weights, Iterable):
        raise WeightFileError(
            "expected a path or URL, tensors by name, a module, or an iterator of names with tensors; got a "
            f"{type(weights).__qualname__}"
        )
    items = iter(weights)
    return GivenWeights(MEMORY, None, lambda *_: Stream(items))


def with_rows(weights: object, rows: object, base: str | None) -> GivenWeights:
    """Return tensors of which only some rows have changed. rows: ids by name, or a tracker, of which they are taken.

    base: the weights id that ids by name start from. Raises Unsupported and WeightsMismatch.
    """
    if not (isinstance(weights, Mapping) or is_module(weights)):
        raise Unsupported(
            f"rows: of a module's tensors, or of a mapping's; got a {type(weights).__qualname__}. A file with rows is "
            "a delta (write_delta, publish(rows=))"
        )
    source = as_given(weights)
    assert isinstance(source, GivenWeights)
    # now, as sources know of each write that torch counts from here on: rows that are changed later are in no ids
    opened = source.open(lambda: None, 0)
    led_to, is_tracked = source.led_to, hasattr(rows, "lend")
    changed: Sequence[ChangedRows]
    if is_tracked:
        if base is not None:
            raise Unsupported("base: of ids by name; a tracker knows which weights its rows start from")
        lent: LentRows = rows.lend()  # type: ignore[attr-defined]
        changed, base, led_to = lent.rows, lent.base, lent.led_to
    elif isinstance(rows, Mapping):
        changed = _named_rows(rows, source.where)
    else:
        raise Unsupported(f"rows: expected ids by name, or a RowTracker; got a {type(rows).__qualname__}")

    given = GivenRows(opened, changed, base, is_tracked)
    return source._replace(open=lambda *_: given, has_rows=True, led_to=led_to)


def _named_rows(rows: Mapping[Any, Any], where: str) -> list[ChangedRows]:
    """Return copies of ids. Raises WeightsMismatch for what are none."""
    found = [(name, _ids(ids)) for name, ids in rows.items()]
    if problems := [f"{name}: {ids}" for name, ids in found if isinstance(ids, str)]:
        raise WeightsMismatch(where, problems, "Give the ascending ids of the rows that have changed, by name.")
    return [ChangedRows(str(name), None, ids) for name, ids in found if not isinstance(ids, str)]


def _ids(given: Any) -> Offsets | str:
    """Return a copy of ids, or what is wrong with them."""
    torch = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(given, torch.Tensor)
    try:
        array = np.array(given.detach().cpu().resolve_neg().numpy() if is_torchs else given)
    except RuntimeError as error:  # of torch
        return f"expected the ids of rows, as a plain tensor with values; got another one ({error})"
    except (TypeError, ValueError, OverflowError) as error:
        return f"expected the ids of rows ({error})"
    return _problem_of_ids(given, array, is_torchs) or array.astype(np.int64)


def _problem_of_ids(given: Any, array: np.ndarray[Any, Any], is_torchs: bool) -> str:
    kind = array.dtype.kind
    if array.ndim == 1 and kind == "b" and array.size:
        advice = "mask.nonzero().flatten()" if is_torchs else "numpy.flatnonzero(mask)"
        return f"expected the ids of rows, got a mask; give {advice}"
    if array.ndim != 1 or not (kind in "iu" or not array.size):
        # numpy makes other numbers of those that are too large for its integers
        large = [each for each in given if _is_too_large(each)] if isinstance(given, Sequence) else []
        found = f"expected the ids of rows, got {array.dtype} of the shape {list(array.shape)}"
        return f"row {large[0]}: is no row of a table" if large else found
    if kind == "u" and array.size and _is_too_large(int(array.max())):
        return f"row {array.max()}: is no row of a table"
    return ""


def _is_too_large(number: object) -> bool:
    return isinstance(number, int) and not -(2**63) <= number < 2**63


def as_file(where: str, open_source: Callable[[Check], ByteSource]) -> GivenWeights:
    """Return weights that are a safetensors file without a name. open_source: is called once."""

    def open_file(check: Check, most_header: int) -> WeightSet:
        file = WeightFile(where, check, most_header, open_source(check))
        return FileSet(file.path, [file]).without_place(where)

    return GivenWeights(where, None, open_file, can_change=False)


def as_arriving(where: str, size: int, receive: Receive) -> GivenWeights:
    """Return weights that come as a safetensors file of `size` bytes, as `Arriving` says."""

    def open_arriving(check: Check) -> Arriving:
        source = Arriving(where, size, receive)
        source.check = check
        return source

    return as_file(where, open_arriving)


def tensors_of(weights: object) -> dict[str, Any]:
    """Return a mapping's or a module's tensors by name. Raises WeightFileError for anything else."""
    if is_module(weights):
        return _of_module(weights)
    if not isinstance(weights, Mapping):
        raise WeightFileError(f"expected tensors by name, or a module; got a {type(weights).__qualname__}")
    return dict(weights)


def is_module(weights: object) -> TypeGuard[nn.Module]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(weights, torch.nn.Module)


def _of_module(module: nn.Module) -> dict[str, Any]:
    """Return parameters and persistent buffers by FQN, tied ones under each name, and extra states."""
    if problem := merged_problem(module):
        raise Unsupported(f"{type(module).__qualname__}: {problem}")
    torch = sys.modules["torch"]
    values: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = {name: value for name, value in part._buffers.items() if name not in part._non_persistent_buffers_set}
        values |= {prefix + name: value for name, value in buffers.items() if value is not None}
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            values[prefix + EXTRA_STATE] = part.get_extra_state()
    return values


def _at_once(where: str, keys: Keys | None, values: Mapping[Any, Any], module: nn.Module | None = None) -> GivenWeights:
    work = _work_on(values.values())

    def open_all(*_: object) -> WeightSet:
        _finish(work)
        found = [(name, _source_of(name, value)) for name, value in values.items()]
        if problems := [source for _, source in found if isinstance(source, str)]:
            raise WeightsMismatch(where, problems, _PLAIN)
        sources = {name: source for name, source in found if isinstance(source, MemorySource)}
        return WeightSet(where, {name: stored(source) for name, source in sources.items()}, sources.values())

    return GivenWeights(where, keys, open_all, module=module)


def check_constants(weights: object, artifact: Artifact) -> None:
    """Raise WeightsMismatch if weights are given as a module whose constants are not the artifact's, or as one with the
    adapters that are variants there."""
    module = weights.module if isinstance(weights, GivenWeights) else None
    if artifact.manifest.variants and hasattr(module, "get_base_model"):
        problem = f"is a model of PEFT, whose adapters are variants of this graph: {listed(artifact.manifest.variants)}"
        raise WeightsMismatch(str(weights), [problem], "Give model.get_base_model(), and adapters to add_variant().")
    if module is not None and (problems := constant_problems(module, artifact)):
        raise WeightsMismatch(str(weights), problems, OTHER_CONSTANTS)


def constant_problems(module: nn.Module, artifact: Artifact) -> list[str]:
    """Return how a module's constants, such as buffers that are not persistent, and a transformers model's settings
    differ from the artifact's.

    A table that has grown is no problem, nor is a value that is not here. One of another dtype is what a cast changes,
    which is wanted if weights are cast, too.
    """
    values = artifact.constants() if artifact.manifest.constants else {}
    problems, rounded = [], []
    for row in artifact.manifest.constants:
        try:
            source = _source_at(module, row.name)
        except ValueError:  # a number, or a tensor without values
            continue
        if source.type.shape != row.shape:
            continue
        content = memoryview(bytearray(source.size))
        source.read_into([content], 0)
        found, expected = TensorBytes(source.type.dtype, row.shape, content), values[row.name]
        text = f"{row.name}, which is a constant of the graph"
        if same_type(found, expected):
            said = difference(expected, found, default_tolerance(row.dtype))
            problems += [f"{text}{said}"] if said else []
        elif has_fractions(found.dtype) and not np.array_equal(as_float64(found), as_float64(expected), equal_nan=True):
            rounded.append(f"{text}: expected {describe(expected)}, found other values in {found.dtype}")
    problems += rounded if rounded and not _is_cast(module, artifact) else []
    if config := artifact.manifest.config:
        problems += config_problems(config, config_of(module))
    return problems


def _is_cast(module: nn.Module, artifact: Artifact) -> bool:
    """Return whether weights of the module have other dtypes than in the artifact, or none can be compared."""
    found = set()
    for row in artifact.manifest.weights:
        with suppress(ValueError):  # of another kind, or missing: others say so
            found.add(_source_at(module, row.name).type.dtype == row.dtype)
    return found != {True}


def _source_at(module: nn.Module, name: str) -> MemorySource:
    """Return the value of a module under a name of the manifest: METHOD/NAME for literals and plain attributes."""
    value: Any = module
    for part in name.rpartition("/")[2].split("."):
        value = getattr(value, part, None)
    return MemorySource(name, value)


def stored(source: MemorySource) -> StoredTensor:
    """Return a whole tensor of this process as one of a weight set."""
    return StoredTensor(source.type.dtype, source.type.shape, source, 0, source.size)


def _source_of(name: object, value: Any) -> MemorySource | str:
    """Return a tensor as a source, or the problem with it."""
    if not isinstance(name, str):
        return f"{name!r:.80}: a name of the type {type(name).__qualname__}, expected a text"
    try:
        return MemorySource(name, _state_as_tensor(value) if extra_state_of(name) else value)
    except ValueError as error:
        return f"{name}: {error}"


def _state_as_tensor(value: Any) -> Any:
    """Return an extra state that is no tensor as one, which is empty if it says nothing, as readings take it."""
    if hasattr(value, "dtype"):
        return value
    content = value.getbuffer() if isinstance(value, io.BytesIO) else value
    says_nothing = content is None or (isinstance(content, Sized) and not len(content))
    return np.zeros(0 if says_nothing else 1, np.uint8)


def _work_on(values: Iterable[Any]) -> list[torch.Event]:
    """Return marks behind the work that this thread has enqueued on the tensors' devices, in their current streams."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    others = [device for device in devices if device.type not in ("cpu", "meta")]
    return [torch.accelerator.current_stream(device).record_event() for device in others]


def _finish(work: Iterable[torch.Event]) -> None:
    for event in work:
        event.synchronize()
