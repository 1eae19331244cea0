"""The zoo: small models with random weights, their inputs, and how their checkpoints are saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Everything
from tests.zoo import own

Kwargs = dict[str, torch.Tensor]
Save = Callable[[nn.Module, Path], Path]


def save_pretrained(model: Any, folder: Path) -> Path:
    """As transformers does: a directory."""
    model.save_pretrained(folder)
    return folder


def save_safetensors(model: nn.Module, folder: Path) -> Path:
    """The tensors of the state dict; a tied one once for each name."""
    state = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    folder.mkdir()
    safetensors.torch.save_file(state, folder / "state.safetensors")
    return folder / "state.safetensors"


def save_pickled(model: nn.Module, folder: Path) -> Path:
    """The state dict, as a trainer saves it."""
    folder.mkdir()
    torch.save(model.state_dict(), folder / "state.pt")
    return folder / "state.pt"


@dataclass(frozen=True, eq=False)
class Entry:
    """One model. `inputs(*sizes)` gives keyword arguments; the first of `sizes` is what it is exported with."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Kwargs]
    sizes: tuple[tuple[int, ...], ...]
    dynamic: dict[str, dict[int, Any]]
    save: Save = save_pretrained
    state: frozenset[str] = frozenset()
    """Buffers that calls change: their values come from the export, not from a checkpoint."""

    def __str__(self) -> str:
        return self.name


BATCH, LENGTH, OUTPUT = Dim("batch", max=64), Dim("length", max=64), Dim("output_length", max=64)
TEXT = {0: BATCH, 1: LENGTH}
TEXTS = ((2, 7), (3, 12), (1, 4))
MASKED = {"input_ids": TEXT, "attention_mask": TEXT}

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}
CAUSAL = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}  # with a cache a call would return it
GROUPED = SMALL | CAUSAL | {"num_key_value_heads": 2}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
IMAGES |= {"image_size": 12, "patch_size": 4}
SEQUENCES = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def hf(architecture: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Build a transformers model from a configuration, both given by the names of their classes."""

    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, architecture)(getattr(transformers, config)(**settings))
        return model

    return build


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 50, (batch, length))


def text(batch: int, length: int) -> Kwargs:
    """Tokens, padded on the right in all rows but the first."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids(batch, length), "attention_mask": mask}


def typed_text(batch: int, length: int) -> Kwargs:
    return text(batch, length) | {"token_type_ids": torch.randint(0, 2, (batch, length))}


def text_pair(batch: int, length: int, output: int) -> Kwargs:
    return text(batch, length) | {"decoder_input_ids": ids(batch, output)}


def images(batch: int, size: int = 12) -> Kwargs:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def texts_and_images(batch: int, length: int, count: int) -> Kwargs:
    return text(batch, length) | images(count)


def spectrograms(batch: int, output: int) -> Kwargs:
    return {"input_features": torch.randn(batch, 8, 60), "decoder_input_ids": ids(batch, output)}


def features(batch: int, width: int) -> Kwargs:
    return {"x": torch.randn(batch, width)}


def with_lora() -> nn.Module:
    """A Llama with adapters, through PEFT; the B matrices start from zero, `randomised` fills them."""
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft 0.21's own
        model: nn.Module = peft.get_peft_model(hf("LlamaForCausalLM", "LlamaConfig", **GROUPED)(), config)
    return model


ZOO = (
    Entry(
        "bert",
        hf("BertForSequenceClassification", "BertConfig", **SMALL),
        typed_text,
        TEXTS,
        MASKED | {"token_type_ids": TEXT},
    ),
    Entry(
        "gpt2",
        hf("GPT2LMHeadModel", "GPT2Config", vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **CAUSAL),
        text,
        TEXTS,
        MASKED,
    ),
    Entry("llama", hf("LlamaForCausalLM", "LlamaConfig", **GROUPED), text, TEXTS, MASKED),
    Entry(
        "llama-tied", hf("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True), text, TEXTS, MASKED
    ),
    Entry(
        "mixtral",
        hf("MixtralForCausalLM", "MixtralConfig", **GROUPED | {"intermediate_size": 40}, num_local_experts=4),
        text,
        TEXTS,
        MASKED,
    ),
    Entry(
        "deberta-v2",
        hf(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **SMALL,
            relative_attention=True,
            position_buckets=8,
            pos_att_type="p2c|c2p",
            type_vocab_size=0,
        ),
        text,
        TEXTS,
        MASKED,
    ),
    Entry(
        "t5",
        hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            use_cache=False,
        ),
        text_pair,
        ((2, 7, 5), (3, 12, 4), (1, 4, 9)),
        MASKED | {"decoder_input_ids": {0: BATCH, 1: OUTPUT}},
    ),
    Entry(
        "mamba",  # its scan is a Python loop over time: the length is fixed
        hf(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            **CAUSAL,
        ),
        lambda batch: {"input_ids": ids(batch, 6)},
        ((2,), (5,), (1,)),
        {"input_ids": {0: BATCH}},
    ),
    Entry(
        "vit",
        hf("ViTForImageClassification", "ViTConfig", **IMAGES),
        images,
        ((2,), (5,), (1,)),
        {"pixel_values": {0: BATCH}},
    ),
    Entry(
        "resnet",
        hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
        ),
        lambda batch: images(batch, 32),
        ((2,), (5,), (1,)),
        {"pixel_values": {0: BATCH}},
    ),
    Entry(
        "clip",
        hf(
            "CLIPModel",
            "CLIPConfig",
            text_config=SMALL | {"projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=IMAGES | {"projection_dim": 16},
            projection_dim=16,
        ),
        texts_and_images,
        ((2, 7, 3), (3, 12, 5), (1, 4, 1)),
        MASKED | {"pixel_values": {0: Dim("images", max=64)}},
    ),
    Entry(
        "whisper",
        hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=99,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            num_mel_bins=8,
            max_source_positions=30,
            max_target_positions=40,
            **SEQUENCES,
        ),
        spectrograms,
        ((2, 5), (3, 9), (1, 2)),
        {"input_features": {0: BATCH}, "decoder_input_ids": TEXT},
    ),
    Entry(
        "wav2vec2",
        hf(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=37,
            conv_dim=(16, 16),
            conv_stride=(4, 2),
            conv_kernel=(8, 4),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
        ),
        lambda batch, time: {"input_values": torch.randn(batch, time)},
        ((2, 400), (3, 560), (1, 333)),
        {"input_values": {0: BATCH, 1: Dim("time", min=64, max=16000)}},
    ),
    Entry("lora", with_lora, text, TEXTS, MASKED, save_safetensors),
    Entry(
        "lstm",  # torch.export fixes the length
        own.Tagger,
        lambda batch: {"input_ids": ids(batch, 7)},
        ((2,), (5,), (1,)),
        {"input_ids": {0: BATCH}},
        save_safetensors,
    ),
    Entry("fusion", own.Fused, lambda batch: features(batch, 6), ((2,), (5,)), {"x": {0: BATCH}}, save_pickled),
    Entry(
        "qkv",
        own.Attentions,
        lambda batch, length: {"x": torch.randn(batch, length, 8)},
        TEXTS,
        {"x": TEXT},
        save_safetensors,
    ),
    Entry(
        "batch-norm",
        Everything,
        lambda batch: {"x": torch.randn(batch, 1, 5, 5)},
        ((2,), (5,)),
        {"x": {0: BATCH}},
        save_safetensors,
    ),
    Entry(
        "buffers",
        own.Buffers,
        lambda batch: features(batch, 4),
        ((2,), (5,)),
        {"x": {0: BATCH}},
        save_safetensors,
        state=frozenset({"steps", "mean"}),
    ),
    Entry("extra-state", own.Noted, lambda batch: features(batch, 4), ((2,), (5,)), {"x": {0: BATCH}}, save_pickled),
)

# smaller ones of the same kind stand for them in the short run
LARGER = {"t5", "clip", "lora", "gpt2", "llama", "llama-tied", "deberta-v2", "mamba", "whisper", "wav2vec2", "mixtral"}
LARGER |= {"resnet"}  # batch-norm has its layers
BY_NAME = {entry.name: entry for entry in ZOO}
HUGGING_FACE = tuple(entry for entry in ZOO if entry.save is save_pretrained)


def randomised(entry: Entry, seed: int) -> Any:
    """A model of the entry, in eval mode, of which every tensor of a checkpoint differs from that of any other seed.

    Vectors are positive, as variances must be; matrices are scaled by their width, so that activations stay small.
    """
    torch.manual_seed(seed)
    model = entry.build().eval()
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name not in entry.state and tensor.numel():
                tensor.copy_(_random(tensor))
    return model


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under each of its names."""
    lasting = {id(value) for value in model.state_dict(keep_vars=True).values()}
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False) if id(value) in lasting}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def _random(like: torch.Tensor) -> torch.Tensor:
    if not like.is_floating_point():
        return torch.randint(0, 2 if like.dtype is torch.bool else 100, like.shape).to(like.dtype)
    if like.ndim < 2:
        return torch.rand(like.shape) + 0.5
    return torch.randn(like.shape) / like[0].numel() ** 0.5
