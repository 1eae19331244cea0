"""What an artifact of several ranks has: the tables of the whole model, graphs for the parts, and one graph id."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import ROOT
from tests.support import warm
from tests.support.goldens import goldens_at, goldens_of
from tests.support.models import Does
from tests.support.split import PACKED_PLAN, Packed, llama, sample
from weightswap_exporter import Parallel, compile_engines, export, pack, publish, skeleton
from weightswap_exporter.modules.tensors import named_tensors
from weightswap_exporter.parity import compare, verify
from weightswap_runtime import Artifact, Unsupported, WeightFile, load
from weightswap_runtime.engines.choosing import choose_engine, open_engine
from weightswap_runtime.engines.engine import EngineOptions
from weightswap_runtime.engines.graph_archive import read_argument, read_program
from weightswap_runtime.format.manifest import RANKS_VERSION, Cut
from weightswap_tools.diff import compare_artifacts

SPLIT = Parallel(2, PACKED_PLAN)


def exported(model: nn.Module, out: Path, parallel: Parallel | None, **more: Any) -> Artifact:
    return export(model.eval(), out=out, parallel=parallel, **sample(model) | more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Artifact]:
    """One model for one process, and for 2 and 4 ranks."""
    folder, model = tmp_path_factory.mktemp("packed"), Packed()
    parallel = {1: None, 2: SPLIT, 4: Parallel(4, PACKED_PLAN)}
    return {size: exported(model, folder / f"{size}.artifact", given) for size, given in parallel.items()}


def cuts_of(artifact: Artifact) -> Mapping[str, Cut]:
    ranks = artifact.manifest.ranks
    assert ranks
    return ranks.cuts


def test_the_tables_are_those_of_the_whole_model(packed: dict[int, Artifact]) -> None:
    alone, *split = (artifact.manifest for artifact in packed.values())
    for manifest in split:
        assert manifest.ranks
        assert manifest.format_version == RANKS_VERSION
        assert manifest.packed_for == manifest.ranks.whole == alone.graph_id != manifest.graph_id
        tables = ("weights", "state", "constants", "conversion")
        assert all(getattr(manifest, table) == getattr(alone, table) for table in tables)
        assert {name: method.signature for name, method in manifest.methods.items()} == {
            name: method.signature for name, method in alone.methods.items()
        }
    assert cuts_of(packed[2]) == {
        **{f"layers.{layer}.up.{leaf}": Cut(dim=0, groups=2) for layer in range(2) for leaf in ("weight", "bias")},
        **{f"layers.{layer}.down.weight": Cut(dim=1) for layer in range(2)},
        **{f"head.{leaf}": Cut(dim=0) for leaf in ("weight", "bias")},
    }


def test_one_weight_file_is_for_any_number_of_ranks(packed: dict[int, Artifact], tmp_path: Path) -> None:
    model = Packed()
    files = [pack(model, artifact.path, out=tmp_path / f"{size}.safetensors") for size, artifact in packed.items()]
    assert {file.graph_id for file in files} == {packed[1].graph_id}
    assert len({file.weights_id for file in files}) == 1
    for artifact in packed.values():  # a file for another number of ranks is packed again as it is
        again = pack(files[1].path, artifact.path, out=tmp_path / "again.safetensors")
        assert again.weights_id == files[0].weights_id


@pytest.fixture
def _own_groups(tmp_path: Path) -> Iterator[None]:
    """What an application has: a default group, and one more."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    dist.new_group([0])
    yield
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


@pytest.mark.usefixtures("_own_groups")
def test_groups_of_the_exporting_process_are_none_of_the_graphs(packed: dict[int, Artifact], tmp_path: Path) -> None:
    again = exported(Packed(), tmp_path / "again.artifact", SPLIT)
    assert again.graph_id == packed[2].graph_id
    graph = read_program(again.read("graphs/forward.pt2")).graph_module.graph
    arguments = [item.arg for node in graph.nodes if "_c10d_" in node.target for item in node.inputs]
    assert {value for kind, value in map(read_argument, arguments) if kind == "as_string"} == {"sum", "ranks"}


def test_another_process_writes_the_same_bytes(packed: dict[int, Artifact], tmp_path: Path) -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "from tests.support.split import *\n"
        "from weightswap_exporter import Parallel, export, skeleton\n"
        "with skeleton():\n    model = Packed().eval()\n"
        "export(model, out=sys.argv[1], parallel=Parallel(2, PACKED_PLAN), **sample(model))\n"
        "assert not dist.is_initialized()\n"
    )
    out = tmp_path / "other.artifact"
    subprocess.run([warm.python(), "-c", code, str(out)], check=True, cwd=ROOT)
    for path in packed[2].folder.rglob("*.*"):
        assert path.is_dir() or path.read_bytes() == (out / path.relative_to(packed[2].folder)).read_bytes()


@pytest.mark.parametrize("hollow", [False, True])
def test_the_model_stays_as_it_was(hollow: bool, packed: dict[int, Artifact], tmp_path: Path) -> None:
    with skeleton() if hollow else nullcontext():
        model = Packed().eval()
    before = dict(named_tensors(model)), [dict(vars(module)) for module in model.modules()]
    assert exported(model, tmp_path / "a.artifact", SPLIT).graph_id == packed[2].graph_id
    tensors = named_tensors(model)
    assert all(tensors[name] is tensor for name, tensor in before[0].items())
    assert [vars(module).keys() for module in model.modules()] == [attributes.keys() for attributes in before[1]]
    assert exported(model, tmp_path / "b.artifact", None).graph_id == packed[1].graph_id


def test_a_transformers_model_has_its_own_plan(tmp_path: Path) -> None:
    with skeleton():
        model = llama(num_hidden_layers=1, num_key_value_heads=2)
    split = exported(model, tmp_path / "4.artifact", Parallel(4))
    layer = "model.layers.0"
    keys = {f"{layer}.self_attn.{name}_proj.weight": Cut(dim=0, repeat=2) for name in "kv"}
    columns = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = {f"{layer}.{name}.weight": Cut(dim=1) for name in ("self_attn.o_proj", "mlp.down_proj")}
    expected = {f"{layer}.{name}.weight": Cut(dim=0) for name in columns} | {"lm_head.weight": Cut(dim=0)}
    assert cuts_of(split) == expected | keys | rows  # and none of the embedding, which the plan splits by vocabulary


def test_a_model_in_a_module_keeps_its_plan_and_tied_embeddings_stay_whole(tmp_path: Path) -> None:
    with skeleton():
        inner = llama(num_hidden_layers=1, tie_word_embeddings=True)
        model = Does(lambda m, ids: m.inner(input_ids=ids, use_cache=False).logits, inner=inner)
    given: dict[str, Any] = {"args": (torch.zeros(2, 5, dtype=torch.long),), "kwargs": None, "dynamic_shapes": None}
    artifact = exported(model, tmp_path / "a.artifact", Parallel(2), **given)
    cuts = cuts_of(artifact)
    assert cuts["inner.model.layers.0.mlp.down_proj.weight"] == Cut(dim=1)
    assert len(cuts) == 7
    (embedding,) = (row for row in artifact.manifest.weights if row.aliases)
    assert embedding.names == ("inner.model.embed_tokens.weight", "inner.lm_head.weight")
    assert not {*embedding.names} & cuts.keys()


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        (torch.float16, None, (1e-2, 1e-2)),
        (torch.bfloat16, None, (5e-2, 5e-2)),
        (torch.float32, (0.5, 0.25), (0.5, 0.25)),
    ],
)
def test_goldens_of_the_whole_model_have_a_tolerance(
    dtype: torch.dtype, given: Any, expected: tuple[float, float], tmp_path: Path
) -> None:
    """Ranks add in another order than the model, and so in other last bits."""
    model, call = Packed().to(dtype), (torch.rand(2, 8).to(dtype),)
    artifact = exported(model, tmp_path / "a.artifact", SPLIT, args=call, goldens=[call], tolerance=given)
    record = goldens_of(artifact).record
    assert (record.tolerance, record.graph_id) == (expected, artifact.manifest.packed_for)


def test_packed_and_published_goldens_have_it_too(packed: dict[int, Artifact], tmp_path: Path) -> None:
    model, calls = Packed().eval(), [(torch.rand(2, 8),)]
    file = pack(model, packed[2].path, out=tmp_path / "w.safetensors", goldens=calls)
    published = publish(model, tmp_path / "place", packed[2].path, step=1, goldens=calls).wait()
    for path in (file.path, published.path):
        with WeightFile(path) as weights:
            assert weights.stamp
            assert weights.stamp.graph_id == packed[1].graph_id
        record = goldens_at(path, packed[2]).record
        assert (record.graph_id, record.tolerance) == (packed[1].graph_id, (1e-4, 1e-5))


def test_what_runs_in_one_process_says_what_to_do(packed: dict[int, Artifact], tmp_path: Path) -> None:
    artifact, model = packed[2], Packed().eval()
    weights = pack(model, artifact.path, out=tmp_path / "w.safetensors").path
    with pytest.raises(Unsupported, match="is for 2 ranks, and this check runs in one process"):
        verify(artifact, weights)
    with pytest.raises(Unsupported, match="is for 2 ranks, and this check runs in one process"):
        compare(model, artifact)
    with pytest.raises(Unsupported):
        load(artifact.path, weights)
    with pytest.raises(Unsupported, match=r"is for 2 ranks, which call its graphs together.*load\(ranks=\.\.\.\)"):
        open_engine("torch", artifact, "cpu", EngineOptions())
    for engine in ("aoti", "onnx"):
        with pytest.raises(Unsupported):
            compile_engines(artifact, [engine])
        with pytest.raises(Unsupported):
            open_engine(engine, artifact, "cpu", EngineOptions(group="ranks"))
    assert choose_engine("auto", artifact) == "torch"


def test_diff_shows_the_cuts(packed: dict[int, Artifact]) -> None:
    diff = compare_artifacts(packed[1].path, packed[2].path)
    assert (diff.same_graph, diff.same_files, diff.level) == (False, True, "notice")
    assert {(row.weight, row.before, row.after) for row in diff.ranks} >= {
        ("", "one process", "2 ranks"),
        ("layers.1.down.weight", "whole", "dimension 1 in 2"),
    }
    assert compare_artifacts(packed[2].path, packed[2].path).ranks == ()
