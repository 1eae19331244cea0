"""Packing for artifacts with variants, and declarations that leave a part of PEFT's layers to the base."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.adapters import Adapters, X, base, with_lora
from weightswap_exporter import export, pack, publish
from weightswap_runtime import CaptureError, CheckpointError, Unsupported, WeightsMismatch, load


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("variants"))


def test_the_base_is_packed_from_whatever_has_it(files: Adapters, tmp_path: Path) -> None:
    """The sources are the module before PEFT, PEFT's model, that one wrapped, the base model in it, and a file."""
    tuned = with_lora(base(1))
    sources: list[Any] = [base(1), tuned, nn.DataParallel(tuned), tuned.get_base_model(), files.weights[1]]
    for number, source in enumerate(sources):
        pack(source, files.artifact, out=tmp_path / f"{number}.safetensors")
    assert len({(tmp_path / f"{number}.safetensors").read_bytes() for number in range(len(sources))}) == 1


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_tied_base_is_packed_from_its_module_and_its_files(tmp_path: Path) -> None:
    """A state dict has tied weights under each name, where transformers' files have one."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "plain")
    for number, targets in enumerate((["q_proj"], ["embed_tokens"], ["lm_head", "q_proj"])):
        tuned = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=targets)).eval()
        artifact = export(tuned, (torch.tensor([[1, 5]]),), out=tmp_path / f"{number}", variants={"lora": "*lora_*"})
        sources: list[Any] = [tmp_path / "plain", plain, plain.state_dict()]
        packed = [pack(source, artifact, out=tmp_path / "v.safetensors").weights_id for source in sources]
        assert len(set(packed)) == 1
        untied = plain.state_dict() | {"lm_head.weight": torch.ones(64, 32)}
        with pytest.raises(WeightsMismatch, match="one tensor in the graph"):
            pack(untied, artifact, out=tmp_path / "v.safetensors")


@pytest.mark.parametrize("wrap", [lambda tuned: tuned, nn.DataParallel], ids=["plain", "wrapped"])
@pytest.mark.parametrize("by", ["pack", "publish"])
def test_recorded_goldens_are_of_the_base_alone(
    by: str, wrap: Callable[[nn.Module], nn.Module], files: Adapters, tmp_path: Path
) -> None:
    tuned = with_lora(base(0), init_lora_weights=False)
    before = tuned(X)
    if by == "pack":
        packed = pack(wrap(tuned), files.artifact, out=tmp_path / "v1.safetensors", goldens=[(X,)])
    else:
        packed = publish(wrap(tuned), tmp_path, files.artifact, step=1, goldens=[(X,)]).wait()
    assert torch.equal(tuned(X), before)
    model = load(files.artifact, packed.path)
    assert model.history[0].verified == "goldens"
    assert torch.equal(model(X), files.expected(0, None))


@pytest.mark.parametrize("pattern", ["*lora_B*", "first.lora_*"])
def test_a_part_of_pefts_tensors_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="declare all that PEFT added"):
        export(with_lora(base(0)), (X,), out=tmp_path / "x.artifact", variants={"lora": pattern})


def test_an_adapter_that_is_merged_but_still_there_is_refused(files: Adapters, tmp_path: Path) -> None:
    """Its base has what the adapter adds, and a graph would add it a second time."""
    tuned = with_lora(base(1), init_lora_weights=False)
    plain = export(tuned, (X,), out=tmp_path / "plain.artifact")
    pack(tuned, plain, out=tmp_path / "v1.safetensors")
    model = load(plain, tmp_path / "v1.safetensors")
    expected = model(X)
    tuned.merge_adapter()
    for artifact in (files.artifact, plain):
        with pytest.raises(CheckpointError, match=r"merged into the base.*unmerge_adapter\(\).*merge_and_unload\(\)"):
            pack(tuned, artifact, out=tmp_path / "v2.safetensors")
        with pytest.raises(CheckpointError):
            publish(tuned, tmp_path, artifact, step=1).wait()
    for variants in (None, {"lora": "*lora_*"}):
        with pytest.raises(CaptureError):
            export(tuned, (X,), out=tmp_path / "x.artifact", variants=variants)
    with pytest.raises(Unsupported):
        model.swap(tuned)
    assert torch.equal(model(X), expected)
    tuned.unmerge_adapter()
    advised = copy.deepcopy(tuned).merge_and_unload()
    served = load(export(base(1), (X,), out=tmp_path / "without.artifact"), advised)
    assert torch.equal(served(X), advised(X))
    model.swap(tuned)
    assert torch.equal(model(X), tuned(X))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.first(x))
        return output


def tuned_by(kind: str, **options: Any) -> Any:
    """A model of PEFT with adapters of a kind, which change what it computes."""
    import peft

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT cannot compile here, and of norms
        model = peft.get_peft_model(Normed().eval(), getattr(peft, kind)(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "default" in name:
                parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
def test_adapters_other_than_lora_keep_their_factor(kind: str, tmp_path: Path) -> None:
    model = tuned_by(kind, r=2, alpha=8, target_modules=["first"])
    parameters = {name.removeprefix("base_model.model."): each for name, each in model.named_parameters()}
    save_file(
        {name: each.detach() for name, each in parameters.items() if ".default" in name}, tmp_path / "v.safetensors"
    )
    artifact = export(model, (X,), out=tmp_path / "a.artifact", variants={"v": "*.default"})
    served = load(artifact, pack(model, artifact, out=tmp_path / "w.safetensors").path)
    served.add_variant("v", "own", tmp_path / "v.safetensors")
    assert torch.equal(served(X, variants={"v": "own"}), model(X))
    with model.disable_adapter():
        assert torch.equal(served(X), model(X))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("IA3Config", {"target_modules": ["first"], "feedforward_modules": []}),
        ("BOFTConfig", {"target_modules": ["first"], "boft_block_size": 2}),
        ("LNTuningConfig", {"target_modules": ["norm"]}),
        ("RoadConfig", {"target_modules": ["first"], "group_size": 4}),
        ("OSFConfig", {"target_modules": ["first"]}),
        ("PsoftConfig", {"target_modules": ["first"], "r": 2}),
        ("LoraConfig", {"target_modules": ["first"], "modules_to_save": ["norm"]}),
    ],
)
def test_adapters_whose_zeros_are_not_the_base_are_refused(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="at zeros is not the base alone"):
        export(tuned_by(kind, **options), (X,), out=tmp_path / "a.artifact", variants={"v": "*.default*"})


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(6, 4), nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.first(self.table(ids))
        return output


@pytest.mark.parametrize("pattern", ["*.default*", "*lora_*", "*trainable_tokens_delta*"])
def test_trained_tokens_are_refused(pattern: str, tmp_path: Path) -> None:
    """They replace rows of the base's table."""
    import peft

    alone = peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["table"])
    beside = peft.LoraConfig(target_modules=["first"], trainable_token_indices={"table": [1, 2]})
    model = peft.get_peft_model(Embedded(), beside if "lora" in pattern else alone).eval()
    with pytest.raises(CaptureError, match="trainable_tokens at zeros is not the base alone"):
        export(model, (torch.arange(6),), out=tmp_path / "a.artifact", variants={"v": pattern})


@pytest.mark.parametrize("options", [{"alora_invocation_tokens": [1]}, {"kasa_config": True}, {"use_dora": True}])
def test_what_makes_other_kinds_of_lora_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """A graph of them computes something else with a plain adapter, of the same names and shapes, than PEFT."""
    from peft.tuners.lora.config import KasaConfig

    given = {"kasa_config": KasaConfig()} if "kasa_config" in options else options
    model = tuned_by("LoraConfig", r=2, target_modules=["first"], **given)
    with pytest.raises(
        CaptureError, match=r"first: (PEFT computes \w+|uses DoRA).*; only (plain )?LoRA can be variable"
    ):
        export(model, (X,), out=tmp_path / "a.artifact", variants={"v": "*lora_*"})
