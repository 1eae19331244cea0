"""The file queue of a directory: which files are taken, when, and in which order. No thread, and no clock of its own.

Whoever writes the files knows nothing of this. So a file may be seen while it is copied, a listing may miss some for
once, and a name may come back with another content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from weightswap_runtime.errors import (
    BaseMismatch,
    DesiredError,
    DigestMismatch,
    GoldenMismatch,
    ModelFailed,
    NotPromoted,
    OutOfMemory,
    RanksRefused,
    StageCancelled,
    StagingBusy,
    Unsupported,
    WaitTimeout,
    WeightFileError,
    WeightswapError,
    reason_of,
)
from weightswap_runtime.format.weight_set import INDEX_SUFFIX, shard_set
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.sources.location import printable

from .controller import Controller
from .directory import UNKNOWN, Entry, FileHeader, Listing, order, read_header, without_traceback

Start = Literal["newest", "all", "new"]
LONGEST_DELAY = 300.0  # seconds between two tries
MOST_REMEMBERED = 10_000  # files that have disappeared
PATIENCE = 60.0  # seconds without a change after which a truncated file counts as damaged
_MENDABLE = (WeightFileError, DigestMismatch, GoldenMismatch)  # by other bytes under the same header
_TRANSIENT = (
    BaseMismatch,
    DesiredError,
    WaitTimeout,
    ModelFailed,
    NotPromoted,  # under a hold
    OutOfMemory,
    RanksRefused,  # whatever the reason is on each
    StagingBusy,
    WeightFileError,
)
_FINAL = ("damaged", "truncated", "superseded", "unproven")  # reasons that the next try would meet again


class FileQueue:
    """The file queue of a directory's weight files, in order, each once. A loop calls `poll()` repeatedly.

    A file is taken when it is complete. The order never goes back: files that come before one that was taken are
    skipped. Transient failures are retried after `interval`, then after twice as long, and so on up to five minutes; a
    file with any other failure is skipped until it, or a file beside it that decides on it, changes. A file that
    disappears and returns, or only has another mode or more hard links than before, is not taken again.
    """

    def __init__(
        self,
        directory: str,
        listing: Listing,
        interval: float,
        start: Start,
        clock: Callable[[], float] = time.monotonic,
        known_names: Callable[[Iterable[Entry]], AbstractSet[str]] | None = None,
    ) -> None:
        self.last_error: BaseException | None = None
        self._directory = directory
        self._list = listing
        self._interval = interval
        self._start = start
        self._clock = clock
        self._known_names = known_names  # called once: which files were taken elsewhere, or before a restart
        self._files: dict[str, _File] = {}
        self._removed: dict[tuple[str, Hashable], _File] = {}  # by name and fingerprint, the latest removed last
        # those at the first poll, for start="newest", until one of them is taken: the newest that can be, not the first
        self._initial_names: set[str] | None = None
        self._last_applied: _File | None = None
        self._failed_listings = 0  # consecutive ones

    @property
    def skipped(self) -> dict[str, BaseException]:
        """The errors of skipped files that are still in the directory, by name, in order."""
        files = sorted(self._files.values(), key=attrgetter("key"))
        return {file.entry.name: file.error for file in files if file.settled and file.error is not None}

    @property
    def waiting(self) -> dict[str, BaseException]:
        """The reasons why deltas and truncated files wait, by name, in order."""
        errors = ((file.entry.name, file.wait_error or file.truncation) for file in self._pending())
        return {name: error for name, error in errors if error is not None}

    def poll(self, target: Controller) -> float:
        """Take the files that can be taken. Return the seconds until the next poll."""
        try:
            entries = self._list()
            names = self._known_names(entries) if self._known_names else ()
        except WeightswapError as error:
            return self._unreachable(error, target)
        if self._failed_listings:
            self._failed_listings, self.last_error = 0, None
        self._update(entries)
        if self._known_names is not None:
            self._known_names = None
            self._continue_after(names)
        self._clear_errors_of_served(target)
        with suppress(StageCancelled):
            with suppress(_NotNowError):
                self._apply(target)
            self._report_waiting(target)
        return self._interval

    def forget_refusal(self) -> None:
        """Try refused files again at the next poll, as something else that decides on them has changed."""
        for file in (*self._files.values(), *self._removed.values()):
            self._reconsider(file)

    def _unreachable(self, error: WeightswapError, target: Controller) -> float:
        self._failed_listings += 1
        self.last_error = without_traceback(error)
        if self._failed_listings == 1:
            target.notify("unreachable", self._directory, error)
        if self._initial_names is None and isinstance(error.__cause__, FileNotFoundError):
            self._initial_names = set()  # no directory, no file in it: all that it will have are new
        # listing a local directory is cheap, so it needs no longer pauses
        return self._interval if isinstance(error.__cause__, OSError) else delay(self._interval, self._failed_listings)

    def _update(self, entries: list[Entry]) -> None:
        before = self._files.values()
        files = [file for file in map(self._file_of, entries) if file is not None]
        self._files = {file.entry.name: file for file in files}
        self._remember(file for file in before if self._files.get(file.entry.name) is not file)
        if self._initial_names is None:
            self._initial_names = set(self._files) if self._start == "newest" else set()
            for file in files:
                file.settled = self._start == "new"

    def _file_of(self, entry: Entry) -> _File | None:
        """Return the file of an entry; None for a new file of which the listing could find out only the name."""
        file = self._files.get(entry.name)
        if entry.fingerprint is UNKNOWN:
            return file
        if file is None or file.entry.fingerprint != entry.fingerprint:
            file = self._removed.pop((entry.name, entry.fingerprint), None) or _File(entry, self._clock())
        before, file.entry = file.entry, entry
        if before.changed != entry.changed:
            file.changed_at, file.polls, file.retry_at, file.must_recheck = self._clock(), 0, 0.0, True
        if before.beside != entry.beside:
            self._reconsider(file)
        file.polls += 1
        return file

    def _reconsider(self, file: _File) -> None:
        file.retry_at = 0.0
        if file.error is not None and not self._is_superseded(file):
            file.settled = False

    def _remember(self, files: Iterable[_File]) -> None:
        """Remember files that are missing: a listing may be incomplete once, and they are not new when they return."""
        for file in sorted(files, key=attrgetter("key")):
            self._removed[file.entry.name, file.entry.fingerprint] = file
        for oldest in list(self._removed)[: max(0, len(self._removed) - MOST_REMEMBERED)]:
            del self._removed[oldest]

    def _continue_after(self, names: Collection[str]) -> None:
        """Treat the last of these files as taken, and those before it as settled."""
        known = [file for file in self._files.values() if file.entry.name in names]
        if not known:
            return
        self._last_applied, self._initial_names = max(known, key=attrgetter("key")), set()
        for file in self._files.values():
            file.settled = file.settled or file is self._last_applied or self._is_superseded(file)

    def _clear_errors_of_served(self, target: Controller) -> None:
        """Clear the errors of skipped files whose weights are served all the same: they were swapped in by hand."""
        for file in self._files.values():
            weights_id = file.header.weights_id if file.header else None
            if file.settled and file.error is not None and weights_id is not None and target.serves(weights_id):
                self.last_error = None if self.last_error is file.error else self.last_error
                file.error = None

    def _apply(self, target: Controller) -> None:
        """Take files in order, but of those at the beginning only the last that can be taken."""
        for file in reversed(self._due()):
            if file.entry.name in (self._initial_names or ()):
                self._process(file, target)
        for file in self._due():
            if file.entry.name not in (self._initial_names or ()):
                self._process(file, target)

    def _pending(self) -> list[_File]:
        return [file for file in self._due() if not file.settled]

    def _due(self) -> list[_File]:
        due = (file for file in self._files.values() if not file.settled or file.must_recheck)
        return sorted(due, key=attrgetter("key"))

    def _process(self, file: _File, target: Controller) -> None:
        target.check()
        if file.must_recheck:
            self._recheck(file, target)
        if file.settled:
            return
        if self._is_superseded(file):
            self._skip_superseded(file, target)
        elif shard_set(file.entry.name) or file.entry.name.endswith(INDEX_SUFFIX):
            self._process_of_several(file, target)
        else:
            self._process_whole(file, target)

    def _process_of_several(self, file: _File, target: Controller) -> None:
        """Skip an index, and all but the first shard whose index is not there; that one is tried, and reported."""
        where, own = printable(file.entry.path), shard_set(file.entry.name)
        skipped = (other.entry.name for other in self._files.values() if other.settled and other.error is not None)
        if own is None:
            error = Unsupported(
                f"{where}: an index of shards, but a watched directory takes each set of weights as one file. Pack the "
                f"checkpoint into it: weightswap pack {where} ARTIFACT -o FILE.safetensors"
            )
            self._set_failed(file, error, target)
        elif own in map(shard_set, skipped):
            file.settled = True
        else:
            self._process_whole(file, target)

    def _process_whole(self, file: _File, target: Controller) -> None:
        if self._clock() >= file.retry_at:
            file.header = file.header or read_header(file.entry.path, target.check)
            if file.header.weights_id is not None and target.serves(file.header.weights_id):
                self._set_applied(file, target)
            elif self._is_ready(file, file.header, target) and not self._try_chain(file, target):
                self._try(file, file.header.weights_id, target)

    def _recheck(self, file: _File, target: Controller) -> None:
        """Check whether a file of which only the ctime has changed may have other content than before.

        A new mode or a new hard link is no reason to take or report a file again.
        """
        if file.settled and self._is_superseded(file):
            file.must_recheck = False  # its content does not matter
            return
        before, now = file.header, read_header(file.entry.path, target.check)
        file.header, file.must_recheck = now, False
        same = before is not None and now.weights_id is not None and now[:2] == before[:2]
        if not same:
            file.wait_error = None
        if same or (before is None and file.error is None):  # a file that was never opened cannot be compared
            file.settled = file.settled and not isinstance(file.error, _MENDABLE)
        else:
            file.settled = False

    def _is_superseded(self, file: _File) -> bool:
        last = self._last_applied
        return last is not None and last.entry.name != file.entry.name and file.key < last.key

    def _is_ready(self, file: _File, header: FileHeader, target: Controller) -> bool:
        if file.truncation:
            return self._clock() - file.changed_at >= PATIENCE
        if header.base is not None:
            return target.serves(header.base)
        # without digests, only a second poll shows that the file is not being written
        return header.weights_id is not None or file.polls > 1

    def _try_chain(self, first: _File, target: Controller) -> bool:
        """Take a delta together with those that follow it, in one swap. Return False if there are none, or it fails.

        Each is then taken by itself, so that the first that cannot be is the one that says so.
        """
        *before, last = self._chain_from(first, target)
        if not before:
            return False
        onto = tuple((file.entry.path, weights_id) for file, weights_id in before)
        file, weights_id = last
        try:
            file.content = target.swap(file.entry.path, weights_id, file.content, onto)
        except StageCancelled:
            raise
        except Exception:
            return False
        for other, _ in before:
            other.settled, other.error = True, None
        self._set_applied(file, target)
        return True

    def _chain_from(self, first: _File, target: Controller) -> list[tuple[_File, str]]:
        """Return a file and the deltas after it that begin where the one before ends, each with its weights id."""
        chain: list[tuple[_File, str]] = []
        for file in self._pending():
            if file.key < first.key:
                continue
            file.header = file.header or read_header(file.entry.path, target.check)
            follows = file is first or (chain and file.header.base == chain[-1][1])
            if not follows or file.header.base is None or not file.header.weights_id or self._clock() < file.retry_at:
                break
            chain.append((file, file.header.weights_id))
        return chain or [(first, "")]

    def _try(self, file: _File, weights_id: str | None, target: Controller) -> None:
        try:
            file.content = target.swap(file.entry.path, weights_id, file.content)
        except StageCancelled:
            raise
        except Exception as error:
            self._set_failed(file, error, target)
        else:
            self._set_applied(file, target)

    def _set_failed(self, file: _File, error: Exception, target: Controller) -> None:
        before, self.last_error, file.error = file.error, without_traceback(error), error
        if not is_transient(error):
            file.settled = True
            if str(before) != str(error):
                target.notify("skipped", printable(file.entry.path), error)
            return
        if reason_of(error) == "held":  # it may be released at any time, so the pauses do not grow
            if str(before) != str(error):
                target.notify("waiting", printable(file.entry.path), error)
        else:
            file.attempts += 1
        file.retry_at = self._clock() + delay(self._interval, max(1, file.attempts))
        file.header = None
        if not isinstance(error, BaseMismatch | WeightFileError):
            # the model or the desired store is not ready: a later file must not be taken before this one
            raise _NotNowError

    def _set_applied(self, file: _File, target: Controller) -> None:
        initial_names, self._initial_names = self._initial_names or set(), set()
        file.settled, file.error, self.last_error = True, None, None
        self._last_applied = file
        superseded = [other for other in self._files.values() if not other.settled and self._is_superseded(other)]
        for other in sorted(superseded, key=attrgetter("key")):
            if other.entry.name in initial_names:
                other.settled = True
            else:
                self._skip_superseded(other, target)

    def _skip_superseded(self, file: _File, target: Controller) -> None:
        assert self._last_applied is not None
        where, later = printable(file.entry.path), self._last_applied.entry.name
        error = NotPromoted(
            f"{where}: passed over, because {later} comes later and was taken{_why_not_before(file)}",
            reason="superseded",
        )
        file.settled, file.error = True, error
        target.notify("skipped", where, error)

    def _report_waiting(self, target: Controller) -> None:
        for file in self._pending():
            base = file.header.base if file.header else None
            if base is None or target.serves(base):
                file.wait_error = None
            elif file.wait_error is None:
                where = printable(file.entry.path)
                error = BaseMismatch(f"{where}: a delta from the weights {base[:12]}, which are not served yet")
                file.wait_error = error
                target.notify("waiting", where, error)


@dataclass(eq=False)
class _File:
    """The state of a file with one fingerprint; a file with another fingerprint is another file."""

    entry: Entry
    changed_at: float
    polls: int = 0
    settled: bool = False  # taken or skipped
    attempts: int = 0
    retry_at: float = 0.0
    header: FileHeader | None = None
    error: BaseException | None = None
    wait_error: BaseException | None = None  # why a delta cannot be taken yet
    must_recheck: bool = False  # only its ctime has changed since its header was read
    content: str | None = None  # the id of the content that was taken
    key: tuple[Any, ...] = field(init=False)  # the sort key

    def __post_init__(self) -> None:
        self.key = order(self.entry)

    @property
    def truncation(self) -> BaseException | None:
        """The error of a truncated file, which may still be being copied."""
        error = self.header.error if self.header else None
        return error if reason_of(error) == "truncated" else None


class _NotNowError(Exception):
    """No further file can be taken at this poll."""


def _why_not_before(file: _File) -> str:
    header = file.header or FileHeader()
    if header.base is not None:
        return f"; it is a delta from the weights {header.base[:12]}, which were not served before that"
    error = file.error or header.error
    return f"; before that: {error}" if error else ""


def refused_weights(event: Event) -> str:
    """Return the id of weights that were refused, and would be again; empty for other events."""
    if event.kind != "refused" or not isinstance(event.error, Exception) or is_transient(event.error):
        return ""
    return event.weights_id or ""


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the same file may help: it could not be read, or the model was not ready for it."""
    if isinstance(error, WeightswapError):
        return isinstance(error, _TRANSIENT) and error.reason not in _FINAL
    return True


def delay(interval: float, attempts: int) -> float:
    """Return the seconds to wait for the next try after so many failed attempts."""
    return min(interval * 2.0 ** min(attempts - 1, 30), max(interval, LONGEST_DELAY))
