"""Listings of folders behind URLs: information on files, and stores that are unreachable."""

from __future__ import annotations

from datetime import datetime

import fsspec
import fsspec.config
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.runtime.sources.remote.answers import status
from tests.runtime.sources.remote.contents import until
from tests.support.servers import Bucket, HubBucket
from tests.support.tiny import WriteWeights, serves
from weightswap_runtime import Model, WeightFileError
from weightswap_runtime.sources.location import Url
from weightswap_runtime.sources.urls import list_files


def test_files_are_listed_with_what_shows_a_change(bucket: Bucket) -> None:
    for name in ("run/a.safetensors", "run/b.json", "run/deeper/c.safetensors"):
        bucket.put(name, b"1")
    folder = Url(bucket.url("run"))
    first = {file.name: file for file in list_files(folder)}
    assert first.keys() == {"a.safetensors", "b.json"}
    bucket.put("run/a.safetensors", b"2")
    second = {file.name: file for file in list_files(folder)}
    assert second["b.json"] == first["b.json"]
    assert second["a.safetensors"].fingerprint != first["a.safetensors"].fingerprint
    with fsspec.open(second["a.safetensors"].url) as file:
        assert file.read() == b"2"


def test_only_folders_can_be_listed(bucket: Bucket) -> None:
    bucket.put("v.safetensors", b"1")
    with pytest.raises(WeightFileError, match=r"nowhere: cannot be listed \(FileNotFoundError"):
        list_files(Url(bucket.url("nowhere")))


def test_a_file_of_the_hub_is_as_old_as_its_last_commit(hf_bucket: HubBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_bucket.put("run/a.safetensors", b"1")
    (plain,) = list_files(Url(hf_bucket.url("run")))
    monkeypatch.setitem(fsspec.config.conf, "hf", {**fsspec.config.conf["hf"], "expand_info": True})
    (expanded,) = list_files(Url(hf_bucket.url("run")))
    assert plain.modified == 0
    assert expanded.modified == datetime.fromisoformat("2026-01-01T00:00:00Z").timestamp()


def test_a_listing_is_not_retried(hf_bucket: HubBucket) -> None:
    """A caller that polls can be stopped between two listings."""
    hf_bucket.put("run/a.safetensors", b"1")
    hf_bucket.server.fault = lambda handler, request: "/tree/" in request.path and status(403)(handler, request) is None
    with pytest.raises(WeightFileError, match=r"cannot be listed \(HfHubHTTPError: 403"):
        list_files(Url(hf_bucket.url("run")))
    assert len([request for request in hf_bucket.server.requests if "/tree/" in request.path]) == 1


class Away(MemoryFileSystem):  # type: ignore[misc]
    """Store with a login that is unreachable."""

    protocol = "away"
    logins = looks = 0

    def __init__(self) -> None:
        super().__init__()
        Away.logins += 1

    def ls(self, *_: object, **__: object) -> list[str]:
        Away.looks += 1
        raise ConnectionError("secret")


def test_an_unreachable_store_is_reported_at_the_first_poll(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("away", Away, clobber=True)
    monkeypatch.setattr(Away, "looks", 0)
    looks: list[int] = []
    with model.watch("away://d", interval=0.01, callback=lambda event: looks.append(Away.looks)):
        until(lambda: bool(looks))
    assert looks[0] == 1
    logins = Away.logins
    for _ in range(3):
        with pytest.raises(WeightFileError):
            list_files(Url("away://d"))
    assert Away.logins == logins + 1  # fsspec caches one instance per thread


@pytest.mark.slow
def test_a_folder_of_the_hub_is_watched(hf_bucket: HubBucket, model: Model, weight_file: WriteWeights) -> None:
    with model.watch(hf_bucket.url(""), interval=0.02):
        for seed in (2, 3):
            hf_bucket.put(f"v{seed}.safetensors", weight_file(seed).read_bytes())
            until(lambda seed=seed: serves(model, seed))  # type: ignore[misc]
