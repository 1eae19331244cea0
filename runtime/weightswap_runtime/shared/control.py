"""The control page: the word that says which arena is served, a slot for each worker, and the keeper's descriptions.

The word is the generation plus one; 0 while nothing is served. The weights of a generation are in the arena of its
parity: generation modulo 2.

To begin a call, a worker reads the word, marks the parity as held in its slot, and reads the word again. If the word
has changed, the worker removes the mark and starts again. The keeper waits until no slot holds a parity, writes to its
arena and its description, and then stores the word. Stores that a processor delays would break this protocol, so the
keeper issues a memory fence across all processes after each store of the word (`fences`).

A staged set in the other arena may be on trial. A second word says so: it is different for every trial, and its lowest
bit is the parity. To call the staged set, a worker reads that word, marks the parity as held, and reads the word again:
if it has changed, the trial is over. The keeper sets it to 0 before it checks who holds the arena, and before a commit.
"""

from __future__ import annotations

import mmap
import zlib
from itertools import accumulate, pairwise
from typing import Final

from .fences import fence, has_fences

_PAGE: Final = 4096
_SLOT: Final = 256  # bytes: a cache line for each of its words
_HISTORY: Final = 1 << 20
_LABELS: Final = 1 << 20
_WORD, _WORKERS, _UNLOADED, _TRIAL, _TRIALS = 8, 16, 17, 24, 25  # offsets in the page, in words of 8 bytes
_PID, _HOLDS, _UNFENCED = 0, (8, 16), 24  # offsets in a slot, in words


def control_size(workers: int, description_size: int) -> int:
    """Return the bytes of a control page. description_size: of one description of weights, without its labels."""
    return _cells_begin(workers) + 2 * _whole_pages(description_size + _LABELS) + 2 * _HISTORY


def _cells_begin(workers: int) -> int:
    return _whole_pages(_PAGE + workers * _SLOT)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


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
        return int(self._words[_WORD])

    @property
    def generation(self) -> int | None:
        """The generation that is served; None before the first weights."""
        return self.word - 1 if self.word else None

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
        self._words[_TRIALS] += 1
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
        fence(any(self._slot_word(slot, _UNFENCED) for slot in range(self.workers)))

    def take_slot(self, slot: int, pid: int) -> None:
        """Take a slot for a worker."""
        self.empty_slot(slot)
        self._words[self._at(slot, _UNFENCED)] = not has_fences()
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
