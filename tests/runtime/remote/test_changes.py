"""Objects that change while they are read."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.servers import Content, WebServer
from tests.tiny import WriteWeights, serves
from weightswap_runtime import DigestMismatch, Model, WeightFileError
from weightswap_runtime.remote import web

from .answers import after_the_data, changing
from .contents import unstamped

VALIDATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ETag": ({}, {}),
    "ETag alone": ({"modified": None}, {"modified": None}),
    "a weak ETag": ({"etag": 'W/"1"', "modified": None}, {"etag": 'W/"2"', "modified": None}),
    "Last-Modified": ({"etag": None}, {"etag": None, "modified": 1.7e9 + 1}),
}


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
    server.preconditions = preconditions and not str(first.get("etag")).startswith("W/")
    before, after = (Content(unstamped(weight_file(seed)), **how) for seed, how in ((2, first), (3, second)))
    server.fault = changing(before, after, at) if at else after_the_data(before, after)
    with pytest.raises(WeightFileError, match="was changed while it was read"):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


def test_an_object_that_nothing_pins_needs_digests(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    data = weight_file(2).read_bytes()
    model.swap(server.put("stamped.safetensors", data, etag=None, modified=None))
    assert serves(model, 2)
    with pytest.raises(WeightFileError, match="neither digests nor anything that shows when it changes"):
        model.swap(server.put("plain.safetensors", unstamped(weight_file(1)), etag=None, modified=None))
    assert serves(model, 2)


def test_an_object_that_nothing_pins_is_proven_by_its_digests(
    model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    contents = [Content(weight_file(seed).read_bytes(), etag=None, modified=None) for seed in (2, 3)]
    server.fault = changing(*contents, 2)
    with pytest.raises(DigestMismatch):
        model.swap(f"{server.url}/v.safetensors")
    assert serves(model, 1)


def test_what_was_just_written_without_an_etag_is_given_time(
    monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    monkeypatch.setattr(web, "CLOCK_TICK", 0.05)
    url = server.put("v.safetensors", unstamped(weight_file(2)), etag=None, modified=time.time())
    model.swap(url)
    assert serves(model, 2)
    probes = [asked for asked in server.asked if (asked.start, asked.stop) == (0, 1)]
    assert len(probes) == 2  # after the wait, and after the data
