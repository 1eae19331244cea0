"""Outputs that are recorded in one place and checked in another; and what is checked before any comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from weightswap_exporter.capture.tracing import Load
from weightswap_exporter.checkpoints.loading import load_into, model_problems
from weightswap_exporter.checkpoints.tensor import pieces
from weightswap_exporter.goldens import (
    GoldensRequest,
    check_has_values,
    record,
    tolerance_problem,
    type_problems,
    weights_identity,
)
from weightswap_exporter.modules.tensors import ModelView, named_tensors, unwrapped
from weightswap_exporter.packing import pack
from weightswap_runtime import Artifact, read_weights
from weightswap_runtime.engines.torch_cpu import environment_here
from weightswap_runtime.errors import CheckpointError, ParityError, Unsupported, WeightFileError, listed
from weightswap_runtime.format.goldens import Goldens, artifact_goldens, goldens_beside, open_goldens
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.memory.device_memory import HOST, open_memory
from weightswap_runtime.sources.writing import new_file
from weightswap_runtime.staging.golden_check import OTHER_KERNELS, default_tolerance
from weightswap_runtime.tensors import Tolerance, digest_of

from .executions import CallCase, Cases, PathLike, calls_to_compare, eager_side, recorded_calls, repeatable_outputs
from .report import compared


def check_one_process(artifact: Artifact) -> None:
    """Raise Unsupported for an artifact of several ranks, whose graphs no single process can run."""
    if ranks := artifact.manifest.ranks:
        raise Unsupported(
            f"{artifact.path}: is for {ranks.size} ranks, and this check runs in one process. Check an artifact of the "
            "model without parallel=, which takes the same weight files. Goldens are checked on the ranks themselves: "
            "export(parallel=..., goldens=...)"
        )


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

    Generated calls that the model refuses are left out. Raises ParityError.
    """
    compared_cases = calls_to_compare(artifact, "generated" if cases is None else cases, [], seed)
    plain = checked_model(unwrapped(model), artifact)
    check_request(plain, artifact, compared_cases, functions, [HOST], tolerance)
    with eager_side(plain, artifact, functions, HOST) as side:
        calls = [case.call for case in compared_cases if not isinstance(repeatable_outputs(side, case, artifact), str)]
    request = GoldensRequest(calls, tolerance)
    view = ModelView(plain)
    recording = record(view, request, artifact.manifest, artifact.constants(), functions or {})
    with new_file(Path(path)) as file:
        file.write(recording.encode(weights_identity(view, artifact.manifest)))


def check_outputs(
    path: PathLike, model: nn.Module, artifact: Artifact, *, functions: Mapping[str, str] | None = None
) -> tuple[Goldens, list[str]]:
    """Return the goldens of a file, and the outputs that the eager model does not reproduce, one sentence each.

    The tolerance is that of the recording. Without one, outputs must be equal bit for bit on the same kind of machine,
    else within the tolerances of their dtypes. The goldens may be of another graph with the same methods. Raises
    ParityError if there is no file, and WeightFileError for one that does not fit.
    """
    if not Path(path).exists():
        raise ParityError(
            [f"{path}: no such file"], "Record the outputs: pytest --weightswap-update-goldens, or record_outputs()."
        )
    goldens = open_goldens(path, artifact.manifest)
    if not goldens.record.has_outputs:
        raise ParityError([f"{path}: has only inputs"], "Record the outputs: record_outputs().")
    plain = checked_model(unwrapped(model), artifact)
    with eager_side(plain, artifact, functions, HOST) as side:
        found = [side.run(case) for case in recorded_calls(artifact, [goldens])]
    problems = list(_problems(goldens, artifact, found))
    if problems and weights_identity(ModelView(plain), artifact.manifest) != goldens.weights_id:
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


# Before anything is compared: the model, the request, the weights.


def checked_model(model: nn.Module, artifact: Artifact) -> nn.Module:
    """Return the model. Raises ParityError if it is not that of the artifact or has no values."""
    view = ModelView(model)
    try:
        check_has_values(view)
    except ParityError as error:
        raise ParityError(error.problems, "A skeleton cannot be run: build the model outside skeleton().") from error
    if problems := [*model_problems(view, artifact), *type_problems(view, artifact.manifest)]:
        raise ParityError(problems, "Compare with the model that was exported, on the CPU and in its dtypes.")
    return model


def check_request(
    model: nn.Module | None,
    artifact: Artifact,
    cases: Sequence[CallCase],
    functions: Mapping[str, str] | None,
    devices: Sequence[str],
    tolerance: Tolerance | None,
) -> None:
    """Raise ParityError for a request that compares nothing or cannot be called, Unsupported for an unknown device."""
    if tolerance is not None and (problem := tolerance_problem(tolerance)):
        raise ParityError([problem], "Leave it out for the tolerances of each engine.")
    problems = [] if devices else ["devices is empty"]
    from_user = any(case.origin == "given" for case in cases)
    for method in artifact.methods:
        name = (functions or {}).get(method, method)
        if not any(case.call.method == method for case in cases):
            problems += [] if from_user else [f"{method}: no sizes meet its conditions"]
        elif model is not None and not callable(getattr(model, name, None)):
            problems.append(f"the model has no attribute {name!r} to call for the method {method!r}")
    if problems:
        raise ParityError(problems, "Give cases=, and functions={method: attribute} where the names differ.")
    for device in devices:
        open_memory(device, "auto")


def recorded_inputs(artifact: Artifact, weights: PathLike) -> list[Goldens]:
    """Return the goldens of this graph beside the weights and in the artifact. Raises WeightFileError."""
    beside = goldens_beside(weights, artifact.manifest, allow_other_graph=True)
    return [goldens for goldens in (beside, artifact_goldens(artifact)) if goldens is not None and goldens.same_graph]


def other_values(model: nn.Module, artifact: Artifact, weights: PathLike) -> Iterator[str]:
    """Yield weights and constants of the model with other values than a packed file and the artifact have."""
    tensors = named_tensors(model)
    with open_weights(weights) as opened:
        digests = opened.stamp.digests if opened.stamp else {}
    constants = artifact.constants()
    digests = digests | {row.name: digest_of([constants[row.name].data]) for row in artifact.manifest.constants}
    for row in (*artifact.manifest.weights, *artifact.manifest.constants):
        if row.name in digests and row.name in tensors and digest_of(pieces(tensors[row.name])) != digests[row.name]:
            yield row.name


def servable(
    weights: PathLike, artifact: Artifact, folder: Path, model: nn.Module | None = None, load: Load | None = None
) -> PathLike:
    """Return weights that a server takes: the same path, or, for pickled weights, a file packed into the folder.

    model, load: as for `pack`. Raises the errors of opening and packing weights.
    """
    try:
        with open_weights(weights):
            return weights
    except WeightFileError:
        if not Path(weights).exists():
            raise
        return pack(weights, artifact, out=folder / f"{Path(weights).stem}.safetensors", model=model, load=load).path


def fill_model(model: nn.Module, artifact: Artifact, weights: PathLike, load: Load | None = None) -> None:
    """Load weights into the model that an artifact was exported from.

    Tensors of a packed weight file are copied by name. Anything else is loaded by `load` or the model's own code, as
    `pack(..., model=model)` does; if the model's own code refuses it, it is packed with the artifact's conversion
    first.

    Raises CheckpointError and the errors of reading weights.
    """
    plain = unwrapped(model)
    if _is_packed(weights):
        _fill(plain, artifact, weights)
        return
    try:
        with load_into(plain, weights, load):
            return
    except CheckpointError:
        if load is not None:
            raise
        with TemporaryDirectory(prefix="weightswap-") as folder:
            _fill(plain, artifact, pack(weights, artifact, out=Path(folder) / "weights.safetensors").path)


def _fill(model: nn.Module, artifact: Artifact, weights: PathLike) -> None:
    view, values = ModelView(model), read_weights(weights, framework="torch")
    problems = list(type_problems(view, artifact.manifest))
    for row in artifact.manifest.weights:
        if (value := values.get(row.name)) is None:
            problems.append(f"{row.name}: not in the file")
        elif value.shape != row.shape:
            problems.append(f"{row.name}: {list(row.shape)}, not {list(value.shape)}")
    if problems:
        raise CheckpointError(f"{weights}: does not fit this model: {listed(problems, between='; ')}")
    with torch.no_grad():
        for row in artifact.manifest.weights:
            view.tensors[row.name].copy_(values[row.name])


def _is_packed(weights: PathLike) -> bool:
    try:
        with open_weights(weights) as opened:
            return opened.stamp is not None
    except WeightFileError:
        return False
