"""Where the document of a desired state lies: a file that is replaced under a lock, or an object, by its version."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from weightswap_runtime.errors import DesiredError, Unsupported, WeightFileError
from weightswap_runtime.sources.byte_source import ByteSource, Check, LocalFile
from weightswap_runtime.sources.location import Url, as_location, fixed
from weightswap_runtime.sources.writing import new_file

NAME = "desired.json"
MOST_BYTES = 4 << 20  # of a document
LOCK = ".desired.lock"
PATIENCE = 30.0  # seconds for another writer, who needs milliseconds unless it was suspended
SHARING_PATIENCE = 0.5  # seconds from the creation of a lock until other users may open it
_POLL = 0.002  # seconds
Source = str | os.PathLike[str]


def open_storage(desired_store: Source) -> LocalStorage | RemoteStorage:
    """Open the storage at a directory's path or a folder's URL, or at that of the document itself.

    Its `replace` returns False if the document is no longer the one that was read. `read` and `replace` raise
    DesiredError, and what `check` raises.
    """
    if not isinstance(desired_store, str | os.PathLike):
        raise Unsupported(f"expected the path or URL of a directory, got a {type(desired_store).__qualname__}")
    try:
        location = as_location(desired_store)
    except WeightFileError as error:
        raise Unsupported(str(error)) from error
    if location.name == NAME:
        location = location.parent
    return RemoteStorage(location) if isinstance(location, Url) else LocalStorage(fixed(location))


class Stored(NamedTuple):
    """A document in a storage."""

    content: bytes | None  # None if it is absent
    tag: str | None = None  # of its version, in remote storage


class LocalStorage:
    """A file that is replaced under a lock, which the system releases if its process dies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / NAME

    def read(self, check: Check | None = None) -> Stored:
        try:
            with closing(LocalFile(self._path)) as source:
                return Stored(_content(source))
        except WeightFileError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise DesiredError(str(error)) from error
            if self._path.is_symlink():
                text = (
                    f"{self._path!s:.200}: is a link, and what it leads to is not there; mount that, or remove the link"
                )
                raise DesiredError(text) from error
            if self.folder.is_dir():
                return Stored(None)
            text = f"{self.folder!s:.200}: no such directory; create it, or mount what has it"
            raise DesiredError(text) from error

    def replace(self, before: Stored, content: bytes, first: Callable[[], None] | None) -> bool:
        try:
            with self.locked():
                if self.read() != before:
                    return False
                if first:
                    first()
                with new_file(self._path) as file:
                    file.write(content)
        except OSError as error:
            raise DesiredError(f"{self._path}: cannot be written ({error})") from error
        return True

    @contextmanager
    def locked(self, patience: float | None = None) -> Iterator[None]:
        """Lock the document for the block. patience: seconds for another writer; None: PATIENCE.

        Raises OSError, and DesiredError, also for a link to a document.
        """
        if self._path.is_symlink():  # each folder with such a link would have a lock of its own
            text = (
                f"{self._path}: is a link, and only read; write to the folder of the document: {self._path.readlink()}"
            )
            raise DesiredError(text)
        fd = self._open_lock()
        try:
            self._lock(fd, PATIENCE if patience is None else patience)
            yield
        finally:
            os.close(fd)  # ends the lock, as the death of the process would

    def _lock(self, fd: int, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    text = f"{self._path}: another process has held {LOCK} for {patience} s; check that process"
                    raise DesiredError(text) from error
            time.sleep(_POLL)

    def _open_lock(self) -> int:
        """Open the lock for writing. Whoever may only read the desired store cannot open it at all, and so cannot lock
        it."""
        path, flags = self.folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        deadline = time.monotonic() + SHARING_PATIENCE
        while True:
            try:
                fd = os.open(path, flags)
                break
            except FileNotFoundError:
                with suppress(FileExistsError):
                    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                    break
            except PermissionError as error:  # perhaps its maker is about to share it
                if time.monotonic() > deadline:
                    raise DesiredError(
                        f"{self._path}: cannot be written ({LOCK}: {error.strerror}). Writers of a desired store need "
                        "the user or the group of its folder. If this one has it, remove that file while nobody "
                        "writes."
                    ) from error
            time.sleep(_POLL)
        _share(fd, self.folder)
        return fd


def _share(fd: int, folder: Path) -> None:
    """Let those open our lock who may write to its folder, whatever the umask is.

    The mode of a folder says who may write into it; so the lock takes that, the group and, from root, the user.
    """
    ours, its = os.fstat(fd), folder.stat()
    if ours.st_uid != os.geteuid() or ours.st_nlink != 1 or not stat.S_ISREG(ours.st_mode):
        return
    with suppress(OSError):
        os.fchown(fd, -1, its.st_gid)
    with suppress(OSError):
        os.fchown(fd, its.st_uid, -1)  # only root may
    # the group's bit counts only if the lock has that group; reading goes with writing, as O_RDWR needs both
    classes = its.st_mode & (0o222 if os.fstat(fd).st_gid == its.st_gid else 0o202) | 0o200
    mode = classes if _has_acl(fd) else classes | classes << 1
    if stat.S_IMODE(ours.st_mode) != mode:
        with suppress(OSError):  # on a file system without modes
            os.fchmod(fd, mode)


def _has_acl(fd: int) -> bool:
    """Return whether others have access of their own, which a mode without reading limits to writing."""
    try:
        return bool(os.getxattr(fd, "system.posix_acl_access"))
    except OSError:
        return False


class RemoteStorage:
    """An object that is replaced only if it is still the one that was read."""

    def __init__(self, folder: Url) -> None:
        self.folder = folder
        self._url = folder / NAME

    def read(self, check: Check | None = None) -> Stored:
        from weightswap_runtime.sources.urls import find_object

        try:
            source = find_object(self._url, check)
            if source is None:
                return Stored(None)
            return Stored(_content(source), source.tag)
        except WeightFileError as error:
            raise DesiredError(str(error)) from error

    def replace(self, before: Stored, content: bytes, first: Callable[[], None] | None) -> bool:
        from weightswap_runtime.sources.urls import replace_object

        if first:
            if self.read() != before:
                return False
            first()
        try:
            # a write whose response was lost is sent again, and then conflicts with itself
            return replace_object(self._url, content, before.tag) or self.read().content == content
        except WeightFileError as error:
            raise DesiredError(str(error)) from error


def _content(source: ByteSource) -> bytes:
    if source.size > MOST_BYTES:
        raise WeightFileError(f"{source.where}: has {source.size} bytes, more than a desired state can have")
    content = bytearray(source.size)
    source.read_into([memoryview(content)], 0)
    return bytes(content)
