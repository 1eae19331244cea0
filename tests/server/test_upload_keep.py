"""`--upload-keep`: uploads that no history needs any more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.administered import BEARER, TOKEN, administered, call, change
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import DesiredPlace, load, write_delta
from weightswap_server import Server


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    (tmp_path / "uploads").mkdir()
    return tmp_path / "uploads"


def upload(server: Server, name: str, path: Path) -> None:
    found = call(server, f"/admin/uploads/{name}.safetensors", path.read_bytes(), BEARER, "PUT")
    assert found.status == 201


def swap(server: Server, name: str, model: str = "tiny") -> None:
    found = change(server, "swap", model, source=f"upload:{name}.safetensors")
    assert found.status == 200, found.json


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors") for path in folder.iterdir())


@pytest.mark.parametrize("follows", [False, True])
def test_uploads_that_no_history_needs_go(
    follows: bool, tiny: TinyArtifact, weight_file: WriteWeights, folder: Path, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(1))
    if follows:
        place = DesiredPlace(tmp_path)
        place.set(weight_file(1), revision=0)
        model.follow(tmp_path, 0.05)
    with administered({"tiny": model}, upload_dir=str(folder), upload_keep=1) as server:
        for seed in (2, 3, 4, 5, 6):
            upload(server, f"v{seed}", weight_file(seed))
        swap(server, "v2")
        upload(server, "v2.goldens", weight_file(2))  # which is not read any more
        swap(server, "v3")
        assert names(folder) == ["v2", "v2.goldens", "v3", "v4", "v5", "v6"]
        swap(server, "v4")
        assert names(folder) == ["v3", "v4", "v5", "v6"]  # the last two were never served
        assert change(server, "rollback", hold=False).status == 200
        assert serves(model, 3)
        swap(server, "v5")
        assert names(folder) == (["v3", "v4", "v5", "v6"] if follows else ["v3", "v5", "v6"])  # v4 is withdrawn


def test_what_another_model_or_a_delta_needs_stays(
    tiny: TinyArtifact, weight_file: WriteWeights, folder: Path, tmp_path: Path
) -> None:
    models = {name: load(tiny.path, weight_file(1)) for name in ("tiny", "other")}
    with administered(models, upload_dir=str(folder), upload_keep=1) as server:
        for seed in (2, 3, 4, 5):
            upload(server, f"v{seed}", weight_file(seed))
        write_delta(weight_file(3), weight_file(4), tmp_path / "patch.safetensors")
        upload(server, "patch", tmp_path / "patch.safetensors")
        swap(server, "v2", "other")
        for seed in (2, 3, 4, 5):
            swap(server, f"v{seed}")
        assert names(folder) == ["patch", "v2", "v3", "v4", "v5"]
        call(server, "/admin/uploads/patch.safetensors", method="DELETE")
        swap(server, "v4")
        assert names(folder) == ["v2", "v4", "v5"]


def test_nothing_goes_where_it_cannot_be_decided(
    tiny: TinyArtifact, weight_file: WriteWeights, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with administered({"tiny": load(tiny.path, weight_file(1))}, upload_dir=str(folder), upload_keep=1) as server:
        call(server, "/admin/uploads/torn.safetensors", b"torn", BEARER, "PUT")
        for seed in (2, 3, 4):
            upload(server, f"v{seed}", weight_file(seed))
            with caplog.at_level(logging.WARNING):
                swap(server, f"v{seed}")
        assert names(folder) == ["torn", "v2", "v3", "v4"]
        assert "torn.safetensors" in caplog.text
        assert "older uploads were not removed" in caplog.text
