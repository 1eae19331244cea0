"""Places in buckets: writing needs a store with conditional writes, reading does not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

import fsspec.config
import pytest

from tests.runtime.sources.remote.answers import status
from tests.support.refusals import because
from tests.support.servers import S3Bucket, S3Server, WebServer
from tests.support.services import wanted, weights_id_of
from tests.support.tiny import TinyArtifact, serves
from tests.support.watched import SOON, eventually
from weightswap_runtime import DesiredError, DesiredStore, NotPromoted, RevisionConflict, Unsupported, load
from weightswap_runtime.sources import remote as retries


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as s3:
        yield s3


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, tiny: TinyArtifact, tmp_path: Path) -> S3Bucket:
    monkeypatch.setitem(fsspec.config.conf, "s3", server.options)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)
    bucket = server.new_bucket()
    for seed in range(1, 7):
        path = tiny.write(tmp_path / f"v{seed}.safetensors", tiny.values(seed))
        bucket.put(f"service/v{seed}.safetensors", path.read_bytes())
    return bucket


def url(seed: int) -> str:
    return f"s3://weights/service/v{seed}.safetensors"


def test_a_desired_store_in_a_bucket(bucket: S3Bucket, tiny: TinyArtifact, tmp_path: Path) -> None:
    desired_store = DesiredStore("s3://weights/service")
    model = load(tiny.path)
    with model.follow("s3://weights/service", SOON) as follower:
        first = desired_store.set(url(1), revision=0, by="ana")
        assert wanted(first).source == "v1.safetensors"
        assert follower.wait(60, revision=1)
        assert serves(model, 1)
        with pytest.raises(RevisionConflict):
            desired_store.set(url(2), revision=0)
        desired_store.promote(url(2))
        assert follower.wait(60, revision=2)
        assert serves(model, 2)
        desired_store.rollback(revision=2, by="ana")
        assert follower.wait(60, revision=3)
        assert serves(model, 1)
    with pytest.raises(NotPromoted, check=because("held")):
        desired_store.promote(url(3))
    with pytest.raises(NotPromoted, check=because("superseded")):
        desired_store.promote(url(2))
    local = tiny.write(tmp_path / "local.safetensors", tiny.values(4))
    assert desired_store.set(local, revision=3).weights == desired_store.read().weights
    assert weights_id_of(local) == wanted(desired_store.read()).weights_id  # type: ignore[union-attr]


@pytest.mark.slow
def test_two_writers_to_a_bucket_lose_nothing(bucket: S3Bucket) -> None:

    def write(seed: int) -> list[int]:
        desired_store, won = DesiredStore("s3://weights/service/"), []
        for _ in range(12):
            with suppress(RevisionConflict):
                won.append(desired_store.set(url(seed), revision=desired_store.read().revision).revision)
        return won

    with ThreadPoolExecutor(2) as pool:
        won = [*chain(*pool.map(write, (1, 2)))]
    assert sorted(won) == list(range(1, DesiredStore("s3://weights/service").read().revision + 1))


def test_a_bucket_that_is_away_for_a_while(
    bucket: S3Bucket, tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightswap_runtime.sources import s3

    desired_store = DesiredStore("s3://weights/service")
    desired_store.set(url(1), revision=0)
    model = load(tiny.path)
    with model.follow("s3://weights/service", SOON) as follower:
        assert follower.wait(120)
        with monkeypatch.context() as patch:
            patch.setattr(retries, "ATTEMPTS", 1)

            async def fail(self: object) -> None:
                raise s3.Transient("away")

            patch.setattr(s3.S3Object, "open", fail)
            assert eventually(lambda: not follower.status.reachable)
            assert serves(model, 1)
            with pytest.raises(DesiredError):
                desired_store.hold(revision=1)
        desired_store.promote(url(2))
        assert follower.wait(60, revision=2)
        assert serves(model, 2)
        assert eventually(lambda: follower.status.error == "")


def test_a_write_whose_response_is_lost_has_happened(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightswap_runtime.sources import s3

    desired_store = DesiredStore("s3://weights/service")
    for seed in (1, 2, 3):
        desired_store.set(url(seed), revision=seed - 1)
    replace, sent = s3.S3Object.replace, []

    async def replace_and_lose(self: s3.S3Object, content: bytes, tag: str | None) -> bool:
        sent.append(await replace(self, content, tag))
        if len(sent) == 1:
            raise s3.Transient("the response was lost")
        return sent[-1]

    monkeypatch.setattr(s3.S3Object, "replace", replace_and_lose)
    state = desired_store.rollback(revision=3)
    assert sent == [True, False]
    assert state == desired_store.read()
    assert wanted(state).source == "v2.safetensors"
    with pytest.raises(RevisionConflict):
        desired_store.rollback(revision=3)


def test_a_bucket_that_is_not_there_is_no_conflict(bucket: S3Bucket) -> None:
    desired_store = DesiredStore("s3://other/service")
    with pytest.raises(DesiredError, match="no such bucket"):
        desired_store.set(url(1), revision=0)
    with pytest.raises(DesiredError):
        desired_store.promote(url(1))


def test_a_web_server_is_read_only(tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.services import Service

    service = Service(tiny, tmp_path / "service")
    service.set(1)
    with WebServer() as web:
        for name in ("desired.json", "v1.safetensors"):
            web.put(f"service/{name}", (service.folder / name).read_bytes(), modified=None)
        web.put("service/v1.goldens.safetensors", b"\2" + bytes(7) + b"{}")  # a whole file without goldens
        desired_store = DesiredStore(f"{web.url}/service/")
        assert desired_store.read() == service.desired_store.read()
        model = load(tiny.path)
        with model.follow(f"{web.url}/service/", SOON) as follower:
            assert eventually(lambda: "v1.goldens" in follower.status.error)
            web.contents.pop("/service/v1.goldens.safetensors")
            assert follower.wait(120)
            monkeypatch.setattr(retries, "ATTEMPTS", 1)
            web.fault = lambda handler, asked: status(503)(handler, asked) is None
            assert eventually(lambda: "503" in follower.status.error)
            web.fault = None
            assert eventually(lambda: follower.status.reachable)
            document = web.contents.pop("/service/desired.json")
            assert eventually(lambda: "was removed" in follower.status.error)
            web.contents["/service/desired.json"] = document
            assert eventually(lambda: follower.status.reachable)
        assert serves(model, 1)
        with pytest.raises(Unsupported):
            desired_store.hold(revision=1)
