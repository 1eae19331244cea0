"""Plans that cannot be carried out are refused by name, all at once, and never ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.split import GPT2_PLAN, PACKED_PLAN, Packed, gpt2, llama, sample
from weightswap_exporter import Parallel, export, skeleton
from weightswap_exporter.engines import rank_check
from weightswap_runtime import CaptureError, ExportError, Unsupported


def refusal(model: nn.Module, parallel: Any, out: Path, **more: Any) -> Exception:
    with pytest.raises((ExportError, Unsupported)) as caught:
        export(model.eval(), out=out / "a.artifact", parallel=parallel, **sample(model) | more)
    assert not (out / "a.artifact").exists()
    return caught.value


PLANS: dict[str, tuple[dict[str, Any], int, str]] = {
    "a style that is not known": ({"head": "sequence_parallel"}, 2, "head: the style 'sequence_parallel', expected"),
    "a style of another type": ({"head": None}, 2, "head: the style None, expected"),
    "one group alone": ({"head": "packed_colwise:1"}, 2, "head: the style 'packed_colwise:1'"),
    "vocabulary": ({"head": "embedding_rowwise"}, 2, "head: the style 'embedding_rowwise'"),
    "a split input": ({"head": "rowwise_split_input"}, 2, "head: the style 'rowwise_split_input'"),
    "no layer": ({"layers.*.gate": "colwise"}, 2, r"layers.\*.gate: matches no layer of the model"),
    "more parts of a name": ({"*.up": "colwise"}, 2, r"\*.up: matches no layer of the model"),
    "a tensor": ({"head.weight": "colwise"}, 2, "head.weight: names head.weight, which is no layer but a tensor"),
    "a container": ({"layers.0": "colwise"}, 2, "layers.0: ModuleDict is not cut, only nn.Linear"),
    "two styles": (
        {"layers.*.up": "packed_colwise", "layers.1.up": "colwise"},
        2,
        r"layers.1.up: is 'packed_colwise' by 'layers.\*.up', and 'colwise' by 'layers.1.up'",
    ),
    "outputs": ({"head": "colwise_gather_output"}, 5, "head: has 12 outputs, which 5 ranks do not divide"),
    "outputs of each part": (PACKED_PLAN, 3, "layers.0.up, layers.1.up: has 2 parts of 16 outputs, which 3 ranks"),
    "inputs": ({"layers.*.down": "rowwise"}, 3, "layers.0.down, layers.1.down: has 16 inputs, which 3 ranks do not"),
    "one rank": (PACKED_PLAN, 1, "size=1: expected the number of ranks, 2 or more"),
}


@pytest.mark.parametrize("case", PLANS)
def test_what_a_plan_cannot_have(case: str, tmp_path: Path) -> None:
    plan, size, says = PLANS[case]
    error = refusal(Packed(), Parallel(size, plan), tmp_path)
    with pytest.raises(ExportError, match=says):
        raise error


def test_all_problems_are_named(tmp_path: Path) -> None:
    error = refusal(Packed(), Parallel(5, PACKED_PLAN | {"foot": "rowwise"}), tmp_path)
    assert [line.split(":")[0] for line in str(error).splitlines()[1:]] == [
        "  - foot",
        "  - layers.0.up, layers.1.up",
        "  - layers.0.down, layers.1.down",
        "  - head",
    ]


def test_a_model_without_a_plan_needs_one(tmp_path: Path) -> None:
    assert "Packed has no plan of its own" in str(refusal(Packed(), Parallel(2), tmp_path))
    assert "GPT2LMHeadModel has no plan of its own" in str(refusal(gpt2(n_layer=1), Parallel(2), tmp_path))
    assert 'expected "auto", or a dict' in str(refusal(Packed(), Parallel(2, "mine"), tmp_path))  # type: ignore[arg-type]
    assert "expected weightswap_exporter.Parallel" in str(refusal(Packed(), 2, tmp_path))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, num_local_experts=4))


ATTENTION = "model.layers.0.self_attn"
MODELS: dict[str, tuple[Callable[[], nn.Module], int, Any, str]] = {
    "experts": (mixtral, 2, "auto", r"model.layers.\*.mlp.experts: the style 'moe_tp_experts'"),
    "experts' tensors": (
        mixtral,
        2,
        "auto",
        r"experts.gate_up_proj: names model.layers.0.mlp.experts.gate_up_proj, which is no layer but a tensor",
    ),
    "heads": (lambda: llama(num_hidden_layers=1), 16, "auto", "q_proj: has 8 heads, which 16 ranks do not divide"),
    "heads of keys": (
        lambda: llama(num_hidden_layers=1, hidden_size=96, num_attention_heads=12, num_key_value_heads=3),
        4,
        "auto",
        "k_proj: has 3 heads, which 4 ranks do not divide",
    ),
    "keys that stay": (
        lambda: llama(num_hidden_layers=1),
        2,
        {f"{ATTENTION}.q_proj": "colwise", f"{ATTENTION}.o_proj": "rowwise"},
        f"{ATTENTION}.q_proj: is cut, but k_proj beside it is not",
    ),
    "tied": (
        lambda: llama(num_hidden_layers=1, tie_word_embeddings=True),
        2,
        {"lm_head": "colwise"},
        "lm_head: is tied to model.embed_tokens.weight",
    ),
    "an embedding": (
        lambda: llama(num_hidden_layers=1),
        2,
        {"model.embed_tokens": "colwise"},
        "embed_tokens: Embedding is not cut, only nn.Linear",
    ),
    "queries with keys": (
        lambda: gpt2(n_layer=1),
        2,
        GPT2_PLAN | {"transformer.h.*.attn.c_attn": "colwise"},
        "c_attn: has queries, keys and values in one tensor, which 'colwise' would mix",
    ),
    "heads of GPT-2": (lambda: gpt2(n_layer=1), 16, GPT2_PLAN, "c_attn: has 8 heads, which 16 ranks do not divide"),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_a_model_cannot_have(case: str, tmp_path: Path) -> None:
    build, size, plan, says = MODELS[case]
    with skeleton():
        model = build()
    error = refusal(model, Parallel(size, plan), tmp_path)
    with pytest.raises(ExportError, match=says):
        raise error


def test_outputs_that_stay_in_parts_are_refused(tmp_path: Path) -> None:
    error = refusal(Packed(), Parallel(2, PACKED_PLAN | {"head": "colwise"}), tmp_path)
    assert isinstance(error, CaptureError)
    assert "gather them with 'colwise_gather_output'" in str(error)


class Sized(nn.Module):
    """Model that reads the sizes of its layer, holds its weight in a list, or needs all features between two layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.way, self.held = way, [self.up.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.way == "a number":
            y = y.view(len(x), 16)
        if self.way == "the layer's":
            y = y.view(len(x), self.up.out_features)
        if self.way == "a list":
            y = y + self.held[0].sum()
        if self.way == "a softmax":
            y = y.softmax(-1)
        if self.way == "a mean":
            y = y - y.mean(-1, keepdim=True)
        if self.way == "a norm":
            y = nn.functional.layer_norm(y, y.shape[-1:])
        if self.way == "two in one":
            one, other = y.chunk(2, -1)
            y = torch.cat([one * other, one], -1)
        return self.down(y)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("a number", "invalid for input of size"),
        ("the layer's", "invalid for input of size"),
        ("a list", "constants of a rank are not those of the whole model"),
        *((way, "computes something else on random") for way in ("a softmax", "a mean", "a norm", "two in one")),
    ],
)
def test_what_reads_a_layer_otherwise_than_by_its_part_is_refused(way: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export(
            Sized(way).eval(),
            (torch.zeros(2, 8),),
            out=tmp_path / "a.artifact",
            parallel=Parallel(2, {"up": "colwise", "down": "rowwise"}),
        )


class Random(nn.Module):
    """Model whose answers are at random."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) + torch.rand_like(x)


def test_answers_at_random_are_refused(tmp_path: Path) -> None:
    split = Parallel(2, {"up": "colwise", "down": "rowwise"})
    with pytest.raises(CaptureError, match=r"each rank would draw others\. Call model\.eval"):
        export(Random().eval(), (torch.zeros(2, 8),), out=tmp_path / "a.artifact", parallel=split)


def test_what_cannot_be_tried_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Parallel(2, {"up": "colwise", "down": "rowwise"})
    monkeypatch.setattr(rank_check, "MOST_BYTES", 100)
    with pytest.warns(UserWarning, match="could not be tried: its weights take more than"):
        export(Sized("").eval(), (torch.zeros(2, 8),), out=tmp_path / "b.artifact", parallel=split)


class Heads(nn.Module):
    """Attention without weights for its outputs, whose heads a part would make smaller."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.values, self.out, self.num_heads = nn.Linear(8, 8), nn.Linear(8, 8), num_heads

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.num_heads, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.split(self.values(x)).softmax(-1).flatten(1))


def test_a_number_of_heads_beside_the_shapes_is_refused(tmp_path: Path) -> None:
    plan = Parallel(2, {"*.values": "colwise", "*.out": "rowwise"})
    error = refusal(nn.Sequential(Heads()), plan, tmp_path, args=(torch.zeros(2, 8),), kwargs=None, dynamic_shapes=None)
    assert "0.values: Heads reads num_heads, which is that of the whole model" in str(error)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x) + self.calls


class Computed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_what_ranks_do_not_have(tmp_path: Path) -> None:
    plan = Parallel(2, {"head": "colwise_gather_output"})
    arguments: dict[str, Any] = {"args": (torch.zeros(2, 8),), "dynamic_shapes": None}
    state = refusal(Remembers(), plan, tmp_path, **arguments, kwargs=None)
    assert "calls change calls, and ranks keep no state" in str(state)
    model = Remembers()
    model.head = Computed(8, 8)
    layer = refusal(model, plan, tmp_path, **arguments, kwargs=None)
    assert "head: Computed is not cut, only nn.Linear" in str(layer)
    for more, says in (
        ({"variants": {"heads": "head*"}}, "calls of several ranks choose no variants"),
        ({"engines": ["onnx"]}, r"several ranks need the engine 'torch'"),
    ):
        assert says in str(refusal(Packed(), Parallel(2, PACKED_PLAN), tmp_path, **more))
