"""Transfer of bytes between two nodes of Ray: in chunks, like nodes of a fleet, and over a plain socket."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from weightswap_fleet.coordinator.actors import RemoteRelay, _Transfer
from weightswap_fleet.node.relay import CHUNK, Relay, RelayedObject, _Reading

NBYTES = 8 * CHUNK
READERS = 2  # reading threads of a staging


class _Memory:
    """`ByteSource` that takes almost no time."""

    where, unit, size = "memory", CHUNK, NBYTES

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        for buffer in buffers:
            buffer[:] = self._content[offset : offset + len(buffer)]
            offset += len(buffer)

    def await_stable_mtime(self) -> None: ...

    def check_unchanged(self, *, proven: bool = False) -> None: ...

    def close(self) -> None: ...


class _Between(_Transfer):
    """Fleet's relay between these two nodes."""

    def __init__(self, giver: ActorHandle[Any] | None = None) -> None:
        self._giver = giver

    def relay_of(self, node: str) -> RemoteRelay:
        assert self._giver is not None
        return RemoteRelay(self._giver)


class Giver:
    def __init__(self) -> None:
        self._content = memoryview(np.random.default_rng(0).bytes(NBYTES))
        self._transfer = _Between()
        self._relay = Relay("giver", self._transfer)

    def open(self, url: str) -> None:
        """Offer the bytes under a name, without any chunk yet."""
        self._relay._readings.clear()
        self._relay._readings[url] = _Reading(_Memory(self._content), CHUNK, self._transfer.put)

    def chunk(self, url: str, tag: str, number: int) -> Any:
        return self._relay.chunk(url, tag, number)

    def listen(self) -> int:
        """Return the port on which the first client gets the bytes."""
        server = socket.create_server(("127.0.0.1", 0))

        def send() -> None:
            with server, server.accept()[0] as to:
                to.sendall(self._content)

        threading.Thread(target=send, daemon=True).start()
        return int(server.getsockname()[1])

    def is_all(self, content: Any) -> bool:
        return bool(memoryview(content) == self._content)


class Taker:
    def __init__(self, giver: ActorHandle[Any]) -> None:
        self._giver, self._relay = giver, Relay("taker", _Between(giver))
        self._content = memoryview(bytearray(NBYTES))

    def fetch(self, url: str) -> float:
        """Return the seconds to receive all bytes chunk by chunk."""
        source = RelayedObject(self._relay, "giver", url, (NBYTES, ""), None)

        def read(offset: int) -> None:
            source.read_into([self._content[offset : offset + CHUNK]], offset)

        start = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(0, NBYTES, CHUNK)))
        return time.perf_counter() - start

    def receive(self, port: int) -> float:
        """Return the seconds to receive all bytes over a connection."""
        start, done = time.perf_counter(), 0
        with socket.create_connection(("127.0.0.1", port)) as connection:
            while done < NBYTES:
                done += connection.recv_into(self._content[done:])
        return time.perf_counter() - start

    def has_all(self) -> bool:
        """Return True if the bytes have arrived, and forget them."""
        whole: bool = ray.get(self._giver.is_all.remote(np.frombuffer(self._content, np.uint8)))
        self._content[:] = bytes(NBYTES)
        return whole


def pair() -> tuple[ActorHandle[Any], ActorHandle[Any]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    one, other = [node["NodeID"] for node in ray.nodes() if node["Alive"]][:2]

    def on(node: str, kind: type) -> Any:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(kind).options(scheduling_strategy=place, max_concurrency=8, num_cpus=0)

    giver = on(one, Giver).remote()
    return giver, on(other, Taker).remote(giver)
