"""A server on the engine `onnx` answers, batches and swaps without torch; without its own extra, it names that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.export import Dim

from weightswap_exporter import export, pack

SERVE = """
import sys, threading
for name in ("torch", "onnxscript", "safetensors"):
    sys.modules[name] = None
import numpy as np
import tritonclient.http as triton
from weightswap_server import ModelSource, Server, Settings

artifact, first, second, out = sys.argv[1:]
model = ModelSource(artifact=artifact, weights=first, options={"engine": "onnx"}).open()
x = np.arange(8, dtype=np.float32).reshape(2, 4)
with Server({"net": model}, Settings(http_port=0, max_batch=8)).running() as server:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    while not client.is_server_ready():
        pass
    tensor = triton.InferInput("input", [2, 4], "FP32").set_data_from_numpy(x)
    before = client.infer("net", [tensor]).as_numpy("output")
    model.swap(second)
    after = client.infer("net", [tensor]).as_numpy("output")
    client.close()
np.savez(out, before=before, after=after)
"""


def test_without_torch(tmp_path: Path) -> None:
    expected, files = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        eager = nn.Linear(4, 3).eval()
        if seed == 1:
            shapes = {"input": {0: Dim("batch", max=64)}}
            out = tmp_path / "net.artifact"
            export(eager, (torch.zeros(2, 4),), out=out, dynamic_shapes=shapes, engines=["onnx"])
        files.append(str(pack(eager, out, out=tmp_path / f"v{seed}.safetensors").path))
        expected.append(eager(torch.arange(8.0).reshape(2, 4)).detach().numpy())
    found = tmp_path / "found.npz"
    subprocess.run([sys.executable, "-c", SERVE, str(out), *files, str(found)], check=True)
    with np.load(found) as answers:
        np.testing.assert_allclose(answers["before"], expected[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(answers["after"], expected[1], rtol=1e-5, atol=1e-5)


def test_without_its_extra() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from weightswap_tools.program import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, "serve", "x"], capture_output=True, text=True, check=False)
    expected = "MissingExtra: weightswap serve needs the extra `serve`: pip install 'weightswap[serve]'\n"
    assert (ended.returncode, ended.stderr) == (2, expected)
