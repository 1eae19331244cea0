"""Sample inputs of transformers models: guessed, tried with the eager model, or given by the user."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import nn

from tests.support.program import run, said
from tests.support.setups import equal
from tests.wild.tiny import tiny
from tests.zoo.entries import GROUPED, IMAGES, hf
from weightswap_exporter import skeleton
from weightswap_exporter.commands.hf_directory import directory_recipe, export_directory
from weightswap_exporter.commands.hf_inputs import Inputs, sample_inputs
from weightswap_runtime import CaptureError, Unsupported, load

MASKED = ["input_ids", "attention_mask"]
TEXT = {"input_ids": [2, 16], "attention_mask": [2, 16]}
SERIES = {"past_values": [2, 15], "past_time_features": [2, 15, 0], "past_observed_mask": [2, 15]}
STEPS = {"rewards": [2, 16, 1], "returns_to_go": [2, 16, 1], "timesteps": [2, 16]}
FAMILIES: dict[str, dict[str, list[int]]] = {
    "LlamaModel": TEXT,
    "T5Model": {**TEXT, "decoder_input_ids": [2, 16]},
    "ViTModel": {"pixel_values": [2, 3, 224, 224]},
    "Wav2Vec2Model": {"input_values": [2, 2640]},
    "ASTModel": {"input_values": [2, 1024, 128]},
    "EncodecModel": {"input_values": [2, 1, 15360]},
    "ParakeetEncoder": {"input_features": [2, 200, 80]},
    "BertForMultipleChoice": {name: [2, 4, 16] for name in (*TEXT, "token_type_ids")},
    "VideoMAEModel": {"pixel_values": [2, 8, 3, 224, 224]},
    "TimesformerModel": {"pixel_values": [2, 8, 3, 224, 224]},
    "LlavaModel": TEXT,
    "FlavaModel": TEXT,
    "Siglip2Model": {**TEXT, "pixel_values": [2, 32, 768], "spatial_shapes": [2, 2]},
    "Qwen2_5_VisionTransformerPretrainedModel": {"hidden_states": [64, 1176], "grid_thw": [2, 3]},
    "LayoutLMModel": {**TEXT, "token_type_ids": [2, 16], "bbox": [2, 16, 4]},
    "LxmertModel": {**TEXT, "token_type_ids": [2, 16], "visual_feats": [2, 16, 256], "visual_pos": [2, 16, 4]},
    "PatchTSTModel": {"past_values": [2, 32, 1]},
    "AutoformerModel": SERIES,
    "DecisionTransformerModel": {"states": [2, 16, 17], "actions": [2, 16, 4], **STEPS},
    "SpeechT5Model": {"input_values": [2, 16, 96], "decoder_input_values": [2, 16, 96]},
}


def small(architecture: str) -> Any:
    """A skeleton of the smallest model of a class, as the survey has it."""
    return next(small_models(architecture))


def small_models(architecture: str) -> Iterator[Any]:
    import transformers

    kind = getattr(transformers, architecture)
    for config in tiny(kind.config_class().to_dict()):
        with skeleton():
            model = kind._from_config(kind.config_class.from_dict(config)).eval()
        yield model


def inputs_of(architecture: str) -> Inputs:
    """Return inputs of the smallest model that can be called: the sizes of some contradict each other."""
    for model in small_models(architecture):
        with suppress(Unsupported):
            return sample_inputs(model)
    raise AssertionError(architecture)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.slow
def test_inputs_of_every_family_are_found(architecture: str) -> None:
    found = inputs_of(architecture)
    assert {name: list(value.shape) for name, value in found.kwargs.items()} == FAMILIES[architecture]
    assert found.sizes.keys() == found.kwargs.keys()


def test_pictures_come_with_as_many_tokens_as_they_have_features() -> None:
    model = small("LlavaModel")
    found = sample_inputs(model, pictures=True)
    assert list(found.kwargs) == [*MASKED, "pixel_values"]
    features = (336 // 14) ** 2
    assert (found.kwargs["input_ids"] == model.config.image_token_id).sum(1).tolist() == [features] * 2
    assert found.kwargs["attention_mask"].shape == (2, 16 + features)


def test_a_model_that_takes_one_text_at_a_time_gets_one() -> None:
    model = hf("LlamaForSequenceClassification", "LlamaConfig", **GROUPED)().eval()
    found = sample_inputs(model)
    assert {name: list(value.shape) for name, value in found.kwargs.items()} == {name: [1, 16] for name in MASKED}
    assert {name: list(axes) for name, axes in found.sizes.items()} == {name: [1] for name in MASKED}


def test_guesses_that_eager_refuses_are_listed_with_its_errors(caplog: pytest.LogCaptureFixture) -> None:
    model = small("BertModel")
    model.embeddings.word_embeddings = nn.Linear(7, 7)
    with caplog.at_level(logging.DEBUG), pytest.raises(Unsupported) as refused:
        sample_inputs(model)
    first, told, *_, advice = str(refused.value).splitlines()
    says = "BertModel (model type 'bert'): accepts none of the inputs that were guessed; it takes input_ids"
    assert first.startswith(says)
    assert told.startswith("  - input_ids [2, 16], attention_mask [2, 16], token_type_ids [2, 16]: ")
    assert "RuntimeError" in told
    assert advice.startswith("Give others with --inputs FILE.py:function")
    assert caplog.records == []


def test_a_model_that_takes_nothing_says_so() -> None:
    with pytest.raises(Unsupported, match=r"BarkModel \(model type 'bark'\): what to give .* it takes nothing"):
        sample_inputs(small("BarkModel"))


def spectra() -> Any:
    """A model of an unknown type, with `dummy_inputs`."""
    from transformers import PretrainedConfig, PreTrainedModel

    class Spectra(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig
        main_input_name = "spectra"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = nn.Linear(5, 3)

        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"spectra": torch.ones(2, 5)}

        def forward(self, spectra: torch.Tensor) -> torch.Tensor:
            return self.layer(spectra)

    return Spectra(PretrainedConfig())


def test_dummy_inputs_of_the_model_are_used() -> None:
    found = sample_inputs(spectra())
    assert {name: value.shape for name, value in found.kwargs.items()} == {"spectra": (2, 5)}
    assert {axis: dim.__name__ for axis, dim in (found.sizes["spectra"] or {}).items()} == {0: "batch"}


def test_a_guess_leaves_the_model_as_it_was() -> None:
    model = small("BertModel")
    model.counted = nn.Buffer(torch.zeros(1))

    def count(module: Any, _: object) -> None:
        module.counted.add_(1)
        module.seen = True

    model.register_forward_pre_hook(count)
    before = torch.random.get_rng_state()
    sample_inputs(model)
    assert model.counted.item() == 0
    assert not hasattr(model, "seen")
    assert torch.equal(torch.random.get_rng_state(), before)


def llava() -> Any:
    text, vision = ({"model_type": "llama", **GROUPED}, {"model_type": "clip_vision_model", **IMAGES})
    names = {"image_token_id": 90, "image_token_index": 90}
    return hf("LlavaForConditionalGeneration", "LlavaConfig", text_config=text, vision_config=vision, **names)().eval()


def write(model: Any, folder: Path) -> Path:
    document = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.slow
def test_a_model_of_pictures_and_texts_is_exported_with_both(tmp_path: Path) -> None:
    torch.manual_seed(1)
    eager = llava()
    directory = write(eager, tmp_path)
    eager.config.use_cache = False
    with pytest.warns(UserWarning, match="cannot keep every size"):
        served = load(export_directory(directory, out=tmp_path / "a.artifact", pictures=True))
    eager.save_pretrained(tmp_path / "weights")
    served.swap(tmp_path / "weights")
    inputs = directory_recipe(directory, pictures=True)["kwargs"]
    inputs["pixel_values"] = torch.randn_like(inputs["pixel_values"])
    with torch.no_grad():
        expected = eager(**inputs)
    assert equal(served(**inputs)["logits"], expected.logits)


def export_by_command(folder: Path, text: str, status: int = 0) -> Result:
    """Export a Llama with the inputs that a text makes."""
    (folder / "samples.py").write_text(f"import torch\n\ndef inputs(model):\n    return {text}\n")
    where = f"hf:{write(llama(), folder)}"
    return run(
        "export", where, "-o", folder / "a.artifact", "--inputs", f"{folder / 'samples.py'}:inputs", status=status
    )


llama = hf("LlamaForCausalLM", "LlamaConfig", **GROUPED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "text",
    [
        "{'input_ids': torch.zeros(3, 5, dtype=torch.int64)}",
        "(torch.zeros(3, model.config.head_dim, dtype=torch.int64),)",
    ],
)
@pytest.mark.slow
def test_the_users_inputs_are_taken(text: str, tmp_path: Path) -> None:
    done = export_by_command(tmp_path, text)
    assert re.search(r"input_ids: \S+ ?\[batch, \d\]", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("None", "--inputs: returned a NoneType; expected a tuple or a dict for forward"),
        ("()", "--inputs: the eager LlamaForCausalLM refuses : "),
        ("{'pixels': 1}", "--inputs: the eager LlamaForCausalLM refuses pixels []: "),
        ("(1,) * 99", "--inputs: not what the forward of LlamaForCausalLM takes: too many positional arguments"),
        ("{'input_ids': torch.zeros(2, 3, 4).long()}", "the eager LlamaForCausalLM refuses input_ids [2, 3, 4]: "),
        ("1 / 0", "samples.py:inputs: raised ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_inputs_are_bad_usage(text: str, says: str, tmp_path: Path) -> None:
    assert says in export_by_command(tmp_path, text, status=2).stderr


def test_what_the_users_code_logs_is_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what the libraries log about themselves is not."""
    logs = "[__import__('logging').getLogger(name).warning(name) for name in ('mine', 'torch.x', 'transformers')]"
    export_by_command(tmp_path, logs, status=2)
    assert [each.name for each in caplog.records if each.name in each.getMessage()] == ["mine"]
    assert logging.getLogger("transformers").level < logging.ERROR


def test_a_recipe_gives_its_inputs_itself(tmp_path: Path) -> None:
    text = said("export", "recipe.py:build", "-o", tmp_path / "a.artifact", "--pictures", status=2)
    assert "--inputs and --pictures are for hf:DIR" in text


def test_a_capture_that_fails_says_that_inputs_were_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(**_: Any) -> None:
        raise CaptureError("no")

    monkeypatch.setattr("weightswap_exporter.commands.hf_directory.export", refusing)
    write(llama(), tmp_path)
    with pytest.raises(CaptureError) as refused:
        export_directory(tmp_path, out=tmp_path / "a.artifact")
    assert str(refused.value).splitlines() == [
        "no",
        "The inputs were guessed, and the eager model accepts them: input_ids [2, 16], attention_mask [2, 16]. Use "
        "--inputs to give others.",
    ]
