"""Four workers take the memory of one, their libraries aside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import ROOT
from weightswap_exporter import export, pack

WIDTH = 4096


def _write(folder: Path, nbytes: int) -> list[str]:
    """Write an artifact with so many bytes of weights, and two sets of them. Returns the arguments of `serve`."""
    model = nn.Linear(WIDTH, max(1, nbytes // (4 * WIDTH)), bias=False).eval()
    export(model, (torch.zeros(1, WIDTH),), out=folder / "m.artifact")
    (folder / "outbox").mkdir()
    pack(model, folder / "m.artifact", out=folder / "1.safetensors")
    with torch.no_grad():
        model.weight += 1
    pack(model, folder / "m.artifact", out=folder / "2.safetensors")
    return [str(folder / "m.artifact"), "-w", str(folder / "1.safetensors"), "--watch", str(folder / "outbox")]


def _drained(arguments: list[str], folder: Path, workers: int) -> int:
    """Return the bytes of owner and workers after both arenas were served; shared pages count once."""
    program = "from weightswap_tools.program import main; main()"
    options = ["--port", "0", "--interval", "0.1", "--workers", str(workers), "--threads", "1"]
    command = [sys.executable, "-c", program, "serve", *arguments, *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[0])
        (folder / "2.safetensors").rename(folder / "outbox" / "2.safetensors")
        while b'"versions":["1"]' not in urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m").read():
            time.sleep(0.1)
        for _ in range(20 * workers):  # all have touched the new weights
            body = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,%d],"data":[%s]}]}' % (
                WIDTH,
                b",".join([b"0"] * WIDTH),
            )
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m/infer", body).read()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == workers + 1
        rollups = [Path(f"/proc/{child}/smaps_rollup").read_text() for child in children]
        shares = [int(found) for rollup in rollups for found in re.findall(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)]
        return sum(shares) << 10
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        process.stdout.close()
        (folder / "outbox" / "2.safetensors").rename(folder / "2.safetensors")


def beyond_libraries(folder: Path, nbytes: int) -> dict[int, int]:
    """Return the bytes of one worker and of four, with the owner's, beyond those for a model without weights."""
    taken: dict[tuple[str, int], int] = {}
    for name, size in (("small", 0), ("large", nbytes)):
        (folder / name).mkdir()
        arguments = _write(folder / name, size)
        taken |= {(name, workers): _drained(arguments, folder / name, workers) for workers in (1, 4)}
    return {workers: taken["large", workers] - taken["small", workers] for workers in (1, 4)}


@pytest.mark.slow
def test_four_workers_take_the_memory_of_one(tmp_path: Path) -> None:
    nbytes = 300 << 20
    found = beyond_libraries(tmp_path, nbytes)
    print({workers: f"{taken >> 20} MiB" for workers, taken in found.items()})
    assert found[1] > 1.9 * nbytes  # both arenas
    assert found[4] <= 1.2 * found[1]
