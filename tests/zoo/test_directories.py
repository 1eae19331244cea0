"""`weightswap export hf:DIR` of a directory with nothing but config.json; later its weights are swapped in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.setups import equal
from weightswap_exporter.commands import export_command
from weightswap_runtime import Model, load

from .entries import BY_NAME, Kwargs, randomised


@pytest.mark.parametrize("name", ["bert", "llama-tied", "mixtral", "t5", "vit", "clip", "whisper", "wav2vec2"])
def test_a_configuration_is_enough_to_export_and_its_weights_swap_in_later(name: str, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    eager = randomised(entry, 5)
    served, said = export_then_swap(eager, tmp_path)
    assert said == []
    for sizes in entry.sizes:
        assert agree(served, eager, entry.inputs(*sizes))


def test_sizes_that_cannot_vary_are_fixed_and_named(tmp_path: Path) -> None:
    eager = randomised(BY_NAME["mamba"], 5)
    served, said = export_then_swap(eager, tmp_path)
    assert len(said) == 1
    assert "cannot keep every size of this model dynamic; fixed at those of the sample inputs: length" in said[0]
    assert "input_ids [2, 16]" in said[0]
    for batch in (1, 3):
        assert agree(served, eager, {"input_ids": torch.randint(0, 99, (batch, 16))})


def export_then_swap(model: Any, folder: Path) -> tuple[Model, list[str]]:
    """Export the model's configuration by the command line, then serve its weights; also the command's warnings."""
    directory, out = folder / "model", folder / "model.artifact"
    directory.mkdir()
    document = model.config.to_dict() | {"architectures": [type(model).__name__], "use_cache": True}
    (directory / "config.json").write_text(json.dumps(document))
    done = CliRunner().invoke(export_command, [f"hf:{directory}", "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    model.save_pretrained(directory)
    served = load(out)
    served.swap(directory)
    return served, json.loads(done.stdout)["warnings"]


@torch.no_grad()
def agree(served: Model, eager: Any, inputs: Kwargs) -> bool:
    return equal(served(**inputs), eager(**inputs))
