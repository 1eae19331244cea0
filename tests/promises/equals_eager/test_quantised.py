"""Weights quantised by torchao are served by their parts, equal to eager with torchao's own classes."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support import warm
from tests.support.aoti import near
from tests.support.compiled import needs_compiler
from tests.support.packages import needs
from tests.support.quantised import BATCH, KINDS, X, floats, quantised
from weightswap_exporter import export, pack, skeleton
from weightswap_exporter.parity import compare, first_divergence
from weightswap_runtime import Artifact, CaptureError, Unsupported, load

pytestmark = needs("torchao")
PACKED = "int4 packed for a CPU"


def exported(kind: str, out: Path, **options: Any) -> Artifact:
    return export(quantised(kind), (X[:3],), out=out, dynamic_shapes=BATCH, **options)


def packed(source: Any, artifact: Artifact, out: Path) -> Path:
    return pack(source, artifact, out=out).path


@torch.no_grad()
def eager(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return model(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_gives_eagers_bits_before_and_after_a_swap(kind: str, tmp_path: Path) -> None:
    artifact = exported(kind, tmp_path / "a.artifact")
    one, two = quantised(kind, 1), quantised(kind, 2)
    model = load(artifact.path, packed(one, artifact, tmp_path / "1.safetensors"))
    assert torch.equal(model(X), eager(one))
    model.swap(packed(two, artifact, tmp_path / "2.safetensors"))
    assert torch.equal(model(X), eager(two))
    assert not torch.equal(eager(one), eager(two))


@pytest.mark.parametrize("kind", ["int8 dynamic", "int4", "float8"])
@pytest.mark.slow
def test_a_skeleton_can_be_quantised_within_its_block_and_after_it(kind: str, tmp_path: Path) -> None:
    real = exported(kind, tmp_path / "real.artifact")
    with skeleton():
        within, after = floats(0), floats(0)
        KINDS[kind](within)
    KINDS[kind](after)
    for model in (within, after):
        artifact = export(model, (X[:3],), out=tmp_path / "hollow.artifact", dynamic_shapes=BATCH)
        assert artifact.manifest == real.manifest


def test_parts_are_named_after_their_tensor_and_stay_in_its_place(tmp_path: Path) -> None:
    weights = exported("int8", tmp_path / "a.artifact").manifest.weights
    parts = ["weight.qdata", "weight.scale", "weight.zero_point", "bias"]
    assert [row.name for row in weights] == [f"{layer}.{name}" for layer in (0, 2) for name in parts]


def test_an_export_leaves_the_model_as_it_was_whatever_the_callers_mode(tmp_path: Path) -> None:
    model = quantised("int8 dynamic")
    before = contents(model)
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    with torch.inference_mode():
        assert export(model, (X,), out=tmp_path / "b.artifact").manifest == artifact.manifest
    assert contents(model) == before


def contents(model: nn.Module) -> list[Any]:
    places = [(module, module._parameters, module._modules) for module in model.modules()]
    return [
        (type(module), *parameters, *map(id, parameters.values()), *modules) for module, parameters, modules in places
    ]


def test_a_server_needs_no_torchao(tmp_path: Path) -> None:
    artifact = exported("int8 dynamic", tmp_path / "a.artifact")
    packed(quantised("int8 dynamic"), artifact, tmp_path / "v1.safetensors")
    torch.save(X, tmp_path / "x.pt")
    server = """
import sys, torch
sys.modules["torchao"] = None
from weightswap_runtime import load
torch.save(load("a.artifact", "v1.safetensors")(torch.load("x.pt")), "y.pt")
"""
    subprocess.run([warm.python(), "-c", server], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), eager(quantised("int8 dynamic")))


class Tied(nn.Module):
    """Model with one quantised tensor in two places, and loading code of its own for another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.halved = (nn.Linear(32, 32) for _ in range(3))
        self.two.weight = self.one.weight
        self._register_state_dict_hook(lambda _, state, *__: state.update({"halved.weight": self.halved.weight / 2}))
        self.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["halved.weight"] = state["halved.weight"] * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halved(self.two(self.one(x)))

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x)


def tied(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied().eval()
    KINDS["int8"](model.one)
    model.two.weight = model.one.weight
    return model


def test_ties_and_loading_code_of_other_layers_are_recorded(tmp_path: Path) -> None:
    artifact = export(tied(0), (X,), out=tmp_path / "a.artifact")
    rows = {row.name: row.aliases for row in artifact.manifest.weights}
    assert rows["one.weight.qdata"] == ("two.weight.qdata",)
    other = tied(1)
    model = load(artifact.path, packed(other.state_dict(), artifact, tmp_path / "v1.safetensors"))
    assert torch.equal(model(X), eager(other))


@pytest.mark.slow
def test_a_quantiser_can_be_the_conversion(tmp_path: Path) -> None:
    """The quantisation of a float checkpoint is recorded as the conversion, and a server runs it."""

    def load_floats(model: nn.Module, checkpoint: dict[str, Any]) -> None:
        with torch.device("meta"):
            quantised_floats = floats(0)
        quantised_floats.load_state_dict(checkpoint, assign=True)
        KINDS["int8 dynamic"](quantised_floats)
        model.load_state_dict(quantised_floats.state_dict(), assign=True)

    artifact = exported("int8 dynamic", tmp_path / "a.artifact", load=load_floats, checkpoint=floats(0).state_dict())
    assert not artifact.manifest.conversion.untraceable
    trained = floats(3)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "trained.safetensors")
    model = load(artifact.path, tmp_path / "trained.safetensors")
    KINDS["int8 dynamic"](trained)
    assert torch.equal(model(X), eager(trained))


@pytest.mark.slow
def test_goldens_and_parity_know_the_parts(tmp_path: Path) -> None:
    model = quantised("int8 dynamic")
    artifact = export(model, (X,), out=tmp_path / "a.artifact", goldens=[(X,)])
    weights = pack(model, artifact, out=tmp_path / "v1.safetensors", goldens=[(X,)]).path
    assert load(artifact.path, weights).weights_id
    assert compare(model, artifact, weights).same
    assert first_divergence(artifact, model, weights) is None
    spoiled = copy.deepcopy(model)
    with torch.no_grad():
        spoiled[2].weight.scale.mul_(2)
    divergence = first_divergence(artifact, spoiled, weights)
    assert divergence is not None
    assert divergence.module == "2"


@pytest.mark.slow
def test_a_model_that_transformers_has_quantised(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "floats")
    from torchao.quantization import Int8WeightOnlyConfig

    how = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "floats", quantization_config=how, dtype=torch.float32
    ).eval()
    model.save_pretrained(tmp_path / "quantised")
    words = torch.randint(0, 64, (2, 8))
    artifact = export(model, kwargs={"input_ids": words}, out=tmp_path / "a.artifact")
    served = load(artifact.path, packed(tmp_path / "quantised", artifact, tmp_path / "v1.safetensors"))
    with torch.no_grad():
        assert torch.equal(served(input_ids=words)["logits"], model(words, use_cache=False).logits)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != PACKED])
def test_compiled_graphs_are_near_eager(kind: str, tmp_path: Path) -> None:
    model, artifact = compiled(kind, tmp_path)
    served = load(artifact.path, packed(model, artifact, tmp_path / "v1.safetensors"), engine="aoti")
    assert near(served(X), eager(model))


@needs_compiler
@pytest.mark.slow
def test_a_constant_that_the_compiler_makes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"AOTInductor made a constant of its own, 'constant\d+'"):
        compiled(PACKED, tmp_path)


def compiled(kind: str, folder: Path) -> tuple[nn.Module, Artifact]:
    model = nn.Sequential(nn.Linear(32, 64)).eval()
    KINDS[kind](model)
    return model, export(model, (X[:3],), out=folder / "a.artifact", dynamic_shapes=BATCH, engines=["aoti"])


HALF = "0.weight.qdata"


def test_no_swap_takes_integers_without_their_scales(tmp_path: Path) -> None:
    artifact = exported("int8 dynamic", tmp_path / "a.artifact")
    one, two = quantised("int8 dynamic", 1), quantised("int8 dynamic", 2)
    file = packed(two, artifact, tmp_path / "2.safetensors")
    model = load(artifact.path, packed(one, artifact, tmp_path / "1.safetensors"))
    (artifact.path / "parts.json").unlink()
    for only in (HALF, "*.qdata", ["*.scale", "2.*"], ["0.weight.qdata", "0.weight.zero_point"]):
        with pytest.raises(
            Unsupported, match=r"takes a part of 0\.weight without 0\.weight\.\w+; take '0\.weight\.\*'"
        ):
            model.swap(file, only=only)
        with pytest.raises(Unsupported, match="takes a part of"):
            model.stage(file, only=only, background=True)
        with pytest.raises(Unsupported):
            model.watch(tmp_path, only=only)
    assert torch.equal(model(X), eager(one))
    model.swap(file, only="0.*")
    mixed = nn.Sequential(two[0], *list(one)[1:])  # type: ignore[index,call-overload]
    assert torch.equal(model(X), eager(mixed))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "groups",
    [
        {"q": HALF},
        {"q": "0.weight.scale"},
        {"q": [HALF, "2.weight.qdata", "2.weight.scale"]},
        {"q": HALF, "s": "0.weight.scale"},
    ],
)
def test_no_group_of_variants_has_integers_without_their_scales(groups: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"variants: 0\.weight is one tensor \(0\.weight\.qdata in "):
        exported("int8 dynamic", tmp_path / "a.artifact", variants=groups)


def test_a_quantised_tensor_can_be_chosen_whole(tmp_path: Path) -> None:
    names = [HALF, "0.weight.scale"]
    artifact = exported("int8 dynamic", tmp_path / "a.artifact", variants={"q": names})
    assert [row.name for row in artifact.manifest.variants["q"]] == names
