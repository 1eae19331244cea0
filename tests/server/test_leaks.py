"""What requests, operators and swaps leave behind: nothing, in one process, and in those of `--workers`."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import tritonclient.grpc as triton

from tests.server.load import INPUT
from tests.server.worker_processes import Fleet, eventually, operated, serving
from tests.support.administered import Operator, call
from tests.support.administered import operated as operated_here
from tests.support.served import INFER, X, as_json, ask, connect
from tests.support.tiny import TinyArtifact
from weightswap_runtime import load

FEW, MANY = 10, 40
MORE = 8  # threads, of pools that grow where one is slow to come back; a leak of each round would be 40
GROWTH = 16 << 20  # bytes; what allocators keep is nobody's leak


class Held(NamedTuple):
    """The resources that a process holds."""

    descriptors: int
    threads: int
    resident: int

    def is_no_more_than(self, before: Held) -> bool:
        return (
            self.descriptors <= before.descriptors
            and self.threads <= before.threads + MORE
            and self.resident < before.resident + GROWTH
        )


def held(pid: int | str = "self") -> Held:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    counted = (len(list((process / part).iterdir())) for part in ("fd", "task"))
    return Held(*counted, pages * os.sysconf("SC_PAGE_SIZE"))


def settled(processes: Sequence[int | str]) -> dict[int | str, Held]:
    """Return the resources of processes once they are stable: connections take a moment to close."""
    gc.collect()
    counted = [held(process)[:2] for process in processes]
    since = time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.05)
        if (now := [held(process)[:2] for process in processes]) != counted:
            counted, since = now, time.monotonic()
    return {process: held(process) for process in processes}


def await_no_more_than(before: dict[int | str, Held]) -> None:
    gc.collect()
    eventually(lambda: all(held(process).is_no_more_than(was) for process, was in before.items()), 20)


def infer_and_leave(port: int) -> None:
    """Send answered and refused requests over gRPC, and open a connection that is not gRPC."""
    tensor = triton.InferInput("x", [2, 3], "FP32").set_data_from_numpy(INPUT)
    wrong = triton.InferInput("y", [2, 3], "FP32").set_data_from_numpy(INPUT)
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.infer("tiny", [tensor])
        for name, given in (("tiny", wrong), ("none", tensor)):
            with suppress(triton.InferenceServerException):
                client.infer(name, [given])
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator of a server in this process."""
    folder = tmp_path_factory.mktemp("one")
    tiny = TinyArtifact(folder / "tiny.artifact")
    model = load(tiny.path, tiny.write(folder / "v1.safetensors", tiny.values(1)))
    with operated_here(model, tiny, folder, serving={"grpc_port": 0, "max_body": 100_000}) as operator:
        yield operator


def by_operators(one: Operator) -> None:
    for source in (2, 1, one.folder / "none.safetensors"):
        one.change("swap", source)
    one.change("stage", 2)
    one.change("discard")
    one.change("rollback")
    call(one.server, "/admin/status", headers={"Authorization": "Bearer no"})
    call(one.server, "/admin/models/tiny/swap", b"{")
    assert one.server.admin is not None
    head = b"POST /admin/models/tiny/swap HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
    for sent in (b"", b"GET", head + b"{"):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", one.server.admin.port), 10) as raw:
            raw.sendall(sent)  # and leaves


def by_http(one: Operator) -> None:
    for path, body in ((INFER, b"{"), (INFER, as_json(y=X)), (INFER, bytes(1_000_000)), ("/v2/models/none", None)):
        assert ask(one.server, path, body).status >= 400
    good = json.dumps(as_json(x=X)).encode()
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    for sent in (b"", b"GET", b"\0" * 100, head % 500, head % len(good) + good[:9], head % len(good) + good):
        with suppress(ConnectionError), connect(one.server) as raw:
            raw.sendall(sent)  # and leaves


def by_grpc(one: Operator) -> None:
    infer_and_leave(one.server.grpc_port)


@pytest.mark.parametrize("do", [by_http, *(pytest.param(do, marks=pytest.mark.slow) for do in (by_operators, by_grpc))])
def test_one_process(one: Operator, do: Callable[[Operator], None]) -> None:
    for _ in range(FEW):
        do(one)
    before = settled(["self"])
    for _ in range(MANY):
        do(one)
    await_no_more_than(before)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("several")
    with serving(folder, 2, "-w", str(folder / "1.safetensors"), *operated(folder)) as found:
        yield found


@pytest.mark.slow
def test_manager_owner_and_workers(fleet: Fleet) -> None:
    processes = [fleet.process.pid, *fleet.children]

    def everything(times: int) -> None:
        for number in range(times):
            for _ in range(3):
                fleet.infer()
            infer_and_leave(fleet.grpc_port)
            fleet.change("swap", source=str(fleet.files[number % 3 + 1]))
            fleet.operator.get("/admin/status")
            fleet.get("/metrics")

    everything(FEW)
    before = settled(processes)
    everything(MANY)
    assert [fleet.process.pid, *fleet.children] == processes
    await_no_more_than(before)
