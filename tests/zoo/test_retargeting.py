"""Graphs that were captured on a machine without a GPU, for one: every tensor that they make is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.zoo.conftest import Exported
from weightswap_exporter import export
from weightswap_exporter.capture.archive import open_program, retarget
from weightswap_runtime import Artifact
from weightswap_runtime.engines import graph as graph_opening
from weightswap_runtime.engines.graph import Compiled
from weightswap_runtime.format.signature import flatten
from weightswap_runtime.torch_tensors import torch_dtype

GPU = torch.device("cuda", 1)
Open = Callable[..., Compiled]
# torch's own code for fake tensors asks for a real device in some operators, where torch was built without CUDA
UNLINKED = "PyTorch is not linked with support for cuda devices"


def arguments(artifact: Artifact, method: str, given: dict[str, Any]) -> Iterator[Any]:
    """What the graph takes, as fake tensors on the GPU."""
    manifest = artifact.manifest
    rows = {
        name: row
        for table in (manifest.weights, manifest.state, manifest.constants)
        for row in table
        for name in row.names
    }
    signature = manifest.methods[method].signature
    flat = (value for name, node in (*signature.args, *signature.kwargs) for value in flatten(node, given[name]))
    for item in manifest.methods[method].inputs:
        if item.kind == "input":
            value = next(flat)
            yield torch.empty(value.shape, dtype=value.dtype, device=GPU) if isinstance(value, torch.Tensor) else value
        else:
            row = rows[item.name]
            yield torch.empty(row.shape, dtype=torch_dtype(row.dtype), device=GPU)


def devices(artifact: Artifact, given: dict[str, Any], opened: Compiled) -> set[torch.device]:
    """Where the outputs of `forward` are. Operators refuse tensors on several devices."""
    with FakeTensorMode():
        outputs = opened.call(*arguments(artifact, "forward", given))
    return {value.device for value in pytree.tree_leaves(outputs) if isinstance(value, torch.Tensor)}


@pytest.mark.sampled(2)
def test_the_zoo_runs_on_a_gpu_that_is_not_there(exported: Exported) -> None:
    entry, artifact = exported.entry, exported.hollow
    opened = graph_opening.open_graph(artifact, artifact.manifest.methods["forward"].graph, GPU)
    assert torch.device("cpu") not in constants(opened)
    assert "cpu" not in constants(opened)
    try:
        found = devices(artifact, entry.inputs(*entry.sizes[0]), opened)
    except RuntimeError as error:
        if UNLINKED in str(error):
            pytest.skip(UNLINKED)
        raise
    assert found == {GPU}


def constants(opened: Compiled) -> set[Any]:
    """What the function's source has no literals for, also in the functions within."""
    found: set[Any] = set()
    seen: set[Any] = set()
    waiting = [opened.call]
    while waiting:
        function = waiting.pop()
        seen.add(function)
        values = list(function.__globals__.values())
        found |= {value for value in values if isinstance(value, str | torch.device)}
        waiting += [value for value in values if getattr(value, "__name__", "") == "graph" and value not in seen]
    return found


class Placed(nn.Module):
    """Devices in many places: made, cast and moved to, and in a block of autocast."""

    def __init__(self, cast: bool = True) -> None:
        super().__init__()
        self.cast = cast
        self.linear = nn.Linear(4, 4)
        self.plain = torch.arange(4.0)
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.cast):
            y = self.linear(x)
        with torch.autocast(device_type="cpu", enabled=False):
            z = self.linear(y.float())
        noise = torch.zeros(4, device="cpu") + torch.tensor(2.0) * self.plain.to("cpu") + self.table
        return {"y": y, "z": z.masked_fill(~mask[:3], 0.0).to(x.device, torch.float64), "noise": noise}


def retargeted(artifact: Artifact, name: str) -> Compiled:
    """A graph as compilers have it."""
    program = open_program(artifact, name)
    retarget(program, GPU)
    places = sum(node.op == "placeholder" for node in program.graph.nodes)
    return Compiled(program.graph_module.forward, places, len(program.graph.output_node().args[0]), False)


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("way", ["reader", "torch"])
def test_every_device_of_a_graph_is_another(way: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    cast = way == "reader"  # torch's own program checks the dtypes, and does not cast without a GPU
    artifact = export(Placed(cast).eval(), (x,), out=tmp_path / "a")
    name = artifact.manifest.methods["forward"].graph
    opened = graph_opening.open_graph(artifact, name, GPU) if way == "reader" else retargeted(artifact, name)
    assert devices(artifact, {"x": x}, opened) == {GPU}


def test_autocast_is_that_of_the_other_device(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    artifact = export(Placed().eval(), (x,), out=tmp_path / "a")
    for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
        opened = graph_opening.open_graph(artifact, artifact.manifest.methods["forward"].graph, torch.device(device))
        assert device in constants(opened)
        assert other not in constants(opened)


class Elsewhere(nn.Module):
    """A block of autocast for a device that the tensors are not on, which eager passes over."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return x @ x.t()


@pytest.mark.filterwarnings("ignore:.*CUDA is not available.*:UserWarning")
def test_autocast_of_another_device_stays_as_it_is(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    artifact = export(Elsewhere().eval(), (x,), out=tmp_path / "a")
    opened = graph_opening.open_graph(artifact, artifact.manifest.methods["forward"].graph, torch.device("cpu"))
    assert "cuda" in constants(opened)
    assert "cpu" not in constants(opened)
    assert torch.equal(opened.call(x)[0], Elsewhere()(x))
