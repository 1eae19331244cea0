"""Packing for artifacts with variants, and declarations that leave a part of PEFT's layers to the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.adapters import Adapters, X, base, with_lora
from weightswap_exporter import export, pack, publish
from weightswap_runtime import CaptureError, load


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("variants"))


def test_the_base_is_packed_from_whatever_has_it(files: Adapters, tmp_path: Path) -> None:
    """The sources are the module before PEFT, PEFT's model, that one wrapped, the base model in it, and a file."""
    tuned = with_lora(base(1))
    sources: list[Any] = [base(1), tuned, nn.DataParallel(tuned), tuned.get_base_model(), files.weights[1]]
    for number, source in enumerate(sources):
        pack(source, files.artifact, out=tmp_path / f"{number}.safetensors")
    assert len({(tmp_path / f"{number}.safetensors").read_bytes() for number in range(len(sources))}) == 1


@pytest.mark.parametrize("wrap", [lambda tuned: tuned, nn.DataParallel], ids=["plain", "wrapped"])
@pytest.mark.parametrize("by", ["pack", "publish"])
def test_recorded_goldens_are_of_the_base_alone(
    by: str, wrap: Callable[[nn.Module], nn.Module], files: Adapters, tmp_path: Path
) -> None:
    tuned = with_lora(base(0), init_lora_weights=False)
    before = tuned(X)
    if by == "pack":
        packed = pack(wrap(tuned), files.artifact, out=tmp_path / "v1.safetensors", goldens=[(X,)])
    else:
        packed = publish(wrap(tuned), tmp_path, files.artifact, step=1, goldens=[(X,)]).wait()
    assert torch.equal(tuned(X), before)
    model = load(files.artifact, packed.path)
    assert model.history[0].verified == "goldens"
    assert torch.equal(model(X), files.expected(0, None))


@pytest.mark.parametrize("pattern", ["*lora_B*", "first.lora_*"])
def test_a_part_of_pefts_tensors_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="declare all that PEFT added"):
        export(with_lora(base(0)), (X,), out=tmp_path / "x.artifact", variants={"lora": pattern})
