"""Generation compared with transformers' `generate` and with the matrices that a token reads, and its export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from report import Goal, Row, compared
from settings import Settings
from subjects import WrongOutput, on_one_thread, quiet
from timing import in_turn, seconds
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from weightswap_exporter import export_decoder, pack
from weightswap_exporter.capture.decoders import decoder
from weightswap_runtime import load

LENGTH, NEW = 96, 64
ENGINES = ("torch", "aoti")
MOST_ROUNDS = 5


class Size(NamedTuple):
    billions: float
    layers: int
    width: int
    vocabulary: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {str(self.dtype).removeprefix('torch.')}"

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": self.width,
            "intermediate_size": self.width * 8 // 3,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 64,
            "vocab_size": self.vocabulary,
        }
        config = LlamaConfig(**sizes, eos_token_id=None, tie_word_embeddings=True)
        return LlamaForCausalLM(config).to(self.dtype).eval()


SMALL = Size(0.001, 4, 128, 1024)
"""Where overhead decides."""
LARGE = (Size(0.11, 12, 768, 32000), Size(0.11, 12, 768, 32000, torch.bfloat16))
"""Where reading the matrices does."""
AHEAD = {"torch": Goal("ratio", "at most", 1 / 3), "aoti": Goal("ratio", "at most", 1 / 10)}
NOT_SLOWER = Goal("ratio", "at most", 1)
NEARLY_BARE = Goal("ratio", "at most", 1.05)
THRICE = Goal("ratio", "at most", 3)


def rows(settings: Settings) -> Iterator[Row]:
    """Measure seconds per token, greedy on one thread; models are no larger than the settings allow."""
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name:
        timings = _token_timings(SMALL, Path(name, "small"), settings.rounds)
        for engine, goal in AHEAD.items():
            yield _row(SMALL, engine, timings, "dynamic", goal)
            yield _row(SMALL, engine, timings, "static", goal)
        for number, size in enumerate(each for each in LARGE if each.billions <= settings.billions):
            timings = _token_timings(size, Path(name, str(number)), min(settings.rounds, MOST_ROUNDS))
            yield _row(size, "torch", timings, "dynamic", NOT_SLOWER)
            yield _row(size, "aoti", timings, "matrices", NEARLY_BARE)
        yield _export(Path(name), min(settings.rounds, MOST_ROUNDS))


def _row(size: Size, engine: str, timings: dict[str, list[float]], peer: str, goal: Goal) -> Row:
    called = "its matrices alone" if peer == "matrices" else f"transformers, {peer} cache"
    return compared(f"model.generate, {engine}, a token of {size}", "us", timings[engine], called, timings[peer], goal)


def _token_timings(size: Size, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per token of each subject."""
    eager = size.model()
    with quiet():
        artifact = export_decoder(eager, out=folder / "a.artifact", length=LENGTH, engines=["aoti"])
        weights = pack(eager, artifact, out=folder / "v.safetensors").path
    prompt = torch.randint(0, size.vocabulary, (1, 16))
    subjects: dict[str, Callable[[], Any]] = {
        engine: partial(_ours, load(artifact, weights, engine=engine), prompt) for engine in ENGINES
    }
    subjects["dynamic"] = partial(_theirs, eager, prompt)
    subjects["static"] = partial(_theirs, eager, prompt, cache_implementation="static")
    _check_tokens(size, eager, prompt, subjects)
    subjects["matrices"] = _matrices(eager)
    timings = in_turn({what: partial(seconds, subject) for what, subject in subjects.items()}, rounds)
    return {what: [second / NEW * 1e6 for second in values] for what, values in timings.items()}


def _check_tokens(size: Size, eager: Any, prompt: torch.Tensor, subjects: dict[str, Callable[[], Any]]) -> None:
    """Raise WrongOutput for tokens other than transformers'.

    In bfloat16, sums of attention are rounded differently over caches of other lengths, so the reference is a cache as
    long as ours.
    """
    ours = subjects["torch"]()
    expected = [_theirs(eager, prompt, past_key_values=StaticCache(config=eager.config, max_cache_len=LENGTH))]
    if size.dtype == torch.float32:
        expected += [subjects["static"](), subjects["dynamic"]()]
    if any(tokens != ours for tokens in expected):
        raise WrongOutput(f"{size}: tokens differ from transformers'")


def _ours(model: Any, prompt: torch.Tensor) -> list[int]:
    tokens: list[int] = model.generate(prompt[0], max_new_tokens=NEW)
    return tokens


def _theirs(eager: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "disable_compile": True}
    tokens: list[int] = eager.generate(prompt, **settings, **options)[0, prompt.shape[1] :].tolist()
    return tokens


def _matrices(eager: nn.Module) -> Callable[[], None]:
    """Multiply a vector with each of the model's matrices, once per new token."""
    pairs = [
        (module.weight, torch.zeros(1, module.in_features, dtype=module.weight.dtype))
        for module in eager.modules()
        if isinstance(module, nn.Linear)
    ]

    @torch.no_grad()
    def multiply() -> None:
        for _ in range(NEW):
            for weight, x in pairs:
                nn.functional.linear(x, weight)

    return multiply


class _Method(nn.Module):
    """One method of a decoder as a module's forward."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner, self.name = owner, name

    def forward(self, ids: Any, mask: Any, positions: Any, position: Any) -> Any:
        return getattr(self.owner, self.name)(ids, mask, positions, position)


def _export(folder: Path, rounds: int) -> Row:
    """Measure the export of both methods, by weightswap and by `torch.export` alone."""
    eager = SMALL.model()
    bare, methods, _ = decoder(eager, LENGTH, 1)

    def theirs() -> None:
        for name, spec in methods.items():
            torch.export.export(_Method(bare, name), tuple(spec.args), dynamic_shapes=spec.dynamic_shapes, strict=False)

    numbers = iter(range(1000))
    measures = {
        "ours": lambda: seconds(lambda: export_decoder(eager, out=folder / f"{next(numbers)}.artifact", length=LENGTH)),
        "theirs": lambda: seconds(theirs),
    }
    with quiet():
        timings = in_turn(measures, rounds)
    what = f"export_decoder, {SMALL}"
    return compared(what, "s", timings["ours"], "torch.export of both methods", timings["theirs"], THRICE)
