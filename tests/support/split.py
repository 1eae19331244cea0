"""Models that are split over ranks, and processes that run their graphs together, each with its part of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.export import Dim

from weightswap_runtime import Ranks, load

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
LENGTHS = {"max_position_embeddings": 64, "intermediate_size": 96}


class Packed(nn.Module):
    """A stack of layers with a gate and what it opens in one tensor, and a head whose outputs are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 32), "down": nn.Linear(16, 8)}) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            gate, up = layer["up"](x).chunk(2, dim=-1)
            x = x + layer["down"](torch.sigmoid(gate) * up)
        return self.head(x)


PACKED_PLAN = {"layers.*.up": "packed_colwise", "layers.*.down": "rowwise", "head": "colwise_rep"}
GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "packed_colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL | LENGTHS | {"num_key_value_heads": 4} | settings))


def gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(**{"vocab_size": 96, "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64} | settings)
    )


def sample(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `export()` for a model: its sample inputs, with as many sizes dynamic as there are."""
    if isinstance(model, Packed):
        return {"args": (torch.zeros(2, 8),), "dynamic_shapes": {"x": {0: Dim("rows")}}}
    sizes = {0: Dim("batch", max=8), 1: Dim("length", max=32)}
    return {"kwargs": {"input_ids": torch.zeros(2, 5, dtype=torch.long)}, "dynamic_shapes": {"input_ids": sizes}}


class Job(NamedTuple):
    """An artifact to load and call on some ranks of the world."""

    artifact: str
    weights: list[str]  # weight files, one after the other
    inputs: dict[str, torch.Tensor]
    ranks: tuple[int, ...]  # of the world, in the order of the model's
    out: str  # where each rank saves its outputs, one for each weight file: FOLDER/RANK.safetensors


def run_jobs(world: int, jobs: list[Job], folder: Path) -> None:
    """Run each job in processes of its own ranks, all in the same few processes."""
    torch.multiprocessing.spawn(_worker, (world, jobs, str(folder / "rendezvous")), nprocs=world)


def _worker(rank: int, world: int, jobs: list[Job], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    groups = [dist.new_group(list(job.ranks)) for job in jobs]
    mine = [(job, group) for job, group in zip(jobs, groups, strict=True) if rank in job.ranks]
    # all are loaded before the first is called: each keeps its own group
    models = [load(job.artifact, job.weights[0], ranks=Ranks(group)) for job, group in mine]
    for (job, _), model in zip(mine, models, strict=True):
        outputs = {}
        for number, weights in enumerate(job.weights):
            if number:
                model.swap(weights)
            output = model(**job.inputs)
            outputs[str(number)] = output["logits"] if isinstance(output, dict) else output
        Path(job.out).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(outputs, f"{job.out}/{rank}.safetensors")
    dist.destroy_process_group()
