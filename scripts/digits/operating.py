"""Server of `weightswap serve` around the same model: HTTP, one client, and a page for the operator."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import torch

from weightswap_runtime import Model
from weightswap_server import AdminSettings, Server, Settings

PAUSE_SECONDS = 0.01
PATH = "/v2/models/digits/infer"


class Operated(NamedTuple):
    """Address of the operator's page, and the token to enter there."""

    address: str
    token: str


@contextmanager
def operated(model: Model, image: torch.Tensor, folder: Path) -> Iterator[Operated]:
    """Serve a model during the block, with a client that sends an image repeatedly; `folder` has files for staging."""
    token = os.environ["WEIGHTSWAP_ADMIN_TOKEN"] = secrets.token_hex(16)
    server = Server({"digits": model}, Settings(http_port=0), AdminSettings(port=0, allow=(str(folder.resolve()),)))
    ended = Event()
    with server.running():
        assert server.admin is not None
        client = Thread(target=_ask, args=(server, image, ended), daemon=True)
        client.start()
        try:
            yield Operated(f"{server.admin.where}/", token)
        finally:
            ended.set()
            client.join()


def _ask(server: Server, image: torch.Tensor, ended: Event) -> None:
    tensor = {"name": "images", "datatype": "FP32", "shape": list(image.shape), "data": image.flatten().tolist()}
    body = json.dumps({"inputs": [tensor]})
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port)) as connection:
        while not ended.wait(PAUSE_SECONDS):
            if server.service.ready:  # weights are loaded
                connection.request("POST", PATH, body)
                connection.getresponse().read()
