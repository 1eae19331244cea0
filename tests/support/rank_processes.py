"""Ranks of a small model as processes, which play a written sequence of steps, and may be killed or stopped in it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.damage import damaged
from tests.support.ports import free_port
from tests.support.ranks import X, values, whole, write_set
from weightswap_runtime import Model, Ranks, load, process_group, write_delta
from weightswap_runtime.errors import RanksLost, RanksRefused, WeightswapError

TIMEOUT = 2.0  # seconds after which a rank that has stopped is lost
PATIENCE = 60.0  # seconds after which a rank that has not ended hangs


class Step(NamedTuple):
    """What all ranks do: "call", "swap", "delta" (a swap of what differs), "stage" (a swap beside calls), "refuse" (a
    swap that `rank` cannot do), or "roll back"."""

    what: str
    seed: int = 0
    rank: int = 0


class Blow(NamedTuple):
    """Signal for a rank, so many seconds after it has begun a step."""

    signal: int
    rank: int
    step: int
    delay: float


@dataclass
class Told:
    """What a rank told of its steps: the seeds of the answers to calls, and what ended it, if anything did."""

    answers: list[tuple[float, ...]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    lost: str = ""
    refused_later: list[str] = field(default_factory=list)
    crashed: str = ""


class _Player:
    """One rank, which knows what it has to serve."""

    def __init__(self, model: Model, folder: Path, size: int, residency: str) -> None:
        self._model, self._folder, self._size = model, folder, size
        self._served, self._before = 0, None if residency == "single" else 0
        self.told = Told()

    def play(self, step: Step) -> None:
        model, seeds = self._model, (self._served, self._before)
        if step.what == "call":
            self._call()
        elif step.what == "swap":
            self._committed(model.swap(self._set(step.seed)), step.seed)
        elif step.what == "delta":
            if self._served != step.seed:
                receipt = model.swap(_delta(self._folder, self._served, step.seed))
                assert receipt.kind == "delta"
                self._committed(receipt, step.seed)
        elif step.what == "stage":
            staged = model.stage(self._set(step.seed), background=True, rate_limit=10_000)
            self._call()
            self._call()
            self._committed(staged.commit(), step.seed)
        elif step.what == "refuse":
            path = self._folder / "damaged" if model.ranks and model.ranks.rank == step.rank else self._set(step.seed)
            self._refused(lambda: model.swap(path), seeds[0])
        elif model.previous_weights_id is None:
            self._refused(model.rollback, seeds[0])
        else:
            self._committed(model.rollback(), seeds[1] or 0)

    def _set(self, seed: int) -> Path:
        return self._folder / f"{seed}.safetensors"

    def _call(self) -> None:
        output, marks = self._model(X)
        self.told.answers.append(tuple(marks.tolist()))
        expected = whole(values(self._served), X)
        if tuple(marks.tolist()) != (float(self._served),) * self._size or not torch.allclose(
            output, expected, atol=1e-4
        ):
            raise AssertionError(f"serves {marks.tolist()}, expected {self._served}")

    def _committed(self, receipt: Any, seed: int) -> None:
        self._before, self._served = self._served, seed
        self.told.ids.append(receipt.weights_id)
        self._call()

    def _refused(self, change: Any, seed: int) -> None:
        before = self._model.weights_id
        try:
            change()
        except RanksRefused:
            pass
        else:
            raise AssertionError("was not refused")
        if self._model.weights_id != before:
            raise AssertionError(f"a refusal changed the weights {seed}")
        if self._model.residency == "double" and self._model.previous_weights_id is None:
            self._before = None
        self._call()


def _run(
    rank: int, size: int, address: str, folder: Path, steps: Sequence[Step], residency: Any, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    told = Told()
    try:
        ranks = Ranks(process_group(address, rank, size), timeout=TIMEOUT)
        model = load(folder / "artifact", folder / "0.safetensors", ranks=ranks, residency=residency)
        player = _Player(model, folder, size, residency)
        told = player.told
        for number, step in enumerate(steps):
            pipe.send(number)
            player.play(step)
    except RanksLost as error:
        told.lost = str(error)
        for change in (lambda: model(X), lambda: model.swap(folder / "0.safetensors"), model.rollback):
            try:
                change()
            except WeightswapError as refused:
                told.refused_later.append(type(refused).__name__)
    except BaseException as error:
        told.crashed = f"{type(error).__name__}: {error}"
    pipe.send(told)


def play(folder: Path, size: int, residency: str, steps: Sequence[Step], blow: Blow | None = None) -> list[Told | None]:
    """Let ranks play; return what each told, None for one that was killed or stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    address = f"tcp://127.0.0.1:{free_port()}"
    pipes, processes = [], []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(rank, size, address, folder, steps, residency, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        if blow is not None:
            _strike(processes[blow.rank].pid, pipes[blow.rank], blow)
        return [None if blow and rank == blow.rank else _told(pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _strike(pid: int | None, pipe: Connection, blow: Blow) -> None:
    for message in _messages(pipe):
        if message == blow.step or isinstance(message, Told):
            break
    time.sleep(blow.delay)
    os.kill(pid or 0, blow.signal)


def _messages(pipe: Connection) -> Iterator[Any]:
    while pipe.poll(PATIENCE):
        yield pipe.recv()
    raise AssertionError("a rank hangs")


def _told(pipe: Connection) -> Told:
    return next(message for message in _messages(pipe) if isinstance(message, Told))


def _delta(folder: Path, old: int, new: int) -> Path:
    return folder / f"{old}-{new}.safetensors"


def prepare(folder: Path, size: int) -> Path:
    """Write what ranks play with: the artifact, four sets of weights, the deltas between them, and a damaged set."""
    from tests.support.ranks import split_artifact

    split_artifact(folder / "artifact", size)
    sets = [write_set(folder / f"{seed}.safetensors", seed, size) for seed in range(4)]
    for old, new in permutations(range(4), 2):
        write_delta(sets[old], sets[new], out=_delta(folder, old, new))
    damaged(folder / "1.safetensors", folder / "damaged")
    return folder


SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
