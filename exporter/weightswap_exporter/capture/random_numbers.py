"""Random numbers that a call seeds itself: a graph keeps no seed, so that it would draw others than the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram

from weightswap_runtime.errors import CaptureError

INSTEAD = "draw the numbers once, before the export, and keep them as a buffer"


@contextmanager
def no_seeding() -> Iterator[None]:
    """A block in which `torch.manual_seed`, called by this thread, raises CaptureError."""
    mine, seed = get_ident(), torch.manual_seed

    def refuse(value: Any) -> torch.Generator:
        if get_ident() != mine:
            return seed(value)
        raise CaptureError(f"a call seeds torch's random numbers, which no graph does: {INSTEAD}")

    with mock.patch.object(torch, "manual_seed", refuse), mock.patch.object(torch.random, "manual_seed", refuse):
        yield


def check_no_generator(program: ExportedProgram) -> None:
    """Raise CaptureError for a generator, which each call of a graph would take on from where the last one stopped."""
    if any(isinstance(value, torch.Generator) for value in program.constants.values()):
        raise CaptureError(f"a call draws random numbers from a torch.Generator, which no graph seeds: {INSTEAD}")
