"""A model and its weights before anything runs: what is known of them, and the model filled with the weights."""

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

from .compared_calls import Given, PathLike


def checked_model(model: nn.Module, artifact: Artifact) -> nn.Module:
    """The model, if it is that of the artifact. Raises ParityError."""
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
    given: Sequence[Given],
    functions: Mapping[str, str] | None,
    devices: Sequence[str],
    tolerance: Tolerance | None,
) -> None:
    """Raise ParityError for what would compare nothing, and Unsupported for a device that there is not."""
    if tolerance is not None and (problem := tolerance_problem(tolerance)):
        raise ParityError([problem], "Leave it out for the tolerances of each engine.")
    problems = [] if devices else ["devices is empty"]
    stated = any(each.origin == "given" for each in given)
    for method in artifact.methods:
        name = (functions or {}).get(method, method)
        if not any(each.call.method == method for each in given):
            problems += [] if stated else [f"{method}: no sizes meet its conditions"]
        elif model is not None and not callable(getattr(model, name, None)):
            problems.append(f"the model has no attribute {name!r} to call for the method {method!r}")
    if problems:
        raise ParityError(problems, "Give cases=, and functions={method: attribute} where the names differ.")
    for device in devices:
        open_memory(device, "auto")


def servable(
    weights: PathLike, artifact: Artifact, folder: Path, model: nn.Module | None = None, load: Load | None = None
) -> PathLike:
    """What a server takes: the weights themselves, or, where they are pickled, packed into a folder.

    model, load: as for `pack`. Raises what opening and packing raise.
    """
    try:
        with open_weights(weights):
            return weights
    except WeightFileError:
        if not Path(weights).exists():
            raise
        return pack(weights, artifact, out=folder / f"{Path(weights).stem}.safetensors", model=model, load=load).path


def recorded_inputs(artifact: Artifact, weights: PathLike) -> list[Goldens]:
    """The goldens of the graph that are beside the weights, and in the artifact. Raises GoldensError."""
    beside = goldens_beside(weights, artifact.manifest, allow_other_graph=True)
    return [goldens for goldens in (beside, artifact_goldens(artifact)) if goldens is not None and goldens.same_graph]


def other_values(model: nn.Module, artifact: Artifact, weights: PathLike) -> Iterator[str]:
    """Weights of the model that have other values than the file says, if it says anything; and such constants."""
    tensors = named_tensors(model)
    with open_weights(weights) as opened:
        digests = opened.stamp.digests if opened.stamp else {}
    constants = artifact.constants()
    digests = digests | {row.name: digest_of([constants[row.name].data]) for row in artifact.manifest.constants}
    for row in (*artifact.manifest.weights, *artifact.manifest.constants):
        if row.name in digests and row.name in tensors and digest_of(pieces(tensors[row.name])) != digests[row.name]:
            yield row.name


def fill_model(model: nn.Module, artifact: Artifact, weights: PathLike, load: Load | None = None) -> None:
    """Put weights into the model that an artifact was exported from.

    A packed weight file's tensors are put in by name. Anything else is loaded by the model's own code, or `load`, as
    `pack(..., model=model)` does; what that refuses but the artifact's adapter does not is packed first.

    Raises CheckpointError and what reading raises.
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
    """Put a packed file's tensors in by name. Raises CheckpointError."""
    tensors, values = named_tensors(model), read_weights(weights, framework="torch")
    problems = list(type_problems(model, artifact.manifest))
    for row in artifact.manifest.weights:
        if (value := values.get(row.name)) is None:
            problems.append(f"{row.name}: not in the file")
        elif value.shape != row.shape:
            problems.append(f"{row.name}: {list(row.shape)}, not {list(value.shape)}")
    if problems:
        raise CheckpointError(f"{weights}: is not for this model: {listed(problems, between='; ')}")
    with torch.no_grad():
        for row in artifact.manifest.weights:
            tensors[row.name].copy_(values[row.name])


def _is_packed(weights: PathLike) -> bool:
    try:
        with open_weights(weights) as opened:
            return opened.stamp is not None
    except WeightFileError:
        return False
