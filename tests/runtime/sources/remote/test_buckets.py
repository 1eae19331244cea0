"""S3, Google Cloud Storage and fsspec's memory: files, shards, directories, versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.runtime.sources.remote.answers import DATA_START
from tests.runtime.sources.remote.contents import random_values, read_all, sharded, unstamped
from tests.support.servers import Bucket, MemoryBucket, S3Bucket, WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import Model, WeightFileError, WeightsMismatch, load, read_weights
from weightswap_runtime.sources import remote as objects
from weightswap_runtime.sources.opening import read_small


@pytest.mark.parametrize("name", ["hub/", "hub/model.safetensors.index.json", "hub/model.safetensors.index.json?sig=1"])
def test_shards_come_from_a_web_server(name: str, model: Model, tiny: TinyArtifact, server: WebServer) -> None:
    sharded(tiny, lambda name, data: server.put(name.replace(" ", "%20"), data))
    model.swap(f"{server.url}/{name}")
    assert serves(model, 2)


def test_directories_of_other_file_systems_are_listed(
    model: Model, tiny: TinyArtifact, weight_file: WriteWeights, bucket: Bucket
) -> None:
    sharded(tiny, bucket.put, index="other.safetensors.index.json")
    for folder in ("hub", "hub/"):
        model.swap(bucket.url(folder))
        assert serves(model, 2)
    bucket.put("hub/model.safetensors", weight_file(3).read_bytes())
    model.swap(bucket.url("hub"))
    assert serves(model, 3)


def test_a_configuration_beside_them_is_compared(
    tiny: TinyArtifact, weight_file: WriteWeights, server: WebServer, bucket: Bucket, tmp_path: Path
) -> None:
    artifact = shutil.copytree(tiny.path, tmp_path / "of_transformers.artifact")
    manifest = json.loads((artifact / "manifest.json").read_text())
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"config": {"num_heads": 4}}))
    places = {f"{server.url}/hub/": lambda name, data: server.put(name.replace(" ", "%20"), data)}
    for place, put in (places | {bucket.url("hub"): bucket.put}).items():
        model = load(artifact, weight_file(1))
        sharded(tiny, put)
        put("hub/config.json", b'{"num_heads": 8}')
        with pytest.raises(WeightsMismatch, match="num_heads"):
            model.swap(place)
        assert serves(model, 1)
        put("hub/config.json", b'{"num_heads": 4}')
        model.swap(place)
        assert serves(model, 2)


def test_parts_of_ranks_are_read_where_files_are_listed(tmp_path: Path, bucket: Bucket) -> None:
    whole = np.arange(80, dtype=np.float32).reshape(8, 10)
    for rank, (low, high) in enumerate([(0, 3), (3, 10)], start=1):  # columns: rows are scattered
        name = f"shard-{rank:05}-model-00001-of-00001.safetensors"
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, low]}})}
        safetensors.numpy.save_file({"w": whole[:, low:high].copy()}, tmp_path / name, info)
        bucket.put(f"step/{name}", (tmp_path / name).read_bytes())
    assert np.array_equal(read_weights(bucket.url("step"))["w"], whole)


def test_a_single_file_is_loaded_and_swapped(tiny: TinyArtifact, weight_file: WriteWeights, bucket: Bucket) -> None:
    for seed in (1, 2):
        bucket.put(f"v{seed}.safetensors", weight_file(seed).read_bytes())
    model = load(tiny.path, bucket.url("v1.safetensors"))
    assert serves(model, 1)
    receipt = model.swap(bucket.url("v2.safetensors"))
    assert serves(model, 2)
    assert receipt.source == bucket.url("v2.safetensors")


def test_large_objects_of_other_file_systems_arrive_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bucket: Bucket
) -> None:
    monkeypatch.setattr(objects, "RANGE_BYTES", 1 << 20)
    values = random_values(5_000_000, 17, 3_333_333)
    safetensors.numpy.save_file(values, tmp_path / "large")
    bucket.put("large.safetensors", (tmp_path / "large").read_bytes())
    read_all(bucket.url("large.safetensors"), values)


@pytest.mark.pairwise
@pytest.mark.parametrize("when", ["data", "probe"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_an_object_that_changes_elsewhere_is_refused(
    when: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    weight_file: WriteWeights,
    bucket: Bucket,
) -> None:
    after = unstamped(weight_file(3))
    bucket.put("v.safetensors", unstamped(weight_file(2)))
    method = {"data": "read_into", "probe": "check_unchanged"}[when]
    original = getattr(objects.RemoteObject, method)

    def interfered(self: objects.RemoteObject, *arguments: Any, **options: Any) -> None:
        if when == "probe" or arguments[1] >= DATA_START:
            bucket.put("v.safetensors", after) if how == "replaced" else bucket.remove("v.safetensors")
        original(self, *arguments, **options)

    monkeypatch.setattr(objects.RemoteObject, method, interfered)
    with pytest.raises(WeightFileError):
        model.swap(bucket.url("v.safetensors"))
    assert serves(model, 1)


def test_missing_and_empty_objects_are_refused(model: Model, bucket: Bucket) -> None:
    for name in ("v.safetensors", "folder", "folder/"):
        with pytest.raises(WeightFileError, match="no such object"):
            model.swap(bucket.url(name))
    assert read_small(bucket.url("goldens.safetensors"), 100) is None
    bucket.put("v.safetensors", b"")
    with pytest.raises(WeightFileError, match="0 bytes"):
        model.swap(bucket.url("v.safetensors"))


def test_a_missing_shard_is_named(model: Model, tiny: TinyArtifact, bucket: Bucket) -> None:
    sharded(tiny, bucket.put)
    bucket.remove("hub/a.safetensors")
    with pytest.raises(WeightFileError, match=r"hub/a\.safetensors: cannot be opened .no such object"):
        model.swap(bucket.url("hub"))


ELSEWHERE = ["../a.safetensors", "/a.safetensors", "a?b.safetensors", "a#1.safetensors", "s3://a/b.safetensors"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_index_that_leads_elsewhere_is_refused(name: str, model: Model) -> None:
    bucket = MemoryBucket()
    bucket.put("hub/model.safetensors.index.json", json.dumps({"weight_map": {"w": name}}).encode())
    with pytest.raises(WeightFileError, match="in the index's folder"):
        model.swap(bucket.url("hub"))


def test_a_small_object_is_read(bucket: Bucket) -> None:
    bucket.put("small", b"abc")
    assert read_small(bucket.url("small"), 3) == b"abc"
    with pytest.raises(WeightFileError):
        read_small(bucket.url("small"), 2)


def test_a_version_of_an_object_can_be_named(model: Model, weight_file: WriteWeights, s3_bucket: S3Bucket) -> None:
    s3_bucket.client.put_bucket_versioning(Bucket="weights", VersioningConfiguration={"Status": "Enabled"})
    version = s3_bucket.put("v.safetensors", weight_file(2).read_bytes())["VersionId"]
    s3_bucket.put("v.safetensors", weight_file(3).read_bytes())
    receipt = model.swap(f"{s3_bucket.url('v.safetensors')}?versionId={version}")
    assert serves(model, 2)
    assert receipt.source.endswith(version)
    model.swap(s3_bucket.url("v.safetensors"))
    assert serves(model, 3)


def test_a_bucket_that_does_not_exist_is_named(model: Model, s3_bucket: S3Bucket) -> None:
    with pytest.raises(WeightFileError):
        model.swap("s3://nowhere/v.safetensors")
