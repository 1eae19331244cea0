"""Random numbers that a call seeds itself: refused, with advice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models import Does
from tests.support.setups import served
from weightswap_exporter import export
from weightswap_exporter.capture.side_effects import no_seeding
from weightswap_runtime import CaptureError

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


def noisy(noise: Callable[[], torch.Tensor]) -> nn.Module:
    return Does(lambda m, x: m.mix(x) + noise(), mix=nn.Linear(3, 3)).eval()


@pytest.mark.parametrize("noise", [of_a_generator, of_a_seed, of_a_fork])
def test_numbers_that_a_call_seeds_are_refused(noise: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"method 'forward': .*random numbers.*keep them in a persistent buffer"):
        export(noisy(noise), (X,), out=tmp_path / "a.artifact")
    assert not (tmp_path / "a.artifact").exists()
    assert torch.equal(of_a_seed(), of_a_seed())  # seeding is what it was


def test_numbers_that_nobody_seeds_are_drawn_as_ever(tmp_path: Path) -> None:
    eager = noisy(lambda: torch.randn(3))
    model, found = served(tmp_path, eager, X), []
    for call in (model, eager):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(call(X))
    assert torch.equal(*found)


@pytest.mark.parametrize("bounds", [{"from": 2.0, "to": 2.0}, None])
def test_an_argument_may_be_called_as_pythons_keyword(bounds: dict[str, float] | None, tmp_path: Path) -> None:
    eager = noisy(lambda: torch.empty(3).uniform_(**bounds) if bounds else torch.empty(3).uniform_(2.0, 2.0))
    with torch.no_grad():
        assert torch.equal(served(tmp_path, eager, X)(X), eager(X))


def test_other_threads_seed_meanwhile() -> None:
    with no_seeding():
        thread = threading.Thread(target=torch.manual_seed, args=(1,))
        before = torch.get_rng_state()
        thread.start()
        thread.join()
        assert not torch.equal(before, torch.get_rng_state())
        with pytest.raises(CaptureError):
            torch.manual_seed(1)
