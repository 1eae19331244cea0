"""Objects that change while they are read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.runtime.sources.remote.answers import DATA_START, after_the_data, changing
from tests.runtime.sources.remote.contents import unstamped
from tests.support.servers import Content, Handler, Request, WebServer
from tests.support.tiny import WriteWeights, serves
from weightswap_runtime import DigestMismatch, Model, WeightFileError
from weightswap_runtime.sources import web

VALIDATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ETag": ({}, {}),
    "ETag alone": ({"modified": None}, {"modified": None}),
    "a weak ETag": ({"etag": 'W/"1"'}, {"etag": 'W/"2"'}),
    "Last-Modified beside a weak ETag": ({"etag": 'W/"1"'}, {"etag": 'W/"1"', "modified": 1.7e9 + 1}),
    "Last-Modified": ({"etag": None}, {"etag": None, "modified": 1.7e9 + 1}),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("preconditions", [True, False], ids=["If-Match", "ignored"])
@pytest.mark.parametrize("at", [1, 3, 0], ids=["first", "midway", "after the last"])
@pytest.mark.parametrize(("first", "second"), VALIDATORS.values(), ids=VALIDATORS)
def test_an_object_that_changes_is_refused(
    first: dict[str, Any],
    second: dict[str, Any],
    at: int,
    preconditions: bool,
    model: Model,
    weight_file: WriteWeights,
    server: WebServer,
) -> None:
    server.preconditions = preconditions
    before, after = (Content(unstamped(weight_file(seed)), **how) for seed, how in ((2, first), (3, second)))
    server.fault = changing(before, after, at) if at else after_the_data(before, after)
    with pytest.raises(WeightFileError, match="was changed while it was read"):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


@pytest.mark.parametrize("etag", [None, 'W/"1"'])
def test_an_object_that_nothing_pins_needs_digests(
    etag: str | None, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    data = weight_file(2).read_bytes()
    model.swap(server.put("stamped.safetensors", data, etag=etag, modified=None))
    assert serves(model, 2)
    with pytest.raises(WeightFileError, match="neither digests nor anything that shows when it changes"):
        model.swap(server.put("plain.safetensors", unstamped(weight_file(1)), etag=etag, modified=None))
    assert serves(model, 2)


def test_an_object_that_nothing_pins_is_proven_by_its_digests(
    model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    contents = [Content(weight_file(seed).read_bytes(), etag=None, modified=None) for seed in (2, 3)]
    server.fault = changing(*contents, 2)
    with pytest.raises(DigestMismatch):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


def probes(server: WebServer) -> int:
    return sum((request.start, request.stop) == (0, 1) for request in server.requests)


def opening_requests(server: WebServer) -> int:
    return sum(request.start == 0 and request.stop > 1 and "goldens" not in request.path for request in server.requests)


SAME_SECOND: dict[str, dict[str, Any]] = {
    "Last-Modified": {"etag": None},
    "an ETag of the second and the size": {"etag": '"65f0a1b2-1a4"'},
    "a weak ETag": {"etag": 'W/"1"'},
}


@pytest.mark.parametrize("how", SAME_SECOND.values(), ids=SAME_SECOND)
def test_a_new_object_is_waited_for(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    monkeypatch.setattr(web, "CLOCK_TICK", 0.05)
    url = server.put("v.safetensors", unstamped(weight_file(2)), modified=time.time() + 1, **how)
    model.swap(url)
    assert serves(model, 2)
    assert opening_requests(server) == 2  # two requests: before the wait, and after it
    assert probes(server) == 1  # the check after the data


def test_an_old_or_stamped_object_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    model.swap(server.put("old.safetensors", unstamped(weight_file(2)), etag=None))
    monkeypatch.setattr(web, "CLOCK_TICK", 1.0)
    model.swap(server.put("stamped.safetensors", weight_file(3).read_bytes(), modified=time.time()))
    assert serves(model, 3)
    assert opening_requests(server) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head", [16, DATA_START + 4], ids=["header", "data"])
@pytest.mark.parametrize("how", SAME_SECOND.values(), ids=SAME_SECOND)
def test_an_object_replaced_within_its_second_never_makes_a_mixture(
    how: dict[str, Any],
    head: int,
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    weight_file: WriteWeights,
    server: WebServer,
) -> None:
    """The first response, or the rest of a long header, has one content; all after the wait have the other."""
    monkeypatch.setattr(web, "CLOCK_TICK", 0.05)
    monkeypatch.setattr(web, "HEAD_BYTES", head)
    before, after = unstamped(weight_file(2)), unstamped(weight_file(3))
    after = after.replace(b'"somethingX"', b'"somethingY"')
    modified = time.time() + 1
    contents = [Content(data, modified=modified, **how) for data in (before, after)]

    def fault(handler: Handler, request: Request) -> bool:
        handler.web.contents["/v.safetensors"] = contents[opening_requests(handler.web) > 1]
        return False

    server.fault = fault
    with pytest.raises(WeightFileError):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)
