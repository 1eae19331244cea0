"""Weights that a conversion's graph computes, from an artifact written by hand."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from torch import nn

from tests.support.damage import damaged
from tests.support.tiny import TinyArtifact, X
from weightswap_runtime import Artifact, ArtifactError, WeightsMismatch, load
from weightswap_runtime.format.canonical import pack_ranges, render_header
from weightswap_runtime.format.manifest import Conversion, ConversionInput, Manifest, WeightSource, encode_manifest
from weightswap_runtime.format.safetensors import TensorRow
from weightswap_runtime.staging.transforms import Transforms

OFFSET = torch.tensor([0.25])
INPUTS = (
    ConversionInput(kind="key", name="halves", dtype="F32", shape=(2, 5, 3)),
    ConversionInput(kind="key", name="both", dtype="F32", shape=(6,)),
    ConversionInput(kind="constant", name="offset", dtype="F32", shape=(1,)),
)
SOURCES = (
    WeightSource(weight="weight", keys=("halves",), transform=0),
    WeightSource(weight="bias", keys=("both",), transform=1),
    WeightSource(weight="tied", keys=("both",), transform=2),
    WeightSource(weight="steps", keys=("steps",)),
)
Values = dict[str, torch.Tensor]


class Sum(nn.Module):
    """Conversion in which `weight` is a sum of transposed halves, and `bias` and `tied` are parts of one tensor."""

    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bias, tied = both.split([5, 1])
        return (halves[0] + halves[1]).t(), bias, tied - offset


def checkpoint(seed: int) -> Values:
    """Return the checkpoint from which the conversion computes the weights of `seed`."""
    values = TinyArtifact.values(seed)
    half = values["weight"].t() / 2
    return {
        "halves": torch.stack([half, half]),
        "both": torch.cat([values["bias"], values["tied"] + OFFSET]),
        "steps": values["steps"],
    }


def saved(path: Path, values: Values) -> Path:
    safetensors.torch.save_file({name: value.contiguous() for name, value in values.items()}, path)
    return path


def write_conversion(
    tiny: TinyArtifact, module: nn.Module, inputs: tuple[ConversionInput, ...] = INPUTS, **changes: Any
) -> Manifest:
    """Give the tiny artifact's conversion a graph; the manifest is not checked."""
    program = torch.export.export(module, tuple(torch.zeros(item.shape) for item in inputs))
    program._example_inputs = None
    graph = io.BytesIO()
    torch.export.save(program, graph)
    constants = render_header(pack_ranges([TensorRow("offset", "F32", (1,))]), {}) + OFFSET.numpy().tobytes()
    files = {"conversion.pt2": graph.getvalue(), "conversion.safetensors": constants}
    for name, content in files.items():
        (tiny.path / name).write_bytes(content)
    fields = {name: getattr(tiny.manifest, name) for name in tiny.manifest.__struct_fields__}
    fields["conversion"] = Conversion(sources=SOURCES, ignored=("extra",), inputs=inputs)
    fields["files"] = tiny.manifest.files | {name: blake3(content).hexdigest() for name, content in files.items()}
    manifest = Manifest(**{**fields, **changes})
    tiny.write_manifest(encode_manifest(manifest))
    return manifest


def with_conversion(tiny: TinyArtifact, module: nn.Module, **changes: Any) -> Artifact:
    write_conversion(tiny, module, **changes)
    return Artifact.open(tiny.path)


@pytest.fixture
def artifact(tiny: TinyArtifact) -> Artifact:
    return with_conversion(tiny, Sum())


@pytest.mark.parametrize("residency", ["double", "single"])
def test_computed_weights_serve(residency: Any, artifact: Artifact, tiny: TinyArtifact, tmp_path: Path) -> None:
    model = load(artifact, residency=residency)
    for seed in range(3):
        receipt = model.swap(saved(tmp_path / f"{seed}.safetensors", checkpoint(seed)))
        packed = load(artifact, tiny.write(tmp_path / "packed.safetensors", weights(seed)))
        assert torch.equal(model(X), packed(X))
        assert receipt.weights_id == packed.weights_id
        assert receipt.bytes_read == (30 + 6) * 4 + 8


def weights(seed: int) -> Values:
    values = checkpoint(seed)
    weight, bias, tied = Sum()(values["halves"], values["both"], OFFSET)
    return {"weight": weight, "bias": bias, "tied": tied, "steps": values["steps"]}


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.device("meta"),
    ],
    ids=["autocast", "inference", "gradients", "device"],
)
def test_torch_modes_of_the_caller_change_no_weight(mode: Any, artifact: Path, tmp_path: Path) -> None:
    path = saved(tmp_path / "c.safetensors", checkpoint(1))
    expected = load(artifact, path)
    with mode():
        model = load(artifact, path)
    assert model.weights_id == expected.weights_id
    assert torch.equal(model(X), expected(X))


class Chain(nn.Module):
    """Conversion in which each result needs two inputs, one of which the next result needs, too."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(((one * 2).exp() + other).t() for one, other in pairwise(inputs))


def test_only_one_weight_and_its_inputs_are_held(tiny: TinyArtifact) -> None:
    count = 8
    inputs = tuple(ConversionInput(kind="key", name=f"k{i}", dtype="F32", shape=(3, 5)) for i in range(count + 1))
    rows = tuple(type(tiny.manifest.weights[0])(name=f"w{i}", dtype="F32", shape=(5, 3)) for i in range(count))
    sources = tuple(WeightSource(weight=f"w{i}", keys=(f"k{i}", f"k{i + 1}"), transform=i) for i in range(count))
    conversion = Conversion(sources=sources, inputs=inputs)
    manifest = write_conversion(tiny, Chain(), inputs, weights=rows, conversion=conversion)
    transforms = Transforms(Artifact(tiny.path, manifest))
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    read: list[str] = []

    def give(key: str) -> torch.Tensor:
        read.append(key)
        value = torch.full((3, 5), float(key[1:]))
        alive.add(value)
        gc.collect()
        assert len(alive) <= 2
        return value

    shuffled = [f"w{i}" for i in (3, 0, 7, 1, 2, 6, 5, 4)]
    results = [weight for weight, _ in transforms.compute(shuffled, give)]
    assert results == [f"w{i}" for i in range(count)]
    assert read == [f"k{i}" for i in range(count + 1)]


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Values], object], str]] = {
    "an input is missing": (lambda values: values.pop("both"), "both: missing, F32[6]"),
    "an input of another shape": (
        lambda values: values.update(both=torch.zeros(7)),
        "both: expected F32[6], found F32[7]",
    ),
    "an input of another dtype": (
        lambda values: values.update(halves=values["halves"].double()),
        "halves: expected F32[2, 5, 3], found F64[2, 5, 3]",
    ),
    "a key too many": (lambda values: values.update(bias=torch.zeros(5)), "bias: unexpected"),
}


@pytest.mark.parametrize(("damage", "says"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_is_refused(
    damage: Callable[[Values], object], says: str, artifact: Artifact, tmp_path: Path
) -> None:
    model = load(artifact, saved(tmp_path / "good.safetensors", checkpoint(0)))
    expected = model(X)
    values = checkpoint(1)
    damage(values)
    with pytest.raises(WeightsMismatch) as refused:
        model.swap(saved(tmp_path / "bad.safetensors", values))
    assert says in refused.value.problems
    assert torch.equal(model(X), expected)


class Fails(Sum):
    """Conversion that needs indices."""

    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias, tied = super().forward(halves, both, offset)
        return weight, bias[both[:5].long()], tied


def test_an_operator_that_fails_is_a_refused_swap(tiny: TinyArtifact, tmp_path: Path) -> None:
    artifact = with_conversion(tiny, Fails())
    values = checkpoint(0)
    values["both"][:5] = torch.arange(5)
    model = load(artifact, saved(tmp_path / "good.safetensors", values))
    expected = model(X)
    values["both"][0] = 99
    with pytest.raises(WeightsMismatch, match="the conversion cannot compute its weights: IndexError"):
        model.swap(saved(tmp_path / "bad.safetensors", values))
    assert torch.equal(model(X), expected)


class InPlace(Sum):
    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(halves, both.add_(1), offset)


class Narrow(Sum):
    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias, tied = super().forward(halves, both, offset)
        return weight[:2], bias, tied


class Two(Sum):
    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(halves, both, offset)[:2]


class Branch(Sum):
    def forward(self, halves: torch.Tensor, both: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            both = both * 2
        return super().forward(halves, both, offset)


BAD_CONVERSIONS = {
    "it changes an input": (InPlace(), "has a call of 'torch.ops.aten.add_.Tensor' in a conversion"),
    "it gives another shape": (Narrow(), "computes F32[2, 5] for weight, expected F32[3, 5]"),
    "it gives too little": (Two(), "its inputs and outputs are not those of the conversion"),
    "it has a region of its own": (Branch(), "has a call of 'torch.ops.higher_order.wrap"),
}


@pytest.mark.parametrize(("module", "says"), BAD_CONVERSIONS.values(), ids=BAD_CONVERSIONS)
def test_a_conversion_that_is_not_what_the_manifest_says_is_refused(
    module: nn.Module, says: str, tiny: TinyArtifact, tmp_path: Path
) -> None:
    artifact = with_conversion(tiny, module)
    with pytest.raises(ArtifactError) as refused:
        load(artifact, saved(tmp_path / "c.safetensors", checkpoint(0)))
    assert says in str(refused.value)
    assert "conversion.pt2" in str(refused.value)


def test_an_altered_conversion_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    for name in ("conversion.safetensors", "conversion.pt2"):
        damaged(artifact.path / name)
        with pytest.raises(ArtifactError, match=f"{name}: altered since the export"):
            load(artifact, saved(tmp_path / "c.safetensors", checkpoint(0)))


MANIFESTS: dict[str, tuple[dict[str, Any], str]] = {
    "an output twice": (
        {"sources": (*SOURCES[:2], WeightSource(weight="tied", keys=("both",), transform=1), SOURCES[3])},
        "its conversion does not have one output for each weight that it computes",
    ),
    "an unknown input": (
        {"sources": (WeightSource(weight="weight", keys=("whole",), transform=0), *SOURCES[1:])},
        "its conversion computes 'weight' from 'whole', which is not among its inputs",
    ),
    "an input twice": ({"inputs": (*INPUTS, INPUTS[0])}, "its conversion takes 'halves' twice"),
    "an unknown dtype": (
        {"inputs": (ConversionInput(kind="key", name="halves", dtype="F31", shape=(2,)), *INPUTS[1:])},
        "its conversion takes 'halves' with the type F31[2]",
    ),
}


@pytest.mark.parametrize(("changes", "says"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str, tiny: TinyArtifact) -> None:
    fields = {"sources": SOURCES, "ignored": (), "inputs": INPUTS}
    with pytest.raises(ArtifactError) as refused:
        with_conversion(tiny, Sum(), conversion=Conversion(**{**fields, **changes}))
    assert says in str(refused.value)


def test_a_manifest_without_the_adapter_s_files_is_refused(tiny: TinyArtifact) -> None:
    with pytest.raises(ArtifactError, match=r"'conversion.pt2' is not among its files"):
        with_conversion(tiny, Sum(), files=tiny.manifest.files)
