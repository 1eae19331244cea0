"""Recording of the eager model's outputs in a file of a test, and checks that the model still reproduces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from weightswap_exporter.goldens.calls import GoldensRequest
from weightswap_exporter.goldens.recording import record, weights_identity
from weightswap_exporter.models.tensors import unwrapped
from weightswap_runtime import Artifact
from weightswap_runtime.engines.torch.cpu import environment_here
from weightswap_runtime.errors import ParityError
from weightswap_runtime.format.goldens import Goldens, open_goldens
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.sources.atomic import new_file
from weightswap_runtime.staging.golden_check import OTHER_KERNELS, default_tolerance
from weightswap_runtime.tensors.comparing import Tolerance

from .compared_calls import Cases, PathLike, calls_to_compare, recorded_calls
from .executions import eager_side, repeatable_outputs
from .measuring import compared
from .preconditions import check_request, checked_model


def record_outputs(
    path: PathLike,
    model: nn.Module,
    artifact: Artifact,
    cases: Cases | None = None,
    *,
    tolerance: Tolerance | None = None,
    functions: Mapping[str, str] | None = None,
    seed: int = 0,
) -> None:
    """Write the eager model's outputs as a goldens file and create its folder. Arguments are those of `compare`.

    Generated calls that the model refuses are left out. Raises RecordingError and ParityError.
    """
    compared_cases = calls_to_compare(artifact, "generated" if cases is None else cases, [], seed)
    plain = checked_model(unwrapped(model), artifact)
    check_request(plain, artifact, compared_cases, functions, [HOST], tolerance)
    with eager_side(plain, artifact, functions, HOST) as side:
        calls = [case.call for case in compared_cases if not isinstance(repeatable_outputs(side, case, artifact), str)]
    request = GoldensRequest(calls, tolerance)
    recording = record(plain, request, artifact.manifest, artifact.constants(), functions or {})
    with new_file(Path(path)) as file:
        file.write(recording.encode(weights_identity(plain, artifact.manifest)))


def check_outputs(
    path: PathLike, model: nn.Module, artifact: Artifact, *, functions: Mapping[str, str] | None = None
) -> tuple[Goldens, list[str]]:
    """Return the goldens of a file, and the outputs that the eager model does not reproduce, one sentence each.

    The tolerance is that of the recording. Without one, outputs must be equal bit for bit on the same kind of machine,
    else within the tolerances of their dtypes. The goldens may be of another graph with the same methods. Raises
    ParityError if there is no file, and GoldensError for one that does not fit.
    """
    if not Path(path).exists():
        raise ParityError(
            [f"{path}: no such file"], "Record the outputs: pytest --weightswap-update-goldens, or record_outputs()."
        )
    goldens = open_goldens(path, artifact.manifest, allow_other_graph=True)
    if not goldens.record.has_outputs:
        raise ParityError([f"{path}: has only inputs"], "Record the outputs: record_outputs().")
    plain = checked_model(unwrapped(model), artifact)
    with eager_side(plain, artifact, functions, HOST) as side:
        found = [side.run(case) for case in recorded_calls(artifact, [goldens])]
    problems = list(_problems(goldens, artifact, found))
    if problems and weights_identity(plain, artifact.manifest) != goldens.weights_id:
        problems.append("the outputs were recorded with weights other than the model has now")
    return goldens, problems


def _problems(goldens: Goldens, artifact: Artifact, found: list[list[Any]]) -> Iterator[str]:
    for number, (case, values) in enumerate(zip(goldens.cases, found, strict=True)):
        outputs = leaves(artifact.manifest.methods[case.method].signature.output)
        for leaf, recorded, value in zip(outputs, case.outputs, values, strict=True):
            expected = goldens.tensors[recorded] if isinstance(recorded, str) else recorded
            if expected is not None and (text := compared(expected, value, partial(_tolerance, goldens))[1]):
                yield f"{case.method}, golden {number}, {leaf.name}: {text}"


def _tolerance(goldens: Goldens, dtype: str) -> Tolerance | None:
    here, there = environment_here(), goldens.record.environment
    if goldens.record.tolerance is not None or here == there:
        return goldens.record.tolerance
    return default_tolerance(dtype, 1 if there and here.device == there.device else OTHER_KERNELS)
