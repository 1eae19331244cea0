"""A graph's archive, as `torch.export.save` writes it, and the schema of the document in it.

torch's own reader unpickles records and evaluates texts of the document. This one knows the records of an archive by
their names, decodes its JSON into the types below, and refuses all else. It needs no torch.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from weightswap_runtime.errors import ArtifactError, listed

MAJOR = 8  # version of the schema; a minor version adds parts that older readers may not know
_MODEL = "/models/model.json"
# records with content, none of them a pickle
_MEMBER = re.compile(
    r"[\w.-]+/(models/model\.json|data/(weights/model_weights|constants/model_constants)_config\.json"
    r"|archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id)"
)
# of tensors, whose content is elsewhere in an artifact; torch would unpickle the last one
_EMPTY = re.compile(r"[\w.-]+/data/(weights/weight_\d+|constants/tensor_\d+|sample_inputs/model\.pt)")
_RECORD = re.compile(r"(weight|tensor)_\d+")
_BAGS = re.compile(r"torch\.ops\.aten\.(_?embedding_bag|_embedding_bag_forward_only)\.\w+")


class UnknownPart(Exception):
    """A part of a graph that this version does not know. Exports refuse such graphs."""


def check_records(raw: bytes, where: str) -> None:
    """Raise ArtifactError if an archive has a record that would be unpickled or does not belong in it."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            problems = list(_record_problems(archive, len(raw)))
    except Exception as error:  # zip and JSON readers raise many types for crafted bytes
        raise ArtifactError(f"{where}: not an archive written by torch.export ({error})") from error
    if problems:
        raise ArtifactError(f"{where}: {listed(problems, between='; ')}. Export the artifact again.")


def read_program(raw: bytes) -> Program:
    """Read the one program in an archive's bytes. Raises UnknownPart, msgspec.MsgspecError, and what zipfile raises."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        models = [name for name in archive.namelist() if name.endswith(_MODEL)]
        if len(models) != 1:
            raise UnknownPart(f"{len(models)} models in one archive")
        program = _PROGRAM.decode(archive.read(models[0]))
    if program.schema_version.major != MAJOR:
        raise UnknownPart(f"schema version {program.schema_version.major}")
    return program


class BagInputs(NamedTuple):
    """Inputs of a graph, by their places, that an operator on bags of rows takes as they are."""

    offsets: int
    indices: int | None  # None: they are computed
    includes_last: bool  # the last offset is where the last bag ends


def bag_inputs(raw: bytes, where: str) -> list[BagInputs]:
    """Return which inputs of a graph are offsets of bags: compiled code and GPUs take these as they are.

    Offsets that the graph computes are not among them, nor those in a part that runs on a condition. Raises
    ArtifactError.
    """
    check_records(raw, where)
    try:
        graph = read_program(raw).graph_module.graph
        places = {name: place for place, item in enumerate(graph.inputs) for name in argument_names(item)}
        calls = [{item.name: item.arg for item in node.inputs} for node in graph.nodes if _BAGS.fullmatch(node.target)]
        found = [
            BagInputs(places[offsets], places.get(indices), _is_true(call.get("include_last_offset")))
            for call in calls
            for indices, offsets in zip(argument_names(call["indices"]), argument_names(call["offsets"]), strict=True)
            if offsets in places
        ]
    except Exception as error:  # as in `check_records`
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error
    return list(dict.fromkeys(found))


def _is_true(argument: Argument | None) -> bool:
    return argument is not None and read_argument(argument) == ("as_bool", True)


def read_argument(argument: Argument) -> tuple[str, Any]:
    """Return an argument's kind and its typed value. Raises UnknownPart and msgspec.MsgspecError."""
    if len(argument) != 1:
        raise UnknownPart(f"an argument with the entries {sorted(argument)!r:.80}")
    ((kind, raw),) = argument.items()
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise UnknownPart(f"an argument of the kind {kind!r:.40}")
    return kind, decoder.decode(raw)


def argument_names(argument: Argument) -> list[str]:
    """Return the names of values that an argument uses or an output defines, without those inside a subgraph."""
    if "as_graph" in argument:
        return []
    _, value = read_argument(argument)
    return list(_named(value))


def _named(value: Any) -> Iterator[str]:
    match value:
        case Name():
            yield value.name
        case Symbol() if value.as_name is not None:
            yield value.as_name
        case OptionalTensor() if value.as_tensor is not None:
            yield value.as_tensor.name
        case list():
            for item in value:
                yield from _named(item)
        case dict():
            for item in value.values():
                yield from argument_names(item)


def calls(raw: bytes) -> Counter[str]:
    """Count the calls in the graphs of a checked archive by target, `torch.ops.NAMESPACE.NAME.OVERLOAD`.

    It also finds the calls of a graph with parts that `read_argument` does not know.
    """
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        models = [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith(_MODEL)]
    return Counter(target for model in models for target in _targets(model))


def _targets(value: Any) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _targets(item)
    if isinstance(value, dict) and isinstance(value.get("target"), str) and "inputs" in value:
        yield value["target"]


def _record_problems(archive: zipfile.ZipFile, size: int) -> Iterator[str]:
    members = archive.infolist()
    if len({info.filename for info in members}) != len(members):
        yield "two records have the same name"  # which of them a reader takes would differ
    elif len({info.filename.partition("/")[0] for info in members}) > 1:
        yield "its records are in several folders"
    elif any(info.compress_type != zipfile.ZIP_STORED for info in members):
        yield "its records are compressed"  # a small file could fill the memory
    elif sum(info.file_size for info in members) > size:
        yield "its records overlap"
    else:
        yield from _member_problems(archive)


def _member_problems(archive: zipfile.ZipFile) -> Iterator[str]:
    for info in archive.infolist():
        if _EMPTY.fullmatch(info.filename):
            if info.file_size:
                yield f"the record {info.filename!r} must be empty"
        elif not _MEMBER.fullmatch(info.filename):
            yield f"the record {info.filename!r} does not belong in an artifact"
        elif info.filename.endswith("_config.json"):
            yield from _config_problems(json.loads(archive.read(info)))


def _config_problems(config: dict[str, Any]) -> Iterator[str]:
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False or not _RECORD.fullmatch(entry["path_name"]):
            yield f"the record of {name!r} would be unpickled"


Argument = dict[str, msgspec.Raw]  # one entry, whose key is the argument's kind
_NONE = msgspec.Raw(b"{}")
Float = float | str  # JSON has no numbers for "Infinity", "-Infinity" and "NaN"


class SchemaRecord(msgspec.Struct, frozen=True):
    """A part of the JSON. Other entries, such as stack traces, are skipped."""


class SchemaVersion(SchemaRecord, frozen=True):
    """Version of the schema."""

    major: int
    minor: int


class NamedArgument(SchemaRecord, frozen=True):
    """An argument of a call."""

    name: str
    arg: Argument
    kind: int | None = None  # 1: positional, 2: keyword


class Node(SchemaRecord, frozen=True):
    """One call."""

    target: str
    inputs: tuple[NamedArgument, ...]
    outputs: tuple[Argument, ...]
    is_hop_single_tensor_return: bool | None = None  # of a higher-order operator
    metadata: msgspec.Raw = _NONE  # texts by name, such as the stack of modules; engines do not decode them


class Graph(SchemaRecord, frozen=True):
    """Calls, in order."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    nodes: tuple[Node, ...]
    is_single_tensor_return: bool = False  # it returns a tensor as it is, not in a tuple
    tensor_values: msgspec.Raw = _NONE  # dtypes and sizes by name; these and the next are not decoded by engines
    sym_int_values: msgspec.Raw = _NONE  # sizes by name


class GraphModule(SchemaRecord, frozen=True):
    """The graph of a method."""

    graph: Graph


class Program(SchemaRecord, frozen=True):
    """The whole document."""

    graph_module: GraphModule
    schema_version: SchemaVersion


class Name(SchemaRecord, frozen=True):
    """A tensor."""

    name: str


class Symbol(SchemaRecord, frozen=True):
    """A number: the name of a computed one, or a constant."""

    as_name: str | None = None
    as_int: int | None = None
    as_float: Float | None = None
    as_bool: bool | None = None


class OptionalTensor(SchemaRecord, frozen=True):
    """A tensor or None."""

    as_tensor: Name | None = None


class SchemaDevice(SchemaRecord, frozen=True):
    """The device that a tensor was on when the graph was captured."""

    type: str
    index: int | None = None


class Complex(SchemaRecord, frozen=True):
    """A complex number."""

    real: float
    imag: float


class Subgraph(SchemaRecord, frozen=True):
    """A graph that a higher-order operator runs."""

    name: str
    graph: Graph


_TYPES: dict[str, Any] = {
    "as_none": bool,
    "as_tensor": Name,
    "as_tensors": list[Name],
    "as_int": int,
    "as_ints": list[int],
    "as_float": Float,
    "as_floats": list[Float],
    "as_string": str,
    "as_strings": list[str],
    "as_sym_int": Symbol,
    "as_sym_ints": list[Symbol],
    "as_scalar_type": int,
    "as_memory_format": int,
    "as_layout": int,
    "as_device": SchemaDevice,
    "as_bool": bool,
    "as_bools": list[bool],
    "as_sym_bool": Symbol,
    "as_sym_bools": list[Symbol],
    "as_graph": Subgraph,
    "as_optional_tensor": OptionalTensor,
    "as_optional_tensors": list[OptionalTensor],
    "as_sym_float": Symbol,
    "as_sym_floats": list[Symbol],
    "as_complex": Complex,
    "as_nested_tensors": list[list[Name]],
    "as_int_lists": list[list[int]],
    "as_float_lists": list[list[Float]],
    "as_string_to_argument": dict[str, Argument],
}
_DECODERS = {kind: msgspec.json.Decoder(value_type) for kind, value_type in _TYPES.items()}
_PROGRAM = msgspec.json.Decoder(Program)
