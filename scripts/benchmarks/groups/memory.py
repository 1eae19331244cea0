"""Swaps from tensors of the process, beside swaps from a file in the page cache and the least that they must do."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
from peers import Memory, Peers, broadcast
from report import Goal, Row, compared
from safetensors.torch import load_file
from settings import Settings
from subjects import Stored, stored
from timing import Measure, in_turn, seconds

from weightswap_runtime import Model, load, process_group
from weightswap_server import AdminSettings, Server
from weightswap_server import Settings as ServerSettings
from weightswap_server.http.listening import HttpServer

AS_A_FILE = Goal("ratio", "at most", 1.25)
NEAR_THE_LEAST = Goal("ratio", "at most", 1.5)
AS_A_MAPPING = Goal("ratio", "at most", 1.25)
AS_ITS_PARTS = Goal("ratio", "at most", 1.2)
A_THIRD = Goal("ratio", "at most", 1 / 3)
HELD = Goal("ratio", "at most", 1.3)
AS_A_BARE_ONE = Goal("ratio", "at most", 1.5)
WITH_A_SECOND_LOOK = Goal("ratio", "at most", 1.35)
TOKEN = "benchmark-benchmark"
Tensors = dict[str, torch.Tensor]


def rows(settings: Settings) -> Iterator[Row]:
    """Measure on a model in double residency that has used both of its arenas."""
    with stored(settings.megabytes * 1_000_000) as large:
        given = [load_file(version.path) for version in large.versions]
        model = load(large.artifact, given[0])
        large.check(model)
        model.swap(given[1])
        large.check(model)
        timings = in_turn(_ways(large, model, given), settings.rounds)
        large.check(model)
    ms = {name: [1e3 * second for second in values] for name, values in timings.items()}
    what = f"swap of {large.size} from memory"
    yield compared(f"{what}, mapping", "ms", ms["mapping"], "file in the page cache", ms["file"], AS_A_FILE)
    least = f"memcpy + BLAKE3, {Peers().threads} threads"
    yield compared(f"{what}, mapping", "ms", ms["mapping"], least, ms["least"], NEAR_THE_LEAST)
    yield compared(f"{what}, iterator", "ms", ms["iterator"], "mapping", ms["mapping"], AS_A_MAPPING)
    second = f"{what}, with a second look"
    yield compared(second, "ms", ms["background"], "mapping", ms["mapping"], WITH_A_SECOND_LOOK)
    yield compared(f"{what}, mapping", "ms", ms["mapping"], "copy_ of each tensor, unverified", ms["copy_"])
    gc.collect()
    yield from _from_another_process(settings)


def _from_another_process(settings: Settings) -> Iterator[Row]:
    """Measure the way of a trainer's weights to answers of another process, by a socket and by a folder in memory."""
    with (
        stored(settings.megabytes * 1_000_000, pickling=False) as large,
        _Trainer(large, settings.megabytes) as trainer,
    ):
        model = load(large.artifact, large.versions[0].path)
        model.swap(large.versions[1].path)
        paths, peers = cycle(version.path for version in large.versions), Peers()
        source, copy = (Memory(large.nbytes, touched=True) for _ in range(2))
        held: dict[str, list[float]] = {"send": [], "publish": []}

        def by(way: str) -> Measure:
            return lambda: trainer.hand_over(way, model, held[way])

        with model.receive(trainer.at), trainer.joined(model), model.watch(trainer.folder, 0.05, start="new"):
            timings = in_turn(
                {
                    "send": by("send"),
                    "publish": by("publish"),
                    "upload": lambda: trainer.order("upload")[1],
                    "bare upload": lambda: trainer.order("bare upload")[1],
                    "broadcast": lambda: trainer.order("broadcast")[1],
                    "bare broadcast": trainer.bare_broadcast,
                    "least": lambda: seconds(lambda: peers.copy_and_hash(copy, source)),
                    "file": lambda: seconds(lambda: model.swap(next(paths))),
                },
                settings.rounds,
            )
    ms = {name: [1e3 * second for second in values] for name, values in timings.items()}
    held_ms = {name: [1e3 * second for second in values[1:]] for name, values in held.items()}
    least = [one + other for one, other in zip(ms["least"], ms["file"], strict=True)]
    what = f"{large.size} from a trainer's memory to answers of another process"
    parts = "memcpy + BLAKE3 there, and a swap of a file"
    yield compared(f"{what}, send", "ms", ms["send"], parts, least, AS_ITS_PARTS)
    yield compared(f"{what}, send", "ms", ms["send"], "publish and watch in /dev/shm", ms["publish"], A_THIRD)
    held_by = f"{large.size}: the trainer is held by a send"
    yield compared(held_by, "ms", held_ms["send"], "memcpy + BLAKE3", ms["least"], HELD)
    yield compared(held_by, "ms", held_ms["send"], "held by publish", held_ms["publish"])
    for way, protocol in (("upload", "HTTP"), ("broadcast", "gloo")):
        sent = f"{large.size}, hashed, from a trainer to another process by {protocol}"
        yield compared(sent, "ms", ms[way], f"a bare {way} into memory", ms[f"bare {way}"], AS_A_BARE_ONE)


async def swallow(_: Any, receive: Any, send: Any) -> None:
    """Keep the body of a request until its end, and answer: an application of ASGI."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class _Trainer:
    """A process with a model, which hands its weights over."""

    def __init__(self, large: Stored, megabytes: int) -> None:
        self._folder = TemporaryDirectory(prefix="weightswap-bench-", dir="/dev/shm")
        self.folder = Path(self._folder.name)
        self.at = f"unix:{self.folder / 'x.sock'}"
        self._swallowed = torch.ones(megabytes * 1_000_000, dtype=torch.uint8)
        self._bare = socket.create_server(("127.0.0.1", 0))
        ports = [free_port() for _ in range(3)]
        self._admin, self._groups = ports[0], [f"tcp://127.0.0.1:{port}" for port in ports[1:]]
        urls = [f"http://127.0.0.1:{port}" for port in (self._admin, self._bare.getsockname()[1])]
        paths = (large.artifact.path, large.versions[0].path, megabytes, self.folder, self.at, *urls, *self._groups)
        command = [sys.executable, str(Path(__file__).parents[1] / "trainer_process.py"), *map(str, paths)]
        environment = os.environ | {"WEIGHTSWAP_ADMIN_TOKEN": TOKEN}
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment)

    @contextmanager
    def joined(self, model: Model) -> Iterator[None]:
        """Let the model take weights by HTTP and by a process group; take others, which nobody looks at, so too."""
        os.environ["WEIGHTSWAP_ADMIN_TOKEN"] = TOKEN
        server = Server({"stack": model}, ServerSettings(http_port=0), AdminSettings(port=self._admin))
        bare = HttpServer(swallow, AdminSettings(port=0).http)
        thread = Thread(target=lambda: asyncio.run(bare.serve(sockets=[self._bare])))
        group, self._other = (process_group(address, 1, 2) for address in self._groups)
        with server.running(), model.receive(group):
            thread.start()
            try:
                yield
            finally:
                self._process.communicate()
                bare.should_exit = True
                thread.join()

    def order(self, way: str) -> tuple[float, float]:
        """Return the seconds for which the trainer was held, and those after it until it had ended."""
        assert self._process.stdin is not None
        print(way, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> tuple[float, float]:
        assert self._process.stdout is not None
        held, rest = map(float, self._process.stdout.readline().split())
        return held, rest

    def bare_broadcast(self) -> float:
        """Return the seconds of a broadcast of as many bytes."""
        assert self._process.stdin is not None
        print("bare broadcast", file=self._process.stdin, flush=True)
        broadcast(self._other, self._swallowed)
        return self._answer()[1]

    def __enter__(self) -> _Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.communicate()
        self._bare.close()
        self._folder.cleanup()

    def hand_over(self, way: str, model: Model, held: list[float]) -> float:
        """Return the seconds until the model serves other weights; append those for which the trainer was held."""
        assert self._process.stdin is not None
        before, start = model.generation, time.perf_counter()
        print(way, file=self._process.stdin, flush=True)
        while model.generation == before:
            time.sleep(0.001)
        total = time.perf_counter() - start
        held.append(self._answer()[0])
        for file in self.folder.glob("*.safetensors"):
            file.unlink()
        return total


def _ways(large: Stored, model: Model, given: list[Tensors]) -> dict[str, Measure]:
    sets, paths = cycle(given), cycle(version.path for version in large.versions)
    target = {name: torch.empty_like(value) for name, value in given[0].items()}
    source, copy = Memory(large.nbytes, touched=True), Memory(large.nbytes, touched=True)
    peers = Peers()

    def swap(form: Callable[[Tensors], Any]) -> Measure:
        return lambda: seconds(lambda: model.swap(form(next(sets))))

    def copied() -> None:
        for name, value in next(sets).items():
            target[name].copy_(value)

    return {
        "mapping": swap(dict),
        "iterator": swap(lambda tensors: iter(tensors.items())),
        "background": lambda: seconds(lambda: model.stage(next(sets), background=True).commit()),
        "file": lambda: seconds(lambda: model.swap(next(paths))),
        "least": lambda: seconds(lambda: peers.copy_and_hash(copy, source)),
        "copy_": lambda: seconds(copied),
    }
