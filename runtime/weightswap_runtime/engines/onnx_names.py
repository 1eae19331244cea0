"""Names and element types of ONNX graphs, for those who write them and those who run them. Needs no onnxruntime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.manifest import Manifest, Method
from weightswap_runtime.format.signature import Leaf, Literal, Tensor, input_leaves, leaves


class Names(NamedTuple):
    """Names in the ONNX graph."""

    inputs: tuple[str | None, ...]  # as the flat signature has them, with None for literals
    outputs: tuple[str | None, ...]  # likewise
    tensors: tuple[str, ...]  # FQNs of weights, state and variants, which are inputs, too
    after: dict[str, str]  # the output with the value of a state tensor after the call, by its FQN


def graph_file(method: str) -> str:
    """Return the path of a method's ONNX graph in an artifact."""
    return f"engines/onnx/{method}.onnx"


def onnx_names(manifest: Manifest, method: Method) -> Names:
    """Return the names: FQNs for the manifest's tensors, the signature's names for inputs and outputs if unused."""
    tables = (*manifest.weights, *manifest.state, *manifest.constants, *manifest.variable)
    taken = {name for tensor in tables for name in tensor.names}
    signature = method.signature
    flat = input_leaves(signature)
    states = [item.name for item in method.inputs if item.kind == "state"]
    return Names(
        inputs=tuple(_names(flat, "input", taken)),
        outputs=tuple(_names(leaves(signature.output), "output", taken)),
        tensors=tuple(item.name for item in method.inputs if item.kind in ("weight", "state", "variant")),
        after={name: _free(f"{name}.after", "state", taken) for name in states},
    )


def output_dtypes(manifest: Manifest, method: Method) -> dict[str, str]:
    """Return the dtypes of an ONNX graph's outputs by name, including those of the state after the call."""
    names = onnx_names(manifest, method)
    outputs = zip(names.outputs, leaves(method.signature.output), strict=True)
    dtypes = {name: dtype_of(leaf) for name, leaf in outputs if name is not None}
    states = {name: row.dtype for row in manifest.state for name in row.names}
    return dtypes | {after: states[name] for name, after in names.after.items()}


def dtype_of(leaf: Leaf) -> str:
    """Return the dtype of a flat input or output in an ONNX graph, where an integer is a tensor."""
    return leaf.dtype if isinstance(leaf, Tensor) else "I64"


def _names(flat: Iterable[Leaf], role: str, taken: set[str]) -> list[str | None]:
    return [None if isinstance(leaf, Literal) else _free(leaf.name, role, taken) for leaf in flat]


def _free(name: str, role: str, taken: set[str]) -> str:
    """Return `name`, or one like it that is not in `taken`, and add it there."""
    while name in taken:
        name = f"{name}.{role}"
    taken.add(name)
    return name


class Element(NamedTuple):
    """An element type."""

    text: str  # its name in ONNX Runtime
    code: int  # its number in ONNX's TensorProto


ELEMENTS = {
    "BOOL": Element("tensor(bool)", 9),
    "U8": Element("tensor(uint8)", 2),
    "I8": Element("tensor(int8)", 3),
    "U16": Element("tensor(uint16)", 4),
    "I16": Element("tensor(int16)", 5),
    "U32": Element("tensor(uint32)", 12),
    "I32": Element("tensor(int32)", 6),
    "U64": Element("tensor(uint64)", 13),
    "I64": Element("tensor(int64)", 7),
    "F16": Element("tensor(float16)", 10),
    "F32": Element("tensor(float)", 1),
    "F64": Element("tensor(double)", 11),
    "BF16": Element("tensor(bfloat16)", 16),
    "F8_E4M3": Element("tensor(float8e4m3fn)", 17),
    "F8_E4M3FNUZ": Element("tensor(float8e4m3fnuz)", 18),
    "F8_E5M2": Element("tensor(float8e5m2)", 19),
    "F8_E5M2FNUZ": Element("tensor(float8e5m2fnuz)", 20),
}


def element_of(name: str, dtype: str) -> Element:
    """Return the element type of a tensor. Raises Unsupported."""
    if dtype not in ELEMENTS:
        raise Unsupported(f"{name}: ONNX Runtime has no {dtype}; it has {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]
