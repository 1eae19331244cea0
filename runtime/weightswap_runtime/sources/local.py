"""Local files as sources of bytes; how it is noticed that one is written to."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from weightswap_runtime.errors import WeightFileError

from .byte_source import between

CLOCK_TICK_NS = 20_000_000  # the kernel stamps files by a clock of up to 10 ms
_REPLACE = "Replace files (os.replace), never rewrite them."
_UNPROVEN = (
    "which cannot be told from a write where no digests are compared. Try again, and let nobody make or remove names "
    "of it meanwhile; a server takes a packed file all the same."
)


class _Fingerprint(NamedTuple):
    """What shows that a file is written to. Times in nanoseconds."""

    size: int
    modified: int
    changed: int
    links: int


def outwait_clock(changed: int) -> bool:
    """Wait until a later write would give a file another ctime than `changed`, in nanoseconds. Whether that took time.

    mtime says nothing: it is what a writer wants it to be. A ctime in the future is that of another clock.
    """
    if time.time_ns() - changed >= CLOCK_TICK_NS:
        return False
    time.sleep(CLOCK_TICK_NS / 1e9)
    return True


def has_writer(fd: int) -> bool:
    """Whether a file is open for writing, or mapped so, in any process; False where that cannot be told.

    A read lease tells: the kernel gives none while there is a writer. Whoever is not the file's owner gets none either,
    and some file systems have none. fd: open for reading alone.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # for a writer that comes just now; SIGIO would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


def open_at_once(path: Path) -> int:
    """A descriptor for reading. Without O_NONBLOCK a named pipe would be waited for."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


class LocalFile:
    """A regular file. It stays readable when its name is replaced."""

    unit = 1 << 20  # small enough that the hasher finds it still in the cache

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.fd = self._open(path)
        try:
            self._check_regular()
            self._identity = self._fingerprint()
            self.size = self._identity.size
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> int:
        try:
            return open_at_once(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightFileError(f"{self.where:.200}: cannot be opened ({reason})") from error

    def _check_regular(self) -> None:
        if not stat.S_ISREG(self._status().st_mode):
            raise WeightFileError(f"{self.where}: cannot be opened (not a regular file)")

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        wanted = sum(map(len, buffers))
        try:
            got = os.preadv(self.fd, buffers, offset)
            while got < wanted:
                more = os.preadv(self.fd, between(buffers, got, wanted), offset + got)
                if not more:
                    raise WeightFileError(
                        f"{self.where}: ends at byte {offset + got}, {wanted - got} bytes early; it was truncated "
                        f"while it was read. {_REPLACE}"
                    )
                got += more
        except OSError as error:
            raise self._unreadable(error, f" at byte {offset}") from error

    def await_stable_mtime(self) -> None:
        """Let a file that was just written grow older than the clock that stamps it, so that a later write shows.

        One write is stamped when it begins, so that no writer may be left from before.
        """
        waited = outwait_clock(self._identity.changed)
        if has_writer(self.fd):
            raise WeightFileError(
                f"{self.where}: is being written to: it is open for writing, in this process or another. Try again "
                f"when it is closed. {_REPLACE}"
            )
        if waited:
            self.check_unchanged()

    def check_unchanged(self, *, proven: bool = False) -> None:
        before, now = self._identity, self._fingerprint()
        if now[:2] != before[:2]:
            raise WeightFileError(f"{self.where}: the file was written to while it was read. {_REPLACE}")
        # a write shows in ctime even where mtime is set back; so do other names, which excuse nothing
        if not proven and now != before:
            names = f"from {before.links} to {now.links} names" if now.links != before.links else "its mode, or more"
            raise WeightFileError(f"{self.where}: was changed while it was read ({names}), {_UNPROVEN}")

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with suppress(OSError):  # the descriptor is free all the same, and nothing was written
                os.close(fd)

    def _fingerprint(self) -> _Fingerprint:
        status = self._status()
        return _Fingerprint(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self.fd)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError, position: str = "") -> WeightFileError:
        return WeightFileError(f"{self.where}: cannot be read{position} ({error.strerror})")
