"""LitServe, which calls models in a separate process: `python peer_litserve.py WEIGHTS PORT`."""

import sys
from base64 import b64decode

import torch
from litserve import LitAPI, LitServer
from peer_network import as_rows, loaded
from starlette.responses import Response


class Network(LitAPI):
    def setup(self, device: str) -> None:
        self.model = loaded(sys.argv[1])

    def decode_request(self, request: dict[str, str]) -> bytes:
        return b64decode(request["rows"])  # LitServe accepts JSON

    def predict(self, x: bytes) -> bytes:
        with torch.no_grad():
            return self.model(as_rows(x)).numpy().tobytes()

    def encode_response(self, output: bytes) -> Response:
        return Response(output)


if __name__ == "__main__":
    server = LitServer(Network(), accelerator="cpu")
    server.run(port=int(sys.argv[2]), generate_client_file=False, log_level="error", timeout_keep_alive=75)
