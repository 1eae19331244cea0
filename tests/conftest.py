"""Seeds, devices, and a tiny artifact made by hand, so that the runtime's tests do not need the exporter."""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# before torch is imported: threads of OpenMP that wait for each other would keep the processors from other processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import warm
from tests.support.blocks import make_blocks_small
from tests.support.file_queue_rig import FileQueueRig
from tests.support.handmade import Stage
from tests.support.quick import quick_exports
from tests.support.rows import prefer_rows
from tests.support.shares import left_for_other_days
from tests.support.short_run import mark_the_rest_slow
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights
from tests.support.watched import Directory
from weightswap_runtime import Model, load, native, write_delta

ON_RAY = (
    "tests/fleet/test_cluster",
    "tests/fleet/test_ranks_on_ray",
    "tests/docs/test_fleet.py",
    "tests/docs/test_bench.py::test_fleet",
)
SLOWEST = (
    *ON_RAY,
    "tests/promises/never_a_mixture/test_machine",
    "tests/runtime/engines/",
    "tests/docs/",
    "tests/exporter/",
    "tests/promises/",
    "tests/zoo/",
    "tests/tools/reports/",
)
COMPILED = "tests/runtime/engines/test_aoti"
BENCHMARK = re.compile(r"tests/docs/test_bench.*\[(\w+)\]$")
SAME_EXPORT = re.compile(r"tests/zoo/.*\[(?:(?:aoti|onnx)-)?(.*?)(?:-(?:cpu|cuda))?\]$")

# how long an example takes says nothing of the code; `--hypothesis-profile=exploring` looks for examples that are new
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("exploring"), derandomize=True)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers, what shares fixtures goes to one: a module, a model of the zoo, a group of benchmarks, what
    is compiled; and all that has clusters of Ray, as others would wait for it.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if entry := SAME_EXPORT.match(nodeid):
                return f"tests/zoo/{entry[1]}"
            if group := BENCHMARK.match(nodeid):
                return f"tests/docs/test_bench/{group[1]}"
            if nodeid.startswith(ON_RAY):
                return "Ray"
            return COMPILED if nodeid.startswith(COMPILED) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        warm.share()


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "run one of N slow tests, each day others"
    parser.addoption("--share", type=int, default=1, metavar="N", help=said)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, so that nothing of it is left for one worker in the end."""
    mark_the_rest_slow(items)
    left = left_for_other_days(items, config.getoption("share"))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: [not item.nodeid.startswith(start) for start in SLOWEST])


@pytest.fixture(scope="session", autouse=True)
def _quick_exports() -> Iterator[None]:
    with quick_exports():
        yield


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What lasts is none of the collector's business: it looks at millions of torch's objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=["double", "single"])
def residency(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyArtifact:
    """An affine map with tied and untied weights, a constant and a counter; see tests/support/tiny.py."""
    return TinyArtifact(tmp_path / "tiny.artifact")


@pytest.fixture
def weight_file(tiny: TinyArtifact, tmp_path: Path) -> WriteWeights:
    """`weight_file(seed)` writes one set of weights for the tiny artifact and returns its path."""

    def write(seed: int) -> Path:
        return tiny.write(tmp_path / f"v{seed}.safetensors", tiny.values(seed))

    return write


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Nothing but the last reference frees anything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def model(tiny: TinyArtifact, residency: Any) -> Model:
    return load(tiny.path, residency=residency)


@pytest.fixture
def stage(tiny: TinyArtifact, tmp_path: Path) -> Stage:
    return Stage(tiny, tmp_path)


@pytest.fixture(params=[1 << 20, 16], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_small(monkeypatch, request.param)


@pytest.fixture(params=["native", "numpy"])
def _code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What native.c does, and what is done where it was not compiled."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "library", None)
    else:
        assert native.library is not None, "native.c was not compiled: is there a C compiler?"


@pytest.fixture(params=["runs", "rows"])
def _places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What deltas name of a table: ranges of bytes, or rows."""
    if request.param == "rows":
        prefer_rows(monkeypatch)


@pytest.fixture
def delta(weight_file: WriteWeights, tmp_path: Path) -> WriteDelta:
    """`delta(0, 1)` leads from the weights of seed 0 to those of seed 1."""

    def write(base: int, new: int) -> Path:
        return write_delta(weight_file(base), weight_file(new), tmp_path / f"d{base}-{new}.safetensors").path

    return write


@pytest.fixture
def directory(tiny: TinyArtifact, tmp_path: Path) -> Directory:
    return Directory(tiny, tmp_path / "run")


@pytest.fixture
def rig(tiny: TinyArtifact, tmp_path: Path) -> FileQueueRig:
    return FileQueueRig(tiny, tmp_path / "run")
