"""`first_divergence()`: where two executions part, whichever they are."""

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

from .compared_calls import Cases, Given, PathLike, calls_to_compare
from .divergence import between_engines, locate_divergence
from .executions import EagerSide, EngineSide, Run, Side, eager_side, taken
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
    """Find the first point where two executions of an artifact's methods part, in the first call whose outputs differ.

    expected: the eager model, or a `Run`: an engine with a weight file or checkpoint; a path is the engine `torch`
    with it. found: another run. So
    `first_divergence(artifact, "v1.safetensors", "v2.safetensors")` says where new weights come to matter,
    and `Run(path), Run(path, "onnx")` where an engine leaves the graph. cases, tolerance, functions, seed: as for
    `compare`; without a tolerance, two runs of the engine `torch` are compared bit for bit.

    None where all outputs agree, or where they differ but nothing on the way does. Raises what `compare` raises, and
    what a run raises to a call that the other takes.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    with TemporaryDirectory(prefix="weightswap-") as folder, ExitStack() as stack:
        wanted = [found] if isinstance(expected, nn.Module) else [expected, found]
        runs = [_servable(each, opened, Path(folder) / str(number)) for number, each in enumerate(wanted)]
        limits = tolerances(next((run.engine for run in runs if run.engine != "torch"), "torch"), tolerance)
        one: EagerSide | EngineSide
        if isinstance(expected, nn.Module):
            model = checked_model(unwrapped(expected), opened)
            one = stack.enter_context(eager_side(model, opened, functions, HOST))
        else:
            one = EngineSide(opened, runs[0])
        other = EngineSide(opened, runs[-1])
        for given in calls_to_compare(opened, cases, recorded_inputs(opened, runs[-1].weights), seed):
            if not _differ(one, other, given, limits, opened):
                continue
            run = other.run_of(given.call.method)
            if isinstance(one, EagerSide):
                return locate_divergence(one, opened, run, given, limits)[0]
            return between_engines(opened, one.run_of(given.call.method), run, given, limits)
    return None


def _servable(given: Run | PathLike, artifact: Artifact, folder: Path) -> Run:
    run = given if isinstance(given, Run) else Run(given)
    folder.mkdir()
    return run._replace(weights=servable(run.weights, artifact, folder))


def _differ(expected: Side, found: Side, given: Given, limits: Tolerances, artifact: Artifact) -> bool:
    """Whether the outputs of a call do; not where one of them does not take it."""
    wanted = taken(expected, given, artifact)
    if isinstance(wanted, str):
        return False
    try:
        got = found.run(given)
    except InputMismatch as error:
        if given.is_refused(error):
            return False
        raise
    return any(compared(one, other, limits.of)[1] for one, other in zip(wanted, got, strict=True))
