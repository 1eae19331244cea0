"""The control page: the word that says which arena is served, a slot for each worker, and what the keeper writes.

The word is the generation and one; 0 as long as nothing is served. A generation lies in the arena of its parity.

To enter, a worker reads the word, holds the parity in its slot, and reads the word again: if it has moved, it lets go
and begins anew. The keeper writes to the arena of a parity, and what describes it, once no slot holds that parity, and
then stores the word. A store that a processor delays would break both, so that the keeper has all of them catch up
after each store of the word (`fences`).

A staged set in the other arena may be on trial. A second word says so, which is never the same for two trials, and ends
in the parity. To call it, a worker that has found it holds the parity, and reads that word again: if it has moved, the
trial is over. The keeper sets it to 0 before it looks who holds the arena, and before it commits.
"""

from __future__ import annotations

import mmap
import zlib
from itertools import pairwise
from typing import Final

from .fences import fence, has_fences

_PAGE: Final = 4096
_SLOT: Final = 256  # bytes: a cache line for each of its words
_HISTORY: Final = 1 << 20
_LABELS: Final = 1 << 20
_WORD, _WORKERS, _UNLOADED, _TRIAL, _TRIALS = 8, 16, 17, 24, 25  # where they are, in words of 8 bytes
_PID, _HOLDS, _UNFENCED = 0, (8, 16), 24


def control_size(workers: int, described: int) -> int:
    """Bytes that a control page takes; `described` are those of one description of weights, labels aside."""
    return _texts_begin(workers) + 2 * _rounded(described + _LABELS) + 2 * _HISTORY


def _texts_begin(workers: int) -> int:
    return _rounded(_PAGE + workers * _SLOT)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class Control:
    """A process's view of a control page. Words of 8 bytes are read and written whole."""

    def __init__(self, descriptor: int, workers: int | None = None) -> None:
        """workers: how many slots there are, said by the one who has made the page."""
        memory = mmap.mmap(descriptor, 0)
        self._words = memoryview(memory).cast("Q")
        if workers is not None:
            self._words[_WORKERS] = workers
        self.workers = self._words[_WORKERS]
        begin = _texts_begin(self.workers)
        described = (len(memory) - begin - 2 * _HISTORY) // 2
        texts, ends = memoryview(memory), [begin]
        for size in (described, described, _HISTORY, _HISTORY):
            ends.append(ends[-1] + size)
        parts = [_Text(texts[start:end]) for start, end in pairwise(ends)]
        self.descriptions, self.histories = (parts[0], parts[1]), (parts[2], parts[3])

    @property
    def word(self) -> int:
        return int(self._words[_WORD])

    @property
    def generation(self) -> int | None:
        """What is served; None before the first weights."""
        return self.word - 1 if self.word else None

    @property
    def unloaded(self) -> bool:
        """Whether an operator wants nobody to be answered."""
        return bool(self._words[_UNLOADED])

    @unloaded.setter
    def unloaded(self, value: bool) -> None:
        self._words[_UNLOADED] = value

    def commit(self, generation: int) -> None:
        """Serve a generation: who enters from now on gets it."""
        self._words[_WORD] = generation + 1
        self.fence()

    @property
    def trial(self) -> int:
        """The word of what is on trial; 0: nothing is."""
        return int(self._words[_TRIAL])

    def begin_trial(self, parity: int) -> None:
        """Let workers call what lies in the arena of a parity, and is described."""
        self._words[_TRIALS] += 1
        self.fence()  # what lies there is seen before the word
        self._words[_TRIAL] = 2 * self._words[_TRIALS] + parity
        self.fence()

    def end_trial(self) -> None:
        """Nobody begins to call that from now on."""
        if self._words[_TRIAL]:
            self._words[_TRIAL] = 0
            self.fence()

    def fence(self) -> None:
        """Let what all processes have stored be seen by all."""
        fence(any(self._slot_word(slot, _UNFENCED) for slot in range(self.workers)))

    def take_slot(self, slot: int, pid: int) -> None:
        """A worker begins."""
        self.empty_slot(slot)
        self._words[self._at(slot, _UNFENCED)] = not has_fences()
        self._words[self._at(slot, _PID)] = pid

    def empty_slot(self, slot: int) -> None:
        """A worker has ended, or is dead: it holds nothing any more."""
        for word in (_PID, *_HOLDS, _UNFENCED):
            self._words[self._at(slot, word)] = 0

    def hold(self, slot: int, parity: int) -> None:
        """A worker has leases in the arena of a parity."""
        self._words[self._at(slot, _HOLDS[parity])] = 1

    def let_go(self, slot: int, parity: int) -> None:
        """It has none there any more."""
        self._words[self._at(slot, _HOLDS[parity])] = 0

    def holders(self, parity: int) -> list[int]:
        """The processes that have leases in the arena of a parity."""
        slots = [slot for slot in range(self.workers) if self._slot_word(slot, _HOLDS[parity])]
        return [self._slot_word(slot, _PID) for slot in slots]

    @property
    def processes(self) -> list[int]:
        """The process of each slot; 0 where it is free."""
        return [self._slot_word(slot, _PID) for slot in range(self.workers)]

    def _slot_word(self, slot: int, word: int) -> int:
        return int(self._words[self._at(slot, word)])

    @staticmethod
    def _at(slot: int, word: int) -> int:
        return (_PAGE + slot * _SLOT) // 8 + word


class _Text:
    """Bytes that one process writes and others read; what is torn, or gone, reads as None."""

    def __init__(self, memory: memoryview) -> None:
        self._head, self._body = memory[:16].cast("Q"), memory[16:]

    @property
    def most(self) -> int:
        return len(self._body)

    def clear(self) -> None:
        self._head[0] = 0

    def write(self, text: bytes) -> None:
        """Raises ValueError for what is longer than `most`."""
        self.clear()
        self._body[: len(text)] = text
        self._head[1] = zlib.crc32(text)
        self._head[0] = len(text)

    def read(self) -> bytes | None:
        text = bytes(self._body[: self._head[0]])
        return text if text and zlib.crc32(text) == self._head[1] else None
