"""Servers, buckets, a loaded model, and small ranges."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec.config
import pytest
from fsspec.registry import _registry

from tests.runtime.sources.remote.answers import DATA_START
from tests.support.servers import (
    Bucket,
    CloudBucket,
    CloudStorage,
    Hub,
    HubBucket,
    MemoryBucket,
    S3Bucket,
    S3Server,
    WebServer,
)
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_runtime import Model, load
from weightswap_runtime.sources import remote as generic
from weightswap_runtime.sources import remote as objects
from weightswap_runtime.sources import remote as retries
from weightswap_runtime.sources import s3, web


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as started:
        yield started


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the code paths of large objects for small ones: the first request reads the header, others 16 bytes."""
    for module in (web, s3, generic):
        monkeypatch.setattr(module, "HEAD_BYTES", DATA_START + 4)
    monkeypatch.setattr(objects, "RANGE_BYTES", 16)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)


@pytest.fixture
def model(tiny: TinyArtifact, weight_file: WriteWeights) -> Model:
    """Model that serves the weights of seed 1."""
    return load(tiny.path, weight_file(1))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as started:
        yield started


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_server.options)
    return s3_server.new_bucket()


@pytest.fixture
def s3_like(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    options = {
        "endpoint_url": server.url,
        "key": "test",
        "secret": "test",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    return server


@pytest.fixture
def gs_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBucket]:
    from gcsfs.core import GCSFileSystem  # without gRPC

    monkeypatch.setitem(_registry, "gs", GCSFileSystem)
    with WebServer(CloudStorage) as started:
        monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": started.url, "token": "anon"})
        yield CloudBucket(started)


@pytest.fixture
def hf_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubBucket]:
    with WebServer(Hub) as started:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": started.url, "token": False})
        yield HubBucket(started)


@pytest.fixture(params=["memory", "s3", "gs", "hf"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Bucket for objects under URLs of some protocol."""
    if request.param == "memory":
        return MemoryBucket()
    found: Bucket = request.getfixturevalue(f"{request.param}_bucket")
    return found
