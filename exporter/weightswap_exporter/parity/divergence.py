"""First point of divergence between two executions of a method, by module and by node of the graph.

The eager model and the graph are compared at every operator that the dispatcher sees in both. A compiled engine shows
no intermediate results: the graph is compiled for it again with the last result of each module as an output, then once
more with all nodes of the stretch in which it diverges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from weightswap_exporter.checkpoints.tensor import content_of, dtype_of
from weightswap_exporter.models.tensors import named_tensors
from weightswap_runtime import Artifact
from weightswap_runtime.tensors.content import TensorBytes
from weightswap_runtime.tensors.dtypes import DTYPES

from .compared_calls import CallCase
from .executions import GRAPH, EagerSide, EngineSide, Run
from .graphs import OpenedGraph
from .measuring import Measure, Tolerances, measure, tolerances
from .report import Divergence, ModuleError
from .steps import ModuleStack, Position, Step, StepRecorder, aligned, first_names
from .taps import Tap, last_of_modules, tapped, taps_of


class _StepPair(NamedTuple):
    """A result that both executions have.

    same_inputs: whether it was computed from the same inputs on both sides, apart from the model's own tensors. alone:
    steps just before it that only one side has. is_output: whether it is an output of the call.
    """

    position: Position
    expected: TensorBytes
    found: TensorBytes
    same_inputs: bool = True
    alone: tuple[Step, ...] = ()
    is_output: bool = False


_OUTPUTS = Position((("", "its outputs"),))


class _Comparison(NamedTuple):
    """A comparison of a case: the names of both executions, the graph, and the tolerances."""

    expected: str
    found: str
    case: CallCase
    graph: OpenedGraph
    limits: Tolerances


def locate_divergence(
    eager: EagerSide | None, artifact: Artifact, run: Run, case: CallCase, limits: Tolerances
) -> tuple[Divergence | None, str]:
    """Find where an engine's outputs diverge: between the eager model and the graph, or the graph and the engine.

    Returns None and the reason if there is no such point. Raises the errors of the executions.
    """
    if eager is not None:
        divergence = eager_and_graph(eager, artifact, run, case, tolerances("torch", limits.stated))
        if divergence is not None:
            return divergence, ""
    divergence = between_engines(artifact, Run(run.weights, GRAPH), run, case, limits)
    return divergence, "" if divergence else _no_divergence(artifact, run.engine)


def _no_divergence(artifact: Artifact, engine: str) -> str:
    if engine == "torch":
        return "no first divergence: with every intermediate result as an output, the outputs agree"
    return (
        f"compiled again here, with intermediate results as outputs, the engine {engine} agrees: what the artifact "
        "has for it does not match its graph on this machine. Run: "
        f"weightswap compile {artifact.path} --engine {engine}"
    )


def eager_and_graph(
    eager: EagerSide, artifact: Artifact, run: Run, case: CallCase, limits: Tolerances
) -> Divergence | None:
    """Find where the eager model and the graph with a run's weights diverge. Holds every result of one call twice."""
    stack = ModuleStack(eager.model)
    recorder = StepRecorder(stack.position, named_tensors(eager.model).values())
    with stack.hooked():
        outputs = eager.run(case, recorder)
    graph, names = OpenedGraph(artifact, case.call.method), first_names(eager.model)
    steps, graph_outputs = graph.steps(run.weights, case)
    renamed = [step._replace(position=step.position.renamed(names)) for step in steps]
    pairs = [*_step_pairs(recorder.steps, renamed, outputs, graph_outputs)]
    return _first_divergence(_Comparison(eager.name, Run(run.weights, GRAPH).name, case, graph, limits), pairs)


def between_engines(
    artifact: Artifact, expected: Run, found: Run, case: CallCase, limits: Tolerances
) -> Divergence | None:
    """Find the node of the graph where two engines diverge. Each may be GRAPH; others compile the graph twice."""
    graph = OpenedGraph(artifact, case.call.method)
    comparison = _Comparison(expected.name, found.name, case, graph, limits)
    if expected.engine == found.engine == GRAPH:
        (ours, first), (theirs, second) = (graph.steps(run.weights, case) for run in (expected, found))
        return _first_divergence(comparison, [*_step_pairs(ours, theirs, first, second)])
    taps = taps_of(graph.open())
    ends = last_of_modules(taps)
    coarse = _tapped_pairs(graph, expected, found, case, ends)
    wrong = _first_wrong(coarse, _measured(coarse, limits), limits)
    if wrong is None:
        return None
    fine = [] if coarse[wrong].is_output else _tapped_pairs(graph, expected, found, case, _stretch(taps, ends, wrong))
    return _first_divergence(comparison, [*coarse[:wrong], *fine]) or _first_divergence(comparison, coarse)


def _step_pairs(
    expected: Sequence[Step], found: Sequence[Step], outputs: Sequence[Any], others: Sequence[Any]
) -> Iterator[_StepPair]:
    """Yield the results of all steps, then the outputs."""
    alone: tuple[Step, ...] = ()
    for one, other, before in aligned(expected, found):
        alone += before
        if one is None or other is None:
            continue
        same_inputs = all(None in pair or pair[0] == pair[1] for pair in zip(one.inputs, other.inputs, strict=False))
        for values in zip(one.values, other.values, strict=True):
            if dtype_of(values[0].dtype) in DTYPES:
                yield _StepPair(other.position, content_of(values[0]), content_of(values[1]), same_inputs, alone)
                alone = ()
    for ours, theirs in zip(outputs, others, strict=True):
        if isinstance(ours, TensorBytes) and isinstance(theirs, TensorBytes):
            yield _StepPair(_OUTPUTS, ours, theirs, same_inputs=False, alone=alone, is_output=True)
            alone = ()


def _stretch(taps: Sequence[Tap], ends: Sequence[Tap], wrong: int) -> list[Tap]:
    """Return the taps after the last right end of a module, up to the first wrong one, `ends[wrong]`."""
    start = taps.index(ends[wrong - 1]) + 1 if wrong else 0
    return list(taps[start : taps.index(ends[wrong]) + 1])


def _tapped_pairs(
    graph: OpenedGraph, expected: Run, found: Run, case: CallCase, taps: Sequence[Tap]
) -> list[_StepPair]:
    """Return the results of both engines for the taps, then their outputs."""
    with TemporaryDirectory(prefix="weightswap-") as folder:
        names = [run.engine for run in (expected, found) if run.engine != GRAPH]
        compiled = tapped(graph.artifact, graph.method, taps, Path(folder), names)
        ours, theirs = (_outputs(compiled, run, case) for run in (expected, found))
    positions = [_OUTPUTS] * (len(ours) - len(taps)) + [tap.position for tap in taps]
    pairs = [
        _StepPair(position, one, other, is_output=position is _OUTPUTS)
        for position, one, other in zip(positions, ours, theirs, strict=True)
        if isinstance(one, TensorBytes) and isinstance(other, TensorBytes)
    ]
    return sorted(pairs, key=lambda pair: pair.is_output)


def _outputs(artifact: Artifact, run: Run, case: CallCase) -> list[Any]:
    if run.engine == GRAPH:
        return OpenedGraph(artifact, case.call.method).outputs(run.weights, case)
    return EngineSide(artifact, run).run(case)


def _measured(pairs: Sequence[_StepPair], limits: Tolerances) -> list[Measure]:
    return [measure(pair.expected, pair.found, limits.of(pair.expected.dtype)) for pair in pairs]


def _first_wrong(pairs: Sequence[_StepPair], measured: Sequence[Measure], limits: Tolerances) -> int | None:
    for index, (pair, found) in enumerate(zip(pairs, measured, strict=True)):
        if not found.same if pair.is_output else limits.is_past(found):
            return index
    return None


def _first_divergence(comparison: _Comparison, pairs: Sequence[_StepPair]) -> Divergence | None:
    """Return the divergence at the first pair that is past the tolerance, with the error of each module.

    If the inputs of that pair already differ although all results before it agree, the last steps that only one side
    has are at fault.
    """
    measured = _measured(pairs, comparison.limits)
    wrong = _first_wrong(pairs, measured, comparison.limits)
    if wrong is None:
        return None
    blamed = () if pairs[wrong].same_inputs else next((pair.alone for pair in pairs[wrong::-1] if pair.alone), ())
    position = _position_of(blamed) if blamed else pairs[wrong].position
    return Divergence(
        expected=comparison.expected,
        found=comparison.found,
        case=comparison.case.where,
        module=position.module,
        kind=position.kind,
        within=tuple(fqn for fqn, _ in position.modules[:-1]),
        node=position.node,
        operator=position.operator,
        weights=comparison.graph.weights_of(position.node),
        alone=tuple(
            f"{'the graph' if step.position.node else comparison.expected}: {step.operator}" for step in blamed
        ),
        measure=measured[wrong],
        agreed=wrong,
        compared=len(pairs),
        modules=tuple(_module_errors(pairs, measured)),
    )


def _position_of(steps: Sequence[Step]) -> Position:
    """Return the position of steps that only one side has, with the innermost module that contains them all."""
    paths = [[fqn for fqn, _ in step.position.modules] for step in steps]
    depth = len(paths[0])
    while any(path[:depth] != paths[0][:depth] for path in paths):
        depth -= 1
    position = next((step.position for step in steps if step.position.node), steps[0].position)
    return position._replace(modules=position.modules[:depth])


def _module_errors(pairs: Sequence[_StepPair], measured: Sequence[Measure]) -> Iterator[ModuleError]:
    worst: dict[tuple[str, str], float] = {}
    for pair, found in zip(pairs, measured, strict=True):
        key = pair.position.module, pair.position.kind
        worst[key] = max(worst.get(key, 0.0), found.scaled)
    for (module, kind), scaled in worst.items():
        yield ModuleError(module=module, kind=kind, scaled=scaled)
