"""The manifest of an artifact: a typed document that describes all other files of the folder (docs/format.md).

Decoding refuses what contradicts itself, so that all other code may take a `Manifest` at its word: names are unique,
graphs take only tensors that are listed, each weight has a source, and the graph id is that of the contents.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import msgspec
from blake3 import blake3

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import ArtifactError, listed
from weightswap_runtime.tensors import DIGEST, DTYPES, describe, is_valid, nbytes

from .expressions import parse_condition
from .safetensors import LEAST_HEADER, MAX_HEADER, TensorRow
from .signature import Leaf, Node, Signature, Size, Tensor, input_leaves, leaves, parse_size, sizes_of
from .signature import Literal as LiteralLeaf

FORMAT_VERSION = 1
VARIANTS_VERSION = 2  # of artifacts that declare variants: readers that know none must not serve them
RANKS_VERSION = 3  # of artifacts for several ranks, each of which has a part of the weights
MANIFEST_NAME = "manifest.json"
CONSTANTS_NAME = "constants.safetensors"
PARTS_NAME = "parts.json"
CONVERSION_NAME = "conversion.pt2"
CONVERSION_CONSTANTS_NAME = "conversion.safetensors"
METHOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STEPS = ("prefill", "decode")  # the methods that generate text
_BYTES_FOR_DIGEST = 20_000  # of tensors for each byte of their blocks' digests: 44 for 1 MiB
_MOST_ELEMENTS = 1 << 63  # the strides of larger tensors do not fit into 64 bits
_MOST_PROBLEMS = 1000  # that are looked for: a hostile manifest may have any number


class _ManifestPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Versioned(msgspec.Struct):
    """The version of a document of any version; other values than numbers are not decoded."""

    format_version: msgspec.Raw = msgspec.Raw(b"")

    @property
    def number(self) -> int | None:
        text = bytes(self.format_version)
        return int(text) if text.isdigit() and len(text) < 20 else None


class GraphInput(_ManifestPart, frozen=True, array_like=True):
    """Flat input of a graph: a named tensor, or an argument of the call (`name` is then only for messages)."""

    kind: Literal["weight", "state", "constant", "input", "variant"]
    name: str


class Method(_ManifestPart, frozen=True):
    """Named entry point: the file of its graph, the graph's flat inputs in order, and the signature for callers."""

    graph: str
    inputs: tuple[GraphInput, ...]
    signature: Signature

    @property
    def has_state(self) -> bool:
        """True if the graph takes state tensors."""
        return any(item.kind == "state" for item in self.inputs)


class Cut(_ManifestPart, frozen=True, omit_defaults=True):
    """How ranks share a weight: along one dimension, in even parts, of which each has one."""

    dim: int
    groups: int = 1  # of that dimension, each of which is cut by itself, such as gate and up in one tensor
    repeat: int = 1  # neighbouring ranks that have the same part, such as a key-value head


class Split(_ManifestPart, frozen=True):
    """What makes a model's ranks one model."""

    size: int  # the number of ranks
    whole: str  # the graph id of the same model in one process: weight files are packed for it, whatever the size
    # by the names of weights; every rank has the whole of all others. The table of weights has the shapes of the whole,
    # as files do; graphs take those of the parts
    cuts: dict[str, Cut]


class NamedTensor(_ManifestPart, frozen=True):
    """Weight, state tensor, constant, or tensor of a group of variants."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()  # FQNs of the tensors tied to it
    stride: tuple[int, ...] | None = None  # in elements, if the model's order is not row-major; that of files always is
    requires_grad: bool = False  # some operators choose their algorithm by it, and so the bits of their results
    zero: bool = False  # a state tensor whose initial values are zeros, which are stored in no file

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def row(self) -> TensorRow:
        return TensorRow(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


class WeightSource(_ManifestPart, frozen=True):
    """Source of a weight in a checkpoint."""

    weight: str
    keys: tuple[str, ...]
    # None: each of the keys holds the weight unchanged; there are several if tied tensors are saved under each name.
    # A number: the weight is that output of `conversion.pt2`, computed from all of the keys.
    transform: int | None = None


class ConversionInput(_ManifestPart, frozen=True, array_like=True):
    """Input of `conversion.pt2`: a tensor of the checkpoint, or a constant in `conversion.safetensors`."""

    kind: Literal["key", "constant"]
    name: str
    dtype: str
    shape: tuple[int, ...]


class Conversion(_ManifestPart, frozen=True):
    """Recorded way from checkpoint keys to weights."""

    sources: tuple[WeightSource, ...]
    ignored: tuple[str, ...] = ()  # keys that may be present, and are not read
    needed: tuple[str, ...] = ()  # those of them without which the loading code does something else
    inputs: tuple[ConversionInput, ...] = ()  # of the graph that computes weights, in order; empty if there is none
    untraceable: str = ""  # why the loading code could not be recorded; a server then accepts weight files only


class Producer(_ManifestPart, frozen=True):
    weightswap: str
    torch: str


class TextGeneration(_ManifestPart, frozen=True):
    """Declaration that `prefill` and `decode` generate text."""

    length: int  # the most tokens of a row
    batch: int  # the rows of a context
    vocabulary: int  # tokens are numbers below it
    ends: tuple[int, ...]  # a row ends after any of these tokens
    pad: int  # the token at places that have none


class Manifest(_ManifestPart, frozen=True, omit_defaults=True):
    """The whole document."""

    format_version: int
    graph_id: str
    producer: Producer
    device: str
    methods: dict[str, Method]
    weights: tuple[NamedTensor, ...]
    state: tuple[NamedTensor, ...]
    constants: tuple[NamedTensor, ...]
    conversion: Conversion
    files: dict[str, str]  # each other file of the artifact -> its BLAKE3 digest
    generation: TextGeneration | None = None
    # group -> its tensors, whose values a call chooses among the resident variants; zeros if it chooses none
    variants: dict[str, tuple[NamedTensor, ...]] = {}
    ranks: Split | None = None  # None: the model runs in one process
    # the settings of a transformers model on which its outputs depend; those of checkpoints have to be the same
    config: dict[str, Any] = {}

    @property
    def packed_for(self) -> str:
        """The graph id in the weight files, deltas and goldens that are for this artifact."""
        return self.ranks.whole if self.ranks else self.graph_id

    @property
    def variable(self) -> tuple[NamedTensor, ...]:
        """The tensors of all groups of variants."""
        return tuple(row for rows in self.variants.values() for row in rows)

    @property
    def most_header(self) -> int:
        """The most bytes of the header of a file for this graph: what weights and a delta of all of them need, with
        digests, and three times as much for other tensors of a checkpoint."""
        rows = (*self.weights, *self.state, *self.variable)
        names = {name for row in rows for name in row.names} | {*self.conversion.ignored, *self.conversion.needed}
        names |= {key for source in self.conversion.sources for key in source.keys}
        needed = sum(1000 + 6 * len(name.encode()) for name in names)
        needed += self.total_bytes // _BYTES_FOR_DIGEST
        return min(MAX_HEADER, max(LEAST_HEADER, 4 * needed))

    @property
    def total_bytes(self) -> int:
        """Size of one set of weights."""
        return sum(weight.nbytes for weight in self.weights)


def graph_identity(manifest: Manifest) -> str:
    """Return the graph id: the BLAKE3 digest of everything that affects outputs, except the weights' values.

    It covers the methods, the tables of weights, state, constants and variants, and the bytes of graphs and constants.
    It does not cover the conversion (how a checkpoint becomes weights) and the engines' files built from the graphs.
    """
    names = sorted({method.graph for method in manifest.methods.values()} | {CONSTANTS_NAME})
    files = {name: manifest.files.get(name) for name in names}
    document: list[object] = [manifest.methods, manifest.weights, manifest.state, manifest.constants, files]
    document += [manifest.variants] if manifest.variants else []
    document += [manifest.ranks] if manifest.ranks else []
    return blake3(msgspec.json.encode(document, order="sorted")).hexdigest()


def with_graph_id(manifest: Manifest) -> Manifest:
    """Return the manifest with the graph id computed from its contents."""
    return msgspec.structs.replace(manifest, graph_id=graph_identity(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as readable, deterministic JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(raw: bytes, where: str) -> Manifest:
    """Decode and validate a manifest.

    Raises ArtifactError, also for an unknown format version.
    """
    advice = "Export the artifact again, or copy it again."
    try:
        version = from_json(raw, Versioned).number
        if version is not None and not FORMAT_VERSION <= version <= RANKS_VERSION:
            raise ArtifactError(
                f"{where}: format version {version}; this runtime reads {FORMAT_VERSION} to {RANKS_VERSION}. "
                f"Install the weightswap that wrote it, or export again."
            )
        manifest = from_json(raw, Manifest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ArtifactError(f"{where}: not a weightswap manifest ({error}). {advice}") from error
    problems = list(islice(_problems(manifest), _MOST_PROBLEMS))
    if problems:
        raise ArtifactError(f"{where}: the manifest contradicts itself: {listed(problems, 10, '; ')}. {advice}")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _file_problems(manifest)
    yield from _tensor_problems(manifest)
    tables = {
        "weight": manifest.weights,
        "state": manifest.state,
        "constant": manifest.constants,
        "variant": manifest.variable,
    }
    known = {kind: {name for row in rows for name in row.names} for kind, rows in tables.items()}
    for name, method in manifest.methods.items():
        yield from _method_problems(name, method, known)
    if not manifest.methods:
        yield "it has no methods"
    yield from _conversion_problems(manifest)
    if manifest.generation:
        yield from _generation_problems(manifest.generation, manifest.methods)
    if bool(manifest.variants) != (manifest.format_version == VARIANTS_VERSION):
        yield f"its format version {manifest.format_version} contradicts whether it declares variants"
    if bool(manifest.ranks) != (manifest.format_version == RANKS_VERSION):
        yield f"its format version {manifest.format_version} contradicts whether it is for several ranks"
    yield from _rank_problems(manifest)
    yield from (
        f"the group {name!r} of variants has no tensors" for name, rows in manifest.variants.items() if not rows
    )
    actual = graph_identity(manifest)
    if actual != manifest.graph_id:
        yield f"its graph id is {manifest.graph_id[:12]}, its contents give {actual[:12]}"


def _file_problems(manifest: Manifest) -> Iterator[str]:
    for name, digest in manifest.files.items():
        parts = name.split("/")
        if not name or any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
            yield f"the file {name!r} would be outside the artifact"
        if not DIGEST.fullmatch(digest):
            yield f"the file {name!r} has no BLAKE3 digest"
    for name in [CONSTANTS_NAME, *(method.graph for method in manifest.methods.values())]:
        if name not in manifest.files:
            yield f"{name!r} is not among its files"


def _tensor_problems(manifest: Manifest) -> Iterator[str]:
    tensors = (*manifest.weights, *manifest.state, *manifest.constants, *manifest.variable)
    for name, count in Counter(name for tensor in tensors for name in tensor.names).items():
        if count > 1:
            yield f"{name!r} names {count} tensors"
    yield from (
        f"{row.name!r} is not state, and has no values"
        for row in (*manifest.weights, *manifest.constants, *manifest.variable)
        if row.zero
    )
    for tensor in tensors:
        if not is_valid(tensor):
            yield f"{tensor.name!r} has the type {describe(tensor)}"
        elif math.prod(max(1, size) for size in tensor.shape) >= _MOST_ELEMENTS:
            yield f"{tensor.name!r} has the shape {list(tensor.shape)}"
        elif tensor.stride is not None and not is_dense(tensor.shape, tensor.stride):
            yield f"{tensor.name!r} has the stride {list(tensor.stride)} for the shape {list(tensor.shape)}"
        elif tensor.requires_grad and tensor.dtype[0] not in "BCF":
            yield f"{tensor.name!r} is {tensor.dtype} and cannot require a gradient"


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if the strides are those of a permuted row-major tensor, without gaps and overlaps."""
    if len(stride) != len(shape):
        return False
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _method_problems(name: str, method: Method, known: Mapping[str, Collection[str]]) -> Iterator[str]:
    if not METHOD_NAME.fullmatch(name):
        yield f"the method name {name!r} is not an identifier"
    for item in method.inputs:
        if item.kind != "input" and item.name not in known[item.kind]:
            yield f"{name} takes the {item.kind} {item.name!r}, which the manifest does not list"
    signature = method.signature
    inputs = input_leaves(signature)
    if len(inputs) != sum(item.kind == "input" for item in method.inputs):
        yield f"{name} has {len(inputs)} inputs in its signature and a different number in its graph"
    for leaf in (*inputs, *leaves(signature.output)):
        yield from _leaf_problems(name, leaf)
    yield from _dimension_problems(name, signature, inputs)


def _leaf_problems(name: str, leaf: Leaf) -> Iterator[str]:
    if isinstance(leaf, Tensor) and leaf.dtype not in DTYPES:
        yield f"{name}: {leaf.name!r} has the unknown dtype {leaf.dtype!r}"
    if isinstance(leaf, Tensor) and not all(0 <= size < _MOST_ELEMENTS for size in leaf.shape if isinstance(size, int)):
        yield f"{name}: {leaf.name!r} has the shape {list(leaf.shape)}"
    try:
        if isinstance(leaf, LiteralLeaf):
            leaf.content  # noqa: B018
    except (ValueError, OverflowError):
        yield f"{name}: {leaf.name!r} is not a number"


def _dimension_problems(name: str, signature: Signature, inputs: Iterable[Leaf]) -> Iterator[str]:
    bound = set()
    for size in (size for leaf in inputs for size in sizes_of(leaf) if isinstance(size, str)):
        try:
            factor, dim, _ = parse_size(size)
        except ValueError as error:
            yield f"{name}: {error}"
            continue
        bound.add(dim)
        if factor < 1 or dim not in signature.dims:
            yield f"{name}: the size {size!r} names no dimension of the signature"
    for text in signature.conditions:
        try:
            names = parse_condition(text).names
        except ValueError as error:
            yield f"{name}: {error}"
        else:
            if not names <= bound:
                yield f"{name}: the condition {text!r} names dimensions that no input has"


def _generation_problems(text: TextGeneration, methods: dict[str, Method]) -> Iterator[str]:
    if not (text.length > 0 < text.batch and 0 <= text.pad < text.vocabulary):
        yield f"it generates {text.batch} rows of {text.length} of {text.vocabulary} tokens, padded with {text.pad}"
    for name in STEPS:
        if name not in methods:
            yield f"it generates, but has no method {name}"
            continue
        signature = methods[name].signature
        row = text.batch, 1 if name == "decode" else _prompt_dimension(signature, text.length)
        expected = [["I64", *shape] for shape in (row, (text.batch, text.length), row, ())]
        inputs = [_kind(node) for _, node in (*signature.args, *signature.kwargs)]
        if inputs != expected or signature.kwargs:
            by_keyword = f", {len(signature.kwargs)} of them by keyword" if signature.kwargs else ""
            yield f"it generates, so {name} needs the inputs {expected}, but has {inputs}{by_keyword}"
        logits = _kind(signature.output)
        if len(logits) != 3 or "F" not in str(logits[0]) or logits[1] != text.batch:
            yield f"it generates, so {name} must give logits [{text.batch}, vocabulary], but gives {logits}"


def _prompt_dimension(signature: Signature, length: int) -> Size:
    """Return the dimension that accepts prompts of 1 to `length` tokens."""
    dims = signature.dims.items()
    return next((name for name, dim in dims if dim.min <= 1 and (dim.max or length) >= length), f"1..{length}")


def _kind(node: Node) -> list[Size]:
    """Return the dtype and the shape of a tensor, or the name of another node's type."""
    return [node.dtype, *node.shape] if isinstance(node, Tensor) else [type(node).__name__.lower()]


def _rank_problems(manifest: Manifest) -> Iterator[str]:
    if manifest.ranks is None:
        return
    size, whole, cuts = manifest.ranks.size, manifest.ranks.whole, manifest.ranks.cuts
    if not (size > 1 and DIGEST.fullmatch(whole)):
        yield f"it is for {size} ranks of the graph {whole[:12]!r}"
        return
    if manifest.generation:
        yield "it is for several ranks, which do not generate text"
    rows = {row.name: row for row in manifest.weights}
    for name, cut in cuts.items():
        problem = _cut_problem(rows[name], cut, size) if name in rows else "there is no such weight"
        if problem:
            yield f"{name!r} cannot be cut for {size} ranks: {problem}"


def _cut_problem(row: NamedTensor, cut: Cut, size: int) -> str:
    if row.stride is not None or row.dtype not in DTYPES or DTYPES[row.dtype].bits % 8:
        return "its elements are in another order, or fill no whole bytes"
    if not 0 <= cut.dim < len(row.shape):
        return f"it has no dimension {cut.dim}"
    if cut.groups < 1 or cut.repeat < 1 or size % cut.repeat:
        return f"{cut.groups} groups, and each part on {cut.repeat} ranks"
    parts = cut.groups * (size // cut.repeat)
    return f"{row.shape[cut.dim]} is no multiple of {parts}" if row.shape[cut.dim] % parts else ""


def _conversion_problems(manifest: Manifest) -> Iterator[str]:
    conversion = manifest.conversion
    if sorted(source.weight for source in conversion.sources) != sorted(w.name for w in manifest.weights):
        yield "its conversion does not have one source for each weight"
    copied = Counter(key for source in conversion.sources if source.transform is None for key in source.keys)
    for key, count in copied.items():
        if count > 1:
            yield f"the checkpoint key {key!r} would become {count} weights"
    yield from _transform_problems(manifest)


def _transform_problems(manifest: Manifest) -> Iterator[str]:
    conversion = manifest.conversion
    computed = [source for source in conversion.sources if source.transform is not None]
    if sorted(source.transform or 0 for source in computed) != list(range(len(computed))):
        yield "its conversion does not have one output for each weight that it computes"
    names = Counter((item.kind, item.name) for item in conversion.inputs)
    if twice := [name for (_, name), count in names.items() if count > 1]:
        yield f"its conversion takes {twice[0]!r} twice"
    for source in computed:
        if unknown := [key for key in source.keys if ("key", key) not in names]:
            yield f"its conversion computes {source.weight!r} from {unknown[0]!r}, which is not among its inputs"
    for item in conversion.inputs:
        if not is_valid(item):
            yield f"its conversion takes {item.name!r} with the type {describe(item)}"
    files = [CONVERSION_NAME] if computed else []
    files += [CONVERSION_CONSTANTS_NAME] if any(item.kind == "constant" for item in conversion.inputs) else []
    yield from (f"{name!r} is not among its files" for name in files if name not in manifest.files)
