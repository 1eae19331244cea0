"""Which files of a directory are to be taken, when, and in which order. It knows no thread and no clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Protocol

from weightswap_runtime.errors import (
    BaseMismatch,
    DamagedFile,
    DesiredError,
    DigestMismatch,
    GoldenMismatch,
    GoldensError,
    Held,
    LeaseTimeout,
    ModelFailed,
    OutOfMemory,
    StageCancelled,
    StagingBusy,
    Superseded,
    TruncatedFile,
    Unproven,
    WeightFileError,
    WeightswapError,
)
from weightswap_runtime.sources.location import printable

from .directory import UNKNOWN, Entry, Listing, order
from .header_peek import HeaderPeek, peek, without_traceback

Start = Literal["newest", "all", "new"]
Told = Literal["skipped", "unreachable", "waiting"]
LONGEST_DELAY = 300.0
MOST_REMEMBERED = 10_000  # files that have gone
PATIENCE = 60.0  # seconds without a change after which a file that is cut off counts as damaged
# what other bytes under the same header can mend
_MENDABLE = (DamagedFile, DigestMismatch, GoldenMismatch, GoldensError)
_TRANSIENT = (BaseMismatch, DesiredError, LeaseTimeout, ModelFailed, OutOfMemory, StagingBusy, WeightFileError)


class Target(Protocol):
    """What is put behind, for the length of one look; see `loop.ModelTarget`."""

    def check(self) -> None:
        """Raise StageCancelled once nothing is to be taken any more."""
        ...

    def serves(self, weights_id: str) -> bool:
        """Whether exactly these weights are served now."""
        ...

    def tell(self, kind: Told, source: str, error: BaseException) -> None: ...


class WatchTarget(Target, Protocol):
    """What the files are put behind."""

    def swap(self, path: str | Path, weights_id: str | None, known: str | None = None) -> str | None:
        """Serve a file; `weights_id` is what its header says it is.

        Returns an id of its content, if that was read; a content with the id `known` is not served. Raises what
        `Model.swap` raises, and StageCancelled as `check` does.
        """
        ...


@dataclass(eq=False)
class _File:
    """A file as it was found; another fingerprint makes it another one.

    `over`: taken, skipped or passed over. `waits`: why a delta cannot be taken yet. `doubted`: only its ctime has
    changed since it was looked into. `content`: the id of what was taken from it.
    """

    entry: Entry
    since: float
    looks: int = 0
    over: bool = False
    attempts: int = 0
    retry_at: float = 0.0
    peek: HeaderPeek | None = None
    error: BaseException | None = None
    waits: BaseException | None = None
    doubted: bool = False
    content: str | None = None
    key: tuple[Any, ...] = field(init=False)  # where it comes among the others

    def __post_init__(self) -> None:
        self.key = order(self.entry)


class _NotNowError(Exception):
    """No file could be taken now."""


class Intake:
    """What is taken of a directory: its weight files, in order, each once. `look()` is called again and again.

    A file is taken when it is complete. It never goes back: of files that could be taken, those that come before one
    that was taken are passed over. Failures that another try may mend are retried after `interval`, then after twice
    as long, and so on up to five minutes; a file with any other is skipped until it changes. What became of a file is
    still known when it has gone and is back, or has another mode or more names than before.
    """

    def __init__(
        self,
        directory: str,
        listing: Listing,
        interval: float,
        start: Start,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[Iterable[Entry]], AbstractSet[str]] | None = None,
    ) -> None:
        self.last_error: BaseException | None = None
        self._directory = directory
        self._list = listing
        self._interval = interval
        self._start = start
        self._clock = clock
        self._begun = begun  # says once which files were taken before, elsewhere or in another life
        self._files: dict[str, _File] = {}
        self._gone: dict[tuple[str, Hashable], _File] = {}  # by name and fingerprint, the last that went last
        self._old: set[str] | None = None  # the names found first, as long as none of them is taken
        self._mark: _File | None = None  # the last in order that was taken
        self._unlisted = 0  # how often the directory could not be listed since it could

    @property
    def skipped(self) -> dict[str, BaseException]:
        """Why files that are in the directory were passed over, by name, in order."""
        files = sorted(self._files.values(), key=attrgetter("key"))
        return {file.entry.name: file.error for file in files if file.over and file.error is not None}

    @property
    def waiting(self) -> dict[str, BaseException]:
        """Why deltas, and files that are cut off, are waited for, by name, in order."""
        found = ((file.entry.name, file.waits or _cut_off(file)) for file in self._pending())
        return {name: why for name, why in found if why is not None}

    def look(self, target: WatchTarget) -> float:
        """Take what can be taken. Returns after how many seconds to look again."""
        try:
            entries = self._list()
            names = self._begun(entries) if self._begun else ()
        except WeightswapError as error:
            return self._unreachable(error, target)
        if self._unlisted:
            self._unlisted, self.last_error = 0, None
        self._update(entries)
        if self._begun is not None:
            self._begun = None
            self._go_on_after(names)
        self._forget_served(target)
        with suppress(StageCancelled):
            with suppress(_NotNowError):
                self._take(target)
            self._tell_waiting(target)
        return self._interval

    def _unreachable(self, error: WeightswapError, target: WatchTarget) -> float:
        self._unlisted += 1
        self.last_error = without_traceback(error)
        if self._unlisted == 1:
            target.tell("unreachable", self._directory, error)
        if self._old is None and isinstance(error.__cause__, FileNotFoundError):
            self._old = set()
        # to ask a local directory costs nothing
        return self._interval if isinstance(error.__cause__, OSError) else delay(self._interval, self._unlisted)

    def _update(self, entries: list[Entry]) -> None:
        before = self._files.values()
        files = [file for file in map(self._found, entries) if file is not None]
        self._files = {file.entry.name: file for file in files}
        self._remember(file for file in before if self._files.get(file.entry.name) is not file)
        if self._old is None:
            self._old = set(self._files) if self._start == "newest" else set()
            for file in files:
                file.over = self._start == "new"

    def _go_on_after(self, names: Collection[str]) -> None:
        """The last of these files counts as taken: what comes before it is not taken any more."""
        known = [file for file in self._files.values() if file.entry.name in names]
        if not known:
            return
        self._mark, self._old = max(known, key=attrgetter("key")), set()
        for file in self._files.values():
            file.over = file.over or file is self._mark or self._is_past(file)

    def _forget_served(self, target: WatchTarget) -> None:
        """What was passed over, and is served all the same, as somebody has swapped it in by hand, is not any more."""
        for file in self._files.values():
            found = file.peek.weights_id if file.peek else None
            if file.over and file.error is not None and found is not None and target.serves(found):
                self.last_error = None if self.last_error is file.error else self.last_error
                file.error = None

    def _found(self, entry: Entry) -> _File | None:
        """The file of an entry; None where nothing is known of it, not even what a listing says."""
        file = self._files.get(entry.name)
        if entry.fingerprint is UNKNOWN:
            return file
        if file is None or file.entry.fingerprint != entry.fingerprint:
            file = self._gone.pop((entry.name, entry.fingerprint), None) or _File(entry, self._clock())
        if file.entry.changed != entry.changed:
            file.entry, file.since, file.looks, file.retry_at, file.doubted = entry, self._clock(), 0, 0.0, True
        file.looks += 1
        return file

    def _remember(self, files: Iterable[_File]) -> None:
        """A directory may be incomplete, or away, for one look; its files are then no new ones at the next."""
        for file in sorted(files, key=attrgetter("key")):
            self._gone[file.entry.name, file.entry.fingerprint] = file
        for oldest in list(self._gone)[: max(0, len(self._gone) - MOST_REMEMBERED)]:
            del self._gone[oldest]

    def _take(self, target: WatchTarget) -> None:
        for file in reversed(self._due()):
            if file.entry.name in (self._old or ()):
                self._step(file, target)
        for file in self._due():
            if file.entry.name not in (self._old or ()):
                self._step(file, target)

    def _pending(self) -> list[_File]:
        return [file for file in self._due() if not file.over]

    def _due(self) -> list[_File]:
        return sorted((file for file in self._files.values() if not file.over or file.doubted), key=attrgetter("key"))

    def _step(self, file: _File, target: WatchTarget) -> None:
        target.check()
        if file.doubted:
            self._look_into(file, target)
        if file.over:
            return
        if self._is_past(file):
            self._pass_over(file, target)
        elif self._clock() >= file.retry_at:
            file.peek = file.peek or peek(file.entry.path, target.check)
            if file.peek.weights_id is not None and target.serves(file.peek.weights_id):
                self._taken(file, target)
            elif self._is_ready(file, file.peek, target):
                self._try(file, file.peek.weights_id, target)

    def _look_into(self, file: _File, target: WatchTarget) -> None:
        """Of a file of which only ctime has changed, find out whether it may hold something else than before.

        A new mode or a new name is no reason to take, or to tell of, a file again.
        """
        if file.over and self._is_past(file):
            file.doubted = False  # whatever it holds
            return
        before, found = file.peek, peek(file.entry.path, target.check)
        file.peek, file.doubted = found, False
        same = before is not None and found.weights_id is not None and found[:2] == before[:2]
        if not same:
            file.waits = None
        if same or (before is None and file.error is None):  # nobody knows what a file held that was never opened
            file.over = file.over and not isinstance(file.error, _MENDABLE)
        else:
            file.over = False

    def _is_past(self, file: _File) -> bool:
        mark = self._mark
        return mark is not None and mark.entry.name != file.entry.name and file.key < mark.key

    def _is_ready(self, file: _File, header: HeaderPeek, target: WatchTarget) -> bool:
        if isinstance(header.error, TruncatedFile):
            return self._clock() - file.since >= PATIENCE
        if header.base is not None:
            return target.serves(header.base)
        # without digests nothing but a second look can tell that it is not being written
        return header.weights_id is not None or file.looks > 1

    def _try(self, file: _File, weights_id: str | None, target: WatchTarget) -> None:
        try:
            file.content = target.swap(file.entry.path, weights_id, file.content)
        except StageCancelled:
            raise
        except Exception as error:
            self._failed(file, error, target)
        else:
            self._taken(file, target)

    def _tell_waiting(self, target: WatchTarget) -> None:
        for file in self._pending():
            base = file.peek.base if file.peek else None
            if base is None or target.serves(base):
                file.waits = None
            elif file.waits is None:
                where = printable(file.entry.path)
                file.waits = BaseMismatch(f"{where}: a delta from the weights {base[:12]}, which are not served yet")
                target.tell("waiting", where, file.waits)

    def _failed(self, file: _File, error: Exception, target: WatchTarget) -> None:
        before, self.last_error, file.error = file.error, without_traceback(error), error
        if not is_transient(error):
            file.over = True
            if str(before) != str(error):
                target.tell("skipped", printable(file.entry.path), error)
            return
        if isinstance(error, Held):  # it ends at once when somebody ends it
            if str(before) != str(error):
                target.tell("waiting", printable(file.entry.path), error)
        else:
            file.attempts += 1
        file.retry_at = self._clock() + delay(self._interval, max(1, file.attempts))
        file.peek = None
        if not isinstance(error, BaseMismatch | WeightFileError):
            raise _NotNowError

    def _taken(self, file: _File, target: WatchTarget) -> None:
        old, self._old = self._old or set(), set()
        file.over, file.error, self.last_error = True, None, None
        self._mark = file
        passed = [other for other in self._files.values() if not other.over and self._is_past(other)]
        for other in sorted(passed, key=attrgetter("key")):
            if other.entry.name in old:
                other.over = True
            else:
                self._pass_over(other, target)

    def _pass_over(self, file: _File, target: WatchTarget) -> None:
        assert self._mark is not None
        where, later = printable(file.entry.path), self._mark.entry.name
        error = Superseded(f"{where}: passed over, as {later} comes later and was taken{_why_not_before(file)}")
        file.over, file.error = True, error
        target.tell("skipped", where, error)


def _cut_off(file: _File) -> TruncatedFile | None:
    """Why a file may still be being copied."""
    error = file.peek.error if file.peek else None
    return error if isinstance(error, TruncatedFile) else None


def _why_not_before(file: _File) -> str:
    found = file.peek or HeaderPeek()
    if found.base is not None:
        return f"; it is a delta from the weights {found.base[:12]}, which were not served before that"
    why = file.error or found.error
    return f"; before that: {why}" if why else ""


def delay(interval: float, attempts: int) -> float:
    """After how many seconds to try again what has failed so often."""
    return min(interval * 2.0 ** min(attempts - 1, 30), max(interval, LONGEST_DELAY))


def is_transient(error: Exception) -> bool:
    """Whether the same file may be taken another time: it could not be read, or the model was not ready for it."""
    if isinstance(error, WeightswapError):
        return isinstance(error, _TRANSIENT) and not isinstance(error, DamagedFile | Unproven)
    return True
