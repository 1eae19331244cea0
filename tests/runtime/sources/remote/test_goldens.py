"""Goldens beside a weight file behind a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.handmade import hand_made, written
from tests.support.servers import Bucket, Handler, MemoryBucket, Request, WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from weightswap_runtime import GoldenMismatch, Model, WeightFileError, load, write_delta


@pytest.fixture
def goldens(tiny: TinyArtifact, tmp_path: Path) -> bytes:
    tensors, document = hand_made(tiny, tmp_path)
    return written(tmp_path / "v1.goldens.safetensors", tensors, document).read_bytes()


def test_remote_goldens_are_verified(
    tiny: TinyArtifact, weight_file: WriteWeights, goldens: bytes, bucket: Bucket, tmp_path: Path
) -> None:
    model = load(tiny.path, weight_file(2))
    bucket.put("v1.safetensors", weight_file(1).read_bytes())
    assert model.swap(bucket.url("v1.safetensors")).verified == "none"
    bucket.put("v1.goldens.safetensors", goldens)
    assert model.swap(bucket.url("v1.safetensors")).verified == "goldens"
    tensors, document = hand_made(tiny, tmp_path, **{"0.output.0": X @ X.T @ X.new_ones(2, 5)})
    bucket.put("v1.goldens.safetensors", written(tmp_path / "wrong", tensors, document).read_bytes())
    model.swap(weight_file(2))
    with pytest.raises(GoldenMismatch):
        model.swap(bucket.url("v1.safetensors"))
    assert serves(model, 2)


@pytest.mark.parametrize("status", [401, 403, 503])
def test_without_access_there_are_none_but_a_server_that_fails_may_have_some(
    status: int, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    def fault(handler: Handler, request: Request) -> bool:
        if "goldens" in request.path:
            handler.reply(status)
        return "goldens" in request.path

    server.fault = fault
    url = server.put("v2.safetensors", weight_file(2).read_bytes())
    if status == 503:
        with pytest.raises(WeightFileError, match=r"v2\.goldens\.safetensors: cannot be opened"):
            model.swap(url)
        assert serves(model, 1)
    else:
        assert model.swap(url).verified == "none"
        assert serves(model, 2)


def test_a_delta_between_urls_has_the_goldens_of_the_new(
    tiny: TinyArtifact, weight_file: WriteWeights, goldens: bytes, tmp_path: Path
) -> None:
    bucket = MemoryBucket()
    for seed in (1, 2):
        bucket.put(f"v{seed}.safetensors", weight_file(seed).read_bytes())
    bucket.put("v1.goldens.safetensors", goldens)
    out = tmp_path / "delta.safetensors"
    write_delta(bucket.url("v2.safetensors"), bucket.url("v1.safetensors"), out)
    assert (tmp_path / "delta.goldens.safetensors").read_bytes() == goldens
    model = load(tiny.path, weight_file(2))
    assert model.swap(out).verified == "goldens"
    assert serves(model, 1)
    write_delta(bucket.url("v1.safetensors"), bucket.url("v2.safetensors"), out)
    assert not (tmp_path / "delta.goldens.safetensors").exists()
