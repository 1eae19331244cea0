"""A load from a process of its own: each answer is checked against what eager gives for the weights that it names.

What it prints: answers by weights id; `mixed`, that no single set of weights gives; `stale`, of older weights than an
answer that had come before the request began; `failed`; and quantiles of the times of answers, in ms. No client asks a
second time before all have been answered once: whoever then stops a worker stops one of those that they talk to.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Barrier
from typing import Any

import numpy as np

from tests import ROOT
from tests.support import warm

INPUT = np.arange(6, dtype=np.float32).reshape(2, 3)
CLIENTS = 4
BACK = 0.1  # seconds until a lost connection is made again; by default a channel of gRPC fails at once for a second
CHANNEL = [(f"grpc.{which}_reconnect_backoff_ms", int(1000 * BACK)) for which in ("initial", "max")]
seen = [-1]  # the latest generation of an answer; clients are threads, and a moment too late does no harm
times: list[float] = []
begun = Barrier(CLIENTS)


def start(server: Any, expected: Mapping[str, np.ndarray[Any, Any]], folder: Path, seconds: float) -> Popen[str]:
    """Start the load on a server's two ports. expected: the outputs by weights id."""
    np.savez(folder / "expected.npz", **expected)
    ports = str(server.http_port), str(server.grpc_port)
    command = [warm.python(), "-m", "tests.server.load", *ports, str(folder / "expected.npz"), str(seconds)]
    return Popen(command, cwd=ROOT, stdout=PIPE, text=True)


def report_of(client: Popen[str]) -> dict[str, Any]:
    """Return what a load has printed, once it has ended."""
    report: dict[str, Any] = json.loads(client.communicate(timeout=120)[0])
    assert client.returncode == 0
    return report


def check_all_right(client: Popen[str]) -> dict[str, Any]:
    """Return the report of a load; no answer of it may be wrong or missing, and each set of weights must have some."""
    report = report_of(client)
    answers = report["answers"]
    assert (answers.pop("mixed"), answers.pop("stale"), answers.pop("failed")) == (0, 0, 0)
    assert all(count > 10 for count in answers.values())
    return report


def load(protocol: str, port: int, expected: dict[str, np.ndarray[Any, Any]], seconds: float) -> dict[str, int]:
    """Run one client, and count its answers by outcome."""
    options: dict[str, Any] = {}
    if protocol == "http":
        import tritonclient.http as triton
    else:
        import tritonclient.grpc as triton  # type: ignore[no-redef]

        options["channel_args"] = CHANNEL
    found = dict.fromkeys(expected, 0) | {"mixed": 0, "stale": 0, "failed": 0}
    tensor = triton.InferInput("x", [2, 3], "FP32")
    tensor.set_data_from_numpy(INPUT)
    with triton.InferenceServerClient(f"127.0.0.1:{port}", **options) as client:
        client.infer("tiny", [tensor])
        begun.wait(120)
        until = time.time() + seconds
        while time.time() < until:
            least, asked = seen[0], time.perf_counter()
            try:
                answer = client.infer("tiny", [tensor])
            except Exception as error:
                print(error, file=sys.stderr)
                found["failed"] += 1
                time.sleep(BACK)
                continue
            times.append(time.perf_counter() - asked)
            weights_id, generation = _served(protocol, answer.get_response())
            found["stale"] += generation < least
            seen[0] = max(seen[0], generation)
            right = np.allclose(answer.as_numpy("output"), expected[weights_id], rtol=1e-5, atol=1e-5)
            found[weights_id if right else "mixed"] += 1
    return found


def _served(protocol: str, answer: Any) -> tuple[str, int]:
    if protocol == "http":
        return answer["parameters"]["weights_id"], answer["parameters"]["generation"]
    return answer.parameters["weights_id"].string_param, answer.parameters["generation"].int64_param


def main(http_port: str, grpc_port: str, expected: str, seconds: str) -> None:
    """Print the sums over all clients as JSON."""
    table = dict(np.load(expected))
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(
                load, *(("http", int(http_port)) if number % 2 else ("grpc", int(grpc_port))), table, float(seconds)
            )
            for number in range(CLIENTS)
        ]
    results = [client.result() for client in clients]
    counted = {name: sum(result[name] for result in results) for name in results[0]}
    p50, p99 = (1000 * float(np.quantile(times, share)) for share in (0.5, 0.99))
    print(json.dumps({"answers": counted, "p50": p50, "p99": p99}))


if __name__ == "__main__":
    main(*sys.argv[1:])
