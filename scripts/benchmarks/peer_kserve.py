"""KServe's Python server around a state dict: `python peer_kserve.py WEIGHTS PORT`."""

import logging
import sys

import kserve
import torch
from kserve import InferOutput, InferRequest, InferResponse
from peer_network import loaded


class Network(kserve.Model):
    def load(self) -> bool:
        self.network = loaded(sys.argv[1])
        self.ready = True
        return True

    async def predict(self, payload: InferRequest, headers: object = None, response_headers: object = None) -> object:
        rows = torch.from_numpy(payload.inputs[0].as_numpy().copy())
        with torch.no_grad():
            logits = self.network(rows).numpy()
        output = InferOutput("output", list(logits.shape), "FP32")
        output.set_data_from_numpy(logits)
        return InferResponse("1", self.name, [output], use_binary_outputs=True)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # KServe logs four lines per request
    model = Network("net")
    model.load()
    port = int(sys.argv[2])
    kserve.ModelServer(http_port=port, enable_grpc=False).start([model])
