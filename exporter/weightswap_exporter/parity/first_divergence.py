"""`first_divergence()`: the first point where any two executions diverge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from weightswap_exporter.models.tensors import unwrapped
from weightswap_runtime import Artifact
from weightswap_runtime.errors import InputMismatch
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.tensors.comparing import Tolerance

from .compared_calls import CallCase, Cases, PathLike, calls_to_compare
from .divergence import between_engines, locate_divergence
from .executions import EagerSide, EngineSide, Run, Side, eager_side, repeatable_outputs
from .measuring import Tolerances, compared, tolerances
from .preconditions import checked_model, recorded_inputs, servable
from .report import Divergence


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
            return between_engines(opened, one.run_of(case.call.method), run, case, limits)
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
