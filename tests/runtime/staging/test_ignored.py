"""Tensors of a file that the caller ignores."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support.tiny import TinyArtifact, serves
from weightswap_runtime import Model, SwapReceipt, Unsupported, WeightsMismatch, load

OLD = {"module.emb.position_ids": torch.arange(5)}


@pytest.fixture
def old(tiny: TinyArtifact, tmp_path: Path) -> Path:
    """Write a checkpoint of a model that had one more buffer."""
    path = tmp_path / "old.safetensors"
    values = {f"module.{name}": value for name, value in tiny.values(1).items()}
    safetensors.torch.save_file(values | OLD, path)
    return path


def staged(model: Model, path: Path) -> SwapReceipt:
    with model.stage(path, ignore=["*.position_ids"]) as staged:
        return staged.commit()


def watched(model: Model, path: Path) -> SwapReceipt:
    with model.watch(path.parent, 0.01, start="all", ignore="*.position_ids"):
        while not model.history:
            time.sleep(0.01)
    return model.history[0]


@pytest.mark.parametrize(
    "swapped",
    [lambda model, path: model.swap(path, ignore="*.position_ids"), staged, watched],
    ids=["swap", "stage", "watch"],
)
def test_ignored_names_are_skipped_and_recorded(
    swapped: Callable[[Model, Path], SwapReceipt], old: Path, tiny: TinyArtifact
) -> None:
    model = load(tiny.path)
    with pytest.raises(WeightsMismatch):
        model.swap(old)
    assert swapped(model, old).ignored == tuple(OLD)
    assert serves(model, 1)


def test_the_first_weights_may_have_ignored_names(old: Path, tiny: TinyArtifact) -> None:
    assert serves(load(tiny.path, old, ignore="*.position_ids"), 1)


def test_a_part_records_ignored_names_too(old: Path, tiny: TinyArtifact, tmp_path: Path) -> None:
    model = load(tiny.path, tiny.write(tmp_path / "v0.safetensors", tiny.values(0)))
    assert model.swap(old, only="bias", ignore="*position*", keys="fqn").ignored == tuple(OLD)


def test_a_weight_that_is_wanted_is_not_hidden(old: Path, tiny: TinyArtifact) -> None:
    model = load(tiny.path)
    with pytest.raises(WeightsMismatch):
        model.swap(old, ignore=["*.position_ids", "*.bias"])
    assert model.generation is None


def test_a_pattern_that_matches_nothing_is_a_warning(old: Path, tiny: TinyArtifact) -> None:
    model = load(tiny.path)
    with pytest.warns(UserWarning, match=r"ignore='\*\.rotary': matches no name of .*old\.safetensors") as caught:
        model.swap(old, ignore=["*.rotary", "*.position_ids"])
    assert {warning.filename for warning in caught} == {__file__}  # the line that calls swap()
    assert serves(model, 1)


def test_patterns_must_be_strings(old: Path, tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match=r"^ignore=\[5\]: expected a pattern"):
        load(tiny.path).swap(old, ignore=[5])  # type: ignore[list-item]
