"""Files and folders that appear whole or not at all.

A link stays, and what it points to is replaced. Nothing replaces a device, a pipe or a socket.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from weightswap_runtime.errors import Unsupported

_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP)


def is_file(path: Path) -> bool:
    """Whether there is a regular file; False also for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_replaceable(path: Path) -> None:
    """Raise Unsupported where there is what no file may replace, and OSError where that cannot be told."""
    if kind := _SPECIAL.get(_kind(path)):
        raise Unsupported(f"{path}: is {kind}, which no file replaces; name a file")


def _kind(path: Path) -> int:
    """What there is, or what a link points to; 0 for nothing."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return 0


def _followed(path: Path) -> Path:
    """What a link points to. Raises what `check_replaceable` does."""
    check_replaceable(path)
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_names(folder: Path) -> None:
    """Have the names in a folder on disk. They are there already: that they are not safe yet is a warning."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            text = f"{folder}: written, but after a power failure it may not be there ({error.strerror})"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class PendingFile:
    """A file that is being written, locked, under a temporary name beside `path`.

    It is removed when the block ends, unless `rename` was called.
    """

    def __init__(self, path: Path) -> None:
        target = _followed(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary, self.file = _new_temporary(target)

    def sync(self) -> None:
        """Have the bytes on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self, path: Path) -> None:
        """Replace `path`, in the same folder. A reader sees the old file or this one; `sync` comes first."""
        target = _followed(path)
        self._temporary.replace(target)
        _sync_names(target.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that replaces `path`, its bytes on disk, when the block ends without an error."""
    with PendingFile(path) as new:
        yield new.file
        new.sync()
        new.rename(path)


@contextmanager
def new_report(path: Path) -> Iterator[BinaryIO]:
    """As `new_file`; but a pipe, or a device that takes bytes in a row, is written to."""
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") if _is_stream(path) else new_file(path) as file:
        yield file


def _is_stream(path: Path) -> bool:
    return _kind(path) in (stat.S_IFIFO, stat.S_IFCHR)


def check_reportable(path: Path) -> None:
    """Raise OSError or Unsupported where `new_report` could not write now; its folder has to be there."""
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


@contextmanager
def companion(path: Path, content: bytes | None) -> Iterator[None]:
    """Replace a small file, or remove it (None). If the block fails, the old one is put back.

    For a file that must be there before the one that it belongs to, which the block renames: whoever watches the folder
    may take that as soon as it is there. A process that is killed in between leaves the new one beside the old.
    """
    check_replaceable(path)
    old = path.read_bytes() if path.exists() else None
    _replace(path, content)
    try:
        yield
    except BaseException:
        _replace(path, old)
        raise


def _replace(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    with new_file(path) as file:
        file.write(content)


def _new_temporary(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = _sibling(path, "tmp")
        file = temporary.open("xb")
        try:
            _lock(file)
            if os.fstat(file.fileno()).st_nlink:
                return temporary, file
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        file.close()  # removed before it was locked


def _lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Lock a file until it is closed or this process ends. False if another has it, or there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_abandoned(folder: Path, prefix: str) -> list[Path]:
    """Remove the temporary files of `new_file` whose writers are gone, for names that begin with `prefix`.

    Those of writers that still run, in any process of this machine, are left alone. Returns what was removed.
    """
    removed = []
    for path in folder.glob(f".{glob.escape(prefix)}*.tmp-{'[0-9a-f]' * 8}"):
        with suppress(OSError):
            if path.is_symlink() or not path.is_file():
                continue
            with path.open("rb") as file:
                if _lock(file, wait=False):
                    path.unlink()
                    removed.append(path)
    return removed


def _put_in_place(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; what is there is moved aside, and back if that fails. Another may do the same."""
    for last in (False, False, False, True):
        old = _sibling(path, "old")
        check_replaceable(path)
        try:
            if path.exists():
                path.rename(old)
            folder.rename(path)
        except OSError:
            if old.exists() and not path.exists():
                old.rename(path)
            if last:
                raise
        else:
            break
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that replaces `path` when the block ends without an error.

    A folder cannot be replaced in one system call: an old one is moved aside first and removed afterwards.
    """
    path = _followed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            _sync(written)
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_names(path.parent)
