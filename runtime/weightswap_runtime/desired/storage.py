"""Storage of a document in a local directory or behind a URL. It is read whole, and replaced atomically."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from weightswap_runtime.errors import DesiredError, Unsupported, WeightFileError
from weightswap_runtime.sources.atomic import new_file, remove_abandoned
from weightswap_runtime.sources.byte_source import ByteSource, Check
from weightswap_runtime.sources.local import LocalFile
from weightswap_runtime.sources.location import Url, as_location, fixed

NAME = "desired.json"
LOCK = ".desired.lock"
PATIENCE, POLL_SECONDS = 30.0, 0.002
SHARING_PATIENCE = 0.5  # from the creation of a lock until other users may open it
MOST_BYTES = 4 << 20


class Stored(NamedTuple):
    """The bytes of a document, None if it is absent, and the tag of its version (remote storage only)."""

    content: bytes | None
    tag: str | None = None


def open_storage(place: str | os.PathLike[str]) -> LocalStorage | RemoteStorage:
    """Open the storage at a directory's path or a folder's URL, or at that of the document itself.

    Its `replace` returns False if the document is no longer the one that was read. `read` and `replace` raise
    DesiredError, and what `check` raises.
    """
    if not isinstance(place, str | os.PathLike):
        raise Unsupported(f"expected the path or URL of a directory, got a {type(place).__qualname__}")
    try:
        location = as_location(place)
    except WeightFileError as error:
        raise Unsupported(str(error)) from error
    if location.name == NAME:
        location = location.parent
    return RemoteStorage(location) if isinstance(location, Url) else LocalStorage(fixed(location))


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
            if isinstance(error.__cause__, FileNotFoundError) and self.folder.is_dir():
                return Stored(None)
            raise DesiredError(str(error)) from error

    def replace(self, before: Stored, content: bytes) -> bool:
        try:
            with self._locked():
                if self.read() != before:
                    return False
                remove_abandoned(self.folder, NAME)
                with new_file(self._path) as file:
                    file.write(content)
        except OSError as error:
            raise DesiredError(f"{self._path}: cannot be written ({error})") from error
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = self._open_lock()
        try:
            self._lock(fd)
            yield
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> None:
        """Lock the file. Other writers hold the lock for milliseconds; give up on one that was suspended."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    text = f"{self._path}: another process has held {LOCK} for {PATIENCE} s; check that process"
                    raise DesiredError(text) from error
            time.sleep(POLL_SECONDS)

    def _open_lock(self) -> int:
        """Open the lock for writing. Whoever may only read the place cannot open it at all, and so cannot lock it."""
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
                        f"{self._path}: cannot be written ({LOCK}: {error.strerror}). Writers of a place need the user "
                        "or the group of its folder. If this one has it, remove that file while nobody writes."
                    ) from error
            time.sleep(POLL_SECONDS)
        _share(fd, self.folder)
        return fd


def _share(fd: int, folder: Path) -> None:
    """Let those open our lock who may write to its folder, whatever the umask is."""
    ours, its = os.fstat(fd), folder.stat()
    if ours.st_uid != os.geteuid() or ours.st_nlink != 1 or not stat.S_ISREG(ours.st_mode):
        return
    with suppress(OSError):
        os.fchown(fd, -1, its.st_gid)
    with suppress(OSError):
        os.fchown(fd, its.st_uid, -1)  # only root may
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
        from weightswap_runtime.sources.remote.opening import find_object

        try:
            source = find_object(self._url, check)
            if source is None:
                return Stored(None)
            return Stored(_content(source), source.tag)
        except WeightFileError as error:
            raise DesiredError(str(error)) from error

    def replace(self, before: Stored, content: bytes) -> bool:
        from weightswap_runtime.sources.remote.opening import replace_object

        try:
            return replace_object(self._url, content, before.tag)
        except WeightFileError as error:
            raise DesiredError(str(error)) from error


def _content(source: ByteSource) -> bytes:
    if source.size > MOST_BYTES:
        raise WeightFileError(f"{source.where}: has {source.size} bytes, more than a desired state can have")
    content = bytearray(source.size)
    source.read_into([memoryview(content)], 0)
    return bytes(content)
