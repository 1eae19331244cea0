"""Goldens: recorded calls of the eager model for one weights id, as a safetensors file.

They lie beside a weight file or in an artifact; an artifact that was exported without weights has inputs only, in the
same format. Reading and checking the file needs no torch; `staging.golden_check` runs the recorded calls.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import InputMismatch, Unsupported, WeightFileError, listed
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Location, Url, as_location
from weightswap_runtime.sources.opening import read_beside, read_small
from weightswap_runtime.tensors import DIGEST, DTYPES, TensorBytes, Tolerance, Typed, describe, digest_of

from .artifact import Artifact
from .canonical import canonical_order, encode_tensors
from .manifest import Manifest, Versioned
from .safetensors import LEAST_HEADER, METADATA_KEY, TensorRow, parse_file
from .signature import CallCheck, Integer, Leaf, Signature, Tensor, call_arguments, input_leaves, leaves
from .weight_set import WeightSet, goldens_name

GOLDENS_NAME = "goldens.safetensors"
INPUTS_NAME = "inputs.safetensors"  # of an artifact without weights
FORMAT_VERSION = 1
_MOST_BYTES = 4 << 30  # of a goldens file, which is read whole
_AGAIN = "Record the goldens again, copy them again, or remove the file."

Mode = Literal["goldens", "finite", "off"]  # of verification, by an operator's `verify=`
Value = str | int | None


def check_mode(mode: str) -> None:
    """Raise Unsupported for an unknown mode of verification."""
    if mode not in get_args(Mode):
        raise Unsupported(f"verify={mode!r}: expected {', '.join(map(repr, get_args(Mode)))}")


class _GoldensPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Case(_GoldensPart, frozen=True):
    """Recorded call of a method: its flat inputs and outputs, in the graph's order.

    A tensor is stored as the name of the file's tensor, an integer as itself, a literal as None: the signature has its
    value.
    """

    method: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Environment(_GoldensPart, frozen=True):
    """What an output's last bits depend on, besides the graph and the weights."""

    torch: str
    device: str
    capability: str
    threads: int  # intra-op


class GoldensRecord(_GoldensPart, frozen=True):
    """Record in `__metadata__`."""

    format_version: int
    graph_id: str
    weights_id: str | None  # None, as the environment, if the file has inputs only
    environment: Environment | None
    tolerance: Tolerance | None  # None: outputs are exact on a server with the same environment
    cases: tuple[Case, ...]
    digests: dict[str, str]  # by the names of the file's tensors

    @property
    def has_outputs(self) -> bool:
        return self.weights_id is not None


class Goldens(NamedTuple):
    """Goldens that were read into memory and checked; the file is closed."""

    where: str
    record: GoldensRecord
    tensors: Mapping[str, TensorBytes]
    bundled: bool  # an artifact's own, which may belong to weights other than the staged ones
    same_graph: bool  # they were recorded for the served graph

    @property
    def weights_id(self) -> str | None:
        return self.record.weights_id

    @property
    def cases(self) -> tuple[Case, ...]:
        return self.record.cases

    def calls(self) -> Iterator[str]:
        """Yield what each case calls: its method and its inputs, with the digests of tensors, whatever their names."""
        for case in self.cases:
            inputs = [
                f"{describe(self.tensors[value])} {self.record.digests[value]}" if isinstance(value, str) else value
                for value in case.inputs
            ]
            yield f"{case.method} {inputs}\n"


def open_goldens(path: str | os.PathLike[str], manifest: Manifest) -> Goldens:
    """Read a goldens file and check it against a manifest: digests, methods, dtypes, shapes.

    The whole file is read into memory. They may be of another graph. Raises OutOfMemory, and WeightFileError for
    everything else.
    """
    raw = read_small(path, _MOST_BYTES)
    if raw is None:
        raise WeightFileError(f"{path}: cannot be opened (no such file)")
    return _decode(raw, str(path), manifest, bundled=False, allow_other_graph=True)


def goldens_beside(
    weights: str | os.PathLike[str] | Url,
    manifest: Manifest,
    *,
    allow_other_graph: bool = False,
    check: Check | None = None,
) -> Goldens | None:
    """Read the goldens beside a weight file; None if there are none, or if a remote server denies access to them.

    check: a callback, called while waiting for a remote response. Raises what `open_goldens` raises, and
    WeightFileError for goldens of another graph unless `allow_other_graph` is set.
    """
    location = as_location(weights)
    raw = read_goldens(location, check)
    if raw is None:
        return None
    where = str(location.with_name(goldens_name(location.name)))
    return _decode(raw, where, manifest, bundled=False, allow_other_graph=allow_other_graph)


def record_beside(weights: Location) -> GoldensRecord | None:
    """Read the record of the goldens beside a weight file, unchecked; None as for `goldens_beside`."""
    raw, where = read_goldens(weights), str(weights.with_name(goldens_name(weights.name)))
    return None if raw is None else _record(parse_file(raw, where)[1], where)


def read_goldens(weights: Location, check: Check | None = None) -> bytearray | None:
    """Return the bytes of the goldens beside a weight file; None as for `goldens_beside`."""
    return read_beside(weights, goldens_name(weights.name), _MOST_BYTES, check)


def record_of(weights: WeightSet) -> GoldensRecord | None:
    """Return the record of goldens that were opened as a weight set, unchecked; None for other files.

    Raises WeightFileError.
    """
    return _record(weights.metadata, weights.where) if weights.holds_goldens else None


def artifact_goldens(artifact: Artifact) -> Goldens | None:
    """Return the goldens of an artifact, or its inputs; None if it has neither.

    Raises ArtifactError and WeightFileError.
    """
    name = next((name for name in (GOLDENS_NAME, INPUTS_NAME) if name in artifact.manifest.files), None)
    if name is None:
        return None
    raw = artifact.read(name)
    where = str(artifact.path / name)
    return _decode(raw, where, artifact.manifest, bundled=True, allow_other_graph=False)


def encode_goldens(
    cases: Sequence[Case],
    tensors: Mapping[str, TensorBytes],
    *,
    graph_id: str,
    weights_id: str | None,
    environment: Environment | None,
    tolerance: Tolerance | None,
) -> bytes:
    """Return the bytes of a goldens file, in the canonical layout of weight files.

    weights_id: None if the file has inputs only. Raises Unsupported for more than readers take.
    """
    if (size := sum(tensor.nbytes for tensor in tensors.values())) > _MOST_BYTES - LEAST_HEADER:
        raise Unsupported(f"goldens of {size} bytes, expected at most 4 GiB: record fewer calls, or smaller ones")
    order = canonical_order(TensorRow(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    record = GoldensRecord(
        format_version=FORMAT_VERSION,
        graph_id=graph_id,
        weights_id=weights_id,
        environment=environment,
        tolerance=tolerance,
        cases=tuple(cases),
        digests={row.name: digest_of([tensors[row.name].data]) for row in order},
    )
    return b"".join(encode_tensors(tensors, {METADATA_KEY: msgspec.json.encode(record).decode()}))


def _decode(
    raw: bytes | bytearray, where: str, manifest: Manifest, *, bundled: bool, allow_other_graph: bool
) -> Goldens:
    tensors, metadata = parse_file(raw, where, LEAST_HEADER + manifest.most_header)
    record = _record(metadata, where)
    same_graph = record.graph_id == manifest.packed_for
    if not same_graph and not allow_other_graph:
        raise WeightFileError(
            f"{where}: recorded for the graph {record.graph_id[:12]}, but this model has {manifest.packed_for[:12]}. "
            "Record the goldens again, or remove the file.",
            reason="damaged",
        )
    goldens = Goldens(where, record, tensors, bundled, same_graph)
    if problems := [*_file_problems(goldens), *_record_problems(goldens, manifest)]:
        raise WeightFileError(f"{where}: unusable goldens: {listed(problems, 10, '; ')}. {_AGAIN}", reason="damaged")
    return goldens


def _record(metadata: Mapping[str, str], where: str) -> GoldensRecord:
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise WeightFileError(
            f"{where}: has no `{METADATA_KEY}` metadata, so it holds no goldens. {_AGAIN}", reason="damaged"
        )
    try:
        version = from_json(text, Versioned).number
        if version is not None and version != FORMAT_VERSION:
            raise WeightFileError(
                f"{where}: goldens of format version {version}; this runtime reads {FORMAT_VERSION}. "
                "Install the weightswap that wrote them, or record them again.",
                reason="damaged",
            )
        return from_json(text, GoldensRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WeightFileError(
            f"{where}: its `{METADATA_KEY}` metadata is invalid ({error}). {_AGAIN}", reason="damaged"
        ) from error


def _file_problems(goldens: Goldens) -> Iterator[str]:
    """Yield the problems of tensors whose bytes are not the recorded ones, or that belong to no case."""
    digests = goldens.record.digests
    for name in sorted(digests.keys() ^ goldens.tensors.keys()):
        yield f"{name!r} lacks a tensor or a digest"
    for name in sorted(digests.keys() & goldens.tensors.keys()):
        digest = digest_of([goldens.tensors[name].data])
        if digest != digests[name]:
            recorded = f"{digests[name][:12]!a}" if DIGEST.fullmatch(digests[name]) else "no BLAKE3 digest"
            yield f"{name!r}: the file records {recorded}, its bytes have {digest[:12]}"
    named = {value for case in goldens.cases for value in (*case.inputs, *case.outputs)}
    yield from (f"{name!r} belongs to no case" for name in sorted(goldens.tensors.keys() - named))


def _record_problems(goldens: Goldens, manifest: Manifest) -> Iterator[str]:
    tolerance = goldens.record.tolerance or ()
    if not all(math.isfinite(part) and part >= 0 for part in tolerance):
        yield f"the tolerance {tolerance} is not two finite numbers of at least 0"
    if (goldens.record.environment is None) is goldens.record.has_outputs:
        yield "it has a weights id without an environment, or an environment without a weights id"
    if not goldens.cases:
        yield "it has no cases"
    for number, case in enumerate(goldens.cases):
        method = manifest.methods.get(case.method)
        if method is None:
            known = ", ".join(manifest.methods)
            yield f"case {number}: the method {case.method!r} is not among those of the artifact ({known})"
        else:
            problems = _case_problems(case, method.signature, goldens.tensors, goldens.record.has_outputs)
            yield from (f"case {number}, {case.method}: {problem}" for problem in problems)


def _case_problems(
    case: Case, signature: Signature, tensors: Mapping[str, TensorBytes], has_outputs: bool
) -> list[str]:
    """Return the reasons why a case cannot be a call of the method."""
    inputs = input_leaves(signature)
    outputs = leaves(signature.output) if has_outputs else []
    problems = [
        *_value_problems("inputs", inputs, case.inputs, tensors),
        *_value_problems("outputs", outputs, case.outputs, tensors),
    ]
    if not problems:
        problems += _input_problems(case, signature, tensors)
        for leaf, value in zip(outputs, case.outputs, strict=True):
            if isinstance(leaf, Tensor) and isinstance(value, str):
                text = type_problem(leaf, tensors[value])
                problems += [f"{leaf.name}{text}"] if text else []
    return problems


def _value_problems(
    kind: str, expected_leaves: Sequence[Leaf], values: Sequence[Value], tensors: Mapping[str, TensorBytes]
) -> Iterator[str]:
    if len(expected_leaves) != len(values):
        yield f"expected {len(expected_leaves)} {kind}, found {len(values)}"
        return
    for leaf, value in zip(expected_leaves, values, strict=True):
        if isinstance(leaf, Tensor):
            fits, expected = value in tensors, "the name of a tensor in the file"
        elif isinstance(leaf, Integer):
            fits, expected = type(value) is int, "an integer"
        else:
            fits, expected = value is None, "null, as the signature has the literal"
        if not fits:
            yield f"{leaf.name}: expected {expected}, found {value!r:.80}"


def _input_problems(case: Case, signature: Signature, tensors: Mapping[str, TensorBytes]) -> tuple[str, ...]:
    """Return the problems for which a server would refuse a call with these inputs."""
    flat = [tensors[value] if isinstance(value, str) else value for value in case.inputs]
    dtypes = {name: name for name in DTYPES}
    # a tensor of a file is on no device, so the check of the device is left out
    check = CallCheck(case.method, signature, TensorBytes, dtypes, lambda _: None, id)
    try:
        check.flatten(*call_arguments(signature, flat))
    except InputMismatch as error:
        return error.problems
    return ()


def type_problem(leaf: Tensor, recorded: Typed) -> str | None:
    """Return why a recorded tensor cannot be the output `leaf`; None if it can. Dynamic sizes are not checked here."""
    fits = len(recorded.shape) == len(leaf.shape) and all(
        expected == size for expected, size in zip(leaf.shape, recorded.shape, strict=True) if isinstance(expected, int)
    )
    if fits and recorded.dtype == leaf.dtype:
        return None
    return f": expected {leaf.dtype}[{', '.join(map(str, leaf.shape))}], found {describe(recorded)}"
