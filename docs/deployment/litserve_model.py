"""A model behind LitServe, each of whose workers serves what a desired store wants.

python litserve_model.py tagger.artifact service --port 8000 --workers 2
"""

import argparse
from typing import Any

import numpy as np
from fastapi import HTTPException
from litserve import LitAPI, LitServer

from weightswap_runtime import CallError, Unsupported, load
from weightswap_server import ServedMethod
from weightswap_server.errors import BadRequest


class Tagger(LitAPI):
    def __init__(self, artifact: str, desired_store: str) -> None:
        super().__init__()
        self.artifact, self.desired_store = artifact, desired_store

    def setup(self, device: str) -> None:
        self.model = load(self.artifact)
        self.method = ServedMethod(self.model, self.model.default_method)
        self.follower = self.model.follow(self.desired_store, interval=1)
        self.follower.wait(timeout=300)  # a worker is ready once it serves what is desired

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        dtypes = self.method.dtypes
        if unknown := [name for name in request if name not in dtypes]:
            raise HTTPException(400, f"{unknown[0]}: no such input; expected nested lists by name: {', '.join(dtypes)}")
        try:
            return {name: np.asarray(value, dtypes[name]) for name, value in request.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise HTTPException(400, str(error)) from error

    def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        try:
            with self.model.pin() as pinned:
                outputs = self.method.answer(pinned, inputs)
                return {"outputs": outputs, "weights_id": pinned.weights_id, "generation": pinned.generation}
        except (BadRequest, CallError, Unsupported) as error:
            raise HTTPException(400, str(error)) from error

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output | {"outputs": {name: array.tolist() for name, array in output["outputs"].items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact")
    parser.add_argument("desired_store")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    server = LitServer(
        Tagger(options.artifact, options.desired_store), accelerator="cpu", workers_per_device=options.workers
    )
    server.run(port=options.port, generate_client_file=False)
