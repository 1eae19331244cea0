"""Generation beside transformers' own `generate`, with its dynamic and its static cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import WrongOutput, on_one_thread, quiet
from timing import in_turn, seconds
from transformers import LlamaConfig, LlamaForCausalLM

from weightswap_exporter import export_decoder, pack
from weightswap_runtime import load

LENGTH, NEW = 96, 64
AHEAD = {"torch": Goal("ratio", "at most", 1 / 3), "aoti": Goal("ratio", "at most", 1 / 10)}


def rows(settings: Settings) -> Iterator[Row]:
    """A Llama of 4 layers and width 128, where overhead decides; one thread, greedy, seconds a token."""
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name:
        yield from _rows(settings, Path(name))


def _rows(settings: Settings, folder: Path) -> Iterator[Row]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    eager = LlamaForCausalLM(LlamaConfig(vocab_size=1024, eos_token_id=None, **sizes)).eval()
    with quiet():
        artifact = export_decoder(eager, out=folder / "a.artifact", length=LENGTH, engines=["aoti"])
    weights = pack(eager, artifact, out=folder / "v.safetensors").path
    prompt = torch.randint(0, 1024, (1, 16))
    subjects: dict[str, Callable[[], list[int]]] = {
        "torch": partial(_ours, load(artifact, weights, engine="torch"), prompt),
        "aoti": partial(_ours, load(artifact, weights, engine="aoti"), prompt),
        "dynamic": partial(_theirs, eager, prompt),
        "static": partial(_theirs, eager, prompt, cache_implementation="static"),
    }
    expected = subjects["dynamic"]()
    for what in ("torch", "static"):
        if subjects[what]() != expected:
            raise WrongOutput(f"{what}: other tokens than transformers'")
    taken = in_turn({what: partial(seconds, subject) for what, subject in subjects.items()}, settings.rounds)
    micros = {what: [second / NEW * 1e6 for second in values] for what, values in taken.items()}
    for engine, goal in AHEAD.items():
        what = f"model.generate, engine {engine}, a token of 4 layers of width 128"
        yield compared(what, "us", micros[engine], "transformers, dynamic cache", micros["dynamic"], goal)
        yield compared(what, "us", micros[engine], "transformers, static cache", micros["static"], goal)


def _ours(model: Any, prompt: torch.Tensor) -> list[int]:
    found: list[int] = model.generate(prompt[0], max_new_tokens=NEW)
    return found


def _theirs(eager: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "disable_compile": True}
    found: list[int] = eager.generate(prompt, **settings, **options)[0, prompt.shape[1] :].tolist()
    return found
