"""ONNX models for other tools, whose weights are external data in a weight file."""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import onnx
except ImportError as error:
    raise MissingExtra("writing ONNX graphs", "onnx-export") from error

import os
from pathlib import Path

from weightswap_runtime import Artifact
from weightswap_runtime.engines import onnx_names
from weightswap_runtime.engines.onnx_names import element_of
from weightswap_runtime.errors import ExportError, UnknownName, Unsupported, WeightsMismatch
from weightswap_runtime.format.manifest import NamedTensor
from weightswap_runtime.format.weight_set import StoredTensor, open_weights
from weightswap_runtime.sources.byte_source import LocalFile
from weightswap_runtime.sources.location import check_writable
from weightswap_runtime.sources.writing import new_file
from weightswap_runtime.staging.request import SwapRequest
from weightswap_runtime.staging.sets import Plan, plan


def export_onnx(
    artifact: str | os.PathLike[str] | Artifact,
    weights: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    method: str | None = None,
) -> Path:
    """Write one method as an ONNX model whose initialisers are external data in a weight file. No tensor is copied.

    artifact: compiled for the engine `onnx`; otherwise its graph is translated now, which needs torch. weights: a local
    weight file, or .safetensors files that hold every weight unchanged, under runtime names or the checkpoint's keys.
    It must lie in the folder of `out` or below, as ONNX requires relative paths. If it is replaced, the model uses the
    new content, whatever that is. method: by default `forward`, or the only one. State stays an input, with its value
    after the call as an output (`NAME.after`).

    Returns the path of the model. Raises ArtifactError, CaptureError, UnknownName, Unsupported, ExportError, and the
    errors of opening weights.
    """
    check_writable(out)
    if Path(out).is_dir():
        raise ExportError(f"{out}: is a folder; give the name of the .onnx file")
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    path, name = Path(out), _method(opened, method)
    model = onnx.load_from_string(_graph(opened, name))
    with open_weights(weights) as files:
        planned = plan(files, opened.manifest, SwapRequest(weights))
        if planned.match.computed:
            raise WeightsMismatch(
                files.where,
                [f"{weight}: has to be computed by the conversion" for weight in planned.match.computed],
                "Pack the checkpoint first: weightswap pack.",
            )
        if any(isinstance(file.path, Path) and path.resolve() == file.path.resolve() for file in files.files):
            raise ExportError(f"{path}: is the weight file itself; give the name of an .onnx file beside it")
        _point(model, opened.manifest.weights, planned, path)
    _write(model, path)
    return path


def _method(artifact: Artifact, method: str | None) -> str:
    name = method or ("forward" if "forward" in artifact.methods or len(artifact.methods) != 1 else artifact.methods[0])
    if name not in artifact.methods:
        raise UnknownName(f"{name!r} is not a method of this artifact, which has: {', '.join(artifact.methods)}")
    return name


def _graph(artifact: Artifact, method: str) -> bytes:
    if (file := onnx_names.graph_file(method)) in artifact.manifest.files:
        return artifact.read(file)
    from .onnx import onnx_graph

    return onnx_graph(artifact, method)


def _point(model: onnx.ModelProto, rows: tuple[NamedTensor, ...], planned: Plan, path: Path) -> None:
    """Turn the inputs that are weights into initialisers."""
    weights = {name: row for row in rows for name in row.names}
    inputs = list(model.graph.input)
    del model.graph.input[:]
    for item in inputs:
        if (row := weights.get(item.name)) is None:
            model.graph.input.append(item)
            continue
        stored = planned.weights.tensors[planned.match.found[row.name][0]]
        model.graph.initializer.append(_pointer(item.name, stored, path))


def _pointer(name: str, stored: StoredTensor, path: Path) -> onnx.TensorProto:
    if not isinstance(stored.source, LocalFile):
        raise Unsupported(f"{stored.source.where}: an ONNX model cannot point to a URL; copy the file beside it")
    file = stored.source.path
    try:
        location = file.resolve().relative_to(path.parent.resolve())
    except ValueError:
        raise ExportError(
            f"{path}: must be in the folder of {file} or above, because ONNX allows only paths from there down"
        ) from None
    code = element_of(name, stored.dtype).code
    if not stored.nbytes:
        return onnx.TensorProto(name=name, data_type=code, dims=stored.shape, raw_data=b"")
    tensor = onnx.TensorProto(name=name, data_type=code, dims=stored.shape, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location.as_posix()), ("offset", stored.offset), ("length", stored.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _write(model: onnx.ModelProto, path: Path) -> None:
    try:
        with new_file(path) as file:
            file.write(model.SerializeToString(deterministic=True))
            file.flush()
            onnx.checker.check_model(file.name, full_check=True)
    except onnx.checker.ValidationError as error:
        raise ExportError(*f"{path}: the ONNX checker refuses it: {error}".splitlines()) from error
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error})") from error
