"""Generation: the tokens are those of transformers' `generate`, and a swap in the middle follows the policy."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.graph_calls import hold_calls
from weightswap_exporter import compile_engines, export, export_decoder, pack, skeleton
from weightswap_exporter.commands.build import export_command
from weightswap_runtime import (
    Artifact,
    ArtifactError,
    CallError,
    Context,
    InputMismatch,
    Model,
    StaleState,
    TokenStream,
    Unsupported,
    load,
)
from weightswap_runtime.engines.choosing import EngineName
from weightswap_runtime.errors import visible_lines
from weightswap_runtime.format.manifest import decode_manifest
from weightswap_runtime.model.generation import Sampling, Tokenizer, choose, probabilities
from weightswap_tools.commands.run import generate_command

LENGTH, VOCABULARY = 24, 64
PROMPT = [3, 51, 58, 35]
PROMPTS = [[3, 51, 58, 35], [9], [1, 2, 3, 4, 5, 6]]
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "eos_token_id": 63,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "eos_token_id": 63,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _SIZES,
    "GPT2LMHead": _GPT2,
    "Qwen2": _SIZES,
    "Qwen3": _SIZES,
    "Mistral": {**_SIZES, "sliding_window": 6},
    "Gemma": _SIZES,
    "Gemma2": {**_SIZES, "sliding_window": 6},
    "Phi3": _SIZES,
}
_CONFIGS = {"GPT2LMHead": "GPT2Config"}


def built(family: str, seed: int = 0) -> Any:
    """A tiny model with random weights, each of which affects the output."""
    import transformers

    config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**FAMILIES[family])
    name = f"{family}Model" if family.endswith("Head") else f"{family}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def expected(model: Any, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    """Return the tokens that transformers generates, without the prompts, up to the end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0} | options
    rows = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    return [row[: row.index(63) + 1] if 63 in row else row for row in rows]


def long_phi(original: int) -> Any:
    """A model whose rotary frequencies change beyond a length."""
    import transformers

    turning = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes: dict[str, Any] = {**_SIZES, "original_max_position_embeddings": original}
    config = transformers.Phi3Config(**sizes, rope_parameters=turning)
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config).eval()


def gpt_neo() -> Any:
    """A model that takes the position of a token from the number of cached keys."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(**sizes, attention_types=kinds, window_size=4, max_position_embeddings=64)
    return transformers.GPTNeoForCausalLM(config).eval()


class Exported(NamedTuple):
    models: list[Any]
    artifact: Artifact
    files: list[Path]

    def served(self, **options: Any) -> Model:
        return load(self.artifact, self.files[0], **options)


def exported(family: str, batch: int, folder: Path, **options: Any) -> Exported:
    models = [built(family, seed) for seed in range(2)]
    artifact = export_decoder(models[0], out=folder / "a.artifact", length=LENGTH, batch=batch, **options)
    files = [pack(each, artifact, out=folder / f"v{n}.safetensors").path for n, each in enumerate(models)]
    return Exported(models, artifact, files)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported("Llama", 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported("GPT2LMHead", 3, tmp_path_factory.mktemp("three"))


def check_generation(found: Exported, prompts: list[list[int]]) -> None:
    model = found.served()
    for number in range(2):
        if number:
            model.swap(found.files[number])
        assert model.generate(prompts, max_new_tokens=15) == expected(found.models[number], prompts, 15)


def test_tokens_are_those_of_transformers(one: Exported) -> None:
    check_generation(one, [PROMPT])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, batch: int, tmp_path: Path) -> None:
    check_generation(exported(family, batch, tmp_path), PROMPTS[:batch])


@pytest.mark.slow
def test_a_model_of_long_texts_generates_up_to_its_original_length(tmp_path: Path) -> None:
    eager = long_phi(LENGTH)
    artifact = export_decoder(eager, out=tmp_path / "a.artifact", length=LENGTH)
    model = load(artifact, pack(eager, artifact, out=tmp_path / "v.safetensors").path)
    assert model.generate(PROMPT, max_new_tokens=20) == expected(eager, [PROMPT], 20)[0]


@pytest.mark.slow
def test_a_skeleton_is_exported_and_a_checkpoint_swapped_in(one: Exported, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with skeleton():
        hollow = LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()
    artifact = export_decoder(hollow, out=tmp_path / "a.artifact", length=LENGTH)
    assert artifact.graph_id == one.artifact.graph_id
    one.models[1].save_pretrained(tmp_path / "checkpoint")
    model = load(artifact, tmp_path / "checkpoint")
    assert model.generate(PROMPT, max_new_tokens=9) == expected(one.models[1], [PROMPT], 9)[0]


@pytest.mark.slow
def test_a_directory_is_exported_and_generates_by_the_command(
    one: Exported, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, artifact = tokenizer.parent, tmp_path / "a.artifact"
    one.models[0].save_pretrained(folder)
    assert run(export_command, f"hf:{folder}", "-o", artifact, "--task", "generate", "--length", LENGTH) == 0
    assert Artifact.open(artifact).graph_id == one.artifact.graph_id
    assert Artifact.open(artifact).manifest.generation == one.artifact.manifest.generation
    capsys.readouterr()
    expected = load(artifact, folder).generate("ABC", max_new_tokens=6)
    assert run(generate_command, artifact, folder, "ABC", "--max-new-tokens", 6) == 0
    assert capsys.readouterr().out == f"{visible_lines(expected)}\n"
    assert run(generate_command, artifact, folder, "3,51", "--tokens", "--max-new-tokens", 4, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == one.served().generate([3, 51], max_new_tokens=4)
    stops = ("--stop", "60,60,60", "--stop", document["tokens"][1], "--on-swap", "reset")
    assert run(generate_command, artifact, folder, "3,51", "--tokens", *stops) == 0
    assert capsys.readouterr().out == f"{','.join(map(str, document['tokens'][:2]))}\n"
    assert run(generate_command, artifact, folder, "ABC", "--stop", expected[0], "--json") == 0
    assert expected[0] in json.loads(capsys.readouterr().out)["text"] != expected
    assert run(generate_command, artifact, folder, "ABC", "--on-swap", "drop") != 0
    assert "on_swap='drop'" in capsys.readouterr().err
    assert run(generate_command, artifact, folder, "3;51", "--tokens") == 2
    assert run(export_command, "recipe.py:build", "-o", artifact, "--task", "generate") == 2
    assert "--task generate is for hf:DIR" in capsys.readouterr().err


def run(command: typer.Typer, *arguments: object) -> int:
    """The exit code of a command."""
    try:
        typer.main.get_command(command)([str(argument) for argument in arguments], standalone_mode=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"repetition_penalty": 1.3}, "generation_config has repetition_penalty=1.3, with"),
        ({"forced_eos_token_id": 0, "min_new_tokens": 1}, "has forced_eos_token_id=0, min_new_tokens=1, with"),
        ({"repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": [], "temperature": 0.6, "do_sample": True}, ""),
    ],
)
def test_settings_of_a_model_that_change_its_tokens_are_named(settings: Any, says: str, tmp_path: Path) -> None:
    eager = built("Llama")
    for name, value in settings.items():
        setattr(eager.generation_config, name, value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        export_decoder(eager, out=tmp_path / "a.artifact", length=LENGTH)
    texts = [str(each.message) for each in told if "generation_config" in str(each.message)]
    assert [says in text for text in texts] == [True] * bool(says)


def test_caches_take_no_bytes_in_the_artifact(one: Exported) -> None:
    state = sum(row.nbytes for row in one.artifact.manifest.state)
    assert state == 2 * 2 * 2 * LENGTH * 8 * 4
    stored = one.artifact.tensors("constants.safetensors", one.artifact.manifest.constants)
    assert not {row.name for row in one.artifact.manifest.state} & stored.keys()


@pytest.mark.parametrize("residency", ["single", "double"])
def test_a_swap_in_the_middle_follows_the_policy(residency: str, one: Exported) -> None:
    model = one.served(residency=residency)
    old, new = (expected(each, [PROMPT], 12)[0] for each in one.models)
    assert old[3:] != new[3:]
    kept, broken = (model.generate(PROMPT, stream=True, on_swap=policy) for policy in ("keep", "invalidate"))
    begun = [[next(stream) for _ in range(3)] for stream in (kept, broken)]
    pinned = model.generate(PROMPT, max_new_tokens=12, stream=True) if residency == "double" else None
    first = next(pinned) if pinned else None
    assert model.swap(one.files[1]).contexts == {"invalidated": 1, "kept": 1} | ({"pinned": 1} if pinned else {})
    assert begun == [old[:3]] * 2
    with pytest.raises(StaleState):
        next(broken)
    assert len(list(kept)) == LENGTH + 1 - len(PROMPT) - 3
    if pinned:
        assert [first, *pinned] == old
    assert model.generate(PROMPT, max_new_tokens=12) == new
    model.swap(one.files[0], timeout=0)  # nothing holds weights any more


def test_after_a_reset_the_new_weights_read_everything_again(one: Exported, three: Exported) -> None:
    for found, prompts in ((one, [PROMPT]), (three, PROMPTS), (three, PROMPTS[:2])):
        model, width = found.served(), max(map(len, prompts))
        stream = model.generate(prompts, stream=True, on_swap="reset")
        tokens = [next(stream) for _ in range(3)]
        for number in (1, 0):
            assert model.swap(found.files[number]).contexts == {"reset": 1}
            so_far = [[*prompt, *row] for prompt, row in zip(prompts, zip(*tokens, strict=True), strict=True)]
            tokens += [next(stream) for _ in range(3)]
            new = [list(row) for row in zip(*tokens[-3:], strict=True)]
            assert new == expected(found.models[number], so_far, 3)
        assert len([*tokens, *stream]) == LENGTH + 1 - width


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["torch", "onnx", pytest.param("aoti", marks=pytest.mark.slow)])
def test_calls_outside_of_the_cache_are_refused_before_anything_runs(
    engine: EngineName, one: Exported, tmp_path: Path
) -> None:
    artifact = one.artifact
    if engine != "torch":
        compile_engines(shutil.copytree(artifact.path, tmp_path / "a.artifact"), [engine], trial=False)
        artifact = Artifact.open(tmp_path / "a.artifact")
    model = load(artifact, one.files[0], engine=engine)

    def given(tokens: int, position: int) -> list[Any]:
        ids, mask = torch.ones(1, tokens, dtype=torch.int64), torch.ones(1, LENGTH, dtype=torch.int64)
        tensors = ids, mask, torch.zeros_like(ids), torch.tensor(position)
        return [tensor.numpy() if engine == "onnx" else tensor for tensor in tensors]

    with model.new_context() as context:
        for method, tokens, position in [("decode", 1, 24), ("decode", 1, -1), ("prefill", 5, 20), ("prefill", 2, -2)]:
            said = f"{method}.*{tokens} tokens at position {position} do not fit in a cache of 24"
            for options in ({"context": context}, {}):
                with pytest.raises(InputMismatch, match=said):
                    model.method(method)(*given(tokens, position), **options)
        model.prefill(*given(5, 19), context=context)
        model.decode(*given(1, 23), context=context)


def test_a_stream_that_is_dropped_or_closed_holds_nothing(one: Exported) -> None:
    model = one.served(residency="single")
    stream = model.generate(PROMPT, stream=True)
    next(stream)
    del stream
    gc.collect()
    model.swap(one.files[1], timeout=0)
    closed = model.generate(PROMPT, stream=True)
    next(closed)
    closed.close()
    closed.close()
    assert list(closed) == []
    model.swap(one.files[0], timeout=0)
    with model.generate(PROMPT, stream=True) as left:
        next(left)
    assert list(left) == []
    model.swap(one.files[1], timeout=0)


def test_streams_for_asyncio(one: Exported) -> None:
    model = one.served()

    async def collect() -> list[int]:
        stream: TokenStream = model.generate(PROMPT, max_new_tokens=8, stream=True)
        return [token async for token in stream]

    with ThreadPoolExecutor(1) as thread:  # other tests leave a loop running in this one
        found = thread.submit(lambda: asyncio.run(collect())).result(120)
    assert found == expected(one.models[0], [PROMPT], 8)[0]


def test_a_stream_is_closed_while_a_thread_is_within_a_step(one: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one.served(residency="single")
    held = hold_calls(monkeypatch)

    async def give_up() -> None:
        stream = model.generate(PROMPT, stream=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.__anext__(), 0.2)
        assert held.inside.is_set()
        held.go_on.set()
        stream.close()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(give_up())).result(120)
    model.swap(one.files[1], timeout=0)


def test_weights_that_give_no_numbers_are_told(one: Exported, tmp_path: Path) -> None:
    broken = built("Llama", 1)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    model = load(one.artifact, pack(broken, one.artifact, out=tmp_path / "nan.safetensors").path)
    for temperature in (0.0, 1.0):
        with pytest.raises(CallError, match="must be finite, got nan"):
            model.generate(PROMPT, temperature=temperature)


def test_what_ends_a_row(one: Exported, three: Exported) -> None:
    model = one.served()
    whole = model.generate(PROMPT)
    assert len(whole) == LENGTH + 1 - len(PROMPT)  # until the cache is full
    assert model.generate(PROMPT, stop=whole[4]) == model.generate(PROMPT, stop=[whole[4]])
    assert model.generate(PROMPT, stop=[whole[4]]) == whole[: whole.index(whole[4]) + 1]
    assert model.generate(PROMPT, stop=[whole[3:5]]) == whole[:5]
    assert model.generate(torch.tensor(PROMPT), max_new_tokens=1) == whole[:1]
    rows = three.served().generate(np.asarray([PROMPT] * 2), stop=[[60000]], max_new_tokens=3)
    assert rows[0] == rows[1]


def test_sampling_with_the_same_noise_equals_transformers(one: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(3).random(12)
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}

    def drawn(weights: Any, number: float) -> int:
        sums = np.cumsum(np.asarray(weights, np.float64))
        return int(np.searchsorted(sums, number * sums[-1], side="right"))

    class Draws:
        """A fake of numpy's generator."""

        def __init__(self, seed: int | None) -> None:
            self._noise = iter(noise)

        def choice(self, count: int, p: Any) -> int:
            return drawn(p, next(self._noise))

    with monkeypatch.context() as patched:
        theirs = iter(noise)
        patched.setattr(torch, "multinomial", lambda p, **_: torch.tensor([[drawn(p[0], next(theirs))]]))
        wanted = expected(one.models[0], [PROMPT], 12, do_sample=True, **options)[0]
    monkeypatch.setattr(np.random, "default_rng", Draws)
    assert one.served().generate(PROMPT, max_new_tokens=12, **options) == wanted
    assert len(set(wanted)) > 3


def test_sampling_is_seeded(one: Exported) -> None:
    model = one.served()

    def sample(seed: int) -> list[int]:
        tokens: list[int] = model.generate(PROMPT, temperature=1.5, top_k=40, top_p=0.95, seed=seed, max_new_tokens=12)
        return tokens

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(6)}) > 3


REFUSED: dict[str, tuple[Callable[[Model], Any], type[Exception], str]] = {
    "a long prompt": (lambda m: m.generate([1] * 25), InputMismatch, "has 25 tokens, but the cache holds 24"),
    "too many": (lambda m: m.generate(PROMPT, max_new_tokens=22), InputMismatch, "22 new ones do not fit"),
    "no tokens": (lambda m: m.generate([]), InputMismatch, "no tokens"),
    "no prompts": (lambda m: m.generate([[]][1:]), InputMismatch, "no tokens"),
    "several": (lambda m: m.generate([[1], [2]]), InputMismatch, "expected 1 to 1 prompts, got 2"),
    "numbers": (lambda m: m.generate([1.5]), InputMismatch, "expected tokens"),
    "unknown": (lambda m: m.generate([3, 64]), InputMismatch, "the token 64, but the vocabulary has 64"),
    "negative": (lambda m: m.generate([[-1]]), InputMismatch, "expected tokens"),
    "no tokenizer": (lambda m: m.generate("text"), Unsupported, "tokenizer.json"),
    "a text to stop at": (lambda m: m.generate(PROMPT, stop=["."]), InputMismatch, "stop"),
    "temperature": (lambda m: m.generate(PROMPT, temperature=-1), Unsupported, "temperature=-1"),
    "top_k": (lambda m: m.generate(PROMPT, top_k=0), Unsupported, "top_k=0"),
    "top_p": (lambda m: m.generate(PROMPT, top_p=1.5), Unsupported, r"top_p=1\.5"),
    "penalty": (lambda m: m.generate(PROMPT, repetition_penalty=0), Unsupported, "repetition_penalty=0"),
    "half a token": (lambda m: m.generate(PROMPT, max_new_tokens=2.5), Unsupported, r"max_new_tokens=2\.5"),
    "half a choice": (lambda m: m.generate(PROMPT, top_k=2.5), Unsupported, r"top_k=2\.5"),
    "seed": (lambda m: m.generate(PROMPT, seed=-1), Unsupported, "seed=-1"),
    "nothing to stop at": (lambda m: m.generate(PROMPT, stop=[""]), InputMismatch, "an empty string"),
    "a flag to stop at": (lambda m: m.generate(PROMPT, stop=True), InputMismatch, "stop: expected tokens"),
    "bytes to stop at": (lambda m: m.generate(PROMPT, stop=b"."), InputMismatch, "stop: expected tokens"),
    "no stop": (lambda m: m.generate(PROMPT, stop=None), InputMismatch, "stop: expected tokens"),
    "half a stop": (lambda m: m.generate(PROMPT, stop=[2.5]), InputMismatch, "stop: expected tokens"),
    "no temperature": (lambda m: m.generate(PROMPT, temperature=None), Unsupported, "temperature=None"),
    "a text for top_p": (lambda m: m.generate(PROMPT, top_p="1"), Unsupported, "top_p='1'"),
    "no penalty": (lambda m: m.generate(PROMPT, repetition_penalty=None), Unsupported, "repetition_penalty=None"),
    "tokens": (lambda m: m.generate(PROMPT, max_new_tokens=0), Unsupported, "max_new_tokens=0"),
    "policy": (lambda m: m.generate(PROMPT, on_swap="drop"), Unsupported, "on_swap='drop'"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_refused(call: Any, error: type[Exception], text: str, one: Exported) -> None:
    model = one.served(residency="single")
    with pytest.raises(error, match=text):
        call(model)
    model.swap(one.files[1], timeout=0)


def _signature(method: str, part: str, value: Any) -> Callable[[Any], None]:
    return lambda document: document["methods"][method]["signature"].update({part: value})


def _input(method: str, place: int, part: str, value: Any) -> Callable[[Any], None]:
    return lambda document: document["methods"][method]["signature"]["args"][place][1].update({part: value})


NOT_GENERATING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no prefill": (lambda document: document["methods"].pop("prefill"), "has no method prefill"),
    "no decode": (lambda document: document["methods"].pop("decode"), "has no method decode"),
    "other ids": (_input("decode", 0, "dtype", "I32"), r"decode needs .*\['I64', 1, 1\], .*has \[\['I32', 1, 1\]"),
    "another mask": (_input("decode", 1, "shape", [1, 23]), r"\['I64', 1, 24\], .* but has .*\['I64', 1, 23\]"),
    "a row of positions": (_input("prefill", 3, "shape", [1]), r"prefill needs .*\['I64'\]\], .*\['I64', 1\]\]"),
    "prompts of one length": (_input("prefill", 0, "shape", [1, 2]), r"'prompt'\], .*but has \[\['I64', 1, 2\]"),
    "prompts not of one token": (_signature("prefill", "dims", {"prompt": {"min": 2, "max": 24}}), r"'1\.\.24'"),
    "prompts not as long": (_signature("prefill", "dims", {"prompt": {"min": 1, "max": 23}}), r"'1\.\.24'"),
    "inputs by keyword": (lambda document: _by_keyword(document, "decode"), "1 of them by keyword"),
    "another batch": (lambda document: document["generation"].update(batch=2), r"so decode needs .*\['I64', 2, 1\], "),
    "two outputs": (
        _signature("decode", "output", {"type": "tuple", "items": []}),
        r"so decode must give .* but gives \['tuple'\]",
    ),
    "no logits": (
        _signature("prefill", "output", {"type": "tensor", "name": "output", "dtype": "I64", "shape": [1, 64]}),
        r"so prefill must give logits \[1, vocabulary\], but gives \['I64', 1, 64\]",
    ),
}


def _by_keyword(document: Any, method: str) -> None:
    signature = document["methods"][method]["signature"]
    signature["kwargs"] = [signature["args"].pop()]


@pytest.mark.parametrize(("alter", "says"), NOT_GENERATING.values(), ids=NOT_GENERATING)
def test_an_artifact_whose_methods_cannot_generate_is_not_opened(
    alter: Callable[[Any], Any], says: str, one: Exported
) -> None:
    document = json.loads((one.artifact.path / "manifest.json").read_bytes())
    alter(document)
    with pytest.raises(ArtifactError, match=f"it generates, .*{says}"):
        decode_manifest(json.dumps(document).encode(), "manifest.json")


_HYBRID = {**_SIZES, "num_key_value_heads": 4, "mamba_n_heads": 8, "mamba_d_head": 8}
# what each model keeps beside the keys and values of its layers, or instead of them
OTHER_MEMORIES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    "Mamba2ForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "head_dim": 8, "num_heads": 8},
    "RwkvForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    "OpenAIGPTLMHeadModel": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4},  # nothing at all
    "BambaForCausalLM": {**_HYBRID, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {**_SIZES, "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_ssm": 32},  # both in one layer
    "Lfm2ForCausalLM": {**_SIZES, "layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("name", OTHER_MEMORIES)
def test_models_that_keep_something_else_than_keys_and_values_are_refused(name: str, tmp_path: Path) -> None:
    import transformers

    owner = getattr(transformers, name)
    model = owner(owner.config_class(**OTHER_MEMORIES[name])).eval()
    with pytest.raises(Unsupported, match=f"{name}: keeps something other than the keys and values of its layers"):
        export_decoder(model, out=tmp_path / "a", length=8)


def test_models_that_do_not_generate(tmp_path: Path) -> None:
    import transformers

    linear = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="not a transformers language model"):
        export_decoder(linear, out=tmp_path / "a", length=8)
    with pytest.raises(Unsupported, match="has only 64 learned positions"):
        export_decoder(built("GPT2LMHead"), out=tmp_path / "a", length=65)
    with pytest.raises(Unsupported, match="Phi3ForCausalLM rotates all keys differently beyond 23 tokens"):
        export_decoder(long_phi(23), out=tmp_path / "a", length=LENGTH)
    with pytest.raises(Unsupported, match=r"GPTNeoForCausalLM masks .* \(transformer\.h\.0\.attn\.attention\.bias\)"):
        export_decoder(gpt_neo(), out=tmp_path / "a", length=8)
    with skeleton():
        hollow = gpt_neo()
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=1))
    with pytest.raises(Unsupported, match="GPTNeoForCausalLM masks"):
        export_decoder(hollow, out=tmp_path / "a", length=8)
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration: is an encoder-decoder"):
        export_decoder(t5, out=tmp_path / "a", length=8)
    with pytest.raises(Unsupported, match="length=1"):
        export_decoder(built("Llama"), out=tmp_path / "a", length=1)
    artifact = export(linear.eval(), (torch.ones(1, 2),), out=tmp_path / "b")
    model = load(artifact, pack(linear, artifact, out=tmp_path / "b.safetensors").path)
    with pytest.raises(Unsupported, match="does not generate"):
        model.generate([1])


# text


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def write_tokenizer(folder: Path, reverse: bool = False) -> Path:
    """Write a tokenizer of bytes, which have the opposite order in one that is reversed."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Back
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(sorted(ByteLevel.alphabet())[:63], reverse=reverse)
    built = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    built.pre_tokenizer, built.decoder = ByteLevel(add_prefix_space=False), Back()
    built.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_text_in_and_out(one: Exported, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    model, plain = one.served(), Tokenizer.from_file(str(tokenizer))
    tokens = model.generate(plain.encode("ABC").ids, max_new_tokens=10)
    text = model.generate("ABC", max_new_tokens=10, tokenizer=tokenizer)
    assert text == plain.decode(tokens)
    assert "".join(model.generate("ABC", max_new_tokens=10, tokenizer=tokenizer, stream=True)) == text
    assert model.generate(["ABC"], max_new_tokens=10, tokenizer=tokenizer.parent) == [text]
    cut = model.generate("ABC", max_new_tokens=10, tokenizer=tokenizer, stop=[text[2:4]])
    assert text.startswith(cut)
    assert text[2:4] in cut


_BYTES = [f"<0x{byte:02X}>" for byte in (0x68, 0x85, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 0x0A)]
_WORDS = [
    "h",
    "\u2581",
    "\u2581a",
    " ",
    "##b",
    ".",
    "don",
    "'",
    "t",
    "c</w>",
    "|",
    "[PAD]",
    "\u00e2",
    "\u00ac",
    "\ufffd",
    "",
]
_SPACES: dict[str, Any] = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
DECODERS: dict[str, Any] = {
    "none": None,
    "Llama": [
        _SPACES,
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
    "Gemma": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}],
    "bytes of Metaspace": [{"type": "ByteFallback"}, _METASPACE],
    "ByteLevel": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}],
    "Metaspace": [_METASPACE],
    "WordPiece": [{"type": "WordPiece", "prefix": "##", "cleanup": True}],
    "BPE": [{"type": "BPEDecoder", "suffix": "</w>"}],
    "CTC": [{"type": "CTC", "pad_token": "[PAD]", "word_delimiter_token": "|", "cleanup": True}],
    "Strip": [{"type": "Fuse"}, {"type": "Strip", "content": "h", "start": 2, "stop": 0}],
}


NAMES = ["<s>", *_BYTES, *_WORDS]  # of tokens


def tokenizer_of(decoders: Any, folder: Path) -> Tokenizer:
    added = {"content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "normalized": False, **added}],
        "decoder": decoders and {"type": "Sequence", "decoders": decoders},
        "model": {"type": "WordLevel", "vocab": {name: number for number, name in enumerate(NAMES)}, "unk_token": "h"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return Tokenizer(folder)


@pytest.mark.parametrize("decoders", DECODERS.values(), ids=DECODERS)
def test_pieces_of_a_text_joined_are_the_whole_text(decoders: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(decoders, tmp_path)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, len(NAMES))))  # the last number is in no vocabulary
    @example([1, 2])
    @example([1, 0, 2])
    @example([3, len(NAMES), 4, 5])
    def joined(tokens: list[int]) -> None:
        assert "".join(tokenizer.pieces(iter(tokens))) == tokenizer.decode(tokens)

    joined()


def test_bytes_of_a_text_come_with_the_word_after_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(DECODERS["Llama"], tmp_path)
    a, euro, left_out = NAMES.index("\u2581a"), [NAMES.index(f"<0x{byte}>") for byte in ("E2", "82", "AC")], 0
    assert list(tokenizer.pieces(iter([a, *euro, left_out, a, a, *euro]))) == ["a", "\u20ac a", " a", "\u20ac"]


def test_a_penalty_that_overflows_is_refused() -> None:
    how = Sampling(temperature=1.0, repetition_penalty=1e-320)
    with pytest.raises(CallError, match="must be finite, got inf"):
        choose(np.asarray([2.0, 1.0], np.float32), [0], how, np.random.default_rng(0))


LIGHT = """
import sys
blocked, artifact, weights, tokenizer = sys.argv[1:]
sys.modules.update(dict.fromkeys(blocked.split(",")))
from weightswap_runtime import MissingExtra, load
from weightswap_tools.program import main

model = load(artifact, weights)
print(model.generate([3, 51, 58, 35], max_new_tokens=9))
try:
    print(repr(model.generate("ABC", max_new_tokens=6, tokenizer=tokenizer)))
except MissingExtra as error:
    print(error)
sys.argv = ["weightswap", "generate", artifact, weights, "3,51,58,35", "--tokens", "--max-new-tokens", "9"]
main()
"""


@pytest.mark.parametrize("blocked", ["transformers", "transformers,tokenizers"])
@pytest.mark.slow
def test_generation_needs_no_transformers(blocked: str, one: Exported, tokenizer: Path) -> None:
    """It does not need the exporter either, and tokenizers only for text."""
    given = [f"{blocked},weightswap_exporter", one.artifact.path, one.files[0], tokenizer]
    command = [sys.executable, "-W", "error", "-c", LIGHT, *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    tokens, text, streamed = done.stdout.splitlines() or [done.stderr] * 3
    expected = one.served().generate(PROMPT, max_new_tokens=9)
    assert tokens == str(expected)
    assert streamed == ",".join(map(str, expected))
    if "tokenizers" in blocked:
        assert "text prompts" in text
    else:
        assert text == repr(one.served().generate("ABC", max_new_tokens=6, tokenizer=tokenizer))


def test_what_a_training_has_left_in_a_tokenizer_changes_no_prompt(one: Exported, tokenizer: Path) -> None:
    model = one.served()
    text = model.generate("ABCD", max_new_tokens=4, tokenizer=tokenizer)
    document = json.loads(tokenizer.read_text())
    document["truncation"] = {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None}
    document["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "A"}
    tokenizer.write_text(json.dumps(document))
    assert model.generate("ABCD", max_new_tokens=4, tokenizer=tokenizer) == text


@pytest.mark.parametrize(
    ("broken", "prompt", "says"),
    [
        ({"model": {"type": "BPE", "vocab": {"A": 0, "##": 1}, "merges": [["A", "A"]]}}, "A", "not a readable"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////8AAAAA"}}, "A", "not a readable"),
        ({}, "\ud800", "gives no tokens"),
    ],
)
def test_a_tokenizer_that_panics_is_refused(
    broken: dict[str, Any], prompt: str, says: str, one: Exported, tokenizer: Path
) -> None:
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | broken))
    with pytest.raises(Unsupported, match=rf"tokenizer\.json: .*{says}"):
        one.served().generate(prompt, max_new_tokens=4, tokenizer=tokenizer)


def test_after_a_rollback_the_tokenizer_is_that_of_the_weights_that_are_served(one: Exported, tmp_path: Path) -> None:
    files = with_tokenizers(one, tmp_path)
    model, found = load(one.artifact, files[0]), []
    model.swap(one.files[1])  # without a tokenizer: that of the weights before goes on
    first = Tokenizer(files[0].parent)
    tokens = model.generate(first.encode("#%"), max_new_tokens=6)
    assert model.generate("#%", max_new_tokens=6) == first.decode(tokens)
    for file in files:
        model.swap(file)
        found.append(model.generate("#%", max_new_tokens=6))
    assert found[0] != found[1]
    for expected_text in (found[0], found[1]):
        model.rollback()
        assert model.generate("#%", max_new_tokens=6) == expected_text


def test_the_tokenizer_of_withdrawn_weights_goes_on_nowhere(one: Exported, tmp_path: Path) -> None:
    """Weights without a tokenizer have that of the weights before, which a rollback has not withdrawn."""
    files = with_tokenizers(one, tmp_path)
    first, model = Tokenizer(files[0].parent), load(one.artifact, files[0])
    tokens = load(one.artifact, one.files[1]).generate(first.encode("#%"), max_new_tokens=6)
    assert Tokenizer(files[1].parent).encode("#%") != first.encode("#%")
    model.swap(one.files[1])
    model.swap(files[1])
    model.swap(one.files[1])  # the same file again, as operators and desired states go back to it
    assert model.generate("#%", max_new_tokens=6) == first.decode(tokens)
    model.swap(files[0])
    model.swap(files[1])
    model.rollback()
    model.swap(one.files[1])
    assert model.generate("#%", max_new_tokens=6) == first.decode(tokens)


def with_tokenizers(one: Exported, folder: Path) -> list[Path]:
    """Return two weight files, each beside a tokenizer of its own."""
    files = [folder / str(number) / "weights.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        file.parent.mkdir()
        shutil.copy(one.files[number], file)
        write_tokenizer(file.parent, reverse=number == 1)
    return files


def test_a_swap_as_a_text_comes_changes_weights_and_tokenizer_together(
    one: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = with_tokenizers(one, tmp_path)
    expected = [load(one.artifact, file).generate("#%", max_new_tokens=6) for file in files]
    model, order = load(one.artifact, files[0]), [0, 1]
    new_context = model.new_context

    def swapping(**options: Any) -> Context:
        chosen = order.pop()
        model.swap(files[chosen])
        context = new_context(**options)
        model.swap(files[1 - chosen])
        return context

    monkeypatch.setattr(model, "new_context", swapping)
    assert [model.generate("#%", max_new_tokens=6) for _ in range(2)] == expected[::-1]


def test_the_tokenizer_beside_the_weights_is_found(one: Exported, tokenizer: Path) -> None:
    beside = tokenizer.parent / "v.safetensors"
    beside.write_bytes(one.files[0].read_bytes())
    model = load(one.artifact, beside)
    assert model.generate("ABC", max_new_tokens=4) == model.generate("ABC", max_new_tokens=4, tokenizer=tokenizer)


# sampling alone, against transformers' own


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 5, 64, 100]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.9, 1.0]),
)
def test_probabilities_are_those_of_transformers(seed: int, temperature: float, top_k: Any, top_p: Any) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(seed).normal(size=64) * 3
    found = probabilities(logits, Sampling(temperature, top_k, top_p))
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    scores = torch.from_numpy(logits)[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 0, dtype=torch.int64), scores)
    np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), rtol=1e-6, atol=1e-12)
