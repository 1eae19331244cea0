"""Staging, commits and whole swaps."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import safetensors.torch
import torch
from models import Stack, Stored, stored
from peers import Memory, Peers
from report import Goal, Row, compared, spread
from settings import Settings
from timing import Measure, alternate, calling, freed, seconds

from weightswap_runtime import Model, SwapReceipt, load

SMALL = 1_000_000
CALLERS = 2
MICRO = 1e6
MILLI = 1e3

HALF_AS_FAST = Goal("ratio", "at least", 0.5)
INSTANT = Goal("p99", "at most", 100)
ONE_COPY = Goal("ratio", "at most", 1.3)


def rows(settings: Settings) -> Iterator[Row]:
    """Files of two sizes; every part frees its memory before the next one starts."""
    with stored(settings.nbytes) as large:
        for part in (_staging, _first_staging, _commits, _single, _whole):
            with freed():
                yield from part(large, settings.rounds)
    with stored(SMALL) as small:
        yield from _commits(small, settings.rounds)


def _size(stored: Stored) -> str:
    return f"{stored.nbytes / 1e6:.0f} MB" if stored.nbytes < 1e8 else f"{stored.nbytes / 1e9:.2f} GB"


def _staging(stored: Stored, rounds: int) -> Iterator[Row]:
    """Into memory that has been written to before."""
    peers, memory = Peers(), Memory(_file_size(stored), touched=True)
    model = _warm(stored)
    paths = cycle(version.path for version in stored.versions)
    path = stored.versions[0].path

    def stage() -> float:
        start = time.perf_counter()
        staged = model.stage(next(paths))
        taken = time.perf_counter() - start
        staged.commit()
        return taken

    def rates(subject: Measure, peer: Measure) -> ...:
        return alternate(subject, peer, rounds).map(lambda taken: stored.nbytes / taken / 1e9)

    def read() -> float:
        return seconds(lambda: peers.read(path, memory))

    def read_and_hash() -> float:
        return seconds(lambda: peers.read_and_hash(path, memory))

    def hashing() -> float:
        return seconds(lambda: peers.hash(memory))

    plain = f"preadv, {peers.threads} threads"
    what = f"stage {_size(stored)}, warm arena"
    yield compared(what, "GB/s", plain, rates(stage, read), HALF_AS_FAST)
    yield compared(what, "GB/s", "preadv + BLAKE3 without checks", rates(stage, read_and_hash))
    yield compared(f"BLAKE3 alone, {peers.threads} threads", "GB/s", plain, rates(hashing, read))
    stored.check(model)
