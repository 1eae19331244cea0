"""Text of signatures, types and names: a short notation for experts, and plain English sentences."""

from __future__ import annotations

from collections.abc import Sequence

from weightswap_runtime.format.signature import (
    Dict,
    Dimension,
    Integer,
    Items,
    Literal,
    Node,
    Signature,
    Size,
    Tensor,
    Tuple,
    key_text,
)
from weightswap_runtime.tensors.dtypes import DTYPES

_PLAIN = {"BOOL": "truth value", "BF16": "bfloat16 number", "C64": "64-bit complex number"}


def signature_text(name: str, signature: Signature) -> str:
    """Return a signature as `forward(x: F32[batch, 1, 8, 8]) -> F32[batch, 10], batch in 0..256`."""
    parameters = [f"{parameter}: {node_text(node)}" for parameter, node in signature.args]
    if signature.kwargs:
        parameters += ["*", *(f"{parameter}: {node_text(node)}" for parameter, node in signature.kwargs)]
    ranges = [
        f"{dim} in {limits.min}..{'any' if limits.max is None else limits.max}"
        for dim, limits in signature.dims.items()
    ]
    return ", ".join([f"{name}({', '.join(parameters)}) -> {node_text(signature.output)}", *ranges])


def node_text(node: Node) -> str:
    """Return a node as `F32[batch, 10]` or `{y: F32[3], n: int rows}`."""
    match node:
        case Tensor():
            return f"{node.dtype}[{', '.join(map(str, node.shape))}]"
        case Integer():
            return f"int {node.value}"
        case Literal():
            return repr(node.content)
        case Items():
            return f"[{', '.join(map(node_text, node.items))}]"
        case Tuple():
            return f"({', '.join(map(node_text, node.items))}{',' if len(node.items) == 1 else ''})"
        case Dict():
            return "{" + ", ".join(f"{key_text(key)}: {node_text(item)}" for key, item in node.items) + "}"


def signature_sentence(name: str, signature: Signature) -> str:
    """Return `forward takes x (a tensor of 32-bit floats, batch × 64), and returns …; batch is from 0 to 256.`"""
    parts = [_argument(*parameter) for parameter in signature.args]
    keywords = [_argument(*parameter) for parameter in signature.kwargs]
    arguments = enumerated(parts) if parts else "" if keywords else "nothing"
    if keywords:
        arguments += f"{', and ' if parts else ''}by keyword only {enumerated(keywords)}"
    ranges = [_range_words(dim, limits) for dim, limits in signature.dims.items()]
    clauses = [enumerated(ranges)] if ranges else []
    clauses += [f"where {enumerated(signature.conditions)}"] if signature.conditions else []
    return "; ".join([f"{name} takes {arguments}, and returns {node_words(signature.output)}", *clauses]) + "."


def _argument(name: str, node: Node) -> str:
    return f"{name} ({f'fixed at {node.content!r}' if isinstance(node, Literal) else node_words(node)})"


def _range_words(dim: str, limits: Dimension) -> str:
    return f"{dim} is {limits.min} or more" if limits.max is None else f"{dim} is from {limits.min} to {limits.max}"


def node_words(node: Node) -> str:
    """Return a node as `a tensor of 32-bit floats, batch × 10` or `a dict with y (…)`."""
    match node:
        case Tensor():
            return _tensor_words(node)
        case Integer():
            return f"an integer, {node.value}"
        case Literal():
            return f"always {node.content!r}"
        case Items():
            return _sequence_words("list", node.items)
        case Tuple():
            return _sequence_words("tuple", node.items)
        case Dict():
            entries = enumerated([f"{key_text(key)} ({node_words(item)})" for key, item in node.items])
            return f"a dict with {entries}" if entries else "an empty dict"


def _sequence_words(kind: str, nodes: Sequence[Node]) -> str:
    words = [node_words(node) for node in nodes]
    if not words:
        return f"an empty {kind}"
    if len(set(words)) == 1:
        return f"a {kind} of {len(words)}: {'each ' if len(words) > 1 else ''}{words[0]}"
    return f"a {kind} of {len(words)}: {enumerated([f'({text})' for text in words])}"


def _tensor_words(tensor: Tensor) -> str:
    if not tensor.shape:
        return f"a single {element_words(tensor.dtype)}"
    if len(tensor.shape) == 1:
        return f"a vector of {element_words(tensor.dtype)}s, {size_words(tensor.shape[0])} long"
    return f"a tensor of {element_words(tensor.dtype)}s, {' × '.join(map(size_words, tensor.shape))}"


def size_words(size: Size) -> str:
    """Return a size with `·` for `*`: `2·rows`."""
    return str(size).replace("*", "·")


def element_words(dtype: str) -> str:
    """Return the name of one element of a safetensors dtype, such as `32-bit float`."""
    if dtype in _PLAIN or dtype not in DTYPES:
        return _PLAIN.get(dtype, dtype)
    bits = DTYPES[dtype].bits
    family, _, variant = dtype.partition("_")
    kind = {"F": "float", "I": "integer", "U": "unsigned integer"}[family[0]]
    return f"{bits}-bit {kind}{f' ({variant})' if variant else ''}"


def enumerated(parts: Sequence[str]) -> str:
    """Join texts as `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
