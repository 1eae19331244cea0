"""Files and folders that appear whole or not at all.

A file is written under a temporary name, flushed to disk, and renamed: readers, and whoever starts after a power
failure, see the old content or the new. A symbolic link is kept, and its target is replaced. Devices, pipes and sockets
are never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from weightswap_runtime.errors import Unsupported, warn

_SPECIAL = {  # what a rename would replace by a file
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot flush a folder
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # of file systems without hard links


@contextmanager
def new_file(path: Path, *, only_new: bool = False) -> Iterator[BinaryIO]:
    """Open a new file. When the block ends without an error, its bytes are flushed to disk and it replaces `path`.

    only_new: it replaces nothing, and follows no link. Raises FileExistsError at the end if there is something by then.
    """
    with PendingFile(path) as new:
        yield new.file
        new.sync()
        (new.rename_new if only_new else new.rename)(path)


class PendingFile:
    """File that is being written under a temporary name beside `path`.

    It is removed when the block ends, unless `rename` was called. A process that is killed leaves it behind, until the
    next writer of the name: the lock that ends with its writer tells `remove_abandoned` that nobody writes it any more.
    """

    def __init__(self, path: Path) -> None:
        target = _followed(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.name)
        self._temporary, self.file = _new_temporary(target)

    def sync(self) -> None:
        """Flush the bytes to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self, path: Path) -> None:
        """Replace `path`, in the same folder. Readers see the old file or this one. Call `sync` first."""
        target = _followed(path)
        self._temporary.replace(target)
        _sync_names(target.parent)

    def rename_new(self, path: Path) -> None:
        """The same for a path in the same folder where nothing is, not even a link. Raises FileExistsError."""
        try:
            os.link(self._temporary, path)  # unlike a rename, it replaces nothing
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
            self._temporary.rename(path)
        else:
            self._temporary.unlink()
        _sync_names(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


def _new_temporary(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = _sibling(path, "tmp")
        file = temporary.open("xb")
        try:
            if _lock(file) is not False and os.fstat(file.fileno()).st_nlink:
                return temporary, file
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        # `remove_abandoned`, or somebody who may only read, was faster with the lock: do not wait for them
        file.close()
        temporary.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool | None:
    """Lock a file until it is closed or this process ends. Return False if it is locked, None if locks do not work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(folder: Path, prefix: str) -> list[Path]:
    """Remove temporary files that ended writers of names with `prefix` have left, and return their paths.

    Files of writers that still run, in any process of this machine, are kept.
    """
    removed = []
    for path in folder.glob(f".{glob.escape(prefix)}*.tmp-{'[0-9a-f]' * 8}"):
        with suppress(OSError):
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as file:
                if _lock(file):
                    path.unlink()
                    removed.append(path)
    return removed


@contextmanager
def companion(path: Path, content: bytes | bytearray | None) -> Iterator[None]:
    """Replace a small file, or remove it (None). If the block fails, restore the old file.

    For a file that must exist before the main file, which the block renames: a process that watches the folder may read
    both as soon as the main file appears. If this process is killed in between, the new companion is left beside the
    old main file.
    """
    check_replaceable(path)
    old = path.read_bytes() if path.exists() else None
    _replace(path, content)
    try:
        yield
    except BaseException:
        _replace(path, old)
        raise


def _replace(path: Path, content: bytes | bytearray | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        remove_abandoned(path.parent, path.name)
        return
    with new_file(path) as file:
        file.write(content)


@contextmanager
def new_report(path: Path) -> Iterator[BinaryIO]:
    """Open a new file like `new_file`, or an existing pipe or character device, which is written to."""
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") if _is_stream(path) else new_file(path) as file:
        yield file


def check_reportable(path: Path) -> None:
    """Raise OSError or Unsupported if `new_report` cannot write now. The folder must exist."""
    if _is_stream(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    target = _followed(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary, file = _new_temporary(target)
    with file:
        temporary.unlink()


def _is_stream(path: Path) -> bool:
    return _kind(path) in (stat.S_IFIFO, stat.S_IFCHR)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder that replaces `path` when the block ends without an error.

    A folder cannot be replaced in one system call: the old one is moved aside first and removed afterwards.
    """
    path = _followed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            _sync(entry)
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_names(path.parent)


def _put_in_place(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`. An old folder is moved aside, and back on failure. Another process may do the same."""
    for last in (False, False, False, True):  # the other's folder may come between the two renames, but not for ever
        old = _sibling(path, "old")
        check_replaceable(path)
        try:
            if path.exists():
                path.rename(old)
            folder.rename(path)
        except BaseException as error:
            if old.exists() and not path.exists():
                old.rename(path)
            if last or not isinstance(error, OSError):
                raise
        else:
            break
        finally:
            if path.exists():  # else the old folder, which could not be moved back, is the only one
                shutil.rmtree(old, ignore_errors=True)


def is_file(path: Path) -> bool:
    """Return True if there is a regular file; False also for an invalid name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_replaceable(path: Path) -> None:
    """Raise Unsupported for a device, a pipe or a socket, and OSError if the path cannot be examined."""
    if kind := _SPECIAL.get(_kind(path)):
        raise Unsupported(f"{path}: is {kind}, which weightswap never replaces; name a file")


def _followed(path: Path) -> Path:
    """Return the target of a link, or the path itself. Raises what `check_replaceable` raises."""
    check_replaceable(path)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _kind(path: Path) -> int:
    """Return the file type bits of a path or of a link's target; 0 if nothing is there."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return 0


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_names(folder: Path) -> None:
    """Flush the names in a folder to disk. A failure is only a warning: the names are there already."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            text = f"{folder}: written, but a power failure may lose it ({error.strerror})"
            warn(text, RuntimeWarning)
