"""Sizes of 0 and 1: a graph has no branch for them, and must not answer calls to which the model answers otherwise.

torch.export takes dynamic sizes for at least 2: `n > 1` is true, `len(x[:2])` is 2, and no guard says so. Where the
declared range has 0 or 1, a call with that size would get what is computed for larger ones. So the model and the graph
are called with sample inputs that are cut to such sizes, and must compute the same: one size at a time, all of them,
and those that answer a question of Python code otherwise, which are noted during the capture.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, product
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from unittest import mock

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _combine_args
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from weightswap_exporter.modules.stand_ins import first_line, tied
from weightswap_exporter.modules.tensors import ModelView, is_fake, tie_key
from weightswap_runtime.errors import CaptureError

from .programs import graph_inputs, memory
from .trials import MOST_FILLED, are_close, filling, has_fractions, in_a_trial, other_integers

_TORCH = str(Path(torch.__file__).parent)
_OURS = Path(__file__).parent.parent
# parts of torch whose questions decide what eager calls compute; others ask while a call is traced
_PARTS = {"nn", "functional.py", "_tensor.py", "distributions", "signal", "nested", "ao"}
# where a question passes on its way: modes of torch.export see sym_max, which they have in place of max
_PASSED = {"__init__.py", "fx/experimental/sym_node.py", "fx/experimental/proxy_tensor.py", "overrides.py"}
_PASSED |= {"_export/non_strict_utils.py"}
_QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "__sym_max__": operator.gt,
    "__sym_min__": operator.lt,
}
_TOGETHER = 3  # sizes that are changed together
_LARGEST = 1 << 12  # size that is tried
_patching = threading.RLock()  # of torch's classes
_RAISE = dis.opmap["RAISE_VARARGS"]
_ADVICE = "servers refuse calls with less; or compute what is right for all sizes, without asking"

_OTHERWISE = (
    "with the sample inputs, the model computes something else than the graph that torch has captured. It may ask "
    "whether it is exported (torch.compiler.is_exporting()), or whether a size is an int (isinstance(n, int)), which "
    "dynamic ones are not during the capture. Compute the same in both cases"
)

Questions = dict[tuple[Callable[[Any, Any], Any], Any, Any], str]  # comparison and its two sides: where it is asked
_Sizes = dict[sympy.Symbol, int]
_Random = Literal["none", "fractions", "masks", "other masks"]
_Way = tuple[dict[str, torch.Tensor], _Random]  # weights and state to call with, and which inputs are random
_Returned = list[Any] | Exception | SystemExit


@contextmanager
def questions_about_sizes() -> Iterator[Questions]:
    """Note the comparisons of dynamic sizes, in code that decides what a call computes, in the block."""
    questions: Questions = {}
    with _patching, ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            for name, compare in _QUESTIONS.items():
                noting = _noting(getattr(kind, name), compare, questions)
                stack.enter_context(mock.patch.object(kind, name, noting))
        yield questions


def _noting(original: Callable[[Any, Any], Any], compare: Callable[[Any, Any], Any], questions: Questions) -> Any:
    @functools.wraps(original)
    def noting(self: Any, other: Any) -> Any:
        if where := _where(sys._getframe(1)):
            one, two = map(_expression, (self, other))
            if one is not None and two is not None:
                questions.setdefault((compare, one, two), where)
        return original(self, other)

    return noting


def _expression(side: Any) -> Any:
    """Return one side of a comparison as an expression; None for what is no number."""
    if isinstance(side, torch.SymInt | torch.SymFloat):
        return getattr(side.node, "expr", None)
    return sympy.sympify(side) if isinstance(side, int | float) else None


def _where(frame: FrameType | None) -> str:
    """Return the place in the user's code that asks, such as `forward (model.py, line 12)`; empty if torch asks."""
    while frame is not None and _part_of_torch(frame.f_code.co_filename) in _PASSED:
        frame = frame.f_back
    if frame is None or not _decides(frame.f_code.co_filename):
        return ""
    asking = frame
    while frame.f_back is not None and _part_of_torch(frame.f_code.co_filename):
        frame = frame.f_back
    asking = asking if _part_of_torch(frame.f_code.co_filename) else frame
    return f"{asking.f_code.co_name} ({Path(asking.f_code.co_filename).name}, line {asking.f_lineno})"


@functools.cache
def _part_of_torch(file: str) -> str:
    """Return the path of a file within torch; empty for others."""
    return Path(file).relative_to(_TORCH).as_posix() if Path(file).is_relative_to(_TORCH) else ""


@functools.cache
def _decides(file: str) -> bool:
    part = _part_of_torch(file)
    return part.partition("/")[0] in _PARTS if part else not Path(file).is_relative_to(_OURS)


def check_small_sizes(
    view: ModelView,
    inputs: Any,
    program: ExportedProgram,
    mutated: Collection[str],
    questions: Questions,
    shapes: Sequence[Any],
) -> list[str]:
    """Return texts about small sizes of which it is unknown what the model computes.

    Raises CaptureError where it computes something else than the program. inputs: args and kwargs of the capture.
    mutated: buffers that a call changes. shapes: what `dynamic_shapes` has for each flat input.
    """
    cases = _Cases(program)
    if not cases.captured:
        return []
    trial = _Trial(view, inputs, program, mutated, cases)
    if trial.differs_as_it_is:
        return [_OTHERWISE]
    texts = []
    for sizes, where in cases.of(questions):
        asks = f"{where} asks for a size. " if where else ""
        named, least = trial.named(sizes, shapes)
        advice = f"Give its Dim min={least}, and {_ADVICE}"
        problem = trial.problem(sizes)
        if problem:
            raise CaptureError(
                f"{asks}With {named}, the model {problem}, unlike the graph, which torch captures for larger ones. "
                f"{advice}"
            )
        if problem is None and where:
            texts.append(
                f"{asks}Whether the model computes with {named} what the graph does, which torch captures for larger "
                f"ones, could not be tried. {advice}"
            )
    return texts


class _Cases:
    """Sets of sizes that a program accepts, and of which some are 0 or 1."""

    def __init__(self, program: ExportedProgram) -> None:
        self.values = [
            node.meta.get("val") for node, spec in graph_inputs(program) if spec.kind is InputKind.USER_INPUT
        ]
        sizes = [size for value in self.values for size in _sizes(value) if isinstance(size, torch.SymInt)]
        environment = sizes[0].node.shape_env if sizes else None
        self._environment: Any = environment
        limits = program.range_constraints
        self._range = {
            symbol: (max(0, int(limits[symbol].lower)), limits[symbol].upper)
            for symbol in sorted(set[sympy.Symbol]().union(*map(_symbols, sizes)), key=str)
        }
        captured = environment.backed_var_to_val if environment else {}
        self.captured: _Sizes = {symbol: int(captured[symbol]) for symbol in self._range}

    def of(self, questions: Questions) -> Iterator[tuple[_Sizes, str]]:
        """Yield sizes by symbol, the largest first, with the place of the first question about them or an empty one."""
        found: dict[tuple[tuple[sympy.Symbol, int], ...], str] = {}
        for (compare, *sides), where in questions.items():
            for sizes in self._other_answers(compare, *map(self._environment.replace, sides)):
                found.setdefault(tuple(sizes.items()), where)
        every = [{symbol: size} for symbol in self._range for size in (0, 1)]
        every += [{symbol: 1 for symbol, (least, _) in self._range.items() if least < 2}]
        for sizes in filter(self._are_accepted, filter(None, every)):
            found.setdefault(tuple(sizes.items()), "")
        for case in sorted(found, key=lambda case: [-size for _, size in case]):
            yield dict(case), found[case]

    def _other_answers(self, compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Iterator[_Sizes]:
        """Yield sizes for which a question has another answer than in the capture, as few as possible at a time."""
        symbols = [symbol for symbol in self._range if symbol in left.free_symbols | right.free_symbols]
        usual = self._answer(compare, left, right, {})
        found: list[_Sizes] = []
        together = range(1, 1 + min(_TOGETHER, len(symbols)))
        for some in (some for count in together for some in combinations(symbols, count)):
            for numbers in product(*map(self._telling, some)):
                sizes = dict(zip(some, numbers, strict=True))
                if any(one.items() <= sizes.items() for one in found) or not self._are_accepted(sizes):
                    continue
                if self._answer(compare, left, right, sizes) != usual:
                    found.append(sizes)
                    yield sizes

    def _telling(self, symbol: sympy.Symbol) -> list[int]:
        """Return the sizes of a symbol that show what depends on it: small ones, and the ends of its range."""
        ends = [int(end) for end in self._range[symbol] if end <= _LARGEST]
        return sorted({0, 1, 2, *ends})

    def _answer(self, compare: Callable[[Any, Any], Any], left: Any, right: Any, sizes: _Sizes) -> bool | None:
        """Return the answer to a question; None if there is none, as where something is divided by 0."""
        try:
            one, other = (_number(side.xreplace({**self.captured, **sizes})) for side in (left, right))
            return bool(compare(one, other))
        except (TypeError, ZeroDivisionError):
            return None

    def _are_accepted(self, sizes: _Sizes) -> bool:
        every = {**self.captured, **sizes}
        in_range = all(self._range[symbol][0] <= size <= self._range[symbol][1] for symbol, size in sizes.items())
        if not in_range or min(sizes.values()) > 1:
            return False
        try:
            guards = [self._environment.replace(guard.expr).xreplace(every) for guard in self._environment.guards]
            exist = all(self.at(size, sizes) >= 0 for value in self.values for size in _sizes(value))
        except ZeroDivisionError:  # a guard that divides by a size
            return False
        return exist and sympy.false not in guards

    def at(self, size: Any, sizes: _Sizes) -> int:
        """Return a size of an input where some symbols have these sizes, and others those of the capture."""
        return int(size.node.expr.xreplace({**self.captured, **sizes})) if isinstance(size, torch.SymInt) else size


def _number(value: Any) -> int | float:
    return int(value) if sympy.sympify(value).is_Integer else float(value)  # to sympy, 6 and 6.0 are not equal


def _sizes(value: Any) -> Sequence[Any]:
    """Return the sizes that an input gives: of a tensor, or an integer itself."""
    return value.shape if isinstance(value, torch.Tensor) else [value] if isinstance(value, torch.SymInt) else []


def _symbols(size: Any) -> set[sympy.Symbol]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


class _Trial:
    """Calls of a model and of its program: with the sample inputs and its own weights, and with random numbers.

    The samples may be zeros, and so may be the state and weights at the export: they would show little.
    """

    def __init__(
        self, view: ModelView, inputs: Any, program: ExportedProgram, mutated: Collection[str], cases: _Cases
    ) -> None:
        self._view, self._program, self._cases = view, program, cases
        self._state = sorted(mutated)
        args, kwargs = inputs
        # in the order of the signature, unlike the inputs
        paths = pytree.tree_leaves_with_path(_combine_args(view.model, args, kwargs))
        names = {id(value): str(getattr(path[0], "key", "")) + pytree.keystr(path[1:]) for path, value in paths}
        self._inputs, self._spec = pytree.tree_flatten(inputs)
        self._names = [names[id(value)] for value in self._inputs]
        self._ways = list(self._all_ways())
        self._as_it_is = self._both({}, {}, self._ways[0]) if self._ways else None

    def _all_ways(self) -> Iterator[_Way]:
        view = self._view
        hollow = {name for name, tensor in view.tensors.items() if is_fake(tensor)}
        weights = {name: view.tensors[name] for name in (*view.parameters, *view.saved_names, *self._state)}
        changing = {name for name, tensor in weights.items() if has_fractions(tensor)}
        if (own := filling(view, hollow)) is not None:
            yield own, "none"
        if (random := filling(view, hollow | changing)) is None:
            return
        names = weights.keys() - changing - hollow
        are_few = sum(weights[name].nbytes for name in names) <= MOST_FILLED
        integers = {name: other_integers(weights[name]) for name in names} if are_few else {}
        ways: list[_Way] = [({**random, **tied(view, integers)}, "masks"), (random, "masks"), (random, "fractions")]
        # the model may not accept other integers
        yield next((way for way in ways if isinstance(self._both({}, {}, way)[0], list)), ways[-1])

    @property
    def differs_as_it_is(self) -> bool:
        """Whether a call with the sample inputs, and nothing changed, shows a difference."""
        if self._as_it_is is None or any(not isinstance(returned, list) for returned in self._as_it_is):
            return False
        return not _agree(*self._as_it_is)

    def named(self, sizes: _Sizes, shapes: Sequence[Any]) -> tuple[str, int]:
        """Return a text such as `x.shape[0] = 1`, and the least size that is larger than those below 2."""
        found: dict[sympy.Symbol, tuple[bool, str, int]] = {}
        for name, value, shape in zip(self._names, self._cases.values, shapes, strict=True):
            for axis, size in enumerate(_sizes(value)):
                label = f"{name}.shape[{axis}]" if isinstance(value, torch.Tensor) else name
                dims = dict(shape.items() if isinstance(shape, Mapping) else enumerate(shape or ()))
                is_derived = hasattr(dims.get(axis), "root")
                for symbol in sizes.keys() & _symbols(size):
                    at = self._cases.at(size, sizes)
                    if symbol not in found or (found[symbol][0] and not is_derived):
                        found[symbol] = is_derived, f"{label} = {at}", at
        small = [at for symbol, (_, _, at) in found.items() if sizes[symbol] < 2]
        return ", ".join(text for _, text, _ in found.values()), 1 + max(small)

    def problem(self, sizes: _Sizes) -> str | None:
        """Return what the model does that its program does not; empty if both do the same, None if that is unknown."""
        if self._as_it_is is None or not isinstance(self._as_it_is[1], list):
            return None
        for weights, random in self._ways:
            # masks that leave nothing show other differences, where torch computes otherwise than eager
            kinds: tuple[_Random, ...] = ("masks", "fractions") if random == "masks" else (random,)
            texts = (self._difference(sizes, (weights, kind)) for kind in kinds)
            if (text := next((text for text in texts if text is not None), None)) != "":
                return text
        return ""

    def _difference(self, sizes: _Sizes, way: _Way) -> str | None:
        eager, graph = self._both(sizes, sizes, way)
        # no caller takes an error of the graph for an answer; one of the model's operators may be due to the inputs
        if not isinstance(graph, list) or _agree(eager, graph) or _is_of_an_operator(eager):
            return ""
        text = "computes something else" if isinstance(eager, list) else f"raises {first_line(eager)}"
        return text if self._is_faithful(sizes, way) else None

    def _is_faithful(self, sizes: _Sizes, way: _Way) -> bool:
        """Return whether the program computes what the model does where nothing is cut, and the model always the same.

        It may not with the zeros that a trial has instead of integers, and random numbers.
        """
        weights, random = way
        # where every other one of a mask is inverted, a part of size 1 may have none that is left
        whole: list[_Way] = [way, (weights, "other masks")] if random == "masks" else [way]
        for eager, graph in (self._both({}, sizes, each) for each in whole):
            if not _agree(eager, graph) and (isinstance(eager, list) or isinstance(graph, list)):
                return False
        (first, _), (second, _) = (self._both(sizes, sizes, way) for _ in range(2))
        return not isinstance(first, list) or _agree(first, second)

    def _both(self, sizes: _Sizes, cut: Collection[sympy.Symbol], way: _Way) -> tuple[_Returned, _Returned]:
        """Return what the model returns for inputs of these sizes, and what its program does."""
        weights, random = way
        inputs = list(self._at(sizes, cut, random))
        return self._call(self._of_model, inputs, weights), self._call(self._of_program, inputs, weights)

    def _at(self, sizes: _Sizes, cut: Collection[sympy.Symbol], random: _Random) -> Iterator[Any]:
        """Yield the sample inputs with other sizes.

        Integers may count or index what is `cut`: those that are not cut themselves become zeros, which is never too
        much. random: "fractions" become random numbers, and integers that are all 0 become 1; with "masks", every
        other one of bools, and of integers that are 0 or 1, is inverted, too; with "other masks", each.
        """
        generator = torch.Generator().manual_seed(0)
        like: Any
        for value, like in zip(self._inputs, self._cases.values, strict=True):
            if isinstance(like, torch.SymInt):
                yield self._cases.at(like, sizes)
            elif not isinstance(value, torch.Tensor):
                yield value
            else:
                shape = [self._cases.at(size, sizes) for size in like.shape]
                is_whole = not cut or any(set(cut) & _symbols(size) for size in like.shape)
                yield _resized(value, shape, is_whole, random, generator)

    def _call(
        self, function: Callable[[list[Any]], list[Any]], inputs: list[Any], weights: Mapping[str, torch.Tensor]
    ) -> _Returned:
        own = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        buffers = tied(self._view, {name: value.detach().clone() for name, value in self._view.buffers.items()})
        for name in buffers.keys() & weights.keys():
            buffers[name].copy_(weights[name])
        kept = memory([tensor for name, tensor in self._view.tensors.items() if name not in buffers])
        with in_a_trial(self._view, {**weights, **buffers}, self._program) as written:
            try:
                returned = function(own)
            except (Exception, SystemExit) as error:
                return error
            if written & kept:
                return CaptureError("it changes a weight")
            return [value.clone() if isinstance(value, torch.Tensor) else value for value in returned]

    def _of_model(self, inputs: list[Any]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(inputs, self._spec)
        returned = self._view.model(*args, **kwargs)
        now = ModelView(self._view.model).tensors
        leaves, spec = pytree.tree_flatten(returned)
        return [spec, *leaves, *(now[name] for name in self._state)]

    def _of_program(self, inputs: list[Any]) -> list[Any]:
        program, signature = self._program, self._program.graph_signature
        # composed parameters have other names in the view, but are the same tensors
        installed = ModelView(self._view.model).tensors
        replaced = {tie_key(tensor): installed[name] for name, tensor in self._view.tensors.items()}
        remaining, values, state = iter(inputs), [], {}
        for _, spec in graph_inputs(program):
            if spec.kind is InputKind.USER_INPUT:
                values.append(next(remaining))
                continue
            name = str(spec.target)
            value = program.state_dict[name] if name in program.state_dict else program.constants[name]
            values.append(replaced.get(tie_key(value), value) if isinstance(value, torch.Tensor) else value)
            state[name] = values[-1]
        returned = Interpreter(program.graph_module).run(*values)
        pairs = zip(returned, signature.output_specs, strict=True)
        outputs = [value for value, spec in pairs if spec.kind is OutputKind.USER_OUTPUT]
        return [program.call_spec.out_spec, *outputs, *(state[name] for name in self._state)]


def _agree(one: _Returned, other: _Returned) -> bool:
    return isinstance(one, list) and isinstance(other, list) and are_close(one, other)


def _resized(
    value: torch.Tensor, shape: list[int], is_whole: bool, random: _Random, generator: torch.Generator
) -> torch.Tensor:
    """Return a tensor cut to a shape, or repeated up to it."""
    is_hollow = is_fake(value)
    if has_fractions(value) and (random != "none" or is_hollow):
        single = torch.complex64 if value.is_complex() else torch.float32
        return torch.rand(shape, generator=generator, dtype=single).to(value.dtype)
    is_integer = not has_fractions(value) and value.dtype is not torch.bool
    if is_hollow or (is_integer and not is_whole) or 0 in value.shape:
        return torch.zeros(shape, dtype=value.dtype)
    is_mask = not has_fractions(value) and torch.equal(value, value.bool().to(value.dtype))
    if random == "fractions" and is_integer and not value.any():
        return torch.ones(shape, dtype=value.dtype)
    for axis, size in enumerate(shape):
        old = value.shape[axis]
        value = value.narrow(axis, 0, size) if size <= old else value.index_select(axis, torch.arange(size) % old)
    value = value.detach().clone(memory_format=torch.contiguous_format)
    if is_mask and random in ("masks", "other masks"):
        some = value.flatten()[:: 2 if random == "masks" else 1]
        some.copy_(some.logical_not())
    return value


def _is_of_an_operator(returned: _Returned) -> bool:
    """Return whether a call has failed other than by a `raise` or an `assert`, as where a model checks its inputs."""
    last = None if isinstance(returned, list) else returned.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE
