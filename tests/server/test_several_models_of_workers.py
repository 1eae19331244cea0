"""Several models of `weightswap serve --workers`, one of several methods, and traces: who answers, who is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.server.worker_processes import Running, eventually, operated, started
from tests.support.collector import Collected, collecting
from tests.support.served import X, expected
from tests.support.tiny import TinyArtifact
from weightswap_exporter import MethodSpec, export, pack

pytestmark = pytest.mark.slow

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SEEDS = (1, 2, 3)
METHODS = {"tiny": "forward", "tiny.encode": "encode", "tiny.decode": "decode"}


class Coder(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inside, self.outside = nn.Linear(3, 4), nn.Linear(4, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).relu()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def eager(seed: int, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if name == "second":
        return expected(seed, x)
    with torch.no_grad():
        found: np.ndarray[Any, Any] = getattr(Coder(seed), METHODS[name])(torch.from_numpy(x)).numpy()
    return found


@dataclass
class Several(Running):
    """A server with two workers and the models `tiny`, a coder, and `second`. files: by their seeds, of each model."""

    tiny: dict[int, str]
    second: dict[int, str]
    collected: Collected
    asked: int = 0

    def states(self) -> dict[str, str]:
        """Return the state of each model and method in the index."""
        index = json.loads(self.get("/v2/repository/index", {"ready": False}))
        return {entry["name"]: entry["state"] for entry in index}

    def seed_of(self, name: str, routing: str = "0") -> int:
        """Return the seed whose weights a model or method answers with, or 0."""
        self.asked += 1
        x = X if name != "tiny.decode" else np.ones((2, 4), np.float32)
        _, found = self.answer(name, x, X_Weightswap_Canary=routing, traceparent=f"00-{TRACE}-{CALLER}-01")
        return next((seed for seed in SEEDS if np.allclose(found, eager(seed, name, x), rtol=1e-5, atol=1e-5)), 0)

    def served(self, routing: str = "0") -> tuple[set[int], set[int]]:
        """Return the seeds that answer for all methods of `tiny`, and for `second`, from any workers."""
        names = [*METHODS, "second"] * 4
        seeds = [(name, self.seed_of(name, routing)) for name in names]
        return {seed for name, seed in seeds if name in METHODS}, {seed for name, seed in seeds if name == "second"}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    shapes, widths = {"x": {0: Dim("batch", max=8)}}, {"forward": 3, "encode": 3, "decode": 4}
    methods = {
        name: MethodSpec(name, (torch.zeros(2, width),), dynamic_shapes=shapes) for name, width in widths.items()
    }
    artifact, other = export(Coder(0).eval(), methods=methods, out=folder / "tiny.artifact"), TinyArtifact(folder / "b")
    tiny = {seed: str(pack(Coder(seed), artifact, out=folder / f"{seed}.safetensors").path) for seed in SEEDS}
    second = {seed: str(other.write(folder / f"b{seed}.safetensors", other.values(seed))) for seed in SEEDS}
    options = ["-w", f"tiny={tiny[1]}", "-w", f"second={second[2]}", "--traces", "--max-batch", "4", *operated(folder)]
    with collecting() as collected, pytest.MonkeyPatch.context() as patch:
        for name, value in (collected.environment | {"OTEL_BSP_SCHEDULE_DELAY": "200"}).items():
            patch.setenv(name, value)
        with started(folder, 2, f"second={other.path}", *options) as running:
            found = Several(**vars(running), tiny=tiny, second=second, collected=collected)
            eventually(lambda: found.served() == ({1}, {2}))
            yield found


def test_requests_and_swaps_have_spans(several: Several) -> None:
    """The span of a request is of its worker, that of a swap of the owner alone. A swap is one of all methods."""

    def said(what: bytes) -> int:
        return sum(body.count(what) for _, body in list(several.collected.posts))

    several.change("swap", source=several.tiny[3])
    assert several.served() == ({3}, {2})
    several.change("rollback")
    eventually(lambda: said(b"weightswap.swap") >= 4, 10)
    assert several.served() == ({1}, {2})
    eventually(lambda: said(bytes.fromhex(CALLER)) == several.asked, 10)
    assert said(b"weightswap.swap") == 4


def test_each_method_is_a_model(several: Several) -> None:
    assert several.states() == dict.fromkeys([*METHODS, "second"], "READY")
    assert json.loads(several.get("/v2/models/tiny.decode"))["inputs"][0]["shape"] == [-1, 4]
    assert several.status["methods"] == list(METHODS)

    def counted() -> bool:
        """Whether the requests to each method are counted. What another worker counted may be a second old."""
        text = several.get("/metrics").decode()
        return all(f'weightswap_server_requests_total{{model="{name}"' in text for name in METHODS)

    eventually(counted, 10)


def test_what_is_unloaded_is_so_with_all_methods(several: Several) -> None:
    several.operator.post("/v2/repository/models/tiny/unload", {})
    assert several.states() == dict.fromkeys(METHODS, "UNAVAILABLE") | {"second": "READY"}
    several.operator.post("/v2/repository/models/tiny/load", {})
    assert several.served() == ({1}, {2})


def test_a_canary_answers_for_all_methods_and_is_measured(several: Several) -> None:
    several.change("canary", source=several.tiny[3], share=0.0, shadow=True)
    assert several.served("1") == ({3}, {2})
    assert several.served("0") == ({1}, {2})
    for measured in ("requests", "compared"):
        eventually(lambda of=measured: several.status["canary"]["values"].get(of, 0) >= 12)  # type: ignore[misc]
    several.change("commit")
    assert several.served() == ({3}, {2})
    several.change("rollback")


def test_operators_are_told_where_variants_go(several: Several) -> None:
    said = several.refused_change("add_variant", group="low", name="a", source=several.tiny[1])
    assert "Start the server without --workers, or start several servers" in said


def test_a_trainers_update_reaches_all_workers_of_its_model(several: Several) -> None:
    post = several.operator.post
    post("/start_weight_update?model=second", {})
    post("/update_weights?model=second", {"update_info": {"path": several.second[3]}})
    assert several.served() == ({1}, {2})
    post("/finish_weight_update?model=second", {"weight_version": "v3"})
    assert several.served() == ({1}, {3})
    assert several.operator.get("/weight_info?model=second")["weight_version"] == "v3"
    digests = [post(f"/weight_checker?model={name}", {"action": "checksum"}) for name in ("tiny", "second")]
    assert [len(each["checksums"]) for each in digests] == [4, 4]
    assert digests[0] != digests[1]
    post("/update_weights_from_disk?model=second", {"model_path": several.second[2]})
    assert several.served() == ({1}, {2})


def test_each_has_its_own_weights_whoever_is_killed(several: Several) -> None:
    several.change("swap", "second", source=several.second[3])
    assert several.served() == ({1}, {3})
    owner, worker, _ = several.children
    for killed in (worker, owner):
        several.replace(killed)
        eventually(lambda: several.served() == ({1}, {3}))
    eventually(lambda: bool(several.status["loaded"]))
    several.change("swap", source=several.tiny[2])
    assert several.served() == ({2}, {3})
