"""Clients that keep their connections get an even share of the workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.server.load import INPUT
from tests.server.worker_processes import Fleet, eventually, serving
from tests.support.administered import TOKEN
from tests.support.served import as_json
from weightswap_tools.admin_client import AdminClient

REQUESTS = 4  # of each connection
BODY = json.dumps(as_json(x=INPUT)).encode()


@contextmanager
def connected(fleet: Fleet, clients: int) -> Iterator[list[HTTPConnection]]:
    """Open that many connections at once."""
    with ExitStack() as stack:
        connections = [HTTPConnection("127.0.0.1", fleet.http_port, timeout=60) for _ in range(clients)]
        for connection in connections:
            stack.enter_context(closing(connection)).connect()
        yield connections


def ask(connections: list[HTTPConnection]) -> None:
    """Send each connection's requests, one after the other."""
    for connection in connections * REQUESTS:
        connection.request("POST", "/v2/models/tiny/infer", BODY)
        reply = connection.getresponse()
        assert (reply.read() != b"", reply.status) == (True, 200)


@pytest.mark.slow
def test_kept_connections_are_shared_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    path = str(tmp_path / "s")
    with serving(tmp_path, 3, "--follow", str(tmp_path / "place"), "--admin-socket", path) as fleet:
        operator = AdminClient(f"unix://{path}", TOKEN)

        def answered() -> dict[int, int]:
            processes = operator.get("/admin/status")["processes"]
            return {each["pid"]: each["answered"] for each in processes if each["role"] == "worker"}

        def shares(connections: list[HTTPConnection]) -> list[int]:
            """Return how many of the answers came from each worker."""
            before = answered()
            ask(connections)
            wanted = sum(before.values()) + len(connections) * REQUESTS
            eventually(lambda: sum(answered().values()) >= wanted)  # it is reported each second
            return [number - before[pid] for pid, number in answered().items()]

        fleet.infer()
        eventually(lambda: len(answered()) == 3 and sum(answered().values()) == 1)
        for clients in (9, 24, 32):
            with connected(fleet, clients) as connections:
                found = shares(connections)
            assert max(found) <= 1.5 * min(found), (clients, found)
        with connected(fleet, 9) as connections:
            ask(connections)
            killed = fleet.children[1]
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: killed not in answered() and len(answered()) == 3 and 0 in answered().values())
            eventually(lambda: all(each["ready"] for each in operator.get("/admin/status")["processes"]))
            with connected(fleet, 3) as others:  # all are for the new worker, which has none
                assert sorted(shares(others)) == [0, 0, 3 * REQUESTS]
