"""Graph archives and their documents."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from weightswap_runtime.engines.graph import Compiled, compile_graph
from weightswap_runtime.engines.graph_archive import read_program

CPU = torch.device("cpu")


Document = dict[str, Any]


def archived(program: ExportedProgram) -> bytes:
    saved = io.BytesIO()
    torch.export.save(program, saved)
    return saved.getvalue()


def compiled(raw: bytes, device: torch.device = CPU) -> Compiled:
    return compile_graph(read_program(raw).graph_module.graph, device)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


class Whole(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def documented(raw: bytes) -> Document:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("models/model.json"))
        document: Document = json.loads(archive.read(name))
    return document


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every position of a document, as its container and key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from parts(value[key])
