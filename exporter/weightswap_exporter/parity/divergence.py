"""The first divergence: where two executions that should give the same results begin to differ.

Eager code and the graph are recorded operator by operator, and aligned. An engine's compiled code has no operators: its
graph is compiled again with intermediate results as outputs, first the last one of each module, then all those of the
module where the results part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import nn

from weightswap_exporter.checkpoints.tensor import content_of, dtype_of
from weightswap_exporter.modules.tensors import named_tensors, unwrapped
from weightswap_runtime import Artifact
from weightswap_runtime.errors import InputMismatch
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.tensors import DTYPES, TensorBytes, Tolerance

from .checks import checked_model, recorded_inputs, servable
from .executions import (
    GRAPH,
    CallCase,
    Cases,
    EagerSide,
    EngineSide,
    PathLike,
    Run,
    Side,
    calls_to_compare,
    eager_side,
    repeatable_outputs,
)
from .report import Divergence, Measure, ModuleError, Tolerances, compared, measure, tolerances
from .steps import (
    ModuleStack,
    OpenedGraph,
    Position,
    Step,
    StepRecorder,
    Tap,
    aligned,
    first_names,
    last_of_modules,
    tapped,
    taps_of,
)


class _StepPair(NamedTuple):
    """A result that both executions have."""

    position: Position
    expected: TensorBytes
    found: TensorBytes
    same_inputs: bool = True  # it was computed from the same on both sides, apart from the model's own tensors
    alone: tuple[Step, ...] = ()  # steps just before it that only one side has
    is_output: bool = False  # of the call


_OUTPUTS = Position((("", "its outputs"),))


class _Comparison(NamedTuple):
    expected: str  # name of the execution
    found: str
    case: CallCase
    graph: OpenedGraph
    limits: Tolerances


def first_divergence(
    artifact: str | os.PathLike[str] | Artifact,
    expected: nn.Module | Run | PathLike,
    found: Run | PathLike,
    cases: Cases | None = None,
    *,
    tolerance: Tolerance | None = None,
    functions: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Divergence | None:
    """Find the first point where two executions of an artifact diverge, in the first call whose outputs differ.

    expected: the eager model, or a `Run`, which is an engine with a weight file or checkpoint; a path stands for the
    engine `torch` with it. found: another run. `first_divergence(artifact, "v1.safetensors", "v2.safetensors")` finds
    where new weights first matter, and `Run(path), Run(path, "onnx")` where an engine departs from the graph. cases,
    tolerance, functions, seed: as for `compare`; without a tolerance, two runs of the engine `torch` are compared bit
    for bit.

    Returns None if all outputs agree, or if they differ but no intermediate result does. Raises the errors of
    `compare`, and the error of a run for a call that the other accepts.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    with TemporaryDirectory(prefix="weightswap-") as folder, ExitStack() as stack:
        sources = [found] if isinstance(expected, nn.Module) else [expected, found]
        runs = [_servable(source, opened, Path(folder) / str(number)) for number, source in enumerate(sources)]
        limits = tolerances(next((run.engine for run in runs if run.engine != "torch"), "torch"), tolerance)
        one: EagerSide | EngineSide
        if isinstance(expected, nn.Module):
            model = checked_model(unwrapped(expected), opened)
            one = stack.enter_context(eager_side(model, opened, functions, HOST))
        else:
            one = EngineSide(opened, runs[0])
        other = EngineSide(opened, runs[-1])
        for case in calls_to_compare(opened, cases, recorded_inputs(opened, runs[-1].weights), seed):
            if not _differ(one, other, case, limits, opened):
                continue
            run = other.run_of(case.call.method)
            if isinstance(one, EagerSide):
                return locate_divergence(one, opened, run, case, limits)[0]
            return _between_engines(opened, one.run_of(case.call.method), run, case, limits)
    return None


def _servable(source: Run | PathLike, artifact: Artifact, folder: Path) -> Run:
    run = source if isinstance(source, Run) else Run(source)
    folder.mkdir()
    return run._replace(weights=servable(run.weights, artifact, folder))


def _differ(expected: Side, found: Side, case: CallCase, limits: Tolerances, artifact: Artifact) -> bool:
    """Return whether the outputs differ; False for a generated case that one side refuses."""
    wanted = repeatable_outputs(expected, case, artifact)
    if isinstance(wanted, str):
        return False
    try:
        got = found.run(case)
    except InputMismatch as error:
        if case.is_refused(error):
            return False
        raise
    return any(compared(one, other, limits.of)[1] for one, other in zip(wanted, got, strict=True))


def locate_divergence(
    eager: EagerSide | None, artifact: Artifact, run: Run, case: CallCase, limits: Tolerances
) -> tuple[Divergence | None, str]:
    """Find where an engine's outputs diverge: between the eager model and the graph, or the graph and the engine.

    Returns None and the reason if there is no such point. Raises the errors of the executions.
    """
    if eager is not None:
        divergence = _eager_and_graph(eager, artifact, run, case, tolerances("torch", limits.stated))
        if divergence is not None:
            return divergence, ""
    divergence = _between_engines(artifact, Run(run.weights, GRAPH), run, case, limits)
    return divergence, "" if divergence else _no_divergence(artifact, run.engine)


def _no_divergence(artifact: Artifact, engine: str) -> str:
    if engine == "torch":
        return "no first divergence: with every intermediate result as an output, the outputs agree"
    return (
        f"compiled again here, with intermediate results as outputs, the engine {engine} agrees: what the artifact "
        "has for it does not match its graph on this machine. Run: "
        f"weightswap compile {artifact.path} --engine {engine}"
    )


def _eager_and_graph(
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


def _between_engines(
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


def _measured(pairs: Sequence[_StepPair], limits: Tolerances) -> list[Measure]:
    return [measure(pair.expected, pair.found, limits.of(pair.expected.dtype)) for pair in pairs]


def _first_wrong(pairs: Sequence[_StepPair], measured: Sequence[Measure], limits: Tolerances) -> int | None:
    for index, (pair, found) in enumerate(zip(pairs, measured, strict=True)):
        if not found.same if pair.is_output else limits.is_past(found):
            return index
    return None


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
