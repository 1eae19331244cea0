"""Models that are split over ranks, and processes that run their graphs together, each with its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.export import Dim

from weightswap_runtime import Artifact
from weightswap_runtime.engines.graph import open_graph
from weightswap_runtime.format.manifest import Cut

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

    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_head=8, n_layer=2, n_positions=64, **settings))


def sample(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `export()` for a model: its sample inputs, with as many sizes dynamic as there are."""
    if isinstance(model, Packed):
        return {"args": (torch.zeros(2, 8),), "dynamic_shapes": {"x": {0: Dim("rows")}}}
    sizes = {0: Dim("batch", max=8), 1: Dim("length", max=32)}
    return {"kwargs": {"input_ids": torch.zeros(2, 5, dtype=torch.long)}, "dynamic_shapes": {"input_ids": sizes}}


def part(whole: torch.Tensor, cut: Cut, size: int, rank: int) -> torch.Tensor:
    """Return what a rank has of a tensor, by torch alone."""
    parts = [group.chunk(size // cut.repeat, cut.dim)[rank // cut.repeat] for group in whole.chunk(cut.groups, cut.dim)]
    return torch.cat(parts, cut.dim).contiguous()


class Job(NamedTuple):
    """A graph to run on some ranks of the world."""

    artifact: str
    weights: str  # a safetensors file, by FQN, of the whole model
    inputs: Mapping[int, list[torch.Tensor]]  # those of each rank
    ranks: tuple[int, ...]  # of the world, in the order of the model's
    out: str  # where each rank saves its outputs: FOLDER/RANK.safetensors


def run_jobs(world: int, jobs: list[Job], folder: Path) -> None:
    """Run each job in processes of its own ranks, all in the same few processes."""
    torch.multiprocessing.spawn(_worker, (world, jobs, str(folder / "rendezvous")), nprocs=world)


def _worker(rank: int, world: int, jobs: list[Job], rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(job.ranks for job in jobs)}
    # all are opened before the first is run: each keeps its own group
    calls = [
        (job, opened(Artifact.open(job.artifact), job.weights, job.ranks.index(rank), groups[job.ranks].group_name))
        for job in jobs
        if rank in job.ranks
    ]
    for job, call in calls:
        outputs = call(job.inputs[rank])
        Path(job.out).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(outputs, f"{job.out}/{rank}.safetensors")
    dist.destroy_process_group()


Run = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


def opened(artifact: Artifact, weights: str, rank: int, group: str) -> Run:
    """Return the only method of an artifact, over one rank's part of the weights."""
    manifest = artifact.manifest
    (method,) = manifest.methods.values()
    assert manifest.ranks
    whole = safetensors.torch.load_file(weights)
    constants = {row.name: row for row in manifest.constants}
    contents = artifact.constants()
    tensors: dict[str, torch.Tensor] = {
        name: torch.frombuffer(bytearray(contents[name].data), dtype=torch.float32).reshape(row.shape)
        for name, row in constants.items()
    }
    for row in manifest.weights:
        cut = manifest.ranks.cuts.get(row.name)
        value = part(whole[row.name], cut, manifest.ranks.size, rank) if cut else whole[row.name]
        tensors |= dict.fromkeys(row.names, value)
    fixed = [item.kind in ("weight", "constant") for item in method.inputs]
    graph = open_graph(artifact, method.graph, torch.device("cpu"), fixed, group)
    bound = [tensors[item.name] for item in method.inputs if item.kind != "input"]

    @torch.no_grad()
    def run(inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        hoisted = graph.prologue(*bound) if graph.prologue else ()
        values = iter(inputs)
        rest = [tensors[item.name] if item.kind != "input" else next(values) for item in method.inputs]
        outputs = graph.call(*hoisted, *rest)
        return {str(index): value.clone() for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}

    return run
