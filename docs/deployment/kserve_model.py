"""A model behind KServe's own Python server, that serves what a desired store wants.

python kserve_model.py --model_name tagger --artifact tagger.artifact --follow service
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import kserve
from kserve import InferOutput, InferRequest, InferResponse
from kserve.errors import InvalidInput, ModelNotReady
from kserve.utils.utils import generate_uuid

from weightswap_runtime import CallError, NoWeights, Unsupported, load
from weightswap_server import ServedMethod
from weightswap_server.errors import BadRequest


class Tagger(kserve.Model):
    def __init__(self, name: str, artifact: str, desired_store: str) -> None:
        super().__init__(name)
        self.model = load(artifact)
        self.method = ServedMethod(self.model, self.model.default_method)
        self.follower = self.model.follow(desired_store, interval=1)
        self.ready = True  # asked by KServe at its start alone; from then on `healthy` tells

    async def healthy(self) -> bool:
        return self.model.generation is not None

    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        return await asyncio.to_thread(self.answer, payload)

    def answer(self, request: InferRequest) -> InferResponse:
        binary = request.use_binary_outputs
        try:
            with self.model.pin() as pinned:
                outputs = self.method.answer(pinned, {x.name: x.as_numpy() for x in request.inputs})
                weights = {"weights_id": pinned.weights_id, "generation": str(pinned.generation)}
        except NoWeights as error:
            raise ModelNotReady(self.name, str(error)) from error
        except (BadRequest, CallError, Unsupported) as error:
            raise InvalidInput(str(error)) from error
        answer = InferResponse(
            request.id or generate_uuid(), self.name, [], parameters=weights, use_binary_outputs=binary
        )
        for told in self.method.outputs:
            array = outputs[told.name]
            answer.outputs.append(InferOutput(told.name, list(array.shape), told.datatype))
            answer.outputs[-1].set_data_from_numpy(array, binary_data=binary)
        return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[kserve.model_server.parser])
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--follow", required=True, metavar="STORE")
    options = parser.parse_args()
    kserve.ModelServer().start([Tagger(options.model_name, options.artifact, options.follow)])
