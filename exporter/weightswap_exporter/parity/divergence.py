"""Where two executions of one method part: first by module, then by node of the graph.

The eager model and the graph are compared at every operator that the dispatcher sees in both. An engine that compiles
graphs shows nothing of what it computes on the way: the graph is compiled for it once more with the last result of each
module as an output, and then once more with all nodes of the stretch in which it parts.
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

from .compared_calls import Given
from .executions import GRAPH, EagerSide, EngineSide, Run
from .graphs import OpenedGraph
from .measuring import Measure, Tolerances, measure, tolerances
from .report import Divergence, ModuleError
from .steps import ModuleStack, Position, Step, StepRecorder, aligned, first_names
from .taps import Tap, last_of_modules, tapped, taps_of


class _StepPair(NamedTuple):
    """A result that both executions have.

    fed_alike: whether what it was computed from is the same on both sides, but for the model's own tensors. alone: what
    one side alone has computed just before. is_output: of the whole call.
    """

    position: Position
    expected: TensorBytes
    found: TensorBytes
    fed_alike: bool = True
    alone: tuple[Step, ...] = ()
    is_output: bool = False


_OUTPUTS = Position((("", "its outputs"),))


class _Compared(NamedTuple):
    """What is compared: the names of both executions, and how near they have to be."""

    expected: str
    found: str
    given: Given
    graph: OpenedGraph
    limits: Tolerances


def locate_divergence(
    eager: EagerSide | None, artifact: Artifact, run: Run, given: Given, limits: Tolerances
) -> tuple[Divergence | None, str]:
    """Where an engine's outputs of a call come to differ: between the eager model and the graph, or between the graph
    and the engine. Without one, a sentence says why. Raises whatever the executions raise."""
    if eager is not None:
        found = eager_and_graph(eager, artifact, run, given, tolerances("torch", limits.stated))
        if found is not None:
            return found, ""
    found = between_engines(artifact, Run(run.weights, GRAPH), run, given, limits)
    return found, "" if found else _vanished(artifact, run.engine)


def _vanished(artifact: Artifact, engine: str) -> str:
    if engine == "torch":
        return "no first divergence: with every intermediate result as an output, the outputs agree"
    return (
        f"compiled here once more, with intermediate results as outputs, the engine {engine} agrees: what the artifact "
        "has for it is not what its graph gives on this machine. Run: "
        f"weightswap compile {artifact.path} --engine {engine}"
    )


def eager_and_graph(
    eager: EagerSide, artifact: Artifact, run: Run, given: Given, limits: Tolerances
) -> Divergence | None:
    """Where the eager model and the graph with a run's weights part. Memory: every result of one call, twice."""
    stack = ModuleStack(eager.model)
    recorder = StepRecorder(stack.position, named_tensors(eager.model).values())
    with stack.hooked():
        outputs = eager.run(given, recorder)
    graph, names = OpenedGraph(artifact, given.call.method), first_names(eager.model)
    steps, found = graph.steps(run.weights, given)
    renamed = [step._replace(position=step.position.renamed(names)) for step in steps]
    pairs = [*_step_pairs(recorder.steps, renamed, outputs, found)]
    return _first(_Compared(eager.name, Run(run.weights, GRAPH).name, given, graph, limits), pairs)


def between_engines(
    artifact: Artifact, expected: Run, found: Run, given: Given, limits: Tolerances
) -> Divergence | None:
    """Where two engines part, by what they give for nodes of the graph; GRAPH is one, too. Others compile twice."""
    graph = OpenedGraph(artifact, given.call.method)
    comparison = _Compared(expected.name, found.name, given, graph, limits)
    if expected.engine == found.engine == GRAPH:
        (ours, first), (theirs, second) = (graph.steps(run.weights, given) for run in (expected, found))
        return _first(comparison, [*_step_pairs(ours, theirs, first, second)])
    taps = taps_of(graph.open())
    ends = last_of_modules(taps)
    coarse = _tapped_pairs(graph, expected, found, given, ends)
    bad = _first_bad(coarse, _measured(coarse, limits), limits)
    if bad is None:
        return None
    fine = [] if coarse[bad].is_output else _tapped_pairs(graph, expected, found, given, _stretch(taps, ends, bad))
    return _first(comparison, [*coarse[:bad], *fine]) or _first(comparison, coarse)


def _step_pairs(
    expected: Sequence[Step], found: Sequence[Step], outputs: Sequence[Any], others: Sequence[Any]
) -> Iterator[_StepPair]:
    """The results of all steps, then the outputs."""
    alone: tuple[Step, ...] = ()
    for one, other, before in aligned(expected, found):
        alone += before
        if one is None or other is None:
            continue
        alike = all(None in both or both[0] == both[1] for both in zip(one.inputs, other.inputs, strict=False))
        for values in zip(one.values, other.values, strict=True):
            if dtype_of(values[0].dtype) in DTYPES:
                yield _StepPair(other.position, content_of(values[0]), content_of(values[1]), alike, alone)
                alone = ()
    for ours, theirs in zip(outputs, others, strict=True):
        if isinstance(ours, TensorBytes) and isinstance(theirs, TensorBytes):
            yield _StepPair(_OUTPUTS, ours, theirs, fed_alike=False, alone=alone, is_output=True)
            alone = ()


def _stretch(taps: Sequence[Tap], ends: Sequence[Tap], bad: int) -> list[Tap]:
    """The nodes after the last end of a module that is right, up to the first that is wrong."""
    start = taps.index(ends[bad - 1]) + 1 if bad else 0
    return list(taps[start : taps.index(ends[bad]) + 1])


def _tapped_pairs(graph: OpenedGraph, expected: Run, found: Run, given: Given, taps: Sequence[Tap]) -> list[_StepPair]:
    """What both engines give for the taps, and their outputs."""
    with TemporaryDirectory(prefix="weightswap-") as folder:
        names = [run.engine for run in (expected, found) if run.engine != GRAPH]
        made = tapped(graph.artifact, graph.method, taps, Path(folder), names)
        ours, theirs = (_outputs(made, run, given) for run in (expected, found))
    positions = [_OUTPUTS] * (len(ours) - len(taps)) + [tap.position for tap in taps]
    pairs = [
        _StepPair(position, one, other, is_output=position is _OUTPUTS)
        for position, one, other in zip(positions, ours, theirs, strict=True)
        if isinstance(one, TensorBytes) and isinstance(other, TensorBytes)
    ]
    return sorted(pairs, key=lambda pair: pair.is_output)


def _outputs(artifact: Artifact, run: Run, given: Given) -> list[Any]:
    if run.engine == GRAPH:
        return OpenedGraph(artifact, given.call.method).outputs(run.weights, given)
    return EngineSide(artifact, run).run(given)


def _measured(pairs: Sequence[_StepPair], limits: Tolerances) -> list[Measure]:
    return [measure(pair.expected, pair.found, limits.of(pair.expected.dtype)) for pair in pairs]


def _first_bad(pairs: Sequence[_StepPair], measured: Sequence[Measure], limits: Tolerances) -> int | None:
    judged = zip(pairs, measured, strict=True)
    wrong = (not found.same if pair.is_output else limits.is_past(found) for pair, found in judged)
    return next((index for index, is_wrong in enumerate(wrong) if is_wrong), None)


def _first(comparison: _Compared, pairs: Sequence[_StepPair]) -> Divergence | None:
    """The first pair that is past the tolerance; and how far each module is off.

    If what it was computed from differs already, although all results before agree, the fault is in what one side
    alone has computed last.
    """
    measured = _measured(pairs, comparison.limits)
    bad = _first_bad(pairs, measured, comparison.limits)
    if bad is None:
        return None
    blamed = () if pairs[bad].fed_alike else next((pair.alone for pair in pairs[bad::-1] if pair.alone), ())
    position = _position_of(blamed) if blamed else pairs[bad].position
    return Divergence(
        expected=comparison.expected,
        found=comparison.found,
        case=comparison.given.where,
        module=position.module,
        kind=position.kind,
        within=tuple(fqn for fqn, _ in position.modules[:-1]),
        node=position.node,
        operator=position.operator,
        weights=comparison.graph.weights_of(position.node),
        alone=tuple(
            f"{'the graph' if step.position.node else comparison.expected}: {step.operator}" for step in blamed
        ),
        measure=measured[bad],
        agreed=bad,
        compared=len(pairs),
        modules=tuple(_module_errors(pairs, measured)),
    )


def _position_of(steps: Sequence[Step]) -> Position:
    """Where one side goes its own way: the innermost module that all of these steps are in."""
    paths = [[fqn for fqn, _ in step.position.modules] for step in steps]
    same = len(paths[0])
    while any(path[:same] != paths[0][:same] for path in paths):
        same -= 1
    position = next((step.position for step in steps if step.position.node), steps[0].position)
    return position._replace(modules=position.modules[:same])


def _module_errors(pairs: Sequence[_StepPair], measured: Sequence[Measure]) -> Iterator[ModuleError]:
    worst: dict[tuple[str, str], float] = {}
    for pair, found in zip(pairs, measured, strict=True):
        key = pair.position.module, pair.position.kind
        worst[key] = max(worst.get(key, 0.0), found.scaled)
    for (module, kind), scaled in worst.items():
        yield ModuleError(module=module, kind=kind, scaled=scaled)
