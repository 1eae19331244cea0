"""Keeping what was served as packed files: weights from memory have none, and a process that starts again needs one."""

from __future__ import annotations

import logging
import os
import re
import threading
from datetime import UTC, datetime
from pathlib import Path

from weightswap_runtime.errors import Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.format.canonical import canonical_order, new_weight_file
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.jobs import Claim, Job
from weightswap_runtime.live.receipt import Event
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.memory.arena import Arena, ArenaLayout, allocate
from weightswap_runtime.staging.reading import read_rows
from weightswap_runtime.threads import Background, UntilStopped

_NAME = re.compile(r"served-\d{8}T\d{12}Z-[0-9a-f]{12}\.safetensors")
_log = logging.getLogger("weightswap.transfer")


class KeptFiles(UntilStopped):
    """The sets of weights that were served last, as packed files of a directory, in a thread that writes them. Made by
    `Model.keep()`.

    Of commits that follow each other faster than files are written, the latest is kept. `stop()` first writes what was
    committed last.
    """

    def __init__(self, store: WeightStore, graph_id: str, directory: str | os.PathLike[str], last: int) -> None:
        """Begin with what is served now. Raises Unsupported, and WeightFileError if the directory cannot be made."""
        if type(last) is not int or last < 1:
            raise Unsupported(f"last={last!r}: expected a number of files, 1 or more")
        self.directory, self._where = Path(directory), os.fspath(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightFileError(f"{self.directory}: cannot be made ({error.strerror})") from error
        self.last_error: BaseException | None = None  # None again once a file was written
        self._store, self._graph_id, self._last = store, graph_id, last
        self._is_stopping = False
        newest = newest_kept(self.directory)
        self._kept = "" if newest is None else newest.stem[-12:]  # the beginning of the newest file's weights id
        self._changed = threading.Event()
        self._changed.set()
        self._unlisten = store.events.listen(self._notice)
        self._thread = Background(self._run, "weightswap-keeping", self._end)
        self._thread.start()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are kept, the oldest first."""
        return kept_files(self.directory)

    def _end(self) -> None:
        self._is_stopping = True
        self._changed.set()

    def _notice(self, event: Event) -> None:
        if event.receipt is not None:
            self._changed.set()

    def _run(self) -> None:
        try:
            stopping = False
            while not stopping:
                self._changed.wait()
                self._changed.clear()
                stopping = self._is_stopping
                self._keep()
        finally:
            self._unlisten()

    def _keep(self) -> None:
        """Write what is served, unless it was the last to be written."""
        try:
            if (served := self._copied()) is not None:
                identity, layout, memory = served
                self._write(identity, layout, memory)
                self._kept, self.last_error = identity.weights_id[:12], None
                for old in kept_files(self.directory)[: -self._last]:
                    old.unlink(missing_ok=True)
        except (WeightswapError, OSError, ValueError, MemoryError) as error:
            self.last_error = error.with_traceback(None)
            _log.warning("%s: what is served was not kept: %s", self.directory, error)

    def _copied(self) -> tuple[Identity, ArenaLayout, dict[str, memoryview]] | None:
        """Return a copy of what is served, so that no swap waits for the disk; None if it is kept already."""
        lease, gate = Claim(), self._store.gate
        if gate.current is None or gate.current.weights_id.startswith(self._kept or "-"):
            return None
        version = gate.acquire(lease)
        try:
            arena = version.session.arena
            return version.identity, arena.layout, {name: _rows(arena, name) for name in arena.layout.slots}
        finally:
            lease.end()
            gate.release(version.session, lease)

    def _write(self, identity: Identity, layout: ArenaLayout, memory: dict[str, memoryview]) -> None:
        rows = [weight.row for weight in layout.weights.values()]
        path = self.directory / f"served-{_next_time(self.directory)}-{identity.weights_id[:12]}.safetensors"
        content = ((row.name, [memory.pop(row.name)]) for row in canonical_order(rows))
        labels = identity.labels
        with new_weight_file(path, rows, content, graph_id=self._graph_id, labels=labels, cast={}) as (file, stamp):
            if stamp.weights_id != identity.weights_id:
                found, served = stamp.weights_id[:12], identity.weights_id[:12]
                raise WeightFileError(f"{path}: has the weights {found}, but {served} were served; it is not kept")
            file.rename(path)


def _rows(arena: Arena, name: str) -> memoryview:
    """Return a copy of a weight's row-major bytes."""
    slot, weight = arena.layout.slots[name], arena.layout.weights[name]
    rows = memoryview(allocate(slot.nbytes))
    if weight.stride is None:
        arena.read(slot.offset, rows)
        return rows
    return read_rows(weight, arena.fetch(*slot), Job())


def _next_time(directory: Path) -> str:
    """Return the time for the name of the next file: now, or, if the clock was set back, right after the newest file's.
    Else the next file would be taken for the oldest."""
    now = datetime.now(UTC).strftime("%Y%m%d%H%M%S%f")
    if (newest := newest_kept(directory)) is not None:
        last = newest.name.split("-")[1]
        now = max(now, str(int(last[:8] + last[9:-1]) + 1))
    return f"{now[:8]}T{now[8:]}Z"


def newest_kept(directory: Path) -> Path | None:
    """Return the file of a directory that was kept last; None if there is none."""
    return next(reversed(kept_files(directory)), None)


def kept_files(directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the files that a directory keeps, the oldest first; none if it cannot be read."""
    try:
        names = sorted(path.name for path in Path(directory).iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return ()
    return tuple(Path(directory, name) for name in names)
