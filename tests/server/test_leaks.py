"""What requests, operators and swaps leave behind: nothing, in one process, and in those of `--workers`."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as triton

from tests.server.load import INPUT
from tests.server.worker_processes import Fleet, eventually
from tests.server.worker_processes import serving as serving_fleet
from tests.support.administered import TOKEN, administered, call, change
from tests.support.tiny import TinyArtifact
from weightswap_runtime import load
from weightswap_runtime.transfer.admin_client import AdminClient
from weightswap_server import Server

FEW, MANY = 10, 40
MORE = 8  # threads, of pools that grow where one is slow to come back; a leak of each round would be 40
GROWTH = 16 << 20  # bytes; what allocators keep is nobody's leak


pytestmark = pytest.mark.slow


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


class OneProcess(NamedTuple):
    """A server in this process, and the operations of operators on it."""

    server: Server
    files: tuple[Path, Path]

    def by_operators(self) -> None:
        server = self.server
        for path in self.files:
            change(server, "swap", source=str(path))
        change(server, "swap", source=str(self.files[0].parent / "none.safetensors"))
        change(server, "stage", source=str(self.files[0]))
        change(server, "discard")
        change(server, "rollback")
        call(server, "/admin/status", headers={"Authorization": "Bearer no"})
        call(server, "/admin/models/tiny/swap", b"{")
        assert server.admin is not None
        head = b"POST /admin/models/tiny/swap HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
        for sent in (b"", b"GET", head + b"{"):
            with suppress(ConnectionError), socket.create_connection(("127.0.0.1", server.admin.port), 10) as raw:
                raw.sendall(sent)  # and leaves

    def by_grpc(self) -> None:
        infer_and_leave(self.server.grpc_port)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    folder = tmp_path_factory.mktemp("one")
    tiny = TinyArtifact(folder / "tiny.artifact")
    first, second = (tiny.write(folder / f"{seed}.safetensors", tiny.values(seed)) for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
        options: Any = {"allow": (str(folder),), "serving": {"grpc_port": 0}}
        with administered({"tiny": load(tiny.path, first)}, **options) as server:
            yield OneProcess(server, (second, first))


@pytest.mark.parametrize("doing", ["by_operators", "by_grpc"])
def test_one_process(one: OneProcess, doing: str) -> None:
    do = getattr(one, doing)
    for _ in range(FEW):
        do()
    before = settled(["self"])
    for _ in range(MANY):
        do()
    await_no_more_than(before)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("several")
    options = ["--admin-socket", str(folder / "s"), "--admin-allow", str(folder), "-w", str(folder / "1.safetensors")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
        with serving_fleet(folder, 2, *options) as found:
            yield found


def test_manager_owner_and_workers(fleet: Fleet) -> None:
    folder = fleet.files[1].parent
    operator = AdminClient(f"unix://{folder / 's'}", TOKEN)
    processes = [fleet.process.pid, *fleet.children]

    def everything(times: int) -> None:
        for number in range(times):
            for _ in range(3):
                fleet.infer()
            infer_and_leave(fleet.grpc_port)
            operator.post("/admin/models/tiny/swap", {"source": str(fleet.files[number % 3 + 1])})
            operator.get("/admin/status")
            fleet.get("/metrics")

    everything(FEW)
    before = settled(processes)
    everything(MANY)
    assert [fleet.process.pid, *fleet.children] == processes
    await_no_more_than(before)
