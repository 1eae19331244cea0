"""A tiny artifact written by hand from the format's specification, without the exporter."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from blake3 import blake3
from msgspec.structs import replace
from torch import nn

from weightswap_runtime import Model
from weightswap_runtime.format.canonical import pack_ranges, render_header, write_weight_file
from weightswap_runtime.format.manifest import (
    Conversion,
    GraphInput,
    Manifest,
    Method,
    NamedTensor,
    Producer,
    WeightSource,
    encode_manifest,
    with_graph_id,
)
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.format.signature import Dimension, Signature, Tensor


class Affine(nn.Module):
    """`x @ weight + bias + tied + shift`, and `tied` once more as `again`. The weights' sizes need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 5))
        self.bias = nn.Parameter(torch.empty(5))
        self.tied = nn.Parameter(torch.empty(1))
        self.again = self.tied
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias + self.tied * self.again + self.shift


WEIGHTS = (
    NamedTensor(name="weight", dtype="F32", shape=(3, 5)),
    NamedTensor(name="bias", dtype="F32", shape=(5,)),
    NamedTensor(name="tied", dtype="F32", shape=(1,), aliases=("again",)),
    NamedTensor(name="steps", dtype="I64", shape=()),
)
SOURCES = (
    WeightSource(weight="weight", keys=("w",)),
    WeightSource(weight="bias", keys=("bias",)),
    WeightSource(weight="tied", keys=("tied", "again")),
    WeightSource(weight="steps", keys=("steps",)),
)
Values = dict[str, torch.Tensor]


X = torch.arange(6.0).reshape(2, 3)
WriteWeights = Callable[[int], Path]
WriteDelta = Callable[[int, int], Path]
SLOW = 20.0  # bytes per second: the tiny model's 92 bytes take longer than any test waits


def serves(model: Model, seed: int) -> bool:
    """Return True if the model answers like the eager model with the weights of `seed`."""
    return torch.equal(model(X), TinyArtifact.eager(seed, X))


class TinyArtifact:
    """Artifact written to `path`. Checkpoints call `weight` `w`; all other names are the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        graph, targets = _graph()
        files = {"graphs/forward.pt2": graph, "constants.safetensors": _constants()}
        digests = {name: blake3(content).hexdigest() for name, content in files.items()}
        inputs = [_graph_input(target) for target in targets]
        signature = Signature(
            args=(("x", Tensor("x", "F32", ("batch", 3))),),
            kwargs=(),
            output=Tensor("output", "F32", ("batch", 5)),
            dims={"batch": Dimension(0, 8)},
        )
        methods = {"forward": Method(graph="graphs/forward.pt2", inputs=tuple(inputs), signature=signature)}
        constants = (NamedTensor(name="shift", dtype="F32", shape=(1,)),)
        manifest = Manifest(
            format_version=1,
            graph_id="",
            producer=Producer(weightswap="0", torch=str(torch.__version__)),
            device="cpu",
            methods=methods,
            weights=WEIGHTS,
            state=(),
            constants=constants,
            conversion=Conversion(sources=SOURCES, ignored=("extra",)),
            files=digests,
        )
        self.manifest = with_graph_id(manifest)
        (path / "graphs").mkdir(parents=True)
        for name, content in files.items():
            (path / name).write_bytes(content)
        self.write_manifest(encode_manifest(self.manifest))

    def write_manifest(self, raw: bytes) -> None:
        (self.path / "manifest.json").write_bytes(raw)

    def document(self) -> dict[str, object]:
        """Return the manifest as plain JSON, for a test to break."""
        document: dict[str, object] = msgspec.json.decode((self.path / "manifest.json").read_bytes())
        return document

    def become_another(self) -> None:
        """Become the artifact of another graph with the same weights: it takes fewer rows."""
        method = self.manifest.methods["forward"]
        signature = replace(method.signature, dims={"batch": Dimension(0, 7)})
        other = replace(self.manifest, methods={"forward": replace(method, signature=signature)})
        self.manifest = with_graph_id(other)
        self.write_manifest(encode_manifest(self.manifest))

    @staticmethod
    def values(seed: int) -> Values:
        generator = torch.Generator().manual_seed(seed)
        return {
            "weight": torch.randn(3, 5, generator=generator),
            "bias": torch.randn(5, generator=generator),
            "tied": torch.randn(1, generator=generator),
            "steps": torch.tensor(seed),
        }

    def write(
        self,
        path: Path,
        values: Mapping[str, torch.Tensor],
        graph_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Path:
        """Write a weight file with weightswap's writer."""
        rows = {weight.name: TensorRow(weight.name, weight.dtype, weight.shape) for weight in WEIGHTS}
        order = [
            "weight",
            "bias",
            "steps",
            "tied",
        ]  # canonical: alignments 4, 4, 8, 4 -> by falling alignment, then name
        order.sort(key=lambda name: (-(size & -size) if (size := values[name].nbytes) else 0, name))
        data = {name: [_bytes(values[name])] for name in order}
        write_weight_file(path, list(rows.values()), data, graph_id=graph_id or self.manifest.graph_id, labels=labels)
        return path

    @staticmethod
    def eager(seed: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the eager model with the weights of `seed`."""
        with torch.no_grad():
            output: torch.Tensor = _filled(TinyArtifact.values(seed))(x)
        return output


@functools.cache
def _graph() -> tuple[bytes, tuple[str | None, ...]]:
    """Return a graph as torch saves it, and the targets of its flat inputs; None is the user's input."""
    batch = torch.export.Dim("batch", max=8)
    model = _filled(TinyArtifact.values(0))
    program = torch.export.export(model, (torch.zeros(2, 3),), dynamic_shapes={"x": {0: batch}})
    for name, tensor in program.state_dict.items():
        program.state_dict[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    for name, tensor in program.constants.items():
        program.constants[name] = torch.empty_like(tensor, device="meta")
    program._example_inputs = None  # torch would pickle them
    saved = io.BytesIO()
    torch.export.save(program, saved)
    return saved.getvalue(), tuple(spec.target for spec in program.graph_signature.input_specs)


def _graph_input(target: str | None) -> GraphInput:
    if target is None:
        return GraphInput(kind="input", name="x")
    return GraphInput(kind="constant" if target == "shift" else "weight", name=target)


def _filled(values: Values) -> Affine:
    model = Affine()
    with torch.no_grad():
        for name, value in values.items():
            getattr(model, name).copy_(value)
    return model


def _constants() -> bytes:
    header = render_header(pack_ranges([TensorRow("shift", "F32", (1,))]), {"format": "pt"})
    return header + _bytes(torch.tensor([0.5]))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def plain(tiny: TinyArtifact, path: Path, **changes: torch.Tensor | None) -> Path:
    """Write a safetensors file without a stamp, like another tool."""
    values = {**tiny.values(7), **changes}
    safetensors.torch.save_file({name: value for name, value in values.items() if value is not None}, path)
    return path
