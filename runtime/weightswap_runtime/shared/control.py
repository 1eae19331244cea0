"""The control page, by which an owner and its workers agree on which of two shared arenas may be read or written.

The owner writes a word, the served generation, and waits until no worker holds the idle arena before it overwrites
that. A worker marks the served arena as held, and then reads the word again (`WorkerGate`). One of the two must see the
other's write. That takes a fence between the write and the read on both sides, but a call has no time for one: so the
owner alone fences, with membarrier(2), which makes a fence of whatever each worker is doing just then.

Layout: a page of words; a slot of words for each worker; then four cells: the descriptions of the weights in the two
arenas, by the parity of their generation, and two histories, of which the later one counts.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, TypeVar

import msgspec

from weightswap_runtime.decoding import from_msgpack
from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.format.identity import Counts, Identity
from weightswap_runtime.live.receipt import SwapReceipt

_PAGE: Final = 4096  # bytes: the words of the model, before the slots; all parts are whole pages
_SLOT: Final = 256  # bytes: a cache line for each of its words, so that workers do not slow each other down
_HISTORY: Final = 1 << 20  # bytes of each of the two histories
_LABELS: Final = 1 << 20  # bytes of a description that labels may take
_WORD, _WORKERS, _UNLOADED, _TRIAL, _TRIALS = 8, 16, 17, 24, 25  # offsets in the page, in words of 8 bytes
_GRAPH: Final = slice(256, 320)  # bytes of the page: the id of the graph that is served
_PID, _HOLDS, _UNFENCED = 0, (8, 16), 24  # offsets in a slot, in words
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}.get(platform.machine())  # number of the system call
_GLOBAL, _GLOBAL_EXPEDITED, _REGISTER = 1, 2, 4  # its commands
_PAUSE = 0.05  # seconds: without the call, every core has long written what it had buffered
D = TypeVar("D", bound="Summary")


class Control:
    """A process's view of a control page. Its words of 8 bytes are read and written atomically."""

    def __init__(self, descriptor: int, workers: int | None = None) -> None:
        """workers: the number of slots, for the process that creates the page; None: read it from the page."""
        memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(memory).cast("Q")
        if workers is not None:
            self._words[_WORKERS] = workers
        self.workers = self._words[_WORKERS]
        begin = _cells_begin(self.workers)
        description_size = (len(memory) - begin - 2 * _HISTORY) // 2
        sizes = (description_size, description_size, _HISTORY, _HISTORY)
        cells = [_Cell(memoryview(memory)[a:b]) for a, b in pairwise(accumulate(sizes, initial=begin))]
        self.descriptions, self.histories = (cells[0], cells[1]), (cells[2], cells[3])

    @property
    def word(self) -> int:
        """The generation of the next commit: one more than the served one; 0 before the first weights."""
        return int(self._words[_WORD])

    @property
    def generation(self) -> int | None:
        """The generation that is served; None before the first weights."""
        return self.word - 1 if self.word else None

    @property
    def graph_id(self) -> str:
        """The id of the graph that all processes serve; empty before the first owner."""
        return bytes(self._words.cast("B")[_GRAPH]).rstrip(b"\0").decode()

    @graph_id.setter
    def graph_id(self, value: str) -> None:
        self._words.cast("B")[_GRAPH] = value.encode().ljust(_GRAPH.stop - _GRAPH.start, b"\0")

    @property
    def unloaded(self) -> bool:
        """True if an operator has unloaded the model, so that requests are refused."""
        return bool(self._words[_UNLOADED])

    @unloaded.setter
    def unloaded(self, value: bool) -> None:
        self._words[_UNLOADED] = value

    def commit(self, generation: int) -> None:
        """Serve a generation: calls that begin from now on use it."""
        self._words[_WORD] = generation + 1
        self.fence()

    @property
    def trial(self) -> int:
        """The word of the trial; 0 if there is none."""
        return int(self._words[_TRIAL])

    def begin_trial(self, parity: int) -> None:
        """Let workers call the described weights in the arena of a parity."""
        self._words[_TRIALS] += 1  # so that no later trial has the word of this one
        self.fence()  # the weights must be visible before the word
        self._words[_TRIAL] = 2 * self._words[_TRIALS] + parity
        self.fence()

    def end_trial(self) -> None:
        """End the trial: no worker begins a call of it from now on."""
        if self._words[_TRIAL]:
            self._words[_TRIAL] = 0
            self.fence()

    def fence(self) -> None:
        """Make the earlier stores of all processes visible to all."""
        _fence(registered=not any(self._slot_word(slot, _UNFENCED) for slot in range(self.workers)))

    def fill_slot(self, slot: int, pid: int) -> None:
        """Take a slot for a worker."""
        self.empty_slot(slot)
        self._words[self._at(slot, _UNFENCED)] = not _has_fences()
        self._words[self._at(slot, _PID)] = pid

    def empty_slot(self, slot: int) -> None:
        """Empty the slot of a worker that has ended or died, so that it holds no arena any more."""
        for word in (_PID, *_HOLDS, _UNFENCED):
            self._words[self._at(slot, word)] = 0

    def hold(self, slot: int, parity: int) -> None:
        """Mark the arena of a parity as held by a worker, who has leases in it."""
        self._words[self._at(slot, _HOLDS[parity])] = 1

    def let_go(self, slot: int, parity: int) -> None:
        """Remove the mark of `hold`."""
        self._words[self._at(slot, _HOLDS[parity])] = 0

    def holders(self, parity: int) -> list[int]:
        """Return the ids of the processes that hold the arena of a parity."""
        slots = [slot for slot in range(self.workers) if self._slot_word(slot, _HOLDS[parity])]
        return [self._slot_word(slot, _PID) for slot in slots]

    @property
    def processes(self) -> list[int]:
        """The process id of each slot; 0 for a free one."""
        return [self._slot_word(slot, _PID) for slot in range(self.workers)]

    def _slot_word(self, slot: int, word: int) -> int:
        return int(self._words[self._at(slot, word)])

    @staticmethod
    def _at(slot: int, word: int) -> int:
        return (_PAGE + slot * _SLOT) // 8 + word


def control_size(workers: int, description_size: int) -> int:
    """Return the bytes of a control page. description_size: of one description of weights, without its labels."""
    return _cells_begin(workers) + 2 * _whole_pages(description_size + _LABELS) + 2 * _HISTORY


def _cells_begin(workers: int) -> int:
    return _whole_pages(_PAGE + workers * _SLOT)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _fence(registered: bool) -> None:
    """Make the earlier stores of all processes visible to all. registered: the fast fence reaches all of them."""
    if not (registered and _has_fences() and _membarrier(_GLOBAL_EXPEDITED)) and not _membarrier(_GLOBAL):
        time.sleep(_PAUSE)


@cache
def _has_fences() -> bool:
    """Register this process, once; return whether the fast fence reaches it."""
    return _membarrier(_REGISTER)


def _membarrier(command: int) -> bool:
    return _MEMBARRIER is not None and ctypes.CDLL(None, use_errno=True).syscall(_MEMBARRIER, command, 0, 0) == 0


class _Cell:
    """A record that one process writes and others read; one that is absent or half written reads as None."""

    def __init__(self, memory: memoryview) -> None:
        self._head, self._body = memory[:16].cast("Q"), memory[16:]

    @property
    def capacity(self) -> int:
        return len(self._body)

    def clear(self) -> None:
        self._head[0] = 0

    def write(self, record: bytes) -> None:
        """Write a record. Raises ValueError if it is longer than `capacity`."""
        self.clear()
        self._body[: len(record)] = record
        self._head[1] = zlib.crc32(record)
        self._head[0] = len(record)

    def read(self) -> bytes | None:
        record = bytes(self._body[: self._head[0]])
        return record if record and zlib.crc32(record) == self._head[1] else None


class Summary(msgspec.Struct, frozen=True):
    """The part of a description that workers need."""

    generation: int
    weights_id: str
    labels: Mapping[str, str]
    terms: bytes = b""  # those of `owner.begin_trial`

    @property
    def identity(self) -> Identity:
        return Identity(self.weights_id, {}, dict(self.labels))


class Description(Summary, frozen=True):
    """A full description of the weights in an arena, as the next owner needs it."""

    digests: Mapping[str, tuple[bytes, ...]] = {}
    nonfinite: Mapping[str, Counts] = {}

    @property
    def identity(self) -> Identity:
        return Identity(self.weights_id, dict(self.digests), dict(self.labels), dict(self.nonfinite))


class _History(msgspec.Struct, frozen=True):
    written: int
    receipts: list[SwapReceipt]


def describe(control: Control, generation: int, identity: Identity, terms: bytes = b"") -> None:
    """Describe the weights in the arena of a generation. Raises WeightFileError if the description is too large."""
    record = msgspec.msgpack.encode(
        Description(generation, identity.weights_id, identity.labels, terms, identity.digests, identity.nonfinite)
    )
    cell = control.descriptions[generation % 2]
    if len(record) > cell.capacity:
        raise WeightFileError(
            f"the weights {identity.weights_id[:12]}: their labels and digests take {len(record)} bytes, but workers "
            f"share at most {cell.capacity}. Pack the file with shorter labels."
        )
    cell.write(record)


def read_description(control: Control, generation: int, kind: type[D]) -> D | None:
    """Return the description of a generation; None if its arena holds another one, or is being written."""
    description = _read(control, generation, kind)
    return description if description is not None and description.generation == generation else None


def read_trial(control: Control, trial: int) -> Summary | None:
    """Return the summary of the weights that the word of a trial names; None once the trial is over."""
    summary = _read(control, trial, Summary) if trial else None
    return summary if control.trial == trial else None


def _read(control: Control, number: int, kind: type[D]) -> D | None:
    record = control.descriptions[number % 2].read()
    return from_msgpack(record, kind) if record else None


def write_history(control: Control, receipts: Iterable[SwapReceipt]) -> None:
    """Write receipts, oldest first: as many of the last ones as fit."""
    kept = list(receipts)
    number = max((history.written for history in _histories(control)), default=0) + 1
    cell = control.histories[number % 2]  # the other cell keeps the last history, should this process be killed here
    while len(record := msgspec.msgpack.encode(_History(number, kept))) > cell.capacity:
        del kept[0]
    cell.write(record)


def read_history(control: Control) -> list[SwapReceipt]:
    """Return the receipts that were written last."""
    histories = _histories(control)
    return max(histories, key=lambda history: history.written).receipts if histories else []


def _histories(control: Control) -> list[_History]:
    records = [cell.read() for cell in control.histories]
    return [from_msgpack(record, _History) for record in records if record]
