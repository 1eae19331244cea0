"""A trainer in a process of its own: `trainer_process.py ARTIFACT FILE MEGABYTES FOLDER SOCKET ADMIN BARE GROUP OTHER`.

Each line of its input is one step and one way to hand over the weights. Each line that it prints are the seconds for
which the trainer was held, and those after that until they were served. The ways `bare upload` and `bare broadcast`
hand over as many bytes, at which nobody looks.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import torch
from peers import broadcast
from safetensors.torch import load_file
from subjects import Stack

from weightswap_exporter import publish
from weightswap_runtime import Artifact, Sender, process_group

PIECE = 1 << 20  # bytes


def main(artifact: str, file: str, megabytes: str, folder: str, at: str, admin: str, bare: str, *groups: str) -> None:
    with torch.device("meta"):
        model = Stack(int(megabytes) * 1_000_000).eval()
    model.load_state_dict(load_file(file), assign=True)
    opened, plain = Artifact.open(artifact), torch.zeros(int(megabytes) * 1_000_000, dtype=torch.uint8)
    group, other = (process_group(address, 0, 2) for address in groups)
    with ExitStack() as stack, torch.no_grad():
        ways: dict[str, Callable[[int], Any]] = {
            "publish": lambda step: publish(model, folder, opened, step=step).wait,
            "bare upload": lambda _: lambda: upload(bare, plain.numpy().data),
            "bare broadcast": lambda _: lambda: broadcast(other, plain),
        }
        for name, to in (("send", at), ("upload", admin), ("broadcast", group)):
            sender = stack.enter_context(Sender(to, opened, timeout=120))
            ways[name] = lambda _, sender=sender: sender.send(model, wait=False).wait  # type: ignore[misc]
        for step, way in zip(count(), sys.stdin, strict=False):
            next(model.parameters()).add_(1e-3)
            start = time.perf_counter()
            wait = ways[way.strip()](step)
            held = time.perf_counter() - start
            wait()
            print(held, time.perf_counter() - start - held, flush=True)


def upload(url: str, content: memoryview) -> None:
    def pieces() -> Iterator[memoryview]:
        for begin in range(0, len(content), PIECE):
            yield content[begin : begin + PIECE]

    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("PUT", "/", pieces(), {"Content-Length": str(len(content))})
        connection.getresponse().read()


if __name__ == "__main__":
    main(*sys.argv[1:])
