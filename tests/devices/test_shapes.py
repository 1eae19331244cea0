"""Sizes that are named for captures, and the inputs created from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.tiny import TinyArtifact
from weightswap_exporter import MethodSpec, export
from weightswap_runtime import Artifact, Unsupported, load
from weightswap_runtime.engines.choosing import choose_engine
from weightswap_runtime.engines.torch_device import samples

CPU = torch.device("cpu")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.linear(x) * mask * scale

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * 2


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    batch, length = Dim("batch", max=8), Dim("length", max=16)
    methods = {
        "forward": MethodSpec(
            "forward",
            (torch.zeros(2, 3, 4), torch.zeros(2, 3, 1)),
            {"scale": 2.0},
            dynamic_shapes={"x": {0: batch, 1: length}, "mask": {0: batch, 1: length}, "scale": None},
        ),
        "embed": MethodSpec("embed", (torch.zeros(3, dtype=torch.int64),), dynamic_shapes={"ids": {0: length}}),
    }
    artifact: Artifact = export(Two(), methods=methods, out=tmp_path_factory.mktemp("two") / "a")
    return artifact


def found(wanted: Any, artifact: Artifact) -> list[tuple[str, list[Any]]]:
    return [
        (name, [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs])
        for name, inputs in samples(wanted, artifact.manifest, CPU)
    ]


def test_sizes_by_name(two: Artifact) -> None:
    assert found("auto", two) == []
    assert found([{"batch": 2, "length": 5}, {"length": 7}], two) == [
        ("forward", [(2, 5, 4), (2, 5, 1), 2.0]),
        ("embed", [(7,)]),
    ]
    ((_, (ids,)),) = samples([{"length": 7}], two.manifest, CPU)
    assert ids.dtype == torch.int64


def test_shapes_of_a_single_tensor(two: Artifact, tiny: TinyArtifact) -> None:
    assert found([(5,), [6]], two) == [("embed", [(5,)]), ("embed", [(6,)])]
    assert found([(4, 3)], Artifact.open(tiny.path)) == [("forward", [(4, 3)])]


@pytest.mark.parametrize("wanted", [[(4, 4)], [(9, 3)], [(3,)], [{"batch": 9}], [{"rows": 1}], [{}]])
def test_sizes_that_no_method_has_are_refused(wanted: Any, tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match=r"no method can be called with .*: forward has batch \(0 to 8\)"):
        found(wanted, Artifact.open(tiny.path))


def test_what_is_no_list_of_sizes_is_refused(tiny: TinyArtifact) -> None:
    with pytest.raises(Unsupported, match=r'expected "auto", or a list of sizes such as \[\{"batch": 1\}\]'):
        found("all", Artifact.open(tiny.path))
    for each in (3, None, {"batch": 1.5}, {"batch": "1"}, "4", ["4"]):
        with pytest.raises(Unsupported, match="is neither sizes by name"):
            found([each], Artifact.open(tiny.path))
    with pytest.raises(Unsupported, match="cuda_graphs=5: expected"):
        found(5, Artifact.open(tiny.path))
    with pytest.raises(Unsupported, match="cuda_graphs with the engine 'torch' on 'cpu'"):
        load(tiny.path, cuda_graphs="auto")


def test_a_missing_accelerator_is_reported(tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for name in ("cuda:7", "xpu:7"):
        with pytest.raises(Unsupported, match="has no such device here; it has none"):
            load(tiny.path, device=name)
    with pytest.raises(Unsupported, match="torch knows no such device"):
        load(tiny.path, device="nowhere")
    for wrong in (None, 3, np.dtype("f4")):
        with pytest.raises(Unsupported, match='expected a string such as "cpu", "cuda" or "cuda:1"'):
            load(tiny.path, device=wrong)
    assert load(tiny.path, device=torch.device("cpu")).device == "cpu"  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match='staging="device" is for accelerators'):
        load(tiny.path, staging="device")
    with pytest.raises(Unsupported, match="staging='gpu': expected 'auto', 'device', 'host'"):
        load(tiny.path, staging="gpu")  # type: ignore[arg-type]


def test_auto_chooses_an_engine_of_the_device(tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightswap_runtime.engines.choosing.can_run", lambda artifact: True)
    artifact = Artifact.open(tiny.path)
    assert [choose_engine("auto", artifact, device) for device in ("cpu", "cuda:0")] == ["aoti", "torch"]
