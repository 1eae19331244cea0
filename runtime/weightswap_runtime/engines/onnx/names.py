"""How the inputs and outputs of a method's ONNX graph are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weightswap_runtime.format.manifest import Manifest, Method
from weightswap_runtime.format.signature import Leaf, Literal, Tensor, input_leaves, leaves


class Names(NamedTuple):
    """Names in the ONNX graph: by the index of a flat input or output (None for a literal, which it lacks); by FQN.

    `tensors` are the FQNs that the method's graph takes as inputs, of weights, state and variants; `after` is what the
    value of a state tensor after the call is called.
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    tensors: tuple[str, ...]
    after: dict[str, str]


def graph_file(method: str) -> str:
    """Where an artifact keeps the ONNX graph of a method."""
    return f"engines/onnx/{method}.onnx"


def onnx_names(manifest: Manifest, method: Method) -> Names:
    """All tensors of the manifest have their FQNs, inputs and outputs the signature's names where those are free."""
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
    """The dtypes of what an ONNX graph gives, by name: outputs, and state after the call."""
    names = onnx_names(manifest, method)
    outputs = zip(names.outputs, leaves(method.signature.output), strict=True)
    found = {name: dtype_of(leaf) for name, leaf in outputs if name is not None}
    states = {name: row.dtype for row in manifest.state for name in row.names}
    return found | {after: states[name] for name, after in names.after.items()}


def dtype_of(leaf: Leaf) -> str:
    """The dtype that a flat input or output has in an ONNX graph; an integer is a tensor there."""
    return leaf.dtype if isinstance(leaf, Tensor) else "I64"


def _names(flat: Iterable[Leaf], role: str, taken: set[str]) -> list[str | None]:
    return [None if isinstance(leaf, Literal) else _free(leaf.name, role, taken) for leaf in flat]


def _free(name: str, role: str, taken: set[str]) -> str:
    """`name`, or one like it that is not taken. It is taken then."""
    while name in taken:
        name = f"{name}.{role}"
    taken.add(name)
    return name
