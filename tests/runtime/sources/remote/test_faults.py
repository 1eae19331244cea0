"""Faults of a web server: which requests are retried, and which are refused."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.runtime.sources.remote.answers import (
    DATA_START,
    ENDLESS_PIECES,
    PIECE,
    always,
    compressed,
    dropped,
    endless,
    everything,
    for_the_first,
    is_data,
    other_range,
    shorter_than_requested,
    status,
    too_much,
    truncated,
    without_a_range,
)
from tests.support.refusals import because
from tests.support.servers import Answer, Handler, Request, WebServer
from tests.support.tiny import WriteWeights, serves
from weightswap_runtime import Model, Unsupported, WeightFileError
from weightswap_runtime.sources.opening import open_source, read_small
from weightswap_runtime.sources.remote import Transient, retry

PASSING = {
    "drops": dropped,
    "truncates": truncated,
    "sends less": shorter_than_requested,
    "500": status(500),
    "503 for a while": status(503, Retry_After="0"),
    "503 until a date": status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "429": status(429, Retry_After="soon"),
}


@pytest.mark.parametrize("answer", PASSING.values(), ids=PASSING)
def test_transient_failures_are_retried(
    answer: Answer, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    data = weight_file(2).read_bytes()
    server.fault = for_the_first(3, answer)
    model.swap(server.put("v2.safetensors", data))
    assert serves(model, 2)
    ranges = [request for request in server.requests if is_data(request)]
    assert len(ranges) == 3 + len(range(DATA_START, len(data), 16))


def test_pauses_leave_the_random_numbers_of_others_alone() -> None:
    failures = [Transient("a"), Transient("b")]

    async def attempt() -> str:
        if failures:
            raise failures.pop()
        return "there"

    before = random.getstate()
    assert asyncio.run(retry(attempt, lambda: "x")) == "there"
    assert random.getstate() == before


def test_bytes_that_arrived_are_not_requested_again(server: WebServer) -> None:
    server.fault = for_the_first(1, truncated)
    data = bytes(range(256)) * 20
    source = open_source(server.put("v", data))
    target = bytearray(16)
    source.read_into([memoryview(target)], 4800)
    assert target == data[4800:4816]
    assert [(request.start, request.stop) for request in server.requests[1:]] == [(4800, 4816), (4808, 4816)]


LASTING: dict[str, tuple[Answer, str]] = {
    "drops": (dropped, r"cannot be read at byte 4\d\d\d, after 6 attempt\(s\) \(Server"),
    "truncates to nothing": (status(206, Content_Range="bytes 0-0/1"), "the object was changed while it was read"),
    "503": (status(503), r"after 6 attempt\(s\) \(503 Service Unavailable\)"),
    "503 for an hour": (status(503, Retry_After="3600"), r"after 1 attempt\(s\) \(503 Service Unavailable\)"),
    "401": (status(401), "refused .401 Unauthorized.. Check the credentials"),
    "403": (status(403), "refused .403 Forbidden.. Check the credentials, and whether a signed URL has expired"),
    "404": (status(404), "the object was changed while it was read"),
    "412": (status(412), "the object was changed while it was read"),
    "416": (status(416), "the object was changed while it was read"),
    "405": (status(405), "refused .405 Method Not Allowed.. Check the URL"),
    "another range": (other_range, r"asked for bytes \d+ to \d+, but sent \d+ to \d+"),
    "everything": (everything, "does not support range requests. Use one that does, or copy the file"),
    "more": (too_much, "sent more bytes than requested|changed|but sent"),
    "compressed": (compressed, "the server compresses it"),
    "no range": (without_a_range, "the Content-Range None, which cannot be parsed"),
    "a strange range": (status(206, Content_Range="lines 1-2/3"), "the Content-Range 'lines 1-2/3', which cannot"),
}


@pytest.mark.parametrize(("answer", "says"), LASTING.values(), ids=LASTING)
def test_lasting_failures_are_refused_and_the_model_keeps_serving(
    answer: Answer, says: str, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    server.fault = always(answer)
    with pytest.raises((WeightFileError, Unsupported), match=says) as refused:
        model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert str(refused.value).startswith(f"{server.url}/v2.safetensors: ")
    assert serves(model, 1)
    server.fault = None
    model.swap(f"{server.url}/v2.safetensors")
    assert serves(model, 2)


OPENING: dict[str, tuple[Answer, str]] = {
    "404": (status(404), "cannot be opened .no such object"),
    "403": (status(403), "the server refused .403 Forbidden"),
    "503": (status(503), r"cannot be opened, after 6 attempt\(s\) .503 Service Unavailable"),
    "empty": (status(416, Content_Range="bytes */0"), "0 bytes"),
    "no size": (status(206, Content_Range="bytes 0-99/*"), "does not report its size"),
    "truncated": (truncated, "cannot be opened, after 6 attempt"),
    "another range": (other_range, "asked for bytes 0 to 4100, but sent 1 to 4101"),
    "more": (too_much, "sent more bytes than requested"),
    "less": (shorter_than_requested, r"after 6 attempt\(s\) .the response has 4099 bytes, expected 4100"),
    "no end": (endless, "sent more bytes than requested"),
}


@pytest.mark.parametrize(("answer", "says"), OPENING.values(), ids=OPENING)
def test_objects_that_cannot_be_opened_are_refused(answer: Answer, says: str, model: Model, server: WebServer) -> None:
    server.fault = lambda handler, request: answer(handler, request) is None
    with pytest.raises(WeightFileError, match=says):
        model.swap(server.put("v2.safetensors", bytes(9000)))
    assert serves(model, 1)
    assert server.sent < ENDLESS_PIECES * len(PIECE)


def whole(content_type: str, body: bytes) -> Answer:
    """Answer with 200, whatever the range."""
    return lambda handler, request: handler.reply(200, body, {"Content-Type": content_type})


def of_unknown_length(content_type: str) -> Answer:
    def answer(handler: Handler, request: Request) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        handler.end_headers()
        handler.wfile.write(LISTING)
        handler.close_connection = True

    return answer


LISTING = b"<!DOCTYPE html><title>Index of /weights</title>"
PAGES: dict[str, Answer] = {
    "a listing": whole("text/html; charset=utf-8", LISTING),
    "a page of another type": whole("application/octet-stream", b"\xef\xbb\xbf\n<HTML><body>" + LISTING),
    "a long page": whole("text/html", b"<!-- a comment -->" + LISTING.ljust(9000)),
    "a page of unknown length": of_unknown_length("text/html"),
}


@pytest.mark.parametrize("answer", PAGES.values(), ids=PAGES)
def test_a_web_page_is_named(answer: Answer, model: Model, server: WebServer) -> None:
    server.fault = lambda handler, request: answer(handler, request) is None
    with pytest.raises(
        WeightFileError, check=because("damaged"), match=r"/weights: the server sent a web page.*a folder.s ends"
    ):
        model.swap(f"{server.url}/weights")
    assert serves(model, 1)


def test_only_web_pages_are_called_web_pages(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    server.fault = lambda handler, request: of_unknown_length("text/plain")(handler, request) is None
    with pytest.raises(WeightFileError, match="does not report its size"):
        model.swap(f"{server.url}/v.safetensors")
    server.fault = lambda handler, request: "goldens" not in request.path and mistyped(handler, request) is None
    model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert serves(model, 2)


def mistyped(handler: Handler, request: Request) -> None:
    content = handler.web.contents[request.path]
    headers = handler.headers_of(content, request) | {"Content-Type": "text/html"}
    handler.reply(206, content.data[request.start : request.stop], headers)


LACKING: dict[str, tuple[Answer, str]] = {
    "no ranges": (everything, "does not support range requests. Use one that does"),
    "compressed": (compressed, "the server compresses it"),
}


@pytest.mark.parametrize(("answer", "says"), LACKING.values(), ids=LACKING)
def test_a_server_that_lacks_what_is_needed_is_not_asked_again(
    answer: Answer, says: str, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    def fault(handler: Handler, request: Request) -> bool:
        answer(handler, request)
        return True

    url = server.put("outbox/v2.safetensors", weight_file(2).read_bytes())
    server.fault = fault
    with pytest.raises(Unsupported, match=says):
        model.swap(url)
    assert len(server.requests) == 1
    assert serves(model, 1)


OPENING_S3 = {what: OPENING[what] for what in ("no size", "another range", "more", "less", "no end")} | {
    "everything": (everything, "asked for bytes 0 to 4100, but sent 0 to 9000"),
}


@pytest.mark.parametrize(("answer", "says"), OPENING_S3.values(), ids=OPENING_S3)
def test_objects_of_a_bucket_that_cannot_be_opened_are_refused(
    answer: Answer, says: str, model: Model, s3_like: WebServer
) -> None:
    s3_like.put("weights/v2.safetensors", bytes(9000))
    s3_like.fault = lambda handler, request: answer(handler, request) is None
    with pytest.raises(WeightFileError, match=says):
        model.swap("s3://weights/v2.safetensors")
    assert serves(model, 1)
    assert s3_like.sent < ENDLESS_PIECES * len(PIECE)


def test_a_server_that_is_not_there_is_named(model: Model) -> None:
    with WebServer() as gone:
        url = f"{gone.url}/v.safetensors"
    with pytest.raises(WeightFileError, match=r"cannot be opened, after 6 attempt\(s\) \(ClientConnectorError"):
        model.swap(url)


def test_a_small_object_may_come_from_a_server_without_ranges(server: WebServer) -> None:
    server.fault = lambda handler, request: everything(handler, request) is None
    assert read_small(server.put("index.json", b"{}"), 100) == b"{}"
