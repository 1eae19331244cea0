"""A trainer in a process of its own: `trainer_process.py ARTIFACT FILE MEGABYTES SOCKET FOLDER`.

Each line of its input is one step and one way to hand over the weights, `send` or `publish`; each line that it prints
is the number of seconds for which the trainer was held.
"""

from __future__ import annotations

import sys
import time
from itertools import count

import torch
from safetensors.torch import load_file
from subjects import Stack

from weightswap_exporter import publish
from weightswap_runtime import Artifact, Sender


def main(artifact: str, file: str, megabytes: str, at: str, folder: str) -> None:
    with torch.device("meta"):
        model = Stack(int(megabytes) * 1_000_000).eval()
    model.load_state_dict(load_file(file), assign=True)
    opened = Artifact.open(artifact)
    with Sender(at, opened, timeout=120) as sender, torch.no_grad():
        for step, way in zip(count(), sys.stdin, strict=False):
            next(model.parameters()).add_(1e-3)
            start = time.perf_counter()
            if way.strip() == "send":
                sending = sender.send(model, wait=False)
            else:
                sending = publish(model, folder, opened, step=step)
            held = time.perf_counter() - start
            sending.wait()
            print(held, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
