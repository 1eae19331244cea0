"""Report of a comparison, as typed results and as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from weightswap_runtime.messages import lines_of, listed, plural
from weightswap_runtime.tensors.comparing import Tolerance

from .measuring import Measure

Origin = Literal["given", "golden", "generated"]
_SHOWN = 5  # wrong outputs of an engine


class OutputParity(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a call. measure: None unless it is a tensor. problem: empty if the output is as expected."""

    name: str
    measure: Measure | None
    problem: str


class CaseParity(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an engine. error: the message if it raised, although the reference gave outputs; else empty.

    refused: the same for a generated call with an empty input. It is no mismatch, as torch.export's ranges begin at 0
    by default, which is seldom intended.
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
        """Problems, each with the method, the case and the output."""
        where = f"{self.method}, {self.case}"
        raised = [f"{where}: raised {self.error}"] if self.error else []
        return raised + [f"{where}, {output.name}: {output.problem}" for output in self.outputs if output.problem]


class ModuleError(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of the results in one module, divided by the largest value there."""

    module: str
    kind: str
    scaled: float


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first point where two executions of a method are further apart than they should be.

    expected, found: the two executions. module, kind: the innermost module, "" for the model itself, and its class.
    within: FQNs of the modules around it, outermost first. node, operator: of the graph; empty if the graph has nothing
    there. weights: weights, state and constants that the node takes. alone: operators that only one side calls there,
    which are then the cause. measure: of the first result that is too far off. agreed: number of results before it
    within the tolerance, of `compared` in all. modules: all modules that were compared, in order.
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


class EngineParity(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of one engine on one device with the reference. tolerance: None is bit for bit.

    default_tolerance: whether the tolerance of each output's dtype is used. note: why no first divergence was found.
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


class ParityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `compare`.

    reference: "eager", or the engine that the others were compared with. weights_id: of the weights in the engines.
    other_values: weights and constants that have other values in the eager model. skipped: generated calls that the
    reference refuses, and why.
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
