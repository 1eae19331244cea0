"""Ranks of one model: what a rank reads of a file, what a vote and a commit take, and calls beside a staging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from report import Goal, Row, compared
from settings import Settings
from timing import Measure, in_turn, seconds
from torch import nn

from weightswap_exporter import Parallel, export, pack, skeleton
from weightswap_runtime import Ranks, load, process_group
from weightswap_runtime.format.canonical import new_weight_file
from weightswap_runtime.format.cuts import Rank
from weightswap_runtime.format.manifest import Cut, NamedTensor, Split
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.jobs import Job
from weightswap_runtime.memory.arena import ArenaLayout, HostArena
from weightswap_runtime.staging.reading import read_tensors
from weightswap_runtime.staging.shares import read_shares
from weightswap_runtime.threads import WorkerThreads

from .memory import free_port

SIZES = (2, 4)
NOT_MORE = Goal("ratio", "at most", 1.0)
BESIDE = Goal("ratio", "at most", 1.3)
LAYERS, CALLS = 16, 20
VOTE = 4096  # bytes
GATHERS, MORE_MS = 3, 1.0  # what a vote and a commit may take: so many exchanges, and so many ms
Timings = dict[str, list[float]]


def rows(settings: Settings) -> Iterator[Row]:
    """Measure on a file in the page cache, and with two processes that have a small model together."""
    with TemporaryDirectory(prefix="weightswap-bench-") as name:
        yield from _reading(Path(name), settings)
        yield from _together(Path(name), settings)


def _reading(folder: Path, settings: Settings) -> Iterator[Row]:
    """Compare a rank's part with the whole file, both hashed, in memory that was used before."""
    width = round((settings.megabytes * 1e6 / 4 / LAYERS) ** 0.5 / 64) * 64
    table = [NamedTensor(name=f"{number:02}", dtype="F32", shape=(width, width)) for number in range(LAYERS)]
    path, names = folder / "whole.safetensors", {row.name: row.name for row in table}
    content = ((row.name, [torch.randn(row.shape).numpy().reshape(-1).view("u1").data]) for row in table)
    parts = [row.row for row in table]
    with new_weight_file(path, parts, content, graph_id="", labels={}, cast={}, with_blocks=True) as (file, _):
        file.rename(path)
    workers, arenas = WorkerThreads(), {"the whole file": HostArena(ArenaLayout(table))}
    for what, dim in (("rows", 0), ("columns", 1)):
        for size in SIZES:
            split = Split(size=size, whole="", cuts={name: Cut(dim=dim) for name in names})
            arenas[f"{what}, one of {size}"] = HostArena(ArenaLayout(table, Rank(split, size - 1)))
    with open_weights(path) as weights:

        def reading(arena: HostArena) -> Measure:
            if arena.layout.shares:
                return lambda: seconds(lambda: read_shares(weights, names, arena, workers, Job()))
            whole = {name: (name,) for name in names}
            return lambda: seconds(lambda: read_tensors(weights, whole, arena, workers, Job()))

        timings = in_turn({what: reading(arena) for what, arena in arenas.items()}, settings.rounds)
    ms = {what: [1e3 * second for second in values] for what, values in timings.items()}
    peer, whole = next(iter(ms.items()))
    for size in SIZES:
        nth = Goal("ratio", "at most", 1.15 / size)
        for what, goal in (("rows", nth), ("columns", NOT_MORE)):
            title = f"{path.stat().st_size / 1e9:.2f} GB, {what} of one of {size} ranks"
            yield compared(title, "ms", ms[f"{what}, one of {size}"], peer, whole, goal)


class Layers(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS // 2))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [batch, width]. Returns the same shape."""
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


def _together(folder: Path, settings: Settings) -> Iterator[Row]:
    """Compare commits of two ranks with bare exchanges, and calls beside a staging with others."""
    with skeleton():
        model = Layers()
    x = torch.zeros(2, 512)
    plan = {"up.*": "colwise", "down.*": "rowwise"}
    artifact = export(model, (x,), out=folder / "layers.artifact", parallel=Parallel(2, plan))
    for seed in range(2):
        torch.manual_seed(seed)
        pack(Layers(), artifact, out=folder / f"{seed}.safetensors")
    address = f"tcp://127.0.0.1:{free_port()}"
    other = get_context("spawn").Process(target=_play, args=(1, address, folder, settings.rounds))
    other.start()
    timings = _play(0, address, folder, settings.rounds)
    other.join()
    ms = {what: [1e3 * second for second in values] for what, values in timings.items()}
    bare = [GATHERS * one + MORE_MS for one in ms["gather"]]
    peer = f"{GATHERS} exchanges of 4 KiB and {MORE_MS:.0f} ms"
    yield compared("2 ranks: vote and commit", "ms", ms["commit"], peer, bare, NOT_MORE)
    yield compared("2 ranks: a call", "ms", ms["call"], "without a vote", ms["unchecked"])
    yield compared("2 ranks: a call while others are staged", "ms", ms["beside"], "nothing staged", ms["call"], BESIDE)


def _play(number: int, address: str, folder: Path, rounds: int) -> Timings:
    """Do the same on both ranks; return the seconds."""
    torch.set_num_threads(1)
    group = process_group(address, number, 2)
    ranks = Ranks(group, timeout=60.0)
    model = load(folder / "layers.artifact", folder / "0.safetensors", ranks=ranks)
    x, paths = torch.ones(2, 512), cycle([folder / "1.safetensors", folder / "0.safetensors"])
    mine = torch.zeros(VOTE, dtype=torch.uint8)
    timings: Timings = {"gather": [], "commit": [], "call": [], "unchecked": [], "beside": []}

    def calls() -> list[float]:
        return [seconds(lambda: model(x)) for _ in range(CALLS)]

    for _ in range(rounds):
        out = [torch.empty_like(mine) for _ in range(2)]
        staged = model.stage(next(paths), background=True).wait()
        _ = model(x)  # which both ranks end at one time
        timings["gather"].append(seconds(lambda out=out: group.allgather([out], [mine]).wait()))
        timings["commit"].append(seconds(staged.commit))
        timings["call"] += calls()
        ranks.check_calls = False
        timings["unchecked"] += calls()
        ranks.check_calls = True
        with model.stage(next(paths), background=True, rate_limit=2e6):
            time.sleep(0.05)
            timings["beside"] += calls()
    return timings
