"""Graphs of ranks compute what the model does in one process: run by real processes, each with its part of the weights.

All models are exported first, and run by the same four processes.
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

WORLD = 4


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
    "two heads of keys on 4": Case(llama, SHORT | {"num_key_value_heads": 2}, 4),
    "one head of keys on 4": Case(llama, SHORT | {"num_key_value_heads": 1, "attention_bias": True}, 4),
    "tied embeddings on 2": Case(llama, SHORT | {"tie_word_embeddings": True}, 2),
    "gpt2 on 2": Case(gpt2, {"n_layer": 1}, 2, GPT2_PLAN),
    "gpt2 on 4": Case(gpt2, {"n_layer": 1, "tie_word_embeddings": False}, 4, GPT2_PLAN),
}
ANOTHER = "packed on 2, in one more group"


class Results(NamedTuple):
    expected: dict[str, list[torch.Tensor]]  # of one process, for each weight file
    folder: Path

    def of_ranks(self, case: str) -> list[list[torch.Tensor]]:
        saved = [safetensors.torch.load_file(path) for path in sorted((self.folder / case).glob("*.safetensors"))]
        return [[outputs[str(number)] for number in range(len(outputs))] for outputs in saved]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    results = Results({}, folder)
    jobs = [prepared(folder, name, case, results.expected) for name, case in CASES.items()]
    # process 0 is a rank of one more group, with inputs of its own
    job = jobs[0]._replace(inputs={"x": torch.randn(5, 8)}, ranks=(0, 3), out=str(folder / ANOTHER))
    results.expected[ANOTHER] = answers(Packed(), job.weights, job.inputs)
    run_jobs(WORLD, [*jobs, job], folder)
    return results


def prepared(folder: Path, name: str, case: Case, expected: dict[str, list[torch.Tensor]]) -> Job:
    """Export a model, with a recorded call, and pack two sets of weights for it: A, B and A again will be served."""
    model, path = case.build(**case.settings).eval(), folder / f"{name}.artifact"
    inputs = {"x": torch.randn(3, 8)} if case.build is Packed else {"input_ids": torch.randint(0, 96, (3, 7))}
    files = []
    filled(model, seed=1)
    export(model, out=path, parallel=Parallel(case.size, case.plan), goldens=[((), inputs)], **sample(model))
    for seed in (1, 2):
        files.append(str(folder / f"{name}.{seed}.safetensors"))
        pack(filled(model, seed), path, out=files[-1])
    files.append(files[0])
    expected[name] = answers(model, files, inputs)
    return Job(str(path), files, inputs, tuple(range(case.size)), str(folder / name))


def filled(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


@torch.no_grad()
def answers(model: nn.Module, files: list[str], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for seed in (1, 2, 1)[: len(files)]:
        output = filled(model, seed)(**inputs)
        found.append(output if isinstance(output, torch.Tensor) else output.logits)
    return found


@pytest.mark.parametrize("case", [*CASES, ANOTHER])
def test_ranks_compute_what_one_process_does(case: str, results: Results) -> None:
    """Every rank, within 1e-5; and the same bits again after a swap to other weights and back."""
    expected, ranks = results.expected[case], results.of_ranks(case)
    assert len(ranks) == (2 if case == ANOTHER else CASES[case].size)
    for outputs in ranks:
        for output, alone, first in zip(outputs, expected, ranks[0], strict=True):
            assert torch.equal(output, first)
            torch.testing.assert_close(output, alone, rtol=1e-5, atol=1e-5 * alone.abs().max().item())
        assert torch.equal(outputs[0], outputs[2])
        assert not torch.equal(outputs[0], outputs[1])
