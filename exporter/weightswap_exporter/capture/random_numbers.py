"""Refusal of calls that seed random numbers: a graph keeps no seed, and would draw other numbers than the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

from weightswap_runtime.errors import CaptureError

INSTEAD = (
    "draw the numbers once, before the export, and keep them in a persistent buffer, so that checkpoints have them"
)


@contextmanager
def no_seeding() -> Iterator[None]:
    """Raise CaptureError if the block calls `torch.manual_seed` in this thread."""
    thread, seed = get_ident(), torch.manual_seed

    def refuse(value: Any) -> torch.Generator:
        if get_ident() != thread:
            return seed(value)
        raise CaptureError(f"a call seeds torch's random numbers, which a graph cannot do: {INSTEAD}")

    with mock.patch.object(torch, "manual_seed", refuse), mock.patch.object(torch.random, "manual_seed", refuse):
        yield


def check_no_generator(program: ExportedProgram) -> None:
    """Raise CaptureError for a generator: each call of a graph would continue its sequence of numbers."""
    if any(isinstance(value, torch.Generator) for value in program.constants.values()):
        raise CaptureError(f"a call draws random numbers from a torch.Generator, which a graph cannot seed: {INSTEAD}")
