"""A checkpoint's configuration: weights of a model that computes something else with the same shapes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightswap_exporter import export, pack
from weightswap_runtime import CheckpointError, Model, WeightFileError, WeightsMismatch, load
from weightswap_runtime.format.model_config import config_problems, read_config

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# what changes answers, and no shape
OTHERS: dict[str, dict[str, Any]] = {
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "hidden_act": {"hidden_act": "gelu"},
    "num_attention_heads": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "rope.rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "rope.rope_type": {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
}
SAME: dict[str, Any] = {"attention_dropout": 0.1, "eos_token_id": 7, "use_cache": False, "unsloth_version": "2024.9"}


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    return read_config(json.dumps(config).encode(), "theirs")


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits


def wrapped(**settings: Any) -> Wrapper:
    return Wrapper(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | settings)).eval())


def saved(folder: Path, model: Wrapper) -> Path:
    """Save a model so that its names are those of the wrapper."""
    model.model.save_pretrained(folder, state_dict=model.state_dict())
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "llama.artifact"
    export(wrapped(), (IDS,), out=path)
    return path


@pytest.fixture
def model(artifact: Path) -> Model:
    return load(artifact, wrapped())


@pytest.mark.parametrize("name", OTHERS)
def test_weights_of_a_model_that_computes_otherwise_are_refused(
    name: str, artifact: Path, model: Model, tmp_path: Path
) -> None:
    before, other = model(IDS), wrapped(**OTHERS[name])
    folder, out = saved(tmp_path / "other", other), tmp_path / "other.safetensors"
    for refused in (folder, other):
        with pytest.raises(WeightsMismatch, match=f"configuration: {name}: .* in the graph"):
            model.swap(refused)
        with pytest.raises((WeightsMismatch, CheckpointError), match=f"configuration: {name}: .* in the graph"):
            pack(refused, artifact, out=out)
    assert torch.equal(model(IDS), before)
    assert not out.exists()
    model.swap(folder / "model.safetensors")  # as the refusal says
    assert not torch.equal(model(IDS), other(IDS))
    export(other, (IDS,), out=tmp_path / "other.artifact")
    assert torch.equal(load(tmp_path / "other.artifact", folder)(IDS), other(IDS))


def test_weights_with_settings_that_change_nothing_are_taken(artifact: Path, model: Model, tmp_path: Path) -> None:
    tuned = wrapped(**SAME)
    folder = saved(tmp_path / "tuned", tuned)
    for weights in (tuned, folder, pack(folder, artifact, out=tmp_path / "tuned.safetensors").path):
        model.swap(weights)
        assert torch.equal(model(IDS), tuned(IDS))


def test_positions_are_compared_in_the_words_of_older_versions(model: Model, tmp_path: Path) -> None:
    tuned = wrapped()
    folder = saved(tmp_path / "tuned", tuned)

    def as_before(theta: float, scaling: Any) -> Callable[[dict[str, Any]], object]:
        def change(config: dict[str, Any]) -> None:
            config.pop("rope_parameters", None)
            config.update(rope_theta=theta, rope_scaling=scaling, head_dim=None, torch_dtype="float32")

        return change

    edit(folder, as_before(1e4, None))
    model.swap(folder)
    assert torch.equal(model(IDS), tuned(IDS))
    for theta, scaling in ((5e5, None), (1e4, {"type": "linear", "factor": 8.0})):
        edit(folder, as_before(theta, scaling))
        with pytest.raises(WeightsMismatch, match=r"configuration: rope\."):
            model.swap(folder)


def against(kind: str, **others: Any) -> list[str]:
    """Return what a configuration has against that of a model of this type with the default settings."""
    ours = read_config(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False).encode(), "ours")
    return config_problems(ours, settings_of({"model_type": kind, **others}))


def test_settings_are_compared_under_their_older_names_too() -> None:
    assert "rope.partial_rotary_factor: 0.25 in the graph, 0.5" in against("gpt_neox", rotary_pct=0.5)[0]
    assert "rope.rope_theta" in against("gpt_neox", rotary_emb_base=500_000)[0]
    assert "rope.local_rope_theta" in against("gemma3_text", rope_theta=1_000_000, rope_local_base_freq=7)[0]
    assert "attention_window" in against("longformer", attention_window=64)[0]
    assert "sliding_window" in against("mistral", sliding_window=None)[0]
    assert against("llama", hidden_act="swish") == []


def test_a_part_is_compared_with_that_part() -> None:
    text, other = ({"model_type": "gemma3_text", "num_attention_heads": heads} for heads in (8, 4))
    whole = {"model_type": "gemma3", "num_attention_heads": 1}
    assert config_problems(settings_of(text), settings_of(whole | {"text_config": text})) == []
    assert len(config_problems(settings_of(text), settings_of(whole | {"text_config": other}))) == 1
    assert config_problems(settings_of(text), settings_of(whole)) == []


def test_a_model_whose_configuration_is_no_json_is_taken(model: Model) -> None:
    tuned = wrapped()
    tuned.model.config.note = object()
    model.swap(tuned)
    assert torch.equal(model(IDS), tuned(IDS))


def test_a_configuration_that_is_none_is_refused_and_none_is_needed(model: Model, tmp_path: Path) -> None:
    folder = saved(tmp_path / "tuned", wrapped())
    for content in (b"[]", b"{", b"\xff", b'{"a":' * 100_000, b"9" * 5000):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(WeightFileError, match="is not a model's configuration"):
            model.swap(folder)
    labels = dict.fromkeys(range(20000), "x" * 60)
    for content in (
        '{"limits": [0.0, Infinity, -Infinity, NaN]}',
        json.dumps({"id2label": labels, "rms_norm_eps": 1e-6}),
    ):
        (folder / "config.json").write_text(content)
        model.swap(folder)
    (folder / "config.json").unlink()
    model.swap(folder)


# as earlier versions of transformers wrote them
OLDER: list[dict[str, Any]] = [
    {
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "num_key_value_heads": None,
        "pretraining_tp": 1,
    },
    {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    {"model_type": "llama", "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 8.0}},
    {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21},
    {
        "model_type": "phi3",
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
    },
    {"model_type": "gemma3_text", "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
    {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
    {"model_type": "falcon", "num_kv_heads": None, "alibi": False},
    {"model_type": "longformer", "attention_window": 512, "id2label": {str(n): "x" * 40 for n in range(20_000)}},
    {
        "model_type": "gpt2",
        "n_ctx": 1024,
        "summary_activation": None,
        "task_specific_params": {"a": {"max_length": 50}},
    },
    {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25},
    {"model_type": "t5", "d_ff": 2048, "feed_forward_proj": "gated-gelu", "output_past": True, "n_positions": 512},
    {
        "model_type": "clip",
        "text_config": {"hidden_act": "quick_gelu", "num_attention_heads": 8},
        "text_config_dict": None,
    },
]


@pytest.mark.parametrize("raw", OLDER, ids=lambda raw: raw["model_type"])
def test_a_model_that_is_built_from_an_older_configuration_does_not_contradict_it(raw: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    ours = read_config(config.to_json_string(use_diff=False).encode(), "ours")
    assert config_problems(ours, settings_of(raw)) == []
    assert ours


def test_no_model_that_transformers_ships_contradicts_its_own_files() -> None:
    tried = 0
    for name in (
        "llama",
        "mistral",
        "gemma2",
        "gemma3",
        "qwen2",
        "phi3",
        "gpt2",
        "bert",
        "t5",
        "mixtral",
        "whisper",
        "vit",
    ):
        config = transformers.CONFIG_MAPPING[name]()
        every, written = (read_config(config.to_json_string(use_diff=diff).encode(), "it") for diff in (False, True))
        assert config_problems(every, written) == []
        tried += len(every)
    assert tried > 50
