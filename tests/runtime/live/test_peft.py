"""PEFT's own directories as variants, against PEFT's own eager model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner, Result

from weightswap_exporter import export, export_decoder, pack
from weightswap_runtime import Model, Unsupported, WeightFileError, WeightsMismatch, load
from weightswap_runtime.format.peft import read_config
from weightswap_runtime.live import variants as staging
from weightswap_tools.commands.run import generate_command, run_command

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
IDS = torch.tensor([[3, 51, 58, 35, 7]])
TARGETS = ["q_proj", "v_proj", "down_proj", "embed_tokens"]
RANK = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "as the graph": {"r": RANK, "lora_alpha": 16, "target_modules": TARGETS},
    "lower rank, odd alpha": {"r": 3, "lora_alpha": 7, "target_modules": TARGETS},
    "fewer targets": {"r": 4, "lora_alpha": 4, "target_modules": ["v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": TARGETS},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 2, "layers.0.self_attn.q_proj": 8},
        "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 5},
    },
}


def base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 64, "eos_token_id": 63, "pad_token_id": 0, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more)).eval()


def tuned(seed: int = 1, **config: Any) -> Any:
    """Return PEFT's model, with values as after a training."""
    import peft

    model = peft.get_peft_model(base(), peft.LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    base().save_pretrained(folder / "base")
    for name, config in VARIANTS.items():
        tuned(**config).save_pretrained(folder / name, save_embedding_layers=False)
    wrapped = tuned(r=RANK, lora_alpha=32, target_modules=TARGETS)
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    export(wrapped, (IDS,), out=folder / "artifact", variants={"lora": "*lora_*"}, goldens=[(IDS,)])
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())
    return folder


@pytest.fixture
def model(folder: Path) -> Model:
    return load(folder / "artifact", folder / "base")


@torch.no_grad()
@pytest.mark.slow
def test_each_variant_equals_pefts_own_model(model: Model, folder: Path) -> None:
    plain = base()(IDS).logits
    for name, config in VARIANTS.items():
        receipt = model.add_variant("lora", name, folder / name)
        assert receipt.source.endswith("adapter_model.safetensors")
        expected = tuned(**config)(IDS).logits
        torch.testing.assert_close(model(IDS, variants={"lora": name})["logits"], expected, rtol=1e-4, atol=1e-5)
        assert (expected - plain).abs().max() > 0.1
    assert torch.equal(model(IDS)["logits"], plain)


def test_the_same_variant_has_the_same_id_wherever_it_comes_from(model: Model, folder: Path) -> None:
    path = folder / "fewer targets"
    receipts = [model.add_variant("lora", "a", given) for given in (path, path / "adapter_model.safetensors")]
    assert receipts[0].weights_id == receipts[1].weights_id


def reconfigured(source: Path, folder: Path, changes: dict[str, Any]) -> None:
    """Write a copy of a directory whose configuration has changes."""
    config = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    shutil.copy(source / "adapter_model.safetensors", folder)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"use_dora": True}, Unsupported, "use_dora"),
        ({"peft_type": "IA3"}, Unsupported, "peft_type IA3"),
        ({"bias": "all"}, Unsupported, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, Unsupported, "changes the base"),
        ({"r": 0}, WeightFileError, "rank below 1"),
        ({"r": "many"}, WeightFileError, "configuration"),
        ({"r": 5}, WeightsMismatch, "the configuration says rank 5"),
        ({"rank_pattern": {"(": 1}}, WeightFileError, "configuration"),
        ({"rank_pattern": {"a{99999999999}": 1}}, WeightFileError, "configuration"),
        ({"alpha_pattern": {"(?i)Q_PROJ": 1}}, WeightFileError, "configuration"),
        ({"rank_pattern": {"(a+)+(b+)+": 1}}, Unsupported, "may take forever"),
        ({"rank_pattern": {"(.+)+!": 1}}, Unsupported, "may take forever"),
        ({"alpha_pattern": {"(.|.)" * 30 + "!": 1}}, Unsupported, "may take forever"),
        ({"alpha_pattern": {".?" * 30 + "!": 1}}, Unsupported, "may take forever"),
        ({"alpha_pattern": {f"({'|'.join('.' * 99)})!": 1}}, Unsupported, "may take forever"),
        ({"use_qalora": True}, Unsupported, "use_qalora"),
        ({"something_new": {"of": 1}}, Unsupported, "something_new"),
        ({"r": 10**400}, WeightFileError, "configuration"),
        ({"rank_pattern": {"v_proj": 10**12}}, WeightFileError, "one that no tensor has"),
        ({"target_modules": None}, Unsupported, "has no target_modules"),
        ({"target_modules": []}, Unsupported, "has no target_modules"),
        ({"target_modules": "(.*"}, WeightFileError, "configuration"),
        ({"target_modules": "(.*a|.*b)*v_proj"}, Unsupported, "may take forever"),
        ({"exclude_modules": ".*.*.*.*.*x"}, Unsupported, "may take forever"),
        ({"layers_to_transform": [1], "layers_pattern": ["(", "layers"]}, WeightFileError, "configuration"),
        ({"layers_to_transform": [1], "layers_pattern": "(.+)+x"}, Unsupported, "may take forever"),
        ({"rank_pattern": {f".*.*.*_{index}": 1 for index in range(3000)}}, Unsupported, "may take forever"),
        ({"alpha_pattern": {f".*.*.*_{index}": 1 for index in range(900)}}, Unsupported, "may take forever"),
        ({"rank_pattern": {"[a]" * 100_000: 1}}, WeightFileError, "expected at most"),
    ],
)
def test_configurations_that_the_graph_does_not_compute(
    model: Model, folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    reconfigured(folder / "fewer targets", tmp_path, changes)
    with pytest.raises(error, match=text):
        model.add_variant("lora", "a", tmp_path)
    assert model.variants == {"lora": {}}


TARGETED: dict[str, dict[str, Any]] = {
    "a name": {"target_modules": ["v_proj"]},
    "a whole name": {"target_modules": ["model.layers.1.self_attn.q_proj", "embed_tokens"]},
    "a pattern": {"target_modules": r".*\.(?:q_proj|v_proj)"},
    "a pattern that looks ahead": {"target_modules": r"^(?!.*layers\.0).*\.(q_proj|v_proj|down_proj)$"},
    "layers": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0},
    "layers below a name": {"target_modules": ["v_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "all but some": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "all but a pattern": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1.*"},
}


@pytest.mark.parametrize("config", TARGETED.values(), ids=TARGETED)
def test_a_directory_has_the_modules_that_its_configuration_targets(
    model: Model, tmp_path: Path, config: dict[str, Any]
) -> None:
    source = tmp_path / "peft"
    tuned(r=4, **config).save_pretrained(source, save_embedding_layers=False)
    model.add_variant("lora", "whole", source)
    tensors = load_file(source / "adapter_model.safetensors")
    modules = sorted({name.partition(".lora_")[0] for name in tensors})
    for module in modules:
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{module}.")}
        save_file(kept, source / "adapter_model.safetensors")
        name = module.removeprefix("base_model.model.")
        with pytest.raises(WeightsMismatch, match=f"{name}: adapter_config.json targets it, but the file has no"):
            model.add_variant("lora", "half", source)
    assert set(model.variants["lora"]) == {"whole"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"target_modules": ["q_proj"]},
            r"1\.self_attn\.v_proj: the file has tensors for it, but \S+ does not target it",
        ),
        ({"layers_to_transform": [0]}, r"layers\.1\.self_attn\.v_proj: the file has tensors for it"),
        ({"exclude_modules": ["v_proj"]}, r"layers\.0\.self_attn\.v_proj: the file has tensors for it"),
        ({"target_modules": ["v_proj", "k_proj"]}, r"k_proj: \S+ targets it, but the graph has no room for it"),
        ({"target_modules": ["v_proj", "lm_head"]}, r"lm_head: \S+ targets it, but the graph has no room for it"),
        ({"target_modules": "all-linear"}, r"q_proj: \S+ targets it, but the file has no tensors for it"),
    ],
)
def test_a_configuration_of_other_modules_than_the_files(
    model: Model, folder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    reconfigured(folder / "fewer targets", tmp_path, changes)
    with pytest.raises(WeightsMismatch, match=text):
        model.add_variant("lora", "a", tmp_path)


def test_a_rank_for_each_of_a_thousand_modules(model: Model, folder: Path, tmp_path: Path) -> None:
    """As methods write it that choose ranks: by name, or by the end of a name, where a dot is any character."""
    source = folder / "fewer targets"
    expected = model.add_variant("lora", "a", source).weights_id
    own = {"model.layers.0.self_attn.v_proj": 4, "self_attn.v.proj": 4}
    pattern = {f"model.layers.{index}.mlp.up_proj": 7 for index in range(1000)} | own
    reconfigured(source, tmp_path, {"r": 99, "rank_pattern": pattern})
    assert model.add_variant("lora", "b", tmp_path).weights_id == expected


def test_a_tensor_that_is_there_twice(model: Model, folder: Path, tmp_path: Path) -> None:
    source = folder / "fewer targets"
    tensors = load_file(source / "adapter_model.safetensors")
    again = {name.removeprefix("base_model.model."): tensor.clone() + 1 for name, tensor in tensors.items()}
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    save_file(tensors | again, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"present both with and without base_model\.model\."):
        model.add_variant("lora", "a", tmp_path)


def test_a_link_that_is_turned_to_another_directory_in_the_middle(
    model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "current"
    link.symlink_to(folder / "fewer targets")
    wanted = model.add_variant("lora", "a", link).weights_id
    monkeypatch.setattr(staging, "read_config", lambda folder: _turning(read_config(folder), link))
    assert model.add_variant("lora", "a", link).weights_id == wanted
    assert link.resolve().name == "doubled"


def _turning(config: Any, link: Path) -> Any:
    """A link to a directory is redirected, between the two reads, to a variant that differs only in its values."""
    source = link.resolve()
    doubled = link.with_name("doubled")
    doubled.mkdir()
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, doubled / "adapter_model.safetensors")
    link.unlink()
    link.symlink_to(doubled)
    return config


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
@torch.no_grad()
def test_adapters_of_grouped_convolutions_have_the_rank_of_the_export(tmp_path: Path) -> None:
    """B has a part of the rank for each group, so that zeros behind a lower one would move the groups."""
    peft = pytest.importorskip("peft")

    def adapted(rank: int, seed: int) -> Any:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)).eval()
        model = peft.get_peft_model(plain, peft.LoraConfig(r=rank, lora_alpha=6, target_modules=["0"])).eval()
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        return model

    x = torch.randn(2, 4, 5, 5)
    artifact = export(adapted(8, 0), (x,), out=tmp_path / "a", variants={"lora": "*lora_*"})
    served = load(artifact, pack(adapted(8, 0), artifact, out=tmp_path / "w.safetensors").path)
    same, lower = adapted(8, 1), adapted(4, 2)
    same.save_pretrained(tmp_path / "same")
    served.add_variant("lora", "same", tmp_path / "same")
    torch.testing.assert_close(served(x, variants={"lora": "same"}), same(x), rtol=1e-4, atol=1e-5)
    lower.save_pretrained(tmp_path / "lower")
    with pytest.raises(WeightsMismatch, match="an adapter of a grouped convolution has the rank of the export"):
        served.add_variant("lora", "lower", tmp_path / "lower")


def test_targets_and_ranks_that_the_graph_has_no_place_for(model: Model, tmp_path: Path) -> None:
    tuned(r=4, target_modules=["k_proj"]).save_pretrained(tmp_path / "target", save_embedding_layers=False)
    with pytest.raises(WeightsMismatch, match=r"k_proj\.lora_A\.weight: not in the graph"):
        model.add_variant("lora", "a", tmp_path / "target")
    tuned(r=16, target_modules=["q_proj"]).save_pretrained(tmp_path / "rank", save_embedding_layers=False)
    with pytest.raises(WeightsMismatch, match=r"room for rank 8.*the file has rank 16"):
        model.add_variant("lora", "a", tmp_path / "rank")
    tuned(r=4, target_modules=["embed_tokens"]).save_pretrained(tmp_path / "base", save_embedding_layers=True)
    with pytest.raises(WeightsMismatch, match=r"embed_tokens\S*: belongs to the base.*save_embedding_layers=False"):
        model.add_variant("lora", "a", tmp_path / "base")
    tensors = load_file(tmp_path / "rank" / "adapter_model.safetensors")
    save_file({k: v for k, v in tensors.items() if "lora_B" in k}, tmp_path / "rank" / "adapter_model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"lora_A.*missing, but its other half is present"):
        model.add_variant("lora", "a", tmp_path / "rank")


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")
def test_a_directory_lacks_what_a_group_has_beside_lora(tmp_path: Path) -> None:
    """At zeros, a norm would not be the one over which PEFT computes; a bias of LoRA's own would."""
    wrapped = tuned(r=RANK, target_modules=["v_proj"], lora_bias=True)
    groups = {"lora": ["*lora_*", "*.input_layernorm.weight"], "norms": "model.norm.weight"}
    served = load(export(wrapped, (IDS,), out=tmp_path / "a.artifact", variants=groups))
    tuned(r=4, target_modules=["v_proj"]).save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    with pytest.raises(WeightsMismatch, match=r"1\.input_layernorm\.weight: .*a PEFT directory has none") as error:
        served.add_variant("lora", "a", tmp_path / "peft")
    assert "lora_B" not in str(error.value)
    with pytest.raises(WeightsMismatch, match=r"model\.norm\.weight: .*a PEFT directory has none"):
        served.add_variant("norms", "a", tmp_path / "peft")


def invoke(command: typer.Typer, *arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(command, list(map(str, arguments)))
    assert result.exit_code == status, result.output
    return result


def test_commands_choose_variants(folder: Path, tmp_path: Path) -> None:
    artifact, chosen = folder / "artifact", ["--variant", f"lora={folder / 'patterns'}"]
    np.savez(tmp_path / "x.npz", input_ids=IDS.numpy())
    call = [artifact, "-w", folder / "base", "-i", tmp_path / "x.npz"]
    model = load(artifact, folder / "base")
    receipt = model.add_variant("lora", "patterns", folder / "patterns")
    for options, expected in ((chosen, model(IDS, variants={"lora": "patterns"})), ([], model(IDS))):
        document = json.loads(invoke(run_command, *call, *options, "-o", tmp_path / "y.npz", "--json").stdout)
        assert document["variants"] == ({"lora": receipt.weights_id} if options else {})
        assert np.array_equal(np.load(tmp_path / "y.npz")["logits"], expected["logits"].numpy())
    assert f"variant lora: {receipt.weights_id}" in invoke(run_command, *call, *chosen).stdout
    for wrong, status, said in (
        (["--variant", "lora"], 2, "expected group=path, got lora"),
        ([*chosen, *chosen], 2, "lora is chosen more than once"),
        (["--variant", "other=x"], 1, "UnknownName"),
        (["--variant", f"lora={tmp_path / 'none'}"], 1, "none"),
    ):
        assert said in invoke(run_command, *call, *wrong, status=status).stderr


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("engine", ["onnx", "aoti"])
def test_compiled_decoders_generate_what_transformers_does(folder: Path, tmp_path: Path, engine: str) -> None:
    wrapped = tuned(r=RANK, lora_alpha=32, target_modules=TARGETS)
    variants = {"lora": "*lora_*"}
    artifact = export_decoder(wrapped, out=tmp_path / "decoder", length=24, variants=variants, engines=[engine])
    model = load(artifact, folder / "base", engine=engine)
    prompt = IDS[0].tolist()
    mask = torch.ones_like(IDS)
    for name in (None, *VARIANTS, None):
        eager = base() if name is None else tuned(**VARIANTS[name])
        if name is not None:
            model.add_variant("lora", name, folder / name)
        expected = eager.generate(input_ids=IDS, do_sample=False, max_new_tokens=12, attention_mask=mask)
        found = model.generate(prompt, max_new_tokens=12, variants={"lora": name})
        assert found == expected[0, IDS.shape[1] :].tolist()


@torch.no_grad()
@pytest.mark.slow
def test_generation_with_a_variant_equals_transformers(folder: Path, tmp_path: Path) -> None:
    wrapped = tuned(r=RANK, lora_alpha=32, target_modules=TARGETS)
    export_decoder(wrapped, out=tmp_path / "decoder", length=24, variants={"lora": "*lora_*"})
    model = load(tmp_path / "decoder", folder / "base")
    for name in ("as the graph", "patterns"):
        model.add_variant("lora", name, folder / name)
        eager = tuned(**VARIANTS[name])
        expected = eager.generate(
            input_ids=IDS, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(IDS)
        )
        found = model.generate(IDS[0].tolist(), max_new_tokens=12, variants={"lora": name})
        assert found == expected[0, IDS.shape[1] :].tolist()
        prompt = ",".join(map(str, IDS[0].tolist()))
        options = ("--tokens", "--max-new-tokens", 12, "--variant", f"lora={folder / name}", "--json")
        said = invoke(generate_command, tmp_path / "decoder", folder / "base", prompt, *options).stdout
        assert json.loads(said)["tokens"] == found
    plain = model.generate(IDS[0].tolist(), max_new_tokens=12)
    assert plain == base().generate(IDS, do_sample=False, max_new_tokens=12)[0, IDS.shape[1] :].tolist()
