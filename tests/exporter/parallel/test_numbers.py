"""Graphs of ranks compute what the model does in one process: run by real processes, each with its part of the weights.

All models of a group are exported first, and run by the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support.split import GPT2_PLAN, PACKED_PLAN, Job, Packed, gpt2, llama, run_jobs, sample
from weightswap_exporter import Parallel, export, pack


class Case(NamedTuple):
    build: Callable[..., nn.Module]
    settings: dict[str, Any]
    size: int
    plan: Any = "auto"


SHORT = {"num_hidden_layers": 1}
CASES = {
    "packed on 2": Case(Packed, {}, 2, PACKED_PLAN),
    "packed on 4": Case(Packed, {}, 4, PACKED_PLAN),
    "llama on 2": Case(llama, {"attention_bias": True, "mlp_bias": True}, 2),
    "llama on 4": Case(llama, SHORT, 4),
    "one head of keys on 2": Case(llama, SHORT | {"num_key_value_heads": 1}, 2),
    "two heads of keys on 4": Case(llama, SHORT | {"num_key_value_heads": 2}, 4),
    "one head of keys on 4": Case(llama, SHORT | {"num_key_value_heads": 1, "attention_bias": True}, 4),
    "tied embeddings on 2": Case(llama, SHORT | {"tie_word_embeddings": True}, 2),
    "gpt2 on 2": Case(gpt2, {"n_layer": 1}, 2, GPT2_PLAN),
    "gpt2 on 4": Case(gpt2, {"n_layer": 1, "tie_word_embeddings": False}, 4, GPT2_PLAN),
}
# on two processes; promises/never_a_mixture/test_ranks.py has four
SHORT_RUN = ("packed on 2", "one head of keys on 2")
LONG_RUN = [name for name in CASES if name not in SHORT_RUN]


def prepared(folder: Path, name: str) -> tuple[Job, nn.Module]:
    """Export a model, with a recorded call, and pack two sets of weights for it: A, B and A again will be served."""
    case = CASES[name]
    model, path = case.build(**case.settings).eval(), folder / f"{name}.artifact"
    inputs = {"x": torch.randn(3, 8)} if case.build is Packed else {"input_ids": torch.randint(0, 96, (3, 7))}
    files = []
    filled(model, seed=1)
    export(model, out=path, parallel=Parallel(case.size, case.plan), goldens=[((), inputs)], **sample(model))
    for seed in (1, 2):
        files.append(str(folder / f"{name}.{seed}.safetensors"))
        pack(filled(model, seed), path, out=files[-1])
    files.append(files[0])
    return Job(str(path), files, inputs, tuple(range(case.size)), str(folder / name)), model


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


@torch.no_grad()
def answers(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return what one process computes with each weight file."""
    outputs = [filled(model, seed)(**inputs) for seed in (1, 2, 1)]
    return [output if isinstance(output, torch.Tensor) else output.logits for output in outputs]


@pytest.mark.parametrize("names", [SHORT_RUN, pytest.param(LONG_RUN, marks=pytest.mark.slow)], ids=["short", "long"])
def test_ranks_compute_what_one_process_does(names: list[str], tmp_path: Path) -> None:
    """Every rank, within 1e-5; and the same bits again after a swap to other weights and back."""
    jobs = [prepared(tmp_path, name) for name in names]
    world = max(CASES[name].size for name in names)
    job, model = next(each for each in jobs if len(each[0].ranks) == 2)
    inputs = {name: value[:2] for name, value in job.inputs.items()}
    again = job._replace(inputs=inputs, ranks=(0, world - 1), out=str(tmp_path / "in one more group"))
    jobs.append((again, model))  # process 0 is a rank of one more group, with inputs of its own
    run_jobs(world, [job for job, _ in jobs], tmp_path)
    for job, model in jobs:
        ranks = [safetensors.torch.load_file(f"{job.out}/{rank}.safetensors") for rank in job.ranks]
        for outputs in ranks:
            for number, alone in enumerate(answers(model, job.inputs)):
                assert torch.equal(outputs[str(number)], ranks[0][str(number)]), job.out
                torch.testing.assert_close(
                    outputs[str(number)], alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item(), msg=job.out
                )
            assert torch.equal(outputs["0"], outputs["2"])
            assert not torch.equal(outputs["0"], outputs["1"])
