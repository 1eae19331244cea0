"""The report of a comparison, typed, and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from weightswap_runtime.messages import lines_of, listed, plural
from weightswap_runtime.tensors.comparing import Tolerance

from .measuring import Measure

Origin = Literal["given", "golden", "generated"]
_SHOWN = 5  # of an engine's wrong outputs


class OutputParity(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one call. `measure` is None for what is no tensor; `problem` is empty where it is as expected."""

    name: str
    measure: Measure | None
    problem: str


class CaseParity(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an engine. `error` is what it raised where the reference gave outputs, else empty.

    refused: the same for a generated call with an empty input, which is no mismatch: torch.export's ranges begin at 0
    unless somebody says otherwise, and few mean that.
    """

    case: str
    origin: Origin
    method: str
    outputs: tuple[OutputParity, ...] = ()
    error: str = ""
    refused: str = ""

    @property
    def same(self) -> bool:
        return not self.error and not any(output.problem for output in self.outputs)

    @property
    def problems(self) -> list[str]:
        """What is wrong, with the method, the case and the output."""
        where = f"{self.method}, {self.case}"
        raised = [f"{where}: raised {self.error}"] if self.error else []
        return raised + [f"{where}, {output.name}: {output.problem}" for output in self.outputs if output.problem]


class ModuleError(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of the results in one module, as a part of the largest value there."""

    module: str
    kind: str
    scaled: float


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first point where two executions of a method are further apart than they should be.

    expected, found: what was executed. module, kind: the innermost module, "" for the model itself, and its class.
    within: the FQNs of the modules around it, outermost first. node, operator: of the graph; empty where the graph has
    nothing there. weights: weights, state and constants that the node takes. alone: operators that one side alone calls
    there, which is then what is wrong. measure: of the first result that is too far off. agreed: how many results
    before it were near enough, of `compared` in all. modules: all of those that were compared, in order.
    """

    expected: str
    found: str
    case: str
    module: str
    kind: str
    within: tuple[str, ...]
    weights: tuple[str, ...]
    alone: tuple[str, ...]
    node: str
    operator: str
    measure: Measure
    agreed: int
    compared: int
    modules: tuple[ModuleError, ...] = ()

    @property
    def text(self) -> str:
        """Four lines: the module; the node; the values; how far both agree."""
        of = f" of {', '.join(self.weights)}" if self.weights else ""
        what = f"one side alone calls {listed(self.alone)}" if self.alone else f"node {self.node}, {self.operator}{of}"
        return "\n".join(
            (
                f"{self.module} ({self.kind})" if self.module else f"the model itself ({self.kind})",
                what,
                self.measure.text,
                f"{self.agreed} of {self.compared} results agree before it ({self.found} against {self.expected})",
            )
        )


class EngineParity(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on one device against the reference. `tolerance` None is bit for bit.

    default_tolerance: whether the tolerance is that of each output's dtype. note: why no first divergence was found.
    """

    engine: str
    device: str
    tolerance: Tolerance | None
    default_tolerance: bool
    cases: tuple[CaseParity, ...]
    divergence: Divergence | None = None
    note: str = ""

    @property
    def same(self) -> bool:
        return all(case.same for case in self.cases)

    @property
    def compared_how(self) -> str:
        """`bit for bit`, or the tolerance."""
        if self.default_tolerance:
            return "within the tolerances of the dtypes"
        if self.tolerance is None:
            return "bit for bit"
        return f"within rtol={self.tolerance[0]:g}, atol={self.tolerance[1]:g}"

    @property
    def nan(self) -> list[str]:
        """Outputs that are as they should be, and hold NaN, as the reference's do."""
        return [
            f"{case.method}, {case.case}, {output.name}"
            for case in self.cases
            for output in case.outputs
            if not output.problem and output.measure is not None and output.measure.nan[0]
        ]

    @property
    def refusals(self) -> list[str]:
        """Generated calls with an empty input that it raises at, although the reference takes them."""
        found = [case for case in self.cases if case.refused]
        return [f"{self.engine} takes no such call: {case.method}, {case.case}: {case.refused}" for case in found]

    def lines(self) -> Iterator[str]:
        name = self.engine if self.device == "cpu" else f"{self.engine} on {self.device}"
        wrong = [case for case in self.cases if not case.same]
        if not wrong:
            yield f"{name}: equal {self.compared_how}, {plural(len(self.cases), 'call')}"
            yield from self.refusals
            return
        yield f"{name}: {len(wrong)} of {plural(len(self.cases), 'call')} differ (compared {self.compared_how})"
        problems = [problem for case in wrong for problem in case.problems]
        yield from (f"  {line}" for line in lines_of(problems, _SHOWN))
        if self.divergence:
            first, *more = self.divergence.text.splitlines()
            yield f"  first divergence: {first}"
            yield from (f"    {line}" for line in more)
        if self.note:
            yield f"  {self.note}"
        yield from self.refusals


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `compare` has found.

    reference: "eager", or the engine that the others were compared with. weights_id: those that the engines had.
    other_values: weights and constants of which the eager model has other values. skipped: generated calls that the
    reference cannot take, and why.
    """

    artifact: str
    graph_id: str
    weights: str
    weights_id: str
    reference: str
    engines: tuple[EngineParity, ...]
    other_values: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether every output of every engine is what it should be."""
        return all(engine.same for engine in self.engines)

    @property
    def text(self) -> str:
        """The report for people, in lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = ", ".join(engine.engine for engine in self.engines)
        yield f"{self.artifact} with {self.weights}: {names} against {self.reference}"
        if self.other_values:
            yield f"the model has other values than the engines for {listed(self.other_values)}"
        for engine in self.engines:
            yield from engine.lines()
        yield from self.notes

    @property
    def notes(self) -> list[str]:
        """What says less than it seems: calls that were left out, and outputs that are equal because both are NaN."""
        nan = list(dict.fromkeys(name for engine in self.engines for name in engine.nan))
        return [f"left out: {text}" for text in self.skipped] + ([f"NaN on both sides: {listed(nan)}"] if nan else [])
