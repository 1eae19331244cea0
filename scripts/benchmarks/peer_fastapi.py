"""FastAPI around a state dict, as people write it: `python peer_fastapi.py WEIGHTS PORT`."""

import sys

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from peer_network import as_rows, loaded

app = FastAPI()
model = loaded(sys.argv[1])


@app.post("/predict")
async def predict(request: Request) -> Response:
    rows = as_rows(await request.body())
    with torch.no_grad():
        return Response(model(rows).numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False, timeout_keep_alive=75)
