"""Dicts with tuples as keys, as in heterogeneous graphs, under unambiguous names."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from tests.support.models import Does
from tests.support.program import said
from weightswap_exporter import export, pack
from weightswap_exporter.parity import compare
from weightswap_runtime import CaptureError, InputMismatch, load
from weightswap_runtime.format.signature import input_leaves, leaves
from weightswap_tools.terminal import node_text

Edges = dict[tuple[str, str, str], torch.Tensor]
RATES, LIKES = ("user", "rates", "film"), ("user", "likes", "user")


class Hetero(nn.Module):
    """A linear layer for each kind of edge."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({"__".join(key): nn.Linear(3, 2) for key in (RATES, LIKES)})

    def forward(self, edges: Edges) -> dict[tuple[str, int], torch.Tensor]:
        return {(key[1], 1): self.of["__".join(key)](value) for key, value in edges.items()}


def edges(count: int) -> Edges:
    return {RATES: torch.randn(count, 3), LIKES: torch.randn(2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hetero")
    torch.manual_seed(0)
    eager = Hetero().eval()
    shapes = {"edges": {RATES: {0: Dim("count", max=9)}, LIKES: None}}
    artifact = export(eager, (edges(4),), out=path / "a", dynamic_shapes=shapes, goldens=[(edges(4),), (edges(5),)])
    pack(eager, artifact, out=path / "w.safetensors")
    torch.save(eager.state_dict(), path / "w.pt")
    return path


def reference(folder: Path) -> Hetero:
    eager = Hetero().eval()
    eager.load_state_dict(torch.load(folder / "w.pt"))
    return eager


def test_calls_equal_eager(folder: Path) -> None:
    model, eager = load(folder / "a", folder / "w.safetensors"), reference(folder)
    for count in (1, 4, 7):
        given = edges(count)
        found = model(given)
        with torch.no_grad():
            wanted = eager(given)
        assert list(found) == [("rates", 1), ("likes", 1)]
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_goldens_and_generated_inputs_agree(folder: Path) -> None:
    assert compare(reference(folder), folder / "a", folder / "w.safetensors").same


def test_names_tell_keys_apart(folder: Path) -> None:
    signature = load(folder / "a").signatures["forward"]
    names = ['edges.["user","rates","film"]', 'edges.["user","likes","user"]']
    assert [leaf.name for leaf in input_leaves(signature)] == names
    assert [leaf.name for leaf in leaves(signature.output)] == ['["rates",1]', '["likes",1]']
    assert node_text(signature.args[0][1]).startswith('{["user","rates","film"]: F32[count, 3], ')


def test_wrong_inputs_are_told_by_their_keys(folder: Path) -> None:
    model = load(folder / "a", folder / "w.safetensors")
    with pytest.raises(InputMismatch, match=r'edges\.\["user","rates","film"\]: dimension 1 expected 3, got 4'):
        model({RATES: torch.zeros(2, 4), LIKES: torch.zeros(2, 3)})
    with pytest.raises(InputMismatch, match=r"expected a dict with the keys \[\('user', 'rates', 'film'\), "):
        model({"user": torch.zeros(2, 3)})


def test_torch_opens_the_graph(folder: Path) -> None:
    program = torch.export.load(io.BytesIO((folder / "a" / "graphs" / "forward.pt2").read_bytes()))
    assert program.call_spec.in_spec is not None
    assert '["user","rates","film"]' in str(program.call_spec.in_spec)


def test_commands_take_them(folder: Path) -> None:
    given = edges(2)
    inputs = {f"edges.{json.dumps(key, separators=(',', ':'))}": value.numpy() for key, value in given.items()}
    np.savez(folder / "x.npz", **inputs)
    run = ["run", "a", "-w", "w.safetensors", "-i", "x.npz", "-o", "y.npz"]
    for command in (["inspect", "a"], run, ["verify", "a", "w.safetensors"]):
        said(*(folder / part if (folder / part).exists() or part == "y.npz" else part for part in command))
    with np.load(folder / "y.npz") as found, torch.no_grad():
        wanted = reference(folder)(given)
        np.testing.assert_array_equal(found['["rates",1]'], wanted["rates", 1].numpy())


KINDS = "keys must be strings, integers, or tuples of these"
SAME = "has the key .* and a tuple that is written the same way; rename one"


@pytest.mark.parametrize(
    ("keys", "says"), [((("a", 1.5), "b"), KINDS), ((("a", ("b",)), "b"), KINDS), ((("a", 1), '["a",1]'), SAME)]
)
def test_other_keys_are_refused(keys: tuple[object, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        export(Does(lambda _, x: sum(x.values())), ({key: torch.zeros(2) for key in keys},), out=tmp_path / "a")
