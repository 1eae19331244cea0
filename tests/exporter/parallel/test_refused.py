"""Plans that cannot be carried out are refused by name, all at once, and never ignored."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import Does
from tests.support.split import GPT2_PLAN, PACKED_PLAN, Packed, gpt2, llama, sample
from weightswap_exporter import Parallel, export, skeleton
from weightswap_exporter.engines import engine_check
from weightswap_runtime import CaptureError, ExportError, Unsupported


def refusal(model: nn.Module, parallel: Any, out: Path, error: Any = ExportError, **more: Any) -> str:
    with pytest.raises(error) as caught:
        export(model.eval(), out=out / "a.artifact", parallel=parallel, **sample(model) | more)
    assert not (out / "a.artifact").exists()
    return str(caught.value)


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
    assert re.search(says, refusal(Packed(), Parallel(size, plan), tmp_path))


def test_all_problems_are_named(tmp_path: Path) -> None:
    message = refusal(Packed(), Parallel(5, PACKED_PLAN | {"foot": "rowwise"}), tmp_path)
    named = [line[4:].split(":")[0] for line in message.splitlines()[1:]]
    assert named == ["foot", "layers.0.up, layers.1.up", "layers.0.down, layers.1.down", "head"]


def test_a_model_without_a_plan_needs_one(tmp_path: Path) -> None:
    assert "Packed has no plan of its own" in refusal(Packed(), Parallel(2), tmp_path)
    assert "GPT2LMHeadModel has no plan of its own" in refusal(gpt2(n_layer=1), Parallel(2), tmp_path)
    assert 'expected "auto", or a dict' in refusal(Packed(), Parallel(2, "mine"), tmp_path)  # type: ignore[arg-type]
    assert "expected weightswap_exporter.Parallel" in refusal(Packed(), 2, tmp_path)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, num_local_experts=4))


ATTENTION = "model.layers.0.self_attn"


def short(**settings: Any) -> Callable[[], nn.Module]:
    return functools.partial(llama, num_hidden_layers=1, **settings)


ONE_GPT2 = functools.partial(gpt2, n_layer=1)
MIXED = GPT2_PLAN | {"transformer.h.*.attn.c_attn": "colwise"}
MODELS: dict[str, tuple[Callable[[], nn.Module], int, Any, str]] = {
    "experts": (mixtral, 2, "auto", r"model.layers.\*.mlp.experts: the style 'moe_tp_experts'"),
    "experts' tensors": (
        mixtral,
        2,
        "auto",
        r"experts.gate_up_proj: names model.layers.0.mlp.experts.gate_up_proj, which is no layer but a tensor",
    ),
    "heads": (short(), 16, "auto", "q_proj: has 8 heads, which 16 ranks do not divide"),
    "heads of keys": (
        short(hidden_size=96, num_attention_heads=12, num_key_value_heads=3),
        4,
        "auto",
        "k_proj: has 3 heads, which 4 ranks do not divide",
    ),
    "keys that stay": (
        short(),
        2,
        {f"{ATTENTION}.q_proj": "colwise", f"{ATTENTION}.o_proj": "rowwise"},
        f"{ATTENTION}.q_proj: is cut, but k_proj beside it is not",
    ),
    "tied": (
        short(tie_word_embeddings=True),
        2,
        {"lm_head": "colwise"},
        "lm_head: is tied to model.embed_tokens.weight",
    ),
    "an embedding": (
        short(),
        2,
        {"model.embed_tokens": "colwise"},
        "embed_tokens: Embedding is not cut, only nn.Linear",
    ),
    "queries with keys": (ONE_GPT2, 2, MIXED, "c_attn: has queries, keys and values in one tensor, which 'colwise'"),
    "heads of GPT-2": (ONE_GPT2, 16, GPT2_PLAN, "c_attn: has 8 heads, which 16 ranks do not divide"),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_a_model_cannot_have(case: str, tmp_path: Path) -> None:
    build, size, plan, says = MODELS[case]
    with skeleton():
        model = build()
    assert re.search(says, refusal(model, Parallel(size, plan), tmp_path))


def test_outputs_that_stay_in_parts_are_refused(tmp_path: Path) -> None:
    message = refusal(Packed(), Parallel(2, PACKED_PLAN | {"head": "colwise"}), tmp_path, CaptureError)
    assert "gather them with 'colwise_gather_output'" in message


def gated(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cat([one * other, one], -1)


WAYS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a number": (lambda m, y: y.view(len(y), 16), "invalid for input of size"),
    "the layer's": (lambda m, y: y.view(len(y), m.up.out_features), "invalid for input of size"),
    "a list": (lambda m, y: y + m.held[0].sum(), "constants of a rank are not those of the whole model"),
    "a softmax": (lambda m, y: y.softmax(-1), "computes something else on random"),
    "a mean": (lambda m, y: y - y.mean(-1, keepdim=True), "computes something else on random"),
    "a norm": (lambda m, y: nn.functional.layer_norm(y, y.shape[-1:]), "computes something else on random"),
    "two in one": (lambda m, y: gated(*y.chunk(2, -1)), "computes something else on random"),
    "at random": (lambda m, y: y + torch.rand_like(y), r"each rank would draw others\. Call model\.eval"),
}


def export_split(between: Callable[[Any, torch.Tensor], torch.Tensor], out: Path) -> None:
    """Export two layers for two ranks, with something between them."""
    up = nn.Linear(8, 16)
    model = Does(lambda m, x: m.down(between(m, m.up(x))), up=up, down=nn.Linear(16, 8), held=[up.weight])
    split = Parallel(2, {"up": "colwise", "down": "rowwise"})
    export(model.eval(), (torch.zeros(2, 8),), out=out / "a.artifact", parallel=split)


@pytest.mark.parametrize(("between", "says"), WAYS.values(), ids=WAYS)
def test_what_reads_a_layer_otherwise_than_by_its_part_is_refused(between: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export_split(between, tmp_path)


def test_what_cannot_be_tried_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "MOST_SPLIT_BYTES", 100)
    with pytest.warns(UserWarning, match="could not be tried: its weights take more than"):
        export_split(lambda m, y: y, tmp_path)


GIVEN: dict[str, Any] = {"args": (torch.zeros(2, 8),), "kwargs": None, "dynamic_shapes": None}


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
    says = "0.values: Heads reads num_heads, which is that of the whole model"
    assert says in refusal(nn.Sequential(Heads()), plan, tmp_path, **GIVEN)


class Computed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_what_ranks_do_not_have(tmp_path: Path) -> None:
    plan = Parallel(2, {"head": "colwise_gather_output"})
    model = Does(lambda m, x: m.head(x) + m.calls.add_(1), head=nn.Linear(8, 8), calls=nn.Buffer(torch.zeros(())))
    assert "calls change calls, and ranks keep no state" in refusal(model, plan, tmp_path, Unsupported, **GIVEN)
    model.head = Computed(8, 8)
    assert "head: Computed is not cut, only nn.Linear" in refusal(model, plan, tmp_path, **GIVEN)
    for more, says in (
        ({"variants": {"heads": "head*"}}, "calls of several ranks choose no variants"),
        ({"engines": ["onnx"]}, r"several ranks need the engine 'torch'"),
    ):
        assert says in refusal(Packed(), Parallel(2, PACKED_PLAN), tmp_path, Unsupported, **more)
