"""A stop finishes what was accepted, in this process and as `weightswap serve`."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tritonclient.grpc as triton

from tests.support import warm
from tests.support.administered import TOKEN, administered
from tests.support.commands import run
from tests.support.served import (
    INFER,
    X,
    answer_of,
    as_json,
    ask,
    await_queued,
    before_calls,
    expected,
    occupied,
    serving,
)
from tests.support.tiny import TinyArtifact, WriteWeights
from tests.support.watched import eventually
from weightswap_runtime import DesiredStore, Model, ModelClosed, Unsupported, load
from weightswap_server import ModelSource, Server, Settings


def test_what_was_accepted_is_answered(model: Model) -> None:
    with ThreadPoolExecutor(4) as pool, serving({"tiny": model}, grpc_port=0) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        tensor = triton.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)
        assert client.infer("tiny", [tensor]).get_response().model_name == "tiny"
        with occupied(server):
            asked = [pool.submit(ask, server, INFER, as_json(x=X)) for _ in range(3)]
            over_grpc = pool.submit(client.infer, "tiny", [tensor])
            await_queued(server, 4)
            server.stop()
            assert not server.service.ready
            assert eventually(lambda: not accepts(server.http_port))
        assert [each.result(120).status for each in asked] == [200, 200, 200]
        assert over_grpc.result(120).as_numpy("output").shape == (2, 5)
        client.close()
    with pytest.raises(ModelClosed):
        model.swap({})


def test_what_was_sent_is_answered_and_idle_connections_end(model: Model) -> None:
    """A client whose connection ends between two requests finds it closed, and the port, too."""
    with ThreadPoolExecutor(8) as pool, serving({"tiny": model}) as server:
        silent = socket.create_connection(("127.0.0.1", server.http_port), 20)
        asking = [pool.submit(ask_until_closed, server.http_port) for _ in range(8)]
        time.sleep(0.3)
        server.stop()
        assert all(each.result(120) > 0 for each in asking)
        assert silent.recv(1) == b""
        silent.close()
        assert not accepts(server.http_port)


def ask_until_closed(port: int) -> int:
    """Send requests until the connection ends, or a response says that it does. Returns the number of responses."""
    body, answered = json.dumps(as_json(x=X)), 0
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        while connection.sock is not None or not answered:
            try:
                connection.request("POST", INFER, body)
                reply = connection.getresponse()
            except (http.client.RemoteDisconnected, ConnectionError):  # not a byte of a response
                break
            assert reply.status == 200, reply.read()
            reply.read()
            answered += 1
    return answered


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_what_takes_too_long_is_broken_off(model: Model) -> None:
    with ThreadPoolExecutor(1) as pool, serving({"tiny": model}, grace=0.2) as server, occupied(server):
        asked = pool.submit(ask, server, INFER, as_json(x=X))
        await_queued(server, 1)
        server.stop()
        with pytest.raises((http.client.HTTPException, ConnectionError, AssertionError)):
            assert asked.result(120).status == 200


def test_all_models_share_the_grace(tiny: TinyArtifact) -> None:
    """Calls that never end hold a stop up once, not once for each model, and not for the admin plane again."""
    models = {name: load(tiny.path) for name in "abcd"}
    release = threading.Event()
    with ExitStack() as stack:
        stack.callback(release.set)
        with administered(models, warm=False, grace=9, body_timeout=60, serving={"grace": 2.0}) as server:
            for served in server.service.served:
                served.thread.do(lambda: release.wait(120))
            upload = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port), 20))
            upload.sendall(f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n".encode())
            assert server.admin is not None
            change = stack.enter_context(socket.create_connection(("127.0.0.1", server.admin.port), 20))
            head = f"POST /admin/models/a/hold HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {TOKEN}\r\n"
            change.sendall(f"{head}content-length: 9\r\n\r\n".encode())
            time.sleep(0.2)
            began = time.monotonic()
        took = time.monotonic() - began
        assert 1.5 < took < 6


def test_a_call_over_grpc_that_never_ends_holds_no_thread(model: Model) -> None:
    """A process does not end before the threads that wait for an answer."""

    def waiting() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("weightswap-grpc_")} - before

    before = {each for each in threading.enumerate() if each.name.startswith("weightswap-grpc_")}
    begun, ended = threading.Event(), threading.Event()
    with ExitStack() as stack:
        stack.callback(ended.set)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        with serving({"tiny": model}, grace=0.2, grpc_port=0) as server:
            client = stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}"))
            before_calls(patch, lambda *_: (begun.set(), ended.wait(120)))
            tensor = triton.InferInput("x", [2, 3], "FP32").set_data_from_numpy(X)
            failed: list[Any] = []
            client.async_infer("tiny", [tensor], lambda result, error: failed.append(error))
            assert begun.wait(60)
        threads = waiting()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert eventually(lambda: len(failed) == 1)


@pytest.mark.parametrize("installed", [True, False])
def test_the_loop_is_of_uvloop_where_that_is_installed(
    tiny: TinyArtifact, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    class Loop(asyncio.SelectorEventLoop):
        pass

    uvloop = SimpleNamespace(new_event_loop=Loop) if installed else None
    monkeypatch.setitem(sys.modules, "uvloop", uvloop)
    loops: list[asyncio.AbstractEventLoop] = []
    server = Server({"tiny": load(tiny.path)}, Settings(http_port=0))
    server.on_listening(lambda: loops.append(asyncio.get_running_loop()))
    with server.running():
        assert [isinstance(loop, Loop) for loop in loops] == [installed]


def test_a_port_that_is_taken(tiny: TinyArtifact) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        before = set(threading.enumerate())
        for ports in ({"http_port": taken}, {"http_port": 0, "grpc_port": taken}):
            with (
                pytest.raises(OSError, match=rf"cannot listen.*127\.0\.0\.1:{taken}"),
                Server({"tiny": load(tiny.path)}, Settings(**ports)).running(),
            ):
                pass
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert "weightswap-model" not in left  # one that still calls a model would end the program with an abort


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the command. Returns it and its HTTP port, once it listens."""
    program = "from weightswap_tools.program import main; main()"
    command = [warm.python(), "-c", program, "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+) serves (.*)\n", said)
            assert found, said + process.communicate()[1]
            yield process, int(found[1])
        finally:
            process.kill()


def get(port: int, path: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        body = reply.read()
        return reply.status, json.loads(body) if body else None


def until_ready(port: int) -> None:
    assert eventually(lambda: get(port, "/v2/health/ready")[0] == 200)


def test_the_command_ends_with_a_signal(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    with serve(str(tiny.path), "-w", str(weight_file(1))) as (process, port):
        until_ready(port)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


@pytest.mark.slow
def test_the_command_watches(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with serve(f"mine={tiny.path}", "--watch", str(tmp_path / "run"), "--interval", "0.05", "--threads", "1") as (
        process,
        port,
    ):
        assert get(port, "/v2/health/ready")[0] == 503
        weight_file(2).rename(tmp_path / "run" / "v2.safetensors")
        until_ready(port)
        assert get(port, "/v2/models/mine")[1]["versions"] == ["0"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_what_is_desired_is_served(tiny: TinyArtifact, weight_file: WriteWeights, desired_store: DesiredStore) -> None:
    """At the start and later on; a rollback in the desired store is one in the server."""
    model = ModelSource(artifact=str(tiny.path), follow=desired_store.where, interval=0.05).open()
    with serving({"tiny": model}) as server:

        def serves_answers(seed: int) -> bool:
            return answer_of(server) == expected(seed).reshape(-1).tolist()

        assert serves_answers(1)
        desired_store.set(weight_file(2), revision=1, by="ana")
        assert eventually(lambda: serves_answers(2))
        desired_store.rollback(revision=2, by="ana")
        assert eventually(lambda: serves_answers(1))
    with pytest.raises(Unsupported):
        ModelSource(artifact=str(tiny.path), follow="service", watch="outbox").open()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["none.artifact", "-w", "v"], 1, "none.artifact"),
        (["{tiny}", "--max-batch", "0"], 2, "max_batch=0: expected a whole number, 1 or more"),
        (["{tiny}", "a={tiny}", "-w", "v.safetensors"], 2, "expected NAME=..., with NAME one of tiny, a"),
        (["{tiny}", "{tiny}"], 2, "two artifacts have the same name"),
        (["{tiny}", "-w", "a", "-w", "b"], 2, "given 2 times"),
        (["{tiny}", "-w", "none.safetensors"], 1, "none.safetensors"),
        (["{tiny}"], 2, "no weights; give"),
        (["{tiny}", "a={tiny}", "--watch", "a=run"], 2, "tiny: no weights; give"),
    ],
)
def test_what_the_command_refuses(tiny: TinyArtifact, arguments: list[str], status: int, says: str) -> None:
    done = run("serve", *(each.format(tiny=tiny.path) for each in arguments), status=status)
    assert says in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())
