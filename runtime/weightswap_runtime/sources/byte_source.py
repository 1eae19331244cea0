"""Files and objects that are read while others may write to them.

What is read shall be the content at one moment. A source therefore tells afterwards whether it was written to since it
was opened; a local file by its times, which the kernel sets in ticks of its clock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import NamedTuple, Protocol

from weightswap_runtime.errors import WeightFileError

MOST_BUFFERS = 512  # below the kernel's IOV_MAX of 1024
CLOCK_TICK_NS = 20_000_000  # twice the tick (up to 10 ms) of the kernel's clock for file times
Check = Callable[[], None]  # a callback that raises an exception to end a wait
_REPLACE = "Replace files (os.replace), never rewrite them."
_UNPROVEN = (
    "which cannot be told from a write where no digests are compared. Try again while nobody adds or removes links "
    "to it; a server accepts a packed file regardless."
)


class GuardedPath(PosixPath):
    """Path behind which only a file is opened that its class admits: links may change after a check of the path.

    A class, because paths that are made from this one are of the same class: those of shards, goldens, signatures.
    """

    @classmethod
    def admits(cls, opened: Path) -> bool:
        """Return True if a file at this path, without links, may be read."""
        raise NotImplementedError


class ByteSource(Protocol):
    """Open file or object of a known size. Several threads may read it at once."""

    where: str  # its name in messages: a path or a URL
    size: int  # bytes

    @property
    def unit(self) -> int | None:
        """Preferred bytes of a read, where each waits for a network; None: as many as suit the reader."""
        return None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill all the buffers, at most MOST_BUFFERS, with the bytes from `offset` on. Raises WeightFileError.

        Nothing is written to the buffers after this method has returned or raised.
        """
        ...

    def await_stable_mtime(self) -> None:
        """Wait until `check_unchanged` can detect every later write.

        Raises WeightFileError if it never can, for example while a local file is open for writing, and if a remote
        object is no longer the one that was read before.
        """
        ...

    def check_unchanged(self, *, proven: bool = False) -> None:
        """Raise WeightFileError if the file or object was written to since it was opened, or may have been.

        proven: True if digests prove the content; other changes of the file (names, mode) are then accepted.
        """
        ...

    def close(self) -> None:
        """Release what is open. Nothing may be read afterwards."""
        return


class LocalFile(ByteSource):
    """Regular file as a ByteSource. It stays readable when its name is replaced, unless it rests."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.path, self._rests = path, False
        self.fd = self._open()
        try:
            status = self._status()
            if not stat.S_ISREG(status.st_mode):
                raise WeightFileError(f"{self.where}: cannot be opened (not a regular file)")
        except BaseException:
            self.close()
            raise
        self._identity = _Fingerprint.of(status)
        self.size = self._identity.size

    def _open(self) -> int:
        try:
            return open_at_once(self.path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeightFileError(f"{self.where:.200}: cannot be opened ({reason})") from error

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        size, done = sum(map(len, buffers)), 0
        try:
            with self.descriptor() as fd:
                while done < size:
                    rest = between(buffers, done, size) if done else buffers
                    count = os.preadv(fd, rest, offset + done)
                    if not count:
                        raise WeightFileError(
                            f"{self.where}: ends at byte {offset + done}, {size - done} bytes early; it was truncated "
                            f"while it was read. {_REPLACE}"
                        )
                    done += count
        except OSError as error:
            raise self._unreadable(error, f" at byte {offset}") from error

    def rest(self) -> None:
        """Close the file, and open it for each read from now on; one that was replaced meanwhile is refused then."""
        self.close()
        self._rests = True

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the open file, for this block alone. Raises WeightFileError if it rests and was replaced."""
        if not self._rests:
            yield self.fd
            return
        fd = self._open()
        try:
            now = _Fingerprint.of(os.fstat(fd))
            if now.inode != self._identity.inode or now[:2] != self._identity[:2]:
                raise WeightFileError(f"{self.where}: the file was replaced or written to while it was read. Try again")
            yield fd
        finally:
            os.close(fd)

    def await_stable_mtime(self) -> None:
        """Wait until the file's times are older than a tick of the clock, so that a later write changes them.

        A write sets the times when it begins, so a file that is still open for writing is refused.
        """
        waited = outwait_clock(self._identity.changed)
        with self.descriptor() as fd:
            is_written = has_writer(fd)
        if is_written:
            raise WeightFileError(
                f"{self.where}: is being written to: it is open for writing, in this process or another. Try again "
                f"when it is closed. {_REPLACE}"
            )
        if waited:
            self.check_unchanged()

    def check_unchanged(self, *, proven: bool = False) -> None:
        before, now = self._identity, _Fingerprint.of(self._status())
        if now[:2] != before[:2]:
            raise WeightFileError(f"{self.where}: the file was written to while it was read. {_REPLACE}")
        # a write changes ctime even if mtime is set back; a change of the names does, too, and could hide a write
        if not proven and now != before:
            names = f"from {before.links} to {now.links} links" if now.links != before.links else "its mode or more"
            raise WeightFileError(f"{self.where}: was changed while it was read ({names}), {_UNPROVEN}")

    def check_in_place(self) -> None:
        """Raise WeightFileError if the path leads to another file by now, as when its folder was replaced."""
        try:
            now = _Fingerprint.of(self.path.stat())
        except OSError as error:
            raise self._unreadable(error) from error
        if now.inode != self._identity.inode:
            raise WeightFileError(f"{self.where}: was replaced while the files beside it were opened. Try again")

    def close(self) -> None:
        fd, self.fd, self._rests = self.fd, -1, False
        if fd >= 0:
            with suppress(OSError):  # the descriptor is closed even then, and nothing was written
                os.close(fd)

    def _status(self) -> os.stat_result:
        try:
            with self.descriptor() as fd:
                return os.fstat(fd)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError, position: str = "") -> WeightFileError:
        return WeightFileError(f"{self.where}: cannot be read{position} ({error.strerror})")


class _Fingerprint(NamedTuple):
    """Status of a file by which writes are detected."""

    size: int
    modified: int  # times in nanoseconds
    changed: int
    links: int
    inode: tuple[int, int]

    @classmethod
    def of(cls, status: os.stat_result) -> _Fingerprint:
        inode = status.st_dev, status.st_ino
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink, inode)


def open_at_once(path: Path) -> int:
    """Open a file descriptor for reading, with O_NONBLOCK so that a named pipe does not block.

    Raises OSError, also for what a GuardedPath does not admit.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if isinstance(path, GuardedPath) and not path.admits(Path(f"/proc/self/fd/{fd}").readlink()):
        os.close(fd)
        raise PermissionError(errno.EACCES, "a link leads to where nothing may be read", str(path))
    return fd


def outwait_clock(changed: int) -> bool:
    """Wait until any later write gives a file a ctime other than `changed`, in nanoseconds. Return True if it waited.

    mtime is no evidence, because writers can set it. A ctime in the future comes from another clock.
    """
    if time.time_ns() - changed >= CLOCK_TICK_NS:
        return False
    time.sleep(CLOCK_TICK_NS / 1e9)
    return True


def has_writer(fd: int) -> bool:
    """Return True if a file is open for writing, or mapped writable, in any process; False if this is unknown.

    The kernel grants no read lease while there is a writer. It is unknown for users other than the file's owner, and on
    file systems without leases. fd: open for reading only.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # sent if a writer opens the file now; SIGIO would kill us
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    return False


def between(buffers: list[memoryview], low: int, high: int) -> list[memoryview]:
    """Return views of bytes `low` to `high` of the concatenation of `buffers`."""
    views = []
    for buffer in buffers:
        views += [buffer[max(0, low) : high]] if low < len(buffer) and high > 0 else []
        low, high = low - len(buffer), high - len(buffer)
    return views
