"""Parity over the zoo: models agree with their graphs, and a fault in one weight is found where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.conftest import Exported
from tests.zoo.entries import Entry, randomised
from weightswap_exporter import pack
from weightswap_exporter.parity import compare
from weightswap_runtime import Artifact


def calls(entry: Entry) -> list[Any]:
    torch.manual_seed(7)
    return [((), entry.inputs(*sizes)) for sizes in entry.sizes]


@pytest.mark.sampled(1)
def test_the_eager_model_and_its_graph_agree(exported: Exported) -> None:
    entry = exported.entry
    report = compare(randomised(entry, 1), exported.hollow, cases=calls(entry), engines=["torch"])
    assert report.same, report.text
    assert report.other_values == ()


@pytest.mark.sampled(1)
def test_generated_inputs_are_what_a_model_takes(exported: Exported) -> None:
    """At least those of ordinary sizes; empty ones are too much for most."""
    entry = exported.entry
    report = compare(randomised(entry, 1), exported.hollow, cases="generated", engines=["torch"], locate=False)
    assert report.same, report.text
    assert report.engines[0].cases[0].case.startswith("random")


def middle_matrix(model: torch.nn.Module, artifact: Artifact) -> str:
    """The weight of a linear layer, a convolution or an embedding that half of them are registered before."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding)
    modules = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
    names = [row.name for row in artifact.manifest.weights if modules.intersection(row.names)]
    return names[len(names) // 2]


@pytest.mark.sampled(1)
def test_a_wrong_weight_is_found_where_it_is_used(exported: Exported, tmp_path: Path) -> None:
    entry, artifact = exported.entry, exported.hollow
    model = randomised(entry, 1)
    weights = pack(model, artifact, out=tmp_path / "v1.safetensors").path
    name = middle_matrix(model, artifact)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    report = compare(model, artifact, weights, cases=calls(entry), engines=["torch"])
    assert name in report.other_values
    found = report.engines[0].divergence
    assert found is not None, report.text
    assert name in found.weights, found.text
