"""The report of a comparison, and how two tensors are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.errors import lines_of, listed, plural
from weightswap_runtime.staging.golden_check import OTHER_KERNELS, default_tolerance
from weightswap_runtime.tensors import (
    DTYPES,
    TensorBytes,
    Tolerance,
    as_array,
    as_float64,
    describe,
    differing,
    furthest,
    has_fractions,
    index_of,
    number,
)

Origin = Literal["given", "golden", "generated"]
_SHOWN = 5  # wrong outputs of an engine


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `compare`."""

    artifact: str
    graph_id: str
    weights: str
    weights_id: str  # of the weights in the engines
    reference: str  # "eager", or the engine that the others were compared with
    engines: tuple[EngineParity, ...]
    other_values: tuple[str, ...] = ()  # weights and constants that have other values in the eager model
    skipped: tuple[str, ...] = ()  # generated calls that the reference refuses, and why

    @property
    def same(self) -> bool:
        """True if every output of every engine is as expected."""
        return all(engine.same for engine in self.engines)

    @property
    def text(self) -> str:
        """The report as text, over several lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = ", ".join(engine.engine for engine in self.engines)
        yield f"{self.artifact} with {self.weights}: {names} against {self.reference}"
        if self.other_values:
            yield f"the model's values differ from the engines' for {listed(self.other_values)}"
        for engine in self.engines:
            yield from engine.lines()
        yield from self.notes

    @property
    def notes(self) -> list[str]:
        """Limits of the comparison: calls that were left out, and outputs that are equal because both are NaN."""
        nan = list(dict.fromkeys(name for engine in self.engines for name in engine.nan))
        return [f"left out: {text}" for text in self.skipped] + ([f"NaN on both sides: {listed(nan)}"] if nan else [])


class EngineParity(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of one engine on one device with the reference."""

    engine: str
    device: str
    tolerance: Tolerance | None  # None is bit for bit
    default_tolerance: bool  # the tolerance of each output's dtype is used
    cases: tuple[CaseParity, ...]
    divergence: Divergence | None = None
    note: str = ""  # why no first divergence was found

    @property
    def same(self) -> bool:
        return all(case.same for case in self.cases)

    @property
    def compared_how(self) -> str:
        """The tolerance in words, such as `bit for bit`."""
        if self.default_tolerance:
            return "within the tolerances of the dtypes"
        if self.tolerance is None:
            return "bit for bit"
        return f"within rtol={self.tolerance[0]:g}, atol={self.tolerance[1]:g}"

    @property
    def nan(self) -> list[str]:
        """Outputs that are as expected and hold NaN, as the reference's do."""
        return [
            f"{case.method}, {case.case}, {output.name}"
            for case in self.cases
            for output in case.outputs
            if not output.problem and output.measure is not None and output.measure.nan[0]
        ]

    @property
    def refusals(self) -> list[str]:
        """Generated calls with an empty input that the engine refuses, although the reference takes them."""
        refused = [case for case in self.cases if case.refused]
        return [f"{self.engine} refuses this call: {case.method}, {case.case}: {case.refused}" for case in refused]

    def lines(self) -> Iterator[str]:
        name = self.engine if self.device == "cpu" else f"{self.engine} on {self.device}"
        wrong = [case for case in self.cases if not case.same]
        if not wrong:
            yield f"{name}: equal {self.compared_how}, {plural(len(self.cases), 'call')}"
            yield from self.refusals
            return
        yield f"{name}: {len(wrong)} of {len(self.cases)} calls differ (compared {self.compared_how})"
        problems = [problem for case in wrong for problem in case.problems]
        yield from (f"  {line}" for line in lines_of(problems, _SHOWN))
        if self.divergence:
            first, *more = self.divergence.text.splitlines()
            yield f"  first divergence: {first}"
            yield from (f"    {line}" for line in more)
        if self.note:
            yield f"  {self.note}"
        yield from self.refusals


class CaseParity(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an engine."""

    case: str
    origin: Origin
    method: str
    outputs: tuple[OutputParity, ...] = ()
    error: str = ""  # the message if it raised, although the reference gave outputs
    # the same for a generated call with an empty input: no mismatch, as torch.export's ranges begin at 0 by default,
    # which is seldom intended
    refused: str = ""

    @property
    def same(self) -> bool:
        return not self.error and not any(output.problem for output in self.outputs)

    @property
    def problems(self) -> list[str]:
        """Problems, each with the method, the case and the output."""
        where = f"{self.method}, {self.case}"
        raised = [f"{where}: raised {self.error}"] if self.error else []
        return raised + [f"{where}, {output.name}: {output.problem}" for output in self.outputs if output.problem]


class OutputParity(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a call."""

    name: str
    measure: Measure | None  # None unless it is a tensor
    problem: str  # empty if the output is as expected


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first point where two executions of a method are further apart than they should be."""

    expected: str  # one execution
    found: str  # the other
    case: str
    module: str  # FQN of the innermost module, "" for the model itself
    kind: str  # class of the module
    within: tuple[str, ...]  # FQNs of the modules around it, outermost first
    weights: tuple[str, ...]  # weights, state and constants that the node takes
    alone: tuple[str, ...]  # operators that only one side calls there, which are then the cause
    node: str  # of the graph; empty if it has nothing there
    operator: str
    measure: Measure  # of the first result that is too far off
    agreed: int  # number of results before it within the tolerance
    compared: int  # number of all results
    modules: tuple[ModuleError, ...] = ()  # all that were compared, in order

    @property
    def text(self) -> str:
        """Four lines: the module, the node, the values, and how many results agree before it."""
        of = f" of {', '.join(self.weights)}" if self.weights else ""
        what = f"only one side calls {listed(self.alone)}" if self.alone else f"node {self.node}, {self.operator}{of}"
        return "\n".join(
            (
                f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})",
                what,
                self.measure.text,
                f"{self.agreed} of {self.compared} results agree before it ({self.found} against {self.expected})",
            )
        )


class ModuleError(msgspec.Struct, frozen=True, kw_only=True):
    """How far the results in one module are off."""

    module: str
    kind: str
    scaled: float  # the largest difference, divided by the largest value


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor compared with the expected one. Distances are over the elements that are finite on both sides."""

    expected: str  # type, as `F32[2, 3]`
    found: str  # type; if it is another, nothing else is measured
    elements: int = 0
    mismatches: int = 0  # elements past the tolerance, NaN being equal to NaN
    max_abs: float = 0.0  # the largest |found - expected|
    max_rel: float = 0.0  # the largest of these divided by |expected|, where that is not zero
    scaled: float = 0.0  # max_abs divided by the largest |expected|
    max_ulp: int | None = None  # the largest number of steps between representable numbers; None for integers
    cosine: float | None = None  # of the angle between both as vectors; None if one has no length
    unlike: int = 0  # mismatches where one side is NaN or infinite
    nan: tuple[int, int] = (0, 0)  # in expected, in found
    infinite: tuple[int, int] = (0, 0)
    worst: Worst | None = None  # None if nothing is past the tolerance

    @property
    def same(self) -> bool:
        """True if the types are equal and all elements are within the tolerance."""
        return self.expected == self.found and not self.mismatches

    @property
    def text(self) -> str:
        """Description of the difference; empty if `same`."""
        if self.expected != self.found:
            return f"expected {self.expected}, found {self.found}"
        if self.worst is None:
            return ""
        where = f"{list(self.worst.index)}: " if self.worst.index else ""
        ulp = "" if self.max_ulp is None else f", {self.max_ulp} ULP"
        return (
            f"{where}expected {self.worst.expected}, found {self.worst.found}; {self.mismatches} of {self.elements} "
            f"elements differ, by at most {self.max_abs:.3g} ({self.max_rel:.3g} relative{ulp})"
        )


class Worst(msgspec.Struct, frozen=True):
    """The element furthest from its expected value. Complex numbers are text, as JSON has none."""

    index: tuple[int, ...]
    expected: float | int | bool | str
    found: float | int | bool | str


# Measuring.


class Tolerances(NamedTuple):
    """Tolerances (rtol, atol) by dtype; None is bit for bit."""

    stated: Tolerance | None
    by_dtype: bool  # use the dtype's own, not the stated one

    def of(self, dtype: str) -> Tolerance | None:
        return default_tolerance(dtype, OTHER_KERNELS) if self.by_dtype else self.stated

    def is_past(self, measured: Measure) -> bool:
        """Return whether an intermediate result is too far off.

        In such results, terms that cancel leave small elements with large relative errors. Unless all bits must be
        equal, the largest difference must therefore also exceed rtol of the largest value.
        """
        if measured.same:
            return False
        dtype = measured.expected.partition("[")[0]
        limits = self.of(dtype)
        exact = limits is None or not has_fractions(dtype) or measured.expected != measured.found
        return exact or measured.unlike > 0 or (limits is not None and measured.scaled > limits[0])


def tolerances(engine: str, stated: Tolerance | None) -> Tolerances:
    """Return the stated tolerance, else the engine's own: the engine `torch` runs the operators of eager, in order."""
    return Tolerances(stated, by_dtype=stated is None and not ENGINES[engine].is_exact)


def compared(expected: Any, found: Any, limits: Callable[[str], Tolerance | None]) -> tuple[Measure | None, str]:
    """Return the measure of two outputs, if they are tensors, and a description of the difference, empty if none."""
    if isinstance(expected, TensorBytes) and isinstance(found, TensorBytes):
        measured = measure(expected, found, limits(expected.dtype))
        return measured, measured.text
    return None, "" if expected == found else f"expected {expected!r:.80}, found {found!r:.80}"


def measure(expected: TensorBytes, found: TensorBytes, tolerance: Tolerance | None) -> Measure:
    """Compare two tensors. tolerance: as for `comparing.difference`. Takes about 40 bytes of memory per element."""
    types = describe(expected), describe(found)
    if types[0] != types[1]:
        return Measure(expected=types[0], found=types[1])
    one, other = as_float64(expected), as_float64(found)
    differ = differing(expected, found, tolerance)
    finite = np.isfinite(one) & np.isfinite(other)
    whole = bool(finite.all())
    gaps, sizes, cosine = _distances(one if whole else one[finite], other if whole else other[finite])
    if not has_fractions(expected.dtype) and expected.dtype != "BOOL":
        gaps = _steps(as_array(expected).reshape(-1), as_array(found).reshape(-1)).astype(np.float64)
    largest = float(sizes.max(initial=0.0))
    widest = float(gaps.max(initial=0.0))
    return Measure(
        expected=types[0],
        found=types[1],
        elements=one.size,
        mismatches=int(differ.sum()),
        max_abs=widest,
        max_rel=_largest_ratio(gaps, sizes),
        scaled=widest / largest if largest else widest,
        max_ulp=_ulp(expected, found, finite) if has_fractions(expected.dtype) else None,
        cosine=cosine,
        unlike=int((differ & ~finite).sum()),
        nan=(int(np.isnan(one).sum()), int(np.isnan(other).sum())),
        infinite=(int(np.isinf(one).sum()), int(np.isinf(other).sum())),
        worst=_worst(expected, found, differ) if differ.any() else None,
    )


def _distances(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], float | None]:
    """Return |other - one|, |one|, and the cosine of the angle between them. All numbers are finite."""
    with np.errstate(over="ignore"):
        gaps, sizes, others = np.abs(other - one), np.abs(one), np.abs(other)
    scales = sizes.max(initial=0.0), others.max(initial=0.0)
    if not all(scales):
        return gaps, sizes, None
    left, right = one / scales[0], other / scales[1]  # so that no square overflows
    lengths = math.sqrt(np.vdot(left, left).real) * math.sqrt(np.vdot(right, right).real)
    return gaps, sizes, min(1.0, max(-1.0, float(np.vdot(left, right).real) / lengths))


def _largest_ratio(gaps: NDArray[Any], sizes: NDArray[Any]) -> float:
    with np.errstate(over="ignore"):
        return float(np.divide(gaps, sizes, out=np.zeros_like(gaps), where=sizes != 0).max(initial=0.0))


def _ulp(expected: TensorBytes, found: TensorBytes, finite: NDArray[Any]) -> int:
    """Return the largest distance in units in the last place (steps between representable numbers)."""
    steps = _steps(_ordinals(expected), _ordinals(found))
    parts = 2 if expected.dtype == "C64" else 1
    return int(steps[np.repeat(finite, parts)].max(initial=0))


def _steps(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the distances of integers, exact for all 64-bit ones as they are taken modulo 2**64."""
    upper, lower = np.maximum(one, other), np.minimum(one, other)
    steps: NDArray[np.uint64] = upper.astype(np.uint64) - lower.astype(np.uint64)
    return steps


def _ordinals(content: TensorBytes) -> NDArray[np.int64]:
    """Return integers in the order of the floats, adjacent for adjacent floats; equal for 0.0 and -0.0.

    Floats of one sign are ordered as their bits are (IEEE 754). A complex number gives two integers.
    """
    bits = 32 if content.dtype == "C64" else DTYPES[content.dtype].bits
    codes = np.frombuffer(content.data, f"<u{bits // 8}")
    if content.dtype == "F8_E8M0":  # has no sign bit
        return codes.astype(np.int64)
    sign = np.uint64(1 << (bits - 1))
    magnitudes = (codes.astype(np.uint64) & (sign - np.uint64(1))).astype(np.int64)
    return np.where(codes.astype(np.uint64) & sign, -magnitudes, magnitudes)


def _worst(expected: TensorBytes, found: TensorBytes, differ: NDArray[np.bool_]) -> Worst:
    position = furthest(expected, found, differ)
    return Worst(index_of(position, found.shape), *(_plain(number(tensor, position)) for tensor in (expected, found)))


def _plain(value: Any) -> float | int | bool | str:
    return str(value) if isinstance(value, complex) else value
