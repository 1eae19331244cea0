"""A trainer publishes while a server watches the directory: each step is served, in order, and equals eager."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.support.models import Renamed, fill
from weightswap_exporter import publish
from weightswap_runtime import Artifact, Event, load

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
STEPS = 12


@pytest.mark.parametrize("residency", ["double", "single"])
def test_every_published_step_is_served_in_order(residency: str, renamed: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers: list[torch.Tensor] = []

    def train() -> None:
        model = Renamed().eval()
        for step in range(STEPS):
            fill(model, float(step + 1))
            with torch.no_grad():
                answers.append(model(X))
            publish(model, out, renamed, step=step * 500).wait(120)

    served: list[tuple[str, torch.Tensor]] = []
    done = threading.Event()
    model = load(renamed, residency=residency)  # type: ignore[arg-type]

    def look(event: Event) -> None:
        if event.kind == "committed":
            served.append((event.labels["step"], model(X)))
            if len(served) == STEPS:
                done.set()

    out.mkdir()
    with model.watch(out, 0.01, start="all", callback=look) as watcher:
        trainer = threading.Thread(target=train)
        trainer.start()
        assert done.wait(120)
        trainer.join()
        assert watcher.skipped == {}
    assert [step for step, _ in served] == [str(step * 500) for step in range(STEPS)]
    assert all(torch.equal(answer, expected) for (_, answer), expected in zip(served, answers, strict=True))
