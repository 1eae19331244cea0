"""Random numbers that a call seeds itself: refused, with advice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from weightswap_exporter import export, pack
from weightswap_exporter.capture.side_effects import no_seeding
from weightswap_runtime import CaptureError, load

X = torch.ones(2, 3)


def of_a_generator() -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(1))


def of_a_seed() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3)


def of_a_fork() -> torch.Tensor:
    with torch.random.fork_rng():
        torch.random.manual_seed(1)
        return torch.randn(3)


class Noisy(nn.Module):
    def __init__(self, noise: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mix(x)
        return y + self.noise()


@pytest.mark.parametrize("noise", [of_a_generator, of_a_seed, of_a_fork])
def test_numbers_that_a_call_seeds_are_refused(noise: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"method 'forward': .*random numbers.*keep them in a persistent buffer"):
        export(Noisy(noise).eval(), (X,), out=tmp_path / "a.artifact")
    assert not (tmp_path / "a.artifact").exists()
    assert torch.equal(of_a_seed(), of_a_seed())  # seeding is what it was


def test_numbers_that_nobody_seeds_are_drawn_as_ever(tmp_path: Path) -> None:
    model = Noisy(lambda: torch.randn(3)).eval()
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, pack(model, artifact, out=tmp_path / "v.safetensors").path)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = model(X)
    torch.manual_seed(3)
    assert torch.equal(served(X), expected)


@pytest.mark.parametrize("bounds", [{"from": 2.0, "to": 2.0}, None])
def test_an_argument_may_be_called_as_pythons_keyword(bounds: dict[str, float] | None, tmp_path: Path) -> None:
    model = Noisy(lambda: torch.empty(3).uniform_(**bounds) if bounds else torch.empty(3).uniform_(2.0, 2.0)).eval()
    artifact = export(model, (X,), out=tmp_path / "a.artifact")
    served = load(artifact, pack(model, artifact, out=tmp_path / "v.safetensors").path)
    with torch.no_grad():
        assert torch.equal(served(X), model(X))


def test_other_threads_seed_meanwhile() -> None:
    with no_seeding():
        thread = threading.Thread(target=torch.manual_seed, args=(1,))
        before = torch.get_rng_state()
        thread.start()
        thread.join()
        assert not torch.equal(before, torch.get_rng_state())
        with pytest.raises(CaptureError):
            torch.manual_seed(1)
