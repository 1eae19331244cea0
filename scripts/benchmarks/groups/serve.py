"""`weightswap serve` compared with hand-written servers: the overhead of a call, and calls per second."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch
from peer_network import CLASSES, WIDTH, network
from report import Goal, Row, compared, spread
from settings import Settings
from subjects import close, on_one_thread, quiet
from timing import in_turn, percentile, seconds
from torch.export import Dim

from weightswap_exporter import export, pack
from weightswap_runtime import load

CALLS, ROWS, SECONDS = 200, 1, 2.0
LOADS = (1, 8, 32)
HTTP, GRPC = Goal("median", "at most", 0.8), Goal("median", "at most", 1.0)
AHEAD, SOONER = Goal("ratio", "at least", 1.0), Goal("ratio", "at most", 1.0)
_SERVE = "from weightswap_tools.commands.serve import serve_command; serve_command()"
_PEERS = Path(__file__).parent.parent
_OF_PROTOCOL = ("fastapi_protocol", "kserve")  # peers with the same protocol
Bodies = tuple[str, bytes, dict[str, str]]  # path, body, headers


def rows(settings: Settings) -> Iterator[Row]:
    """Measure a network of two layers, one row per call, clients in this process, and every server in its own."""
    with on_one_thread(), TemporaryDirectory(prefix="weightswap-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        eager = network()
        torch.save(eager.state_dict(), folder / "w.pt")
        with quiet():
            shapes = {"input": {0: Dim("batch", max=1024)}}
            export(eager, (torch.zeros(2, WIDTH),), out=folder / "net.artifact", dynamic_shapes=shapes)
        weights = pack(eager, folder / "net.artifact", out=folder / "w.safetensors").path
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            expected = eager(x)
        yield from _alone(settings, stack, folder, weights, x, expected)
        yield from _loaded(settings, folder, weights, x)


def _alone(
    settings: Settings, stack: ExitStack, folder: Path, weights: Path, x: torch.Tensor, expected: torch.Tensor
) -> Iterator[Row]:
    """Measure concurrency 1: the protocol's own clients, and a bare connection for the peers."""
    http_port, grpc_port = stack.enter_context(_ours(folder, weights, "--grpc-port", str(_free_port())))
    model = load(folder / "net.artifact", weights)
    subjects: dict[str, Callable[[], Any]] = {"bare": partial(model, x)}
    if find_spec("tritonclient"):
        subjects["http"] = _triton("http", http_port, x)
        subjects["grpc"] = _triton("grpc", grpc_port, x)
    subjects["ours"] = _raw(http_port, *_our_request(x))
    for peer in _peers():
        port = stack.enter_context(_served(peer, folder))
        subjects[peer] = _raw(port, *_their_request(peer, x))
    for name, subject in subjects.items():
        close(subject(), expected, name)
    measures = {name: partial(_milliseconds, subject) for name, subject in subjects.items()}
    figures = in_turn(measures, settings.rounds)
    for name, goal in (("http", HTTP), ("grpc", GRPC)):
        if name in figures:
            beyond = [one - bare for one, bare in zip(figures[name], figures["bare"], strict=True)]
            yield spread(f"tritonclient.{name}, binary, 1 client: beyond model(x)", "ms", beyond, goal)
    yield spread("model(x)", "ms", figures["bare"])
    for peer in _peers():
        yield compared("serve, HTTP, binary, 1 client", "ms", figures["ours"], peer, figures[peer], SOONER)


def _loaded(settings: Settings, folder: Path, weights: Path, x: torch.Tensor) -> Iterator[Row]:
    """Measure calls per second of clients that call without pause, and their slowest waits."""
    path, body, headers = _our_request(x)
    ours = {"serve": (), "serve --max-batch 32": ("--max-batch", "32")}
    peers = _peers()
    with ExitStack() as stack:
        ports = {name: stack.enter_context(_ours(folder, weights, *options))[0] for name, options in ours.items()}
        requests: dict[str, Bodies] = {
            name: (f"http://127.0.0.1:{port}{path}", body, headers) for name, port in ports.items()
        }
        for peer in peers:
            path, body, headers = _their_request(peer, x)
            requests[peer] = f"http://127.0.0.1:{stack.enter_context(_served(peer, folder))}{path}", body, headers
        for clients in LOADS:
            waits: dict[str, list[list[float]]] = {name: [] for name in requests}
            measures = {
                name: partial(_calls_per_second, request, clients, waits[name]) for name, request in requests.items()
            }
            figures = in_turn(measures, max(1, settings.rounds // 3))
            slowest = {name: [percentile(calls, 0.99) for calls in rounds] for name, rounds in waits.items()}
            load = "1 client" if clients == 1 else f"{clients} clients"
            for name in ours:
                yield spread(f"{name}, {load}: a call", "ms", list(chain(*waits[name])))
                for peer in peers:
                    yield compared(f"{name}, {load}: calls", "1/s", figures[name], peer, figures[peer], AHEAD)
                    yield compared(f"{name}, {load}: p99 of a call", "ms", slowest[name], peer, slowest[peer], SOONER)
            for peer in peers:
                yield spread(f"{peer}, {load}: a call", "ms", list(chain(*waits[peer])))


def _peers() -> Sequence[str]:
    """Return the installed peers; KServe, which needs older packages, runs in the Python named by KSERVE_PYTHON."""
    needs = {"fastapi": "fastapi", "fastapi_protocol": "fastapi", "litserve": "litserve"}
    return [peer for peer, package in needs.items() if find_spec(package)] + ["kserve"] * (
        "KSERVE_PYTHON" in os.environ
    )


def _milliseconds(subject: Callable[[], Any]) -> float:
    return percentile([seconds(subject) * 1e3 for _ in range(CALLS)], 0.5)


def _calls_per_second(request: Bodies, clients: int, waits: list[list[float]]) -> float:
    return asyncio.run(_ask_for_a_while(request, clients, waits))


async def _ask_for_a_while(request: Bodies, clients: int, waits: list[list[float]]) -> float:
    url, body, headers = request
    until = time.perf_counter() + SECONDS
    waits_ms: list[float] = []

    async def ask(session: aiohttp.ClientSession) -> None:
        while (start := time.perf_counter()) < until:
            async with session.post(url, data=body, headers=headers) as reply:
                await reply.read()
                reply.raise_for_status()
            waits_ms.append((time.perf_counter() - start) * 1e3)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        await asyncio.gather(*(ask(session) for _ in range(clients)))
    waits.append(waits_ms)
    return len(waits_ms) / SECONDS


def _our_request(x: torch.Tensor) -> Bodies:
    data = x.numpy().tobytes()
    tensor = {
        "name": "input",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": len(data)},
    }
    head = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return "/v2/models/net/infer", head + data, {"Inference-Header-Content-Length": str(len(head))}


def _their_request(peer: str, x: torch.Tensor) -> Bodies:
    if peer in _OF_PROTOCOL:
        return _our_request(x)
    rows = x.numpy().tobytes()
    body = rows if peer == "fastapi" else msgspec.json.encode({"rows": rows})  # as base64
    return "/predict", body, {"Content-Type": "application/json"}


def _raw(port: int, path: str, body: bytes, headers: dict[str, str]) -> Callable[[], Any]:
    """Call over a connection of Python's own; the last bytes of the response are the output."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    nbytes = ROWS * CLASSES * 4

    def call() -> Any:
        connection.request("POST", path, body, headers)
        return np.frombuffer(connection.getresponse().read()[-nbytes:], np.float32).reshape(ROWS, -1)

    return call


def _triton(protocol: str, port: int, x: torch.Tensor) -> Callable[[], Any]:
    triton: Any = __import__(f"tritonclient.{protocol}", fromlist=["InferInput"])
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = triton.InferInput("input", list(x.shape), "FP32").set_data_from_numpy(x.numpy())
    return lambda: client.infer("net", [tensor]).as_numpy("output")


@contextmanager
def _ours(folder: Path, weights: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Run `weightswap serve` during the block. Yield its ports for HTTP and gRPC."""
    port = _free_port()
    arguments = [str(folder / "net.artifact"), "-w", str(weights), "--port", str(port), "--threads", "1", *options]
    with _process([sys.executable, "-c", _SERVE, *arguments], port):
        yield port, int(options[-1]) if options else 0


@contextmanager
def _served(peer: str, folder: Path) -> Iterator[int]:
    port = _free_port()
    python = os.environ["KSERVE_PYTHON"] if peer == "kserve" else sys.executable
    with _process([python, str(_PEERS / f"peer_{peer}.py"), str(folder / "w.pt"), str(port)], port):
        yield port


@contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True) as process:
        try:
            while not _answers(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{command}: ended with status {process.returncode}")
                time.sleep(0.05)
            time.sleep(1)  # warm-up
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
