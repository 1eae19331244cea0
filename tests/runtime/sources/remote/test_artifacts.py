"""Artifacts behind URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.servers import Bucket, WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_exporter import compile_engines, pack
from weightswap_runtime import Artifact, ArtifactError, Unsupported, load
from weightswap_runtime.sources import remote as objects
from weightswap_tools.commands.swap import swap_command
from weightswap_tools.diff.command import diff_command
from weightswap_tools.inspect.command import inspect_command


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, _small: None) -> None:
    """Read an artifact's files, which are read whole, in few ranges."""
    monkeypatch.setattr(objects, "RANGE_BYTES", 1 << 20)


def files(tiny: TinyArtifact) -> dict[str, bytes]:
    return {str(path.relative_to(tiny.path)): path.read_bytes() for path in tiny.path.rglob("*") if path.is_file()}


@pytest.fixture
def url(tiny: TinyArtifact, server: WebServer) -> str:
    for name, content in files(tiny).items():
        server.put(f"tiny.artifact/{name}", content)
    return f"{server.url}/tiny.artifact"


def test_an_artifact_is_loaded_from_a_bucket(tiny: TinyArtifact, weight_file: WriteWeights, bucket: Bucket) -> None:
    for name, content in files(tiny).items():
        bucket.put(f"tiny.artifact/{name}", content)
    for path in (bucket.url("tiny.artifact"), bucket.url("tiny.artifact/")):
        assert serves(load(path, weight_file(1)), 1)


def test_an_artifact_is_loaded_from_a_web_server(url: str, weight_file: WriteWeights) -> None:
    model = load(url, weight_file(1))
    assert serves(model, 1)
    assert repr(model).startswith(f"Model({url!r}")
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_a_query_is_used_for_every_file_and_not_shown(url: str, server: WebServer) -> None:
    opened = Artifact.open(f"{url}?token=secret")
    opened.verify()
    assert "secret" not in f"{opened!r}{opened.path}{load(opened)!r}"


def test_altered_and_missing_files_and_other_folders_are_named(url: str, server: WebServer) -> None:
    at = f"{url}/graphs/forward.pt2"
    server.put("tiny.artifact/graphs/forward.pt2", b"another")
    with pytest.raises(ArtifactError, match=f"^{at}: altered since the export"):
        load(url)
    del server.contents["/tiny.artifact/graphs/forward.pt2"]
    with pytest.raises(ArtifactError, match=f"^{at}: listed in the manifest but missing. Export the artifact again"):
        load(url)
    with pytest.raises(ArtifactError, match=r"/other: no artifact here \(expected a folder with a manifest\.json\)"):
        load(f"{server.url}/other")
    with pytest.raises(ArtifactError, match=r"cannot be opened"):
        load("http://127.0.0.1:9/tiny.artifact")


def test_commands_take_the_url(url: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    swapped = CliRunner().invoke(swap_command, [url, str(weight_file(1)), "--json"])
    assert json.loads(swapped.stdout)["receipts"][0]["graph_id"] == tiny.manifest.graph_id
    assert tiny.manifest.graph_id in CliRunner().invoke(inspect_command, [url]).output
    assert tiny.manifest.graph_id[:12] in CliRunner().invoke(diff_command, [url, str(tiny.path)]).output


def test_weights_are_packed_for_it_and_nothing_is_written_to_it(url: str, tiny: TinyArtifact, tmp_path: Path) -> None:
    packed = pack(tiny.values(1), url, out=tmp_path / "v1.safetensors")
    assert serves(load(url, packed.path), 1)
    with pytest.raises(Unsupported, match="cannot write to a URL; copy the artifact here first"):
        compile_engines(url, ["onnx"])
