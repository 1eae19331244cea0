"""`weightswap inspect` of all kinds of files: text, tree, document and report."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry
from torch import nn
from torch.export import Dim

from tests.support.models import Counter, Does, Everything, Renamed
from tests.support.program import document, said
from weightswap_exporter import MethodSpec, export, pack
from weightswap_runtime import load, write_delta
from weightswap_runtime.metrics import ModelCollector

EVIL = "<img src=x onerror=alert(1)>.\x1b[31m[red]"
CASES = {"cases": "3"}
Inspect = Callable[..., str]


def layers() -> nn.Module:
    def act(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        return model.head(x)

    repeated = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12))
    return Does(act, layers=repeated, head=nn.Linear(4, 2)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts, weight files, a delta, goldens and plain checkpoints."""
    folder = tmp_path_factory.mktemp("inspect")
    batch = {0: Dim("batch", max=9)}
    torch.manual_seed(0)
    model = layers()
    export(model, (torch.rand(2, 4),), out=folder / "layers.artifact", dynamic_shapes={"x": batch})
    goldens = [((torch.rand(3, 4),), {})]
    pack(model, folder / "layers.artifact", out=folder / "v1.safetensors", labels={"step": "1"}, goldens=goldens)
    with torch.no_grad():
        model.head.bias += 1
        model.layers[10][0].weight[[0, 3]] += 1
        model.layers[11][0].weight[1:] += 1
    pack(model, folder / "layers.artifact", out=folder / "v2.safetensors")
    write_delta(folder / "v1.safetensors", folder / "v2.safetensors", folder / "d.safetensors")
    calls = {"forward": (torch.rand(2, 1, 8, 8),), "encode": (torch.arange(4),)}
    methods = {name: MethodSpec(name, args) for name, args in calls.items()}
    export(Everything().eval(), methods=methods, out=folder / "everything.artifact")
    export(Counter().eval(), (torch.rand(2, 3),), out=folder / "counter.artifact")
    tables = Does(lambda m, ids: m.large(ids) + m.small(ids), large=nn.Embedding(70_000, 16), small=nn.Embedding(9, 16))
    export(tables.eval(), (torch.arange(4),), out=folder / "tables.artifact")
    pack(tables, folder / "tables.artifact", out=folder / "tables-1.safetensors")
    with torch.no_grad():
        tables.large.weight[::1000] += 1  # some rows of each MiB
        tables.small.weight += 1
    pack(tables, folder / "tables.artifact", out=folder / "tables-2.safetensors")
    write_delta(folder / "tables-1.safetensors", folder / "tables-2.safetensors", folder / "tables-d.safetensors")
    export(Renamed().eval(), (torch.rand(2, 3),), out=folder / "renamed.artifact")
    safetensors.torch.save_file(
        {EVIL: torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16)}, folder / "evil.safetensors"
    )
    save_sharded(folder / "shards", {f"layers.{place}.weight": torch.ones(2, 2) for place in range(12)})
    return folder


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A Hugging Face directory with one shard for each tensor."""
    folder.mkdir()
    names = {key: f"model-{place:05}-of-{len(tensors):05}.safetensors" for place, key in enumerate(tensors, 1)}
    for key, name in names.items():
        safetensors.torch.save_file({key: tensors[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.fixture
def inspect(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Inspect:
    monkeypatch.chdir(folder)

    def run(*arguments: str, status: int = 0) -> str:
        return said("inspect", *arguments, status=status)

    return run


def report(inspect: Inspect, path: str) -> tuple[str, list[dict[str, Any]]]:
    """The visible texts of the report that inspect writes, and its data."""
    assert inspect(path, "--html", "r.html") == "report     r.html\n"
    page = Path("r.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    body = re.sub(r"<[^>]*>", " ", page.partition("<body>")[2].partition("<script")[0])
    return html.unescape(body), json.loads(data)


def blocks(data: list[dict[str, Any]], kind: str, caption: str) -> list[dict[str, Any]]:
    return [block for block in data if block["type"] == kind and block["caption"] == caption]


def rows(data: list[dict[str, Any]], caption: str) -> list[list[Any]]:
    (table,) = blocks(data, "table", caption)
    found: list[list[Any]] = table["rows"]
    return found


def test_an_artifact_in_words(inspect: Inspect) -> None:
    told = document("inspect", "layers.artifact")
    sentence = (
        "forward takes x (a tensor of 32-bit floats, batch × 4), and returns a tensor of 32-bit floats, batch × 2; "
    )
    assert told["sentences"]["forward"] == f"{sentence}batch is from 0 to 9."
    assert told["sentences"]["forward"] in inspect("layers.artifact")
    assert told["kind"] == "artifact"
    assert {"path": "layers.11.0", "tensors": 2, "nbytes": 80} in told["modules"]
    assert {"weight": "head.bias", "how": "as it is", "keys": ["head.bias"]} in told["origins"]


def test_what_hash_trees_take_is_what_the_metric_comes_to(inspect: Inspect) -> None:
    most = 4 * 2**20 // 16  # of a table of four whole MiB and a part; smaller weights have none
    words = "at most 262.1 kB of a server's memory, if rows of all weights are updated"
    assert f"hash trees {words}\n" in inspect("tables.artifact")
    assert words in report(inspect, "tables.artifact")[0]
    assert document("inspect", "tables.artifact")["hash_trees_bytes"] == most
    assert "hash trees" not in inspect("layers.artifact")
    with load("tables.artifact", "tables-1.safetensors") as model:
        model.swap("tables-d.safetensors")
        metrics = CollectorRegistry()
        ModelCollector(model, "tables", registry=metrics)
        assert metrics.get_sample_value("weightswap_hash_trees_bytes", {"model": "tables"}) == most


def test_equal_layers_are_shown_once(inspect: Inspect) -> None:
    lines = inspect("layers.artifact", "--tree").splitlines()
    assert lines[0] == "layers.artifact  Does  26 tensors, 1.0 kB"
    assert "│   └── 0 … 11  (12 × alike)  Sequential  2 tensors, 80 B each" in lines
    assert sum("weight" in line for line in lines) == 2
    assert "    ├── weight  F32[2, 4]  32 B" in lines


def test_a_tree_shows_ties_and_roles(inspect: Inspect) -> None:
    assert "tied to head.weight" in inspect("everything.artifact", "--tree")
    assert "steps  I64[]  8 B  state" in inspect("counter.artifact", "--tree")
    assert "0 … 11  (12 × alike)  1 tensor, 16 B each" in inspect("shards", "--tree")  # in the file, 10 follows 1
    assert "\x1b" not in inspect("evil.safetensors", "--tree")


def test_a_report_of_an_artifact(inspect: Inspect) -> None:
    seen, data = report(inspect, "layers.artifact")
    told = document("inspect", "layers.artifact")
    manifest = told["manifest"]
    for text in ("all digests match", manifest["graph_id"], told["sentences"]["forward"]):
        assert text in seen
    assert [row[0] for row in rows(data, "Weights")] == [weight["name"] for weight in manifest["weights"]]
    assert [row[:2] for row in rows(data, "By module")] == [
        [module["path"] or "(model)", module["tensors"]] for module in told["modules"]
    ]
    (areas,) = blocks(data, "chart", "Bytes by module")
    assert areas["root"]["value"] == told["total_bytes"] == sum(leaf_sizes(areas["root"]))
    assert rows(data, "Operators") == [["aten.linear.default", 13], ["aten.relu.default", 12]]
    assert ["head.bias", "as it is", "head.bias"] in rows(data, "How checkpoints become weights")


def leaf_sizes(area: dict[str, Any]) -> list[int]:
    below = [size for child in area["children"] for size in leaf_sizes(child)]
    return below or [area["value"]]


def test_the_graph_of_every_method_is_there_by_module(inspect: Inspect) -> None:
    seen, data = report(inspect, "everything.artifact")
    assert "Graph of forward" in seen
    assert "Graph of encode" in seen
    forward, encode = blocks(data, "modules", "Modules, in the order of their first call")
    assert [child["name"] for child in forward["root"]["children"]] == ["conv", "norm", "drop", "head"]
    conv = forward["root"]["children"][0]
    assert (conv["kind"], conv["ops"], conv["detail"]) == ("Conv2d", [["aten.conv2d.default", 1]], "2 weights, 240 B")
    assert conv["takes"] == ["F32[2, 1, 8, 8]  from the input x"]
    assert [child["name"] for child in encode["root"]["children"]] == ["embed", "head"]
    assert ["embed.weight", "F32", "6 × 6", 144, "head.weight"] in rows(data, "Weights")
    assert "table" in {row[0] for row in rows(data, "Constants")}


def test_state_and_weights_are_separate(inspect: Inspect) -> None:
    _, data = report(inspect, "counter.artifact")
    assert {row[0] for row in rows(data, "State")} == {"steps", "mean"}
    assert {row[0] for row in rows(data, "Weights")} == {"linear.weight", "linear.bias"}


def test_renamed_keys_are_listed(inspect: Inspect) -> None:
    assert "layers.0.weight" in inspect("renamed.artifact")
    _, data = report(inspect, "renamed.artifact")
    assert ["layers.0.layer.weight", "renamed", "layers.0.weight"] in rows(data, "How checkpoints become weights")
    assert {row[0] for row in rows(data, "Other checkpoint keys")} == {"_extra_state"}


def test_a_report_of_a_weight_file(inspect: Inspect) -> None:
    seen, data = report(inspect, "v1.safetensors")
    stamp = document("inspect", "v1.safetensors")["stamp"]
    ids = (stamp["weights_id"], stamp["graph_id"])
    for text in (*ids, "step = 1", "1 of forward", "Weight file: 26 tensors", "recorded on"):
        assert text in seen
    tensors = rows(data, "Tensors, as they lie in the file")
    assert {row[0]: row[5] for row in tensors} == {name: digest[:16] for name, digest in stamp["digests"].items()}
    assert [row[4] for row in tensors] == sorted(row[4] for row in tensors)


def test_a_report_of_a_delta(inspect: Inspect) -> None:
    seen, data = report(inspect, "d.safetensors")
    assert "Delta file" in seen
    assert rows(data, "Weights that change") == [
        ["head.bias", "F32[2]", 8, 8, "1 range"],
        ["layers.10.0.weight", "F32[4, 4]", 64, 32, "2 of 4 rows"],
        ["layers.11.0.weight", "F32[4, 4]", 64, 48, "3 of 4 rows"],
    ]
    assert "changes    layers.10.0.weight, F32[4, 4]: 2 of 4 rows, 32 B" in inspect("d.safetensors")
    assert document("inspect", "d.safetensors")["changes"] == [
        {"weight": "head.bias", "nbytes": 8, "ranges": 1, "rows": None},
        {"weight": "layers.10.0.weight", "nbytes": 32, "ranges": None, "rows": 2},
        {"weight": "layers.11.0.weight", "nbytes": 48, "ranges": 1, "rows": 3},
    ]


def test_a_report_of_shards(inspect: Inspect) -> None:
    seen, data = report(inspect, "shards")
    assert "Checkpoint: 12 tensors, 192 B" in seen
    tensors = rows(data, "Tensors, as they lie in the file")
    assert [row[-1] for row in tensors] == [f"model-{place:05}-of-00012.safetensors" for place in range(1, 13)]


def test_goldens_are_inspected_alone(inspect: Inspect) -> None:
    path = "v1.goldens.safetensors"
    text, told = inspect(path), document("inspect", path)
    assert told["kind"] == "goldens file"
    assert f"weights id {told['record']['weights_id']}\n" in text
    assert "F32[3, 4]" in text
    seen, data = report(inspect, path)
    assert "Goldens: 1 recorded call" in seen
    assert rows(data, "Inputs, and the outputs of the eager model") == [[0, "forward", "F32[3, 4]", "F32[3, 2]"]]
    assert "goldens have no modules" in inspect(path, "--tree", status=2)


def test_a_label_makes_no_goldens(inspect: Inspect, folder: Path) -> None:
    weights = pack(folder / "v1.safetensors", folder / "layers.artifact", out=folder / "l.safetensors", labels=CASES)
    told = document("inspect", weights.path)
    assert (told["kind"], told["stamp"]["labels"]) == ("weight file", CASES)
    assert load(folder / "layers.artifact", weights.path).weights_id == weights.weights_id


def test_names_cannot_reach_a_terminal_or_a_browser(inspect: Inspect) -> None:
    shown = "<img src=x onerror=alert(1)>.\\x1b[31m[red]"
    assert shown in inspect("evil.safetensors")
    assert "\x1b" not in inspect("evil.safetensors")
    assert EVIL in document("inspect", "evil.safetensors")["tensors"]
    _, data = report(inspect, "evil.safetensors")
    assert [row[0] for row in rows(data, "Tensors, as they lie in the file")] == [shown, "b"]
    assert "<img src=x" not in Path("r.html").read_text()


def test_tree_and_json_exclude_each_other(inspect: Inspect) -> None:
    assert "--tree and --json: give only one" in inspect("layers.artifact", "--tree", "--json", status=2)
    assert document("inspect", "layers.artifact", "--html", "both.html")["kind"] == "artifact"
    assert Path("both.html").exists()


def test_a_report_is_the_same_twice(inspect: Inspect) -> None:
    inspect("layers.artifact", "--html", "one.html")
    inspect("layers.artifact", "--html", "two.html")
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()


def test_a_damaged_artifact_is_not_shown(inspect: Inspect, folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.artifact"
    (broken / "graphs").mkdir(parents=True)
    for name in ("manifest.json", "constants.safetensors", "graphs/forward.pt2"):
        (broken / name).write_bytes((folder / "layers.artifact" / name).read_bytes())
    (broken / "graphs/forward.pt2").write_bytes(b"x")
    assert "altered since the export" in inspect(str(broken), "--html", "broken.html", status=1)
    assert not Path("broken.html").exists()


SERVER = """
import sys
for name in ("torch", "onnxruntime", "safetensors"):
    sys.modules[name] = None
from weightswap_tools.inspect.command import inspect_command
for form in ([], ["--tree"], ["--json"], ["--html", "r.html"]):
    inspect_command(["everything.artifact", *form], standalone_mode=False)
"""


def test_no_torch_is_needed(folder: Path) -> None:
    command = [sys.executable, "-c", SERVER]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
