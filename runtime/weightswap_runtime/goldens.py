"""Goldens: recorded inputs with the eager model's outputs for one weights id, as a safetensors file.

Reading and checking the file needs no torch; `verifying` runs it.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from .artifact import Artifact
from .dtypes import DTYPES, describe
from .errors import GoldensError, InputMismatch, OutOfMemory
from .header import FileTensor, header_length, pack_ranges, parse_header, render_header
from .inputs import Inputs
from .manifest import Manifest
from .signature import Integer, Leaf, Node, Signature, Tensor, leaves, unflatten
from .weightfile import METADATA_KEY, TensorRow, canonical_order
from .weightset import INDEX_SUFFIX, SUFFIX

GOLDENS_NAME = "goldens.safetensors"
GOLDENS_SUFFIX = ".goldens.safetensors"
FORMAT_VERSION = 1
_HEX = re.compile(r"[0-9a-f]{64}")
_AGAIN = "Record the goldens again, copy them again, or remove the file."
_DTYPE_NAMES = {name: name for name in DTYPES}

Value = str | int | None
Tolerance = tuple[float, float]


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Environment(_Document, frozen=True):
    """What decides the last bits of an output: torch's version, the device, its instruction set, intra-op threads."""

    torch: str
    device: str
    capability: str
    threads: int


class Case(_Document, frozen=True):
    """One call of a method: its flat inputs and outputs, in the graph's order.

    A tensor is the name of an entry of the file, an integer is itself, a literal is None: the signature has its value.
    """

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Record(_Document, frozen=True):
    """What `__metadata__` says. `tolerance` is (rtol, atol); None: exact where `environment` is that of the server.

    `digests` are BLAKE3, hexadecimal, by tensor name.
    """

    format_version: int
    graph_id: str
    weights_id: str
    environment: Environment
    tolerance: Tolerance | None
    cases: tuple[Case, ...]
    digests: dict[str, str]


class Content(NamedTuple):
    """A tensor to be written: row-major, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Goldens(NamedTuple):
    """Goldens that were read and checked. Nothing of the file is open.

    bundled: whether they are an artifact's own, and so may be of other weights than those that are staged.
    same_graph: whether they were recorded for the graph that serves.
    """

    where: str
    record: Record
    tensors: Mapping[str, FileTensor]
    data: memoryview
    bundled: bool
    same_graph: bool

    @property
    def weights_id(self) -> str:
        return self.record.weights_id

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.record.cases

    def bytes_of(self, name: str) -> memoryview:
        """The row-major, little-endian bytes of a tensor."""
        place = self.tensors[name]
        return self.data[place.begin : place.end]


def goldens_path(weights: str | os.PathLike[str]) -> Path:
    """`v1.goldens.safetensors` for `v1.safetensors`, or for the index of its shards."""
    path = Path(weights)
    suffix = next((suffix for suffix in (INDEX_SUFFIX, SUFFIX) if path.name.endswith(suffix)), "")
    return path.with_name(path.name.removesuffix(suffix) + GOLDENS_SUFFIX)


def encode_goldens(
    cases: Sequence[Case],
    tensors: Mapping[str, Content],
    *,
    graph_id: str,
    weights_id: str,
    environment: Environment,
    tolerance: Tolerance | None,
) -> bytes:
    """The bytes of a goldens file, in the canonical layout of weight files."""
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    record = Record(
        format_version=FORMAT_VERSION,
        graph_id=graph_id,
        weights_id=weights_id,
        environment=environment,
        tolerance=tolerance,
        cases=tuple(cases),
        digests={row.name: blake3(tensors[row.name].data).hexdigest() for row in order},
    )
    metadata = {"format": "pt", METADATA_KEY: msgspec.json.encode(record).decode()}
    return b"".join([render_header(pack_ranges(order), metadata), *(tensors[row.name].data for row in order)])


def open_goldens(path: str | os.PathLike[str], manifest: Manifest, *, allow_other_graph: bool = False) -> Goldens:
    """Read a goldens file and check it against a manifest: digests, methods, dtypes, shapes.

    The whole file is read into memory. Raises WeightFileError where it is no safetensors file, OutOfMemory, and
    GoldensError for everything else, also for goldens of another graph unless `allow_other_graph` is set.
    """
    raw = _read(Path(path))
    return _decode(raw, str(path), manifest, bundled=False, allow_other_graph=allow_other_graph)


def goldens_beside(
    weights: str | os.PathLike[str], manifest: Manifest, *, allow_other_graph: bool = False
) -> Goldens | None:
    """The goldens beside a weight file; None if there are none. Raises what `open_goldens` raises."""
    path = goldens_path(weights)
    if not os.path.lexists(path):
        return None
    return open_goldens(path, manifest, allow_other_graph=allow_other_graph)


def artifact_goldens(artifact: Artifact) -> Goldens | None:
    """The goldens in an artifact; None if there are none. Raises ArtifactError, WeightFileError and GoldensError."""
    if GOLDENS_NAME not in artifact.manifest.files:
        return None
    raw = artifact.read(GOLDENS_NAME)
    where = str(artifact.path / GOLDENS_NAME)
    return _decode(raw, where, artifact.manifest, bundled=True, allow_other_graph=False)


def _read(path: Path) -> bytes:
    try:
        # without O_NONBLOCK a named pipe would be waited for
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise GoldensError(f"{path}: cannot be read (not a regular file). {_AGAIN}")
            return file.read()
    except (OSError, ValueError) as error:
        raise GoldensError(f"{path!s:.200}: cannot be read ({getattr(error, 'strerror', error)}). {_AGAIN}") from error
    except MemoryError as error:
        raise OutOfMemory(f"{path}: no memory to read it into") from error


def _decode(raw: bytes, where: str, manifest: Manifest, *, bundled: bool, allow_other_graph: bool) -> Goldens:
    length = header_length(raw[:8], len(raw), where)
    header = parse_header(raw[8 : 8 + length], len(raw), where)
    record = _record(header.metadata.get(METADATA_KEY), where)
    same_graph = record.graph_id == manifest.graph_id
    if not same_graph and not allow_other_graph:
        raise GoldensError(
            f"{where}: recorded for the graph {record.graph_id[:12]}, this model is {manifest.graph_id[:12]}. "
            "Record the goldens again, or remove the file."
        )
    data = memoryview(raw)[header.data_start :]
    goldens = Goldens(where, record, header.tensors, data, bundled, same_graph)
    if problems := [*_file_problems(goldens), *_record_problems(goldens, manifest)]:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise GoldensError(f"{where}: unusable goldens: {'; '.join(problems[:10])}{more}. {_AGAIN}")
    return goldens


def _record(text: str | None, where: str) -> Record:
    if text is None:
        raise GoldensError(f"{where}: has no `{METADATA_KEY}` metadata, so it holds no goldens. {_AGAIN}")
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("format_version")
        if type(version) is int and version != FORMAT_VERSION:
            raise GoldensError(
                f"{where}: goldens of format version {version}; this runtime reads {FORMAT_VERSION}. "
                "Install the weightswap that wrote them, or record them again."
            )
        return msgspec.json.decode(text, type=Record)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise GoldensError(f"{where}: its `{METADATA_KEY}` metadata are no goldens ({error}). {_AGAIN}") from error


def _file_problems(goldens: Goldens) -> Iterator[str]:
    """Whether every tensor has the bytes that were recorded, and belongs to a case."""
    digests = goldens.record.digests
    for name in sorted(digests.keys() ^ goldens.tensors.keys()):
        yield f"{name!r} is not both a tensor and a digest"
    for name in sorted(digests.keys() & goldens.tensors.keys()):
        found = blake3(goldens.bytes_of(name)).hexdigest()
        if found != digests[name]:
            recorded = f"{digests[name][:12]!a}" if _HEX.fullmatch(digests[name]) else "no BLAKE3 digest"
            yield f"{name!r}: the file records {recorded}, its bytes have {found[:12]}"
    named = {value for case in goldens.cases for value in (*case.inputs, *case.outputs)}
    yield from (f"{name!r} belongs to no case" for name in sorted(goldens.tensors.keys() - named))


def _record_problems(goldens: Goldens, manifest: Manifest) -> Iterator[str]:
    if tolerance_problem(goldens.record.tolerance):
        yield f"the tolerance {goldens.record.tolerance} is not two finite numbers from 0"
    if not goldens.cases:
        yield "it has no cases"
    for number, case in enumerate(goldens.cases):
        method = manifest.methods.get(case.method)
        if method is None:
            known = ", ".join(manifest.methods)
            yield f"case {number}: the method {case.method!r} is not among those of the artifact ({known})"
        else:
            found = _case_problems(case, method.signature, goldens.tensors)
            yield from (f"case {number}, {case.method}: {problem}" for problem in found)


def tolerance_problem(tolerance: Tolerance | None) -> bool:
    """Whether a tolerance is none: (rtol, atol) must be finite and not negative."""
    return tolerance is not None and not all(math.isfinite(part) and part >= 0 for part in tolerance)


def _case_problems(case: Case, signature: Signature, tensors: Mapping[str, FileTensor]) -> list[str]:
    inputs = input_leaves(signature)
    outputs = leaves(signature.output)
    problems = [
        *_value_problems("inputs", inputs, case.inputs, tensors),
        *_value_problems("outputs", outputs, case.outputs, tensors),
    ]
    if not problems:
        problems += _input_problems(case, signature, tensors)
        for leaf, value in zip(outputs, case.outputs, strict=True):
            if isinstance(leaf, Tensor) and isinstance(value, str):
                text = type_problem(leaf, tensors[value].dtype, tensors[value].shape)
                problems += [f"{leaf.name}{text}"] if text else []
    return problems


def input_leaves(signature: Signature) -> list[Leaf]:
    """The flat inputs of a method, in the graph's order."""
    return [leaf for _, node in (*signature.args, *signature.kwargs) for leaf in leaves(node)]


def _value_problems(
    what: str, wanted: Sequence[Leaf], values: Sequence[Value], tensors: Mapping[str, FileTensor]
) -> Iterator[str]:
    if len(wanted) != len(values):
        yield f"expected {len(wanted)} {what}, found {len(values)}"
        return
    for leaf, value in zip(wanted, values, strict=True):
        if isinstance(leaf, Tensor):
            if value not in tensors:
                yield f"{leaf.name}: expected the name of a tensor in the file, found {value!r:.80}"
        elif (type(value) is int) != isinstance(leaf, Integer):
            expected = "an integer" if isinstance(leaf, Integer) else "null, for a literal"
            yield f"{leaf.name}: expected {expected}, found {value!r:.80}"


def _input_problems(case: Case, signature: Signature, tensors: Mapping[str, FileTensor]) -> tuple[str, ...]:
    """What a server would refuse in a call with these inputs."""
    values = iter([tensors[value] if isinstance(value, str) else value for value in case.inputs])

    def tree(node: Node) -> Any:
        return unflatten(node, [next(values) for _ in leaves(node)])

    check = Inputs(case.method, signature, FileTensor, _DTYPE_NAMES, _nowhere, tuple)
    try:
        args = tuple(tree(node) for _, node in signature.args)
        check.flatten(args, {name: tree(node) for name, node in signature.kwargs})
    except InputMismatch as error:
        return error.problems
    return ()


def _nowhere(tensor: FileTensor) -> None:
    """A tensor of a file is on no device, so on no wrong one."""


def type_problem(leaf: Tensor, dtype: str, shape: Sequence[int]) -> str | None:
    """Why a recorded tensor cannot be that output; None if it can. Sizes that vary are left to a run."""
    fits = len(shape) == len(leaf.shape) and all(
        wanted == size for wanted, size in zip(leaf.shape, shape, strict=True) if isinstance(wanted, int)
    )
    if fits and dtype == leaf.dtype:
        return None
    expected = f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return f": expected {expected}, found {describe(dtype, shape)}"
