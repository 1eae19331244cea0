"""A trainer publishes while a server watches the directory: each step is served, in order, and equals eager."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models import Renamed
from weightswap_exporter import export, publish
from weightswap_runtime import Artifact, Event, load, write_delta

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
STEPS = 12


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return export(Renamed().eval(), (X,), out=tmp_path / "renamed.artifact")


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("residency", ["double", "single"])
def test_every_published_step_is_served_in_order(residency: str, artifact: Artifact, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answers: list[torch.Tensor] = []

    def train() -> None:
        model = Renamed().eval()
        for step in range(STEPS):
            fill(model, float(step + 1))
            with torch.no_grad():
                answers.append(model(X))
            publish(model, out, artifact, step=step * 500).wait(60)

    served: list[tuple[str, torch.Tensor]] = []
    done = threading.Event()
    model = load(artifact, residency=residency)  # type: ignore[arg-type]

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


def test_a_server_that_starts_late_takes_the_newest_and_the_deltas_after_it(artifact: Artifact, tmp_path: Path) -> None:
    model, out = Renamed().eval(), tmp_path / "out"
    files = []
    for step in range(4):
        fill(model, float(step + 1))
        files.append(publish(model, tmp_path / "all", artifact, step=step).wait(60).path)
    out.mkdir()
    for path in files[:2]:
        (out / path.name).hardlink_to(path)
    for base, new in ((1, 2), (2, 3)):
        write_delta(files[base], files[new], out / files[new].name)
    served = load(artifact)
    with served.watch(out, 0.01):
        deadline = time.monotonic() + 60
        while served.generation != 1 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [receipt.kind for receipt in served.history] == ["full", "delta"]  # both deltas at once
    with torch.no_grad():
        assert torch.equal(served(X), model(X))
