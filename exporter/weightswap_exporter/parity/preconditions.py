"""Checks of a model and weights before anything runs, and loading of the weights into the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from weightswap_exporter.adapter.tracing import Load
from weightswap_exporter.checkpoints.tensor import pieces
from weightswap_exporter.checkpoints.tensor_kinds import model_problems
from weightswap_exporter.checkpoints.through_model import load_into
from weightswap_exporter.goldens.calls import tolerance_problem
from weightswap_exporter.goldens.recording import check_has_values, type_problems
from weightswap_exporter.models.tensors import named_tensors, unwrapped
from weightswap_exporter.packing import pack
from weightswap_runtime import Artifact, read_weights
from weightswap_runtime.errors import CheckpointError, ParityError, RecordingError, WeightFileError
from weightswap_runtime.format.goldens import Goldens, artifact_goldens, goldens_beside
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.memory.device_choice import open_memory
from weightswap_runtime.messages import listed
from weightswap_runtime.tensors.comparing import Tolerance
from weightswap_runtime.tensors.digests import digest_of

from .compared_calls import CallCase, PathLike


def checked_model(model: nn.Module, artifact: Artifact) -> nn.Module:
    """Return the model. Raises ParityError if it is not that of the artifact or has no values."""
    try:
        check_has_values(model)
    except RecordingError as error:
        raise ParityError(error.problems, "A skeleton cannot be run: build the model outside skeleton().") from error
    if problems := [*model_problems(model, artifact), *type_problems(model, artifact.manifest)]:
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


def recorded_inputs(artifact: Artifact, weights: PathLike) -> list[Goldens]:
    """Return the goldens of this graph beside the weights and in the artifact. Raises GoldensError."""
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


def fill_model(model: nn.Module, artifact: Artifact, weights: PathLike, load: Load | None = None) -> None:
    """Load weights into the model that an artifact was exported from.

    Tensors of a packed weight file are copied by name. Anything else is loaded by `load` or the model's own code, as
    `pack(..., model=model)` does; if the model's own code refuses it, it is packed with the artifact's adapter first.

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
    tensors, values = named_tensors(model), read_weights(weights, framework="torch")
    problems = list(type_problems(model, artifact.manifest))
    for row in artifact.manifest.weights:
        if (value := values.get(row.name)) is None:
            problems.append(f"{row.name}: not in the file")
        elif value.shape != row.shape:
            problems.append(f"{row.name}: {list(row.shape)}, not {list(value.shape)}")
    if problems:
        raise CheckpointError(f"{weights}: does not fit this model: {listed(problems, between='; ')}")
    with torch.no_grad():
        for row in artifact.manifest.weights:
            tensors[row.name].copy_(values[row.name])


def _is_packed(weights: PathLike) -> bool:
    try:
        with open_weights(weights) as opened:
            return opened.stamp is not None
    except WeightFileError:
        return False
