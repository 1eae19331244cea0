"""Connections of a server with several workers: who gets them, also if a worker hangs, ends, or is not there yet."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, closing
from functools import wraps
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.server.load import INPUT
from tests.server.worker_processes import Running, eventually, operated, started
from tests.support.served import as_json
from tests.support.tiny import TinyArtifact
from weightswap_server.http.handover import Dispatcher, Handed

BODY = json.dumps(as_json(x=INPUT)).encode()
REQUESTS = 4  # of each connection


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return wraps(test)(lambda: asyncio.run(test()))


class Named(asyncio.Protocol):
    """A protocol that says the name of its worker, and closes with its client."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.worker.name.encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.handed.count_closed()

    def shutdown(self) -> None:
        self.transport.close()


class Worker:
    """A worker in the process of its manager, and the manager's end."""

    def __init__(self, name: str, stack: ExitStack, dispatcher: Dispatcher) -> None:
        self.name = name
        self.handover = stack.enter_context(dispatcher.handover())
        self.handed = Handed(*map(os.dup, self.handover.descriptors))
        stack.callback(self.handed._channel.close)  # otherwise its process's end closes it

    def serve(self) -> None:
        self.handed.serve(lambda: Named(self))
        self.handover.ready = True


class Manager:
    """A manager, its workers by their names, and its clients."""

    def __init__(self, listener: socket.socket, names: str, stack: ExitStack) -> None:
        self.port, self.dispatcher = listener.getsockname()[1], Dispatcher(listener)
        stack.callback(self.dispatcher.close)
        self.workers = {name: Worker(name, stack, self.dispatcher) for name in names}
        self._clients = ExitStack()

    async def answers(self, count: int) -> list[tuple[str, socket.socket]]:
        """Connect at once, and return who answers, and the connections, which stay."""
        loop = asyncio.get_running_loop()

        async def connect() -> tuple[str, socket.socket]:
            client = self._clients.enter_context(socket.socket())
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", self.port))
            return (await loop.sock_recv(client, 1)).decode(), client

        return await asyncio.wait_for(asyncio.gather(*(connect() for _ in range(count))), 20)

    async def counted(self, count: int) -> Counter[str]:
        return Counter(name for name, _ in await self.answers(count))

    async def disconnect(self) -> None:
        """Close all connections, and wait until the workers know."""
        self._clients.close()
        while any(worker.handover.open for worker in self.workers.values()):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def managing(names: str, kind: type[socket.socket] = socket.socket) -> AsyncIterator[Manager]:
    with ExitStack() as stack:
        listener = stack.enter_context(kind())
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        manager = Manager(listener, names, stack)
        yield manager
        await manager.disconnect()


@on_a_loop
async def test_each_is_for_the_worker_with_the_fewest() -> None:
    async with managing("abc") as manager:
        for worker in manager.workers.values():
            worker.serve()
        answers = await manager.answers(10)
        assert sorted(Counter(name for name, _ in answers).values()) == [3, 3, 4]
        for name, connection in answers:
            if name == "b":
                connection.close()
        await asyncio.sleep(0.05)
        assert await manager.counted(2) == {"b": 2}
        await manager.disconnect()
        assert sorted([(await manager.answers(1))[0][0] for _ in range(3)]) == ["a", "b", "c"]


@on_a_loop
async def test_more_than_a_worker_may_have_on_their_way_come_all() -> None:
    async with managing("ab") as manager:
        for worker in manager.workers.values():
            worker.serve()
        assert await manager.counted(300) == {"a": 150, "b": 150}


@on_a_loop
async def test_they_wait_for_a_first_worker() -> None:
    async with managing("a") as manager:
        asyncio.get_running_loop().call_later(0.1, manager.workers["a"].serve)
        assert await manager.counted(5) == {"a": 5}


@on_a_loop
async def test_what_a_hanging_worker_does_not_take_goes_to_others() -> None:
    async with managing("ab") as manager:
        manager.workers["a"].serve()
        manager.workers["b"].handover.ready = True  # takes nothing
        assert await manager.counted(8) == {"a": 8}
        assert await manager.counted(8) == {"a": 8}
        manager.workers["b"].serve()
        assert await manager.counted(16) == {"b": 16}


@on_a_loop
async def test_a_worker_alone_keeps_what_it_takes_late() -> None:
    async with managing("a") as manager:
        manager.workers["a"].handover.ready = True
        asyncio.get_running_loop().call_later(1, manager.workers["a"].serve)
        assert await manager.counted(5) == {"a": 5}


@on_a_loop
async def test_what_comes_to_a_worker_that_ends_goes_to_others() -> None:
    async with managing("ab") as manager:
        ended, other = manager.workers["a"], manager.workers["b"]
        ended.handover.ready = True
        waiting = asyncio.ensure_future(manager.counted(3))
        await asyncio.sleep(0.05)
        ended.handed.serve(lambda: Named(ended))
        ended.handed.close()
        other.serve()
        assert await waiting == {"b": 3}
        ended.handover.ready = True  # as its last sign of life says
        assert await manager.counted(3) == {"b": 3}


@on_a_loop
async def test_what_nobody_has_taken_soon_after_the_end_is_closed() -> None:
    async with managing("a") as manager:
        manager.workers["a"].handover.ready = True  # takes nothing
        waiting = asyncio.ensure_future(manager.counted(3))
        await asyncio.sleep(0.05)
        manager.dispatcher.close()
        assert await waiting == {"": 3}


@on_a_loop
async def test_connections_on_their_way_survive_the_workers_process() -> None:
    async with managing("b") as manager:
        with manager.dispatcher.handover() as killed:
            killed.ready = True
            waiting = asyncio.ensure_future(manager.counted(3))
            await asyncio.sleep(0.05)
        manager.workers["b"].serve()
        assert await waiting == {"b": 3}


def test_a_system_without_descriptors_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return super().accept()

    async def run() -> None:
        async with managing("a", Full) as manager:
            manager.workers["a"].serve()
            assert await manager.counted(2) == {"a": 2}

    monkeypatch.setattr("weightswap_server.http.handover._PAUSE", 0.05)
    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept a connection ([Errno 24] Too many open files); trying again in 0.05 s"
    ]


class Clients:
    """Clients of a server, which keep their connections."""

    def __init__(self, server: Running, stack: ExitStack) -> None:
        self._server, self._stack = server, stack
        self._answered: dict[int, int] = {}  # by the worker's process, once all of an `ask` are reported

    def connect(self, count: int) -> list[HTTPConnection]:
        """Open connections at once."""
        made = [HTTPConnection("127.0.0.1", self._server.http_port, timeout=120) for _ in range(count)]
        for connection in made:
            self._stack.enter_context(closing(connection)).connect()
        return made

    def ask(self, connections: list[HTTPConnection]) -> dict[int, int]:
        """Send each connection's requests, one after the other, and return how many answers came from each worker."""
        for connection in connections * REQUESTS:
            connection.request("POST", "/v2/models/tiny/infer", BODY)
            reply = connection.getresponse()
            assert (reply.read() != b"", reply.status) == (True, 200)
        found: dict[int, int] = {}

        def reported() -> bool:
            nonlocal found
            workers = [each for each in self._server.processes if each["role"] == "worker"]
            found = {each["pid"]: each["answered"] - self._answered.get(each["pid"], 0) for each in workers}
            return sum(found.values()) == len(connections) * REQUESTS

        eventually(reported)  # each process reports each second
        self._answered = {pid: number + self._answered.get(pid, 0) for pid, number in found.items()}
        return found


@pytest.mark.slow
def test_workers_answer_alike_whoever_is_stopped_or_killed(tmp_path: Path) -> None:
    tiny = TinyArtifact(tmp_path / "tiny.artifact")
    weights = str(tiny.write(tmp_path / "1.safetensors", tiny.values(1)))
    options = ["-w", weights, "--worker-timeout", "0", *operated(tmp_path)]
    with started(tmp_path, 3, *options) as server, ExitStack() as stack:
        server.await_ready()
        clients = Clients(server, stack)
        kept: list[HTTPConnection] = []
        for count in (9, 24, 32):
            kept += clients.connect(count - len(kept))
            found = clients.ask(kept)
            assert max(found.values()) - min(found.values()) <= REQUESTS, (count, found)
        stopped, killed = list(found)[:2]
        os.kill(stopped, signal.SIGSTOP)
        found = clients.ask(clients.connect(12))
        assert found[stopped] == 0, found
        os.kill(stopped, signal.SIGCONT)
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: killed not in [each["pid"] for each in server.processes])
        eventually(lambda: all(each["ready"] for each in server.processes))
        found = clients.ask(clients.connect(3))  # all are for the new worker, which has none
        assert max(found.values()) == 3 * REQUESTS, found
        new = max(found, key=lambda pid: found[pid])
        before = resource.prlimit(new, resource.RLIMIT_NOFILE)
        resource.prlimit(new, resource.RLIMIT_NOFILE, (3, before[1]))  # it has the fewest, and can open no more
        found = clients.ask(clients.connect(6))
        assert found[new] == 0, found
        resource.prlimit(new, resource.RLIMIT_NOFILE, before)
        eventually(lambda: clients.ask(clients.connect(1))[new] > 0)
