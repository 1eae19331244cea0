"""A server without the model library, and without the exporter: outputs of library classes are plain dicts there."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support import warm
from tests.zoo.conftest import Shelf
from tests.zoo.entries import BY_NAME, randomised

SERVER = """
import sys

for absent in ("transformers", "weightswap_exporter", "tests"):
    sys.modules[absent] = None  # importing it raises ImportError

import safetensors.torch
import torch
from weightswap_runtime import load

artifact, weights, inputs, outputs = sys.argv[1:]
served = load(artifact)
served.swap(weights)
kinds, expected = set(), safetensors.torch.load_file(outputs)


def check(path, value):
    kinds.add(type(value))
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, expected.pop(path)), path
        return
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        check(f"{path}.{key}", part)


check("output", served(**safetensors.torch.load_file(inputs)))
assert not expected, expected.keys()
assert kinds <= {dict, tuple, list, torch.Tensor}, kinds
"""


@pytest.mark.parametrize("name", ["bert", pytest.param("clip", marks=pytest.mark.slow)])
def test_outputs_are_plain_where_the_library_is_not_installed(name: str, shelf: Shelf, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    eager = randomised(entry, 3)
    saved = entry.save(eager, tmp_path / "checkpoint")
    inputs = entry.inputs(*entry.sizes[1])
    with torch.no_grad():
        outputs = eager(**inputs)
    assert type(outputs).__module__.startswith("transformers.")
    safetensors.torch.save_file(inputs, tmp_path / "inputs.safetensors")
    safetensors.torch.save_file(dict(flat("output", outputs)), tmp_path / "outputs.safetensors")
    paths = [shelf(entry).hollow.path, saved, tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"]
    done = subprocess.run([warm.python(), "-c", SERVER, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def flat(path: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a tree by their paths."""
    if isinstance(value, torch.Tensor):
        return [(path, value.contiguous().clone())]
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [leaf for key, part in parts for leaf in flat(f"{path}.{key}", part)]
