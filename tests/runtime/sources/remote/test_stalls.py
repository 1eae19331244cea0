"""Responses that never come: waits are cancelled at once, and nothing is written."""

from __future__ import annotations

import gc
import subprocess
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest

from tests.runtime.sources.remote.answers import DATA_START, always, for_the_first, is_data, stalled
from tests.runtime.sources.remote.contents import until
from tests.support import warm
from tests.support.servers import WebServer
from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import Model, StageCancelled, WeightFileError
from weightswap_runtime.sources import remote as objects
from weightswap_runtime.sources import web
from weightswap_runtime.sources.opening import open_source


def test_a_stalled_staging_is_cancelled_at_once(model: Model, weight_file: WriteWeights, server: WebServer) -> None:
    server.fault = always(stalled)
    staged = model.stage(server.put("v2.safetensors", weight_file(2).read_bytes()), background=True)
    until(lambda: any(map(is_data, server.requests)))
    start = time.monotonic()
    staged.cancel()
    assert time.monotonic() - start < 15  # half of what the server would take
    with pytest.raises(StageCancelled):
        staged.wait()
    server.released.set()
    server.fault = None
    model.swap(f"{server.url}/v2.safetensors")
    assert serves(model, 2)


def test_a_staging_that_waits_for_its_first_answer_is_cancelled_at_once(model: Model, server: WebServer) -> None:
    server.fault = lambda handler, request: server.released.wait(120)
    staged = model.stage(f"{server.url}/v.safetensors", background=True)
    until(lambda: bool(server.requests))
    start = time.monotonic()
    staged.cancel()
    assert time.monotonic() - start < 15  # half of what the server would take
    assert serves(model, 1)


def test_an_answer_that_comes_too_late_is_written_nowhere(server: WebServer) -> None:
    class Enough(Exception):
        """Error that a caller raises to end a wait."""

    target = bytearray(4000)

    def check() -> None:
        if target[0]:  # the first byte has come
            raise Enough

    server.fault = lambda handler, request: is_data(request) and stalled(handler, request) is None
    source = open_source(server.put("v", b"x" * 9000), check)
    with pytest.raises(Enough):
        source.read_into([memoryview(target)], 5000)
    before = bytes(target)
    server.released.set()
    until(lambda: not server.busy)
    assert target == before
    assert before.count(b"x") < 4000


def test_memory_that_is_closed_is_not_written_to() -> None:
    memory = bytearray(4)
    landing = objects.Landing([memoryview(memory)])
    landing.write(1, b"ab")
    landing.close()
    with pytest.raises(StageCancelled):
        landing.write(0, b"c")
    assert memory == b"\0ab\0"


@pytest.mark.parametrize("sizes", [[7], [0, 3, 0, 0, 4, 0], [1] * 7, [2, 5]], ids=str)
def test_bytes_land_across_buffers(sizes: list[int]) -> None:
    for step in (1, 2, 3, 7):
        buffers = [bytearray(size) for size in sizes]
        landing = objects.Landing([memoryview(buffer) for buffer in buffers])
        for start in range(0, 7, step):
            landing.write(start, b"abcdefg"[start : start + step])
        assert b"".join(buffers) == b"abcdefg"
        assert landing.size == 7


def test_a_request_without_progress_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, model: Model, weight_file: WriteWeights, server: WebServer
) -> None:
    monkeypatch.setattr(web, "STALL", 0.1)
    server.fault = for_the_first(2, stalled)
    model.swap(server.put("v2.safetensors", weight_file(2).read_bytes()))
    assert serves(model, 2)


def test_a_refusal_keeps_no_memory(server: WebServer) -> None:
    source = open_source(server.put("v", bytes(9000)))
    server.fault = always(lambda handler, request: handler.reply(405))
    memory = np.zeros(4000, np.uint8)
    alive = weakref.ref(memory)
    gc.collect()
    gc.disable()
    try:
        with suppress(WeightFileError):
            source.read_into([memoryview(memory)], 5000)
        del memory
        until(lambda: alive() is None)
    finally:
        gc.enable()


def test_the_interpreter_ends_while_a_server_stalls(
    tiny: TinyArtifact, weight_file: WriteWeights, server: WebServer
) -> None:
    server.fault = always(stalled)
    url = server.put("v2.safetensors", weight_file(2).read_bytes())
    code = f"""
import time
from weightswap_runtime import load
from weightswap_runtime.sources import web
web.HEAD_BYTES = {DATA_START}
staged = load({str(tiny.path)!r}, {str(weight_file(1))!r}).stage({url!r}, background=True)
while not staged.progress.phase == "reading":
    time.sleep(0.01)
time.sleep(0.2)
"""
    done = subprocess.run([warm.python(), "-e", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert any(map(is_data, server.requests))
