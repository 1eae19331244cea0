"""FastAPI with a hand-written Open Inference Protocol: `python peer_fastapi_protocol.py WEIGHTS PORT`.

It does the necessary work of a server: tensors as JSON or as binary data are checked, and answered in the same form.
"""

import json
import sys
from math import prod
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from peer_network import WIDTH, loaded

HEADER, SIZE = "Inference-Header-Content-Length", "binary_data_size"
app = FastAPI()
model = loaded(sys.argv[1])


@app.post("/v2/models/net/infer")
async def infer(request: Request) -> Response:
    try:
        document, rows = read(await request.body(), request.headers.get(HEADER))
    except (KeyError, TypeError, ValueError) as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
    with torch.no_grad():
        output = model(torch.from_numpy(rows)).numpy()
    return written(output, document.get("parameters", {}).get("binary_data_output", False))


def read(body: bytes, header_length: str | None) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Return the document, and the rows of its one input. Raises KeyError, TypeError and ValueError."""
    end = len(body) if header_length is None else int(header_length)
    document = json.loads(body[:end])
    (tensor,) = document["inputs"]
    shape = tensor["shape"]
    if tensor["name"] != "input" or tensor["datatype"] != "FP32" or shape[1:] != [WIDTH] or not shape[0] > 0:
        raise ValueError(f"expected input, FP32, [-1, {WIDTH}]")
    size = tensor.get("parameters", {}).get(SIZE)
    if size is None:
        return document, np.array(tensor["data"], np.float32).reshape(shape)
    if size != len(body) - end or size != 4 * prod(shape):
        raise ValueError(f"{len(body) - end} bytes follow")
    return document, np.frombuffer(bytearray(body[end:]), np.float32).reshape(shape)


def written(output: np.ndarray[Any, Any], binary: bool) -> Response:
    """Return a response, as JSON or with binary data."""
    tensor: dict[str, Any] = {"name": "output", "datatype": "FP32", "shape": list(output.shape)}
    document = {"model_name": "net", "outputs": [tensor]}
    if not binary:
        tensor["data"] = output.reshape(-1).tolist()
        return JSONResponse(document)
    tensor["parameters"] = {SIZE: output.nbytes}
    head = json.dumps(document).encode()
    return Response(head + output.tobytes(), headers={HEADER: str(len(head))}, media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False, timeout_keep_alive=75)
