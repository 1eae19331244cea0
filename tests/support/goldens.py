"""Models whose calls are recorded as goldens in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Counter, Does, Everything, Nested, Views
from tests.support.sessions import bound_of
from tests.support.setups import different
from tests.zoo.entries import GROUPED, hf
from weightswap_exporter import MethodSpec, export
from weightswap_runtime import Artifact, Model
from weightswap_runtime.format.goldens import Goldens, artifact_goldens, goldens_beside
from weightswap_runtime.model.served import engine_of
from weightswap_runtime.staging.golden_check import verify

IMAGE = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(2, 3, generator=torch.Generator().manual_seed(2))
LINEAR = {"forward": MethodSpec("forward", (torch.zeros(2, 3),), {}, {"input": {0: Dim("batch", max=8)}})}


class Cached(nn.Module):
    """Cache of keys that calls write to, at positions given as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("keys", torch.zeros(4, 3))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> dict[str, torch.Tensor]:
        self.keys.index_copy_(0, place, self.linear(x))
        self.written = self.written + x.shape[0]  # assigned, not written to
        return {"keys": self.keys, "written": self.written}


def masked() -> nn.Module:
    """Return a linear layer whose output is minus infinity where the input is negative."""
    return Does(lambda m, x: m.linear(x).masked_fill(x < 0, float("-inf")), linear=nn.Linear(3, 3))


def changing() -> nn.Module:
    return Does(lambda m, x: m.linear(x.add_(1)), linear=nn.Linear(3, 3))


class Sized(nn.Module):
    """Linear layer with an integer input and an integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, int]:
        return self.linear(x) * times, x.shape[0]


class Multiplied(Sized):
    """Linear layer with a literal whose default is not the exported value."""

    def forward(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return self.linear(x) * scale


class Setting(NamedTuple):
    build: Callable[[], nn.Module]
    methods: dict[str, MethodSpec]
    goldens: Any
    count: int


NESTED = (
    (ROWS[:, :1].repeat(1, 4), [torch.ones(4), {"deep": torch.ones(2, 4)}], torch.ones(4)),
    {"options": {"gain": torch.ones(4)}, "flag": True},
)
TOKENS = {"input_ids": torch.arange(8).view(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}


def caching() -> nn.Module:
    """Return a model of transformers that would also return its key-value cache."""
    model: Any = hf("LlamaForCausalLM", "LlamaConfig", **GROUPED)()
    model.config.use_cache = True
    return model


SETTINGS: dict[str, Setting] = {
    "several methods": Setting(
        Everything,
        {
            "forward": MethodSpec("forward", (IMAGE, 2.0), dynamic_shapes={"x": {0: Dim("n", max=9)}, "scale": None}),
            "code": MethodSpec("encode", (torch.arange(4),)),
        },
        {"forward": [(IMAGE, 2.0), ((IMAGE[:1],), {"scale": 2.0})], "code": [(torch.tensor([5, 0, 0, 1]),)]},
        3,
    ),
    "counters": Setting(
        Counter,
        {"forward": MethodSpec("forward", (ROWS,)), "peek": MethodSpec("peek")},
        {"forward": [(ROWS,), (ROWS + 1,)], "peek": [()]},
        3,
    ),
    "a cache": Setting(
        Cached,
        {"forward": MethodSpec("forward", (ROWS, torch.tensor([1, 2])))},
        [(ROWS, torch.tensor([3, 0])), (ROWS, torch.tensor([1, 0]))],
        2,
    ),
    "nested trees": Setting(Nested, {"forward": MethodSpec("forward", *NESTED)}, [NESTED], 1),
    "integers": Setting(
        Sized,
        {"forward": MethodSpec("forward", (ROWS, 5), {}, {"x": {0: Dim("n", max=9)}, "times": Dim.DYNAMIC})},
        [(ROWS, 7), (torch.cat([ROWS, ROWS]), 2)],
        2,
    ),
    "a literal that is left out": Setting(Multiplied, {"forward": MethodSpec("forward", (ROWS, 2.0))}, [(ROWS,)], 1),
    "views of weights": Setting(Views, {"only": MethodSpec("forward", (torch.ones(4),))}, [(torch.ones(4),)], 1),
    "minus infinity": Setting(masked, {"forward": MethodSpec("forward", (ROWS,))}, [(ROWS,)], 1),
    "bfloat16": Setting(
        lambda: nn.Linear(3, 3).bfloat16(),
        {"forward": MethodSpec("forward", (ROWS.bfloat16(),))},
        [((ROWS.bfloat16(),), {})],
        1,
    ),
    "inputs in another order": Setting(
        lambda: nn.Linear(64, 48),
        {"forward": MethodSpec("forward", (torch.zeros(7, 64),))},
        [(torch.linspace(-1, 1, 448).sin().view(64, 7).t(),)],
        1,
    ),
    "inputs that are written to": Setting(changing, {"forward": MethodSpec("forward", (ROWS,))}, [(ROWS,)], 1),
    "an encoder layer, which has a fused path": Setting(
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        {"forward": MethodSpec("forward", (torch.zeros(2, 3, 16),))},
        [(torch.linspace(-1, 1, 96).view(2, 3, 16),)],
        1,
    ),
    "a model of transformers": Setting(caching, {"forward": MethodSpec("forward", (), TOKENS)}, [((), TOKENS)], 1),
}


every = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def recorded(setting: Setting, folder: Path, **options: Any) -> tuple[Artifact, nn.Module, Goldens]:
    model = different(setting.build, 1)
    artifact = export(model, methods=setting.methods, out=folder / "m.artifact", goldens=setting.goldens, **options)
    return artifact, model, goldens_of(artifact)


def goldens_of(artifact: Artifact) -> Goldens:
    found = artifact_goldens(artifact)
    assert found is not None
    return found


def goldens_at(weights: Path | str, artifact: Artifact) -> Goldens:
    """Return the goldens beside a weight file."""
    found = goldens_beside(weights, artifact.manifest)
    assert found is not None
    return found


def verified(goldens: Goldens, model: Model) -> str:
    return verify(goldens, bound_of(model), engine_of(model), model.artifact.manifest, str(model.weights_id))


def everything_in(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors}
    return values, [module.training for module in model.modules()], torch.get_rng_state()


def same(one: Any, other: Any) -> bool:
    (values, modes, numbers), (others, other_modes, other_numbers) = one, other
    kept = all(key == others[name][0] and torch.equal(value, others[name][1]) for name, (key, value) in values.items())
    return kept and values.keys() == others.keys() and modes == other_modes and torch.equal(numbers, other_numbers)
