"""A load from a process of its own: each answer is checked against what eager gives for the weights that it names."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

INPUT = np.arange(6, dtype=np.float32).reshape(2, 3)
CLIENTS = 4


def load(protocol: str, port: int, expected: dict[str, np.ndarray[Any, Any]], until: float) -> dict[str, int]:
    """One client's answers, by weights id; `mixed`: those that no single set of weights gives."""
    if protocol == "http":
        import tritonclient.http as triton
    else:
        import tritonclient.grpc as triton  # type: ignore[no-redef]

    found = dict.fromkeys(expected, 0) | {"mixed": 0, "failed": 0}
    tensor = triton.InferInput("x", [2, 3], "FP32")
    tensor.set_data_from_numpy(INPUT)
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        while time.time() < until:
            try:
                answer = client.infer("tiny", [tensor])
            except Exception as error:
                print(error, file=sys.stderr)
                found["failed"] += 1
                continue
            parameters = answer.get_response()
            weights_id = (
                parameters["parameters"]["weights_id"]
                if protocol == "http"
                else parameters.parameters["weights_id"].string_param
            )
            right = np.allclose(answer.as_numpy("output"), expected[weights_id], rtol=1e-5)
            found[weights_id if right else "mixed"] += 1
    return found


def main(http_port: str, grpc_port: str, expected: str, seconds: str) -> None:
    """Prints the sum over all clients as JSON."""
    table = dict(np.load(expected))
    until = time.time() + float(seconds)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [
            pool.submit(load, *(("http", int(http_port)) if number % 2 else ("grpc", int(grpc_port))), table, until)
            for number in range(CLIENTS)
        ]
    results = [client.result() for client in clients]
    print(json.dumps({name: sum(result[name] for result in results) for name in results[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
