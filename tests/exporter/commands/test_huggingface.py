"""Checkpoints of transformers models without a disk, and models from a directory of theirs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.setups import loaded
from tests.zoo.entries import BY_NAME, GROUPED, HUGGING_FACE, SMALL, Entry, hf, named_tensors, randomised
from weightswap_exporter import export, pack, skeleton
from weightswap_exporter.commands.hf_directory import directory_recipe, export_directory
from weightswap_exporter.commands.hf_inputs import sample_inputs
from weightswap_exporter.modules.libraries import checkpoint, load
from weightswap_exporter.modules.tensors import is_fake
from weightswap_runtime import CaptureError, CheckpointError, MissingExtra, Unsupported, WeightswapError
from weightswap_runtime import load as serve

zoo = pytest.mark.parametrize("entry", HUGGING_FACE, ids=str)
llama = hf("LlamaForCausalLM", "LlamaConfig", **GROUPED)
mixtral = hf("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4)


def hollow(build: Callable[[], nn.Module]) -> nn.Module:
    with skeleton():
        return build().eval()


@zoo
@pytest.mark.sampled(1)
def test_a_checkpoint_is_what_save_pretrained_writes(entry: Entry, tmp_path: Path) -> None:
    model = randomised(entry, 1)
    entry.save(model, tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for described in (checkpoint(model), checkpoint(hollow(entry.build))):
        kinds = [{key: (value.dtype, value.shape) for key, value in each.items()} for each in (described, saved)]
        assert kinds[0] == kinds[1]
        assert all(value.is_meta for value in described.values())


@zoo
def test_loading_does_what_from_pretrained_does(entry: Entry, tmp_path: Path) -> None:
    model: Any = randomised(entry, 1)
    entry.save(model, tmp_path)
    expected = named_tensors(type(model).from_pretrained(tmp_path))
    loaded = entry.build()
    load(loaded, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    found = named_tensors(loaded)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert [name for name in found if found[name].requires_grad != expected[name].requires_grad] == []
    assert ties(found) == ties(expected)


def ties(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """The names that belong to one tensor."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {frozenset(names) for names in groups.values()}


def test_loading_can_be_traced_with_its_conversions() -> None:
    model = hollow(mixtral)

    def loading(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        load(model, tensors)
        return {name: tensor.detach() for name, tensor in named_tensors(model).items()}

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in checkpoint(model).items()}
        graph = make_fx(loading, tracing_mode="fake")(fakes)
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {"aten.stack.default", "aten.cat.default"} <= called

    tensors = {key: torch.randn(value.shape) for key, value in fakes.items()}
    expected = mixtral()
    load(expected, tensors)
    computed = graph(tensors)
    for name, tensor in named_tensors(expected).items():
        assert torch.equal(computed[name], tensor), name


def test_nothing_is_printed_and_no_thread_is_started(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    load(hollow(mixtral), checkpoint(hollow(mixtral)))
    assert set(threading.enumerate()) <= before
    assert capfd.readouterr() == ("", "")


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_reason() -> None:
    tensors = checkpoint(llama())
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.empty(3, 32, device="meta")
    tensors["model.other"] = torch.empty(1, device="meta")
    with pytest.raises(CheckpointError) as refused:
        load(hollow(llama), tensors)
    assert str(refused.value).splitlines()[1:] == [
        "  - model.norm.weight: missing",
        "  - model.layers.0.mlp.up_proj.weight: has shape [3, 32], the model has [37, 32]",
    ]


def test_a_conversion_that_fails_is_named() -> None:
    tensors = checkpoint(mixtral())
    key = next(key for key in tensors if key.endswith("experts.0.w1.weight"))
    tensors[key] = torch.empty(3, 3, device="meta")
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj: cannot be converted"):
        load(hollow(mixtral), tensors)


def test_ties_may_be_absent_and_old_buffers_present() -> None:
    tied = hf("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True)
    tensors = checkpoint(tied())
    assert "lm_head.weight" not in tensors
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.empty(4, device="meta")}
    model: Any = hollow(tied)
    load(model, tensors | old)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_with_adapters_of_its_own_is_refused() -> None:
    import peft

    model: Any = llama()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    for use in (checkpoint, lambda model: load(model, {})):
        with pytest.raises(Unsupported, match=r"has adapters.*peft.get_peft_model"):
            use(model)


def test_ties_that_transformers_does_not_know_are_refused_and_the_advice_helps(tmp_path: Path) -> None:
    model: Any = llama().eval()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    ids = torch.tensor([[3, 51, 58]])
    with pytest.raises(Unsupported, match=r"has tied tensors.*checkpoint=model.state_dict\(\)"):
        export(model, (ids,), out=tmp_path / "refused.artifact")
    artifact = export(model, (ids,), out=tmp_path / "tied.artifact", checkpoint=model.state_dict())
    served = serve(artifact, pack(model.state_dict(), artifact, out=tmp_path / "tied.safetensors").path)
    with torch.no_grad():
        assert torch.equal(served(ids)["logits"], model(ids).logits)


def write(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_directory_gives_a_skeleton_of_its_architecture_and_dtype(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**GROUPED | {"use_cache": True}).to_dict()
    for name, dtype in (("bfloat16", torch.bfloat16), (None, torch.float32)):
        write(tmp_path, **config | {"architectures": ["LlamaForSequenceClassification"], "dtype": name})
        model = directory_recipe(tmp_path)["model"]
        assert type(model) is LlamaForSequenceClassification
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert all(is_fake(parameter) for parameter in model.parameters())
        assert not model.training
        assert not model.config.use_cache


def test_without_an_architecture_the_library_s_plain_model_is_taken(tmp_path: Path) -> None:
    """And no code of the directory is run."""
    from transformers import BertModel

    (tmp_path / "modeling.py").write_text("raise SystemExit('run')")
    code = {"AutoModel": "modeling.Own", "AutoConfig": "modeling.Config"}
    for more in ({}, {"auto_map": code}):
        assert type(directory_recipe(write(tmp_path, model_type="bert", **SMALL, **more))["model"]) is BertModel


def test_parameters_that_stay_in_float32_do_so(tmp_path: Path) -> None:
    model: Any = BY_NAME["t5"].build()
    model.half().save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path)
    found = directory_recipe(tmp_path)["model"]
    dtypes = {name: parameter.dtype for name, parameter in found.named_parameters()}
    assert dtypes == {name: parameter.dtype for name, parameter in expected.named_parameters()}
    assert set(dtypes.values()) == {torch.float16, torch.float32}


@pytest.mark.parametrize(
    ("config", "kind", "says"),
    [
        (None, Unsupported, "has no config.json; hf: takes the local directory"),
        ("{", Unsupported, "cannot be read as JSON"),
        ("[]", Unsupported, "names no model_type"),
        ('{"architectures": ["BertModel"]}', Unsupported, "names no model_type"),
        ('{"model_type": "nobody"}', Unsupported, r"has no model type 'nobody'\. Write a recipe"),
        ('{"model_type": "nobody", "auto_map": {"AutoModel": "a.B"}}', Unsupported, r"\(auto_map\) is never run"),
        ('{"model_type": "bert", "architectures": ["BertForNothing"]}', Unsupported, "no model class 'BertForNothing'"),
        ('{"model_type": "bert", "architectures": ["BertConfig"]}', Unsupported, "no model class 'BertConfig'"),
        ('{"model_type": "bert", "hidden_size": "wide"}', Unsupported, "transformers cannot use it"),
        ('{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 7}', Unsupported, "cannot be built"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', Unsupported, "is quantised"),
    ],
)
def test_bad_directories_are_refused(
    config: str | None, kind: type[WeightswapError], says: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(kind, match=says) as refused:
        directory_recipe(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"hf:DIR needs the extra `hf`"):
        directory_recipe(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("architecture", "config", "names"),
    [
        ("DistilBertForMaskedLM", "DistilBertConfig", ["input_ids", "attention_mask"]),
        ("BertForMaskedLM", "BertConfig", ["input_ids", "attention_mask", "token_type_ids"]),
        ("BartForConditionalGeneration", "BartConfig", ["input_ids", "attention_mask", "decoder_input_ids"]),
        ("T5EncoderModel", "T5Config", ["input_ids", "attention_mask"]),
        ("MambaForCausalLM", "MambaConfig", ["input_ids"]),
        ("SwinForImageClassification", "SwinConfig", ["pixel_values"]),
        ("ResNetModel", "ResNetConfig", ["pixel_values"]),
        ("SiglipModel", "SiglipConfig", ["input_ids", "attention_mask", "pixel_values"]),
        ("CLIPTextModelWithProjection", "CLIPTextConfig", ["input_ids", "attention_mask"]),
        ("WhisperForAudioClassification", "WhisperConfig", ["input_features"]),
        ("HubertForCTC", "HubertConfig", ["input_values"]),
    ],
)
def test_inputs_follow_the_kind(architecture: str, config: str, names: list[str]) -> None:
    found = sample_inputs(hollow(hf(architecture, config)))
    assert list(found.kwargs) == names
    assert found.sizes.keys() == found.kwargs.keys()
    assert all(0 in axes for axes in found.sizes.values())


def test_texts_are_no_longer_than_the_model_has_positions_for() -> None:
    roberta = hf("RobertaForMaskedLM", "RobertaConfig", **SMALL | {"max_position_embeddings": 12}, pad_token_id=1)
    found = sample_inputs(hollow(roberta))
    assert found.kwargs["input_ids"].shape == (2, 10)
    assert found.sizes["input_ids"][1].max == 10  # two rows of its table are before the first position


def test_sizes_are_fixed_one_after_the_other_until_a_capture_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[dict[str, list[int]]] = []

    def refusing(*, dynamic_shapes: dict[str, dict[int, Any]], **_: Any) -> None:
        tried.append({name: list(axes) for name, axes in dynamic_shapes.items()})
        raise CaptureError(f"attempt {len(tried)}")

    monkeypatch.setattr("weightswap_exporter.commands.hf_directory.export", refusing)
    write(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    with pytest.raises(CaptureError, match="attempt 3"):
        export_directory(tmp_path, out=tmp_path / "a.artifact")
    both = ("input_ids", "attention_mask")
    assert tried == [dict.fromkeys(both, axes) for axes in ([0, 1], [0], [])]


State = dict[str, torch.Tensor]


def older_gpt2(state: State) -> State:
    plain = {key.removeprefix("transformer."): value for key, value in state.items()}
    return {**plain, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}


def older_bert(state: State) -> State:
    """Change names as those of TensorFlow were, and add the head of another task."""
    found = {key.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): state[key] for key in state}
    return {**found, "cls.seq_relationship.weight": torch.zeros(2, 32)}


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
OLDER: dict[str, tuple[Callable[[], nn.Module], Callable[[State], State], set[str]]] = {
    "without the prefix, with masks": (hf("GPT2LMHeadModel", "GPT2Config", **GPT2), older_gpt2, {"h.0.attn.bias"}),
    "old names, and heads of other tasks": (
        hf("BertForMaskedLM", "BertConfig", **SMALL),
        older_bert,
        {"cls.seq_relationship.weight"},
    ),
    "another dtype": (llama, lambda state: {key: value.bfloat16() for key, value in state.items()}, set()),
}


@pytest.mark.parametrize(("build", "rewrite", "unused"), OLDER.values(), ids=OLDER)
@pytest.mark.slow
def test_the_form_of_the_weights_in_a_directory_is_recorded(
    build: Callable[[], nn.Module], rewrite: Callable[[Any], Any], unused: set[str], tmp_path: Path
) -> None:
    now, old = tmp_path / "now", tmp_path / "old"
    model = build().eval()
    for folder in (now, old):
        model.save_pretrained(folder)
    file = old / "model.safetensors"
    safetensors.torch.save_file(rewrite(safetensors.torch.load_file(file)), file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="no weight uses these checkpoint keys") if unused else nullcontext():
        artifact = export_directory(old, out=tmp_path / "a.artifact")
    served = serve(artifact)
    assert set(served.swap(old).ignored) == unused
    loaded = type(model).from_pretrained(old)
    assert served.weights_id == pack(loaded, artifact, out=tmp_path / "v.safetensors").weights_id
    served.swap(now)


@pytest.mark.slow
def test_weights_of_another_model_are_no_example(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    safetensors.torch.save_file({"other": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    with pytest.warns(UserWarning, match="its weights cannot serve as the example checkpoint"):
        export_directory(tmp_path / "model", out=tmp_path / "a.artifact")


@pytest.mark.slow
def test_a_model_is_captured_without_its_cache(tmp_path: Path) -> None:
    model = hollow(hf("LlamaForCausalLM", "LlamaConfig", **{**GROUPED, "use_cache": True}))
    artifact = export(model, (), {"input_ids": torch.zeros(2, 7, dtype=torch.int64)}, out=tmp_path / "a.artifact")
    assert model.config.use_cache
    assert list(artifact.manifest.methods["forward"].signature.output.items)


LAYERS = {"num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
TINY = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32} | LAYERS
CACHING = GROUPED | {"use_cache": True}
WORDS = torch.arange(14).view(2, 7)


class Through(nn.Module):
    """Returns what the model in it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids)


class Continued(Through):
    """Reads a last word with the cache of the others, and returns that cache, too."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        first = self.model(input_ids[:, :-1])
        second = self.model(input_ids[:, -1:], past_key_values=first.past_key_values)
        return {"logits": second.logits, "caches": (first.past_key_values, second.past_key_values)}


def continued_pretrained() -> nn.Module:
    """A subclass of PreTrainedModel, which is no class of transformers."""
    import transformers

    class Own(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class, _supports_sdpa = transformers.LlamaConfig, True
        forward = Continued.forward

        def __init__(self, model: Any) -> None:
            super().__init__(deepcopy(model.config))
            self.model = model
            self.post_init()

    return Own(caching_llama())


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))  # type: ignore[arg-type]


def with_prefix(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def t5(kind: str) -> Callable[[], nn.Module]:
    return hf(f"{kind}ForConditionalGeneration", f"{kind}Config", **TINY)


caching_llama = hf("LlamaForCausalLM", "LlamaConfig", **CACHING)
PAIRS = {"input_ids": WORDS, "decoder_input_ids": WORDS[:, :3]}
CACHES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    **{kind: (t5(kind), PAIRS) for kind in ("T5", "MT5", "UMT5")},
    "PEFT": (lambda: with_lora(caching_llama(), target_modules=["q_proj"]), {"input_ids": WORDS}),
    "PEFT's prefix": (lambda: with_prefix(caching_llama()), {"input_ids": WORDS}),
    "PEFT around T5": (lambda: with_lora(t5("T5")(), target_modules=["q"], task_type="SEQ_2_SEQ_LM"), PAIRS),
    "a wrapper": (lambda: Through(caching_llama()), {"input_ids": WORDS}),
    "a wrapper that needs the cache": (lambda: Continued(caching_llama()), {"input_ids": WORDS}),
    "a class of one's own that needs it": (continued_pretrained, {"input_ids": WORDS}),
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("build", "inputs"), CACHES.values(), ids=CACHES)
def test_what_returns_a_cache_is_captured_without_it(
    build: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = build().eval()
    artifact = export(model, (), inputs, out=tmp_path / "a.artifact", goldens={"forward": [((), inputs)]})
    served = loaded(artifact, tmp_path, model)
    with torch.no_grad():
        expected = model(**inputs)  # with its cache: the configurations are as they were
    assert torch.equal(served(**inputs)["logits"], expected["logits"])
    assert any(expected.get(name) is not None for name in ("past_key_values", "caches"))


def test_a_cache_that_the_caller_asks_for_is_refused(tmp_path: Path) -> None:
    says = r"a call returns a transformers\.cache_utils\.DynamicCache.*use_cache=False"
    with pytest.raises(CaptureError, match=says):
        export(llama().eval(), (), {"input_ids": WORDS, "use_cache": True}, out=tmp_path / "a.artifact")
