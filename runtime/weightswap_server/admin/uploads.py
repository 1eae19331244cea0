"""Weight files in the bodies of requests: kept as files once they are complete, or staged while they arrive."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Set
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from blake3 import blake3

from weightswap_runtime.errors import DesiredError, Unsupported, WeightswapError, text_of
from weightswap_runtime.following.desired_state import DesiredState
from weightswap_runtime.following.desired_store import DesiredStore, unchanging
from weightswap_runtime.following.directory import AnyStamp, remove, stamps_in, unused
from weightswap_runtime.format.weight_set import companions
from weightswap_runtime.jobs import POLL_SECONDS
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.writing import new_file, remove_abandoned
from weightswap_runtime.tensors import DIGEST
from weightswap_runtime.threads import in_thread
from weightswap_server.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    Conflict,
    NoRoom,
    NotThere,
    UploadMismatch,
    log,
)

from .access import UPLOAD, FilesInUse
from .documents import Uploaded, Uploads
from .operations import ModelOperations

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors(?:\.sig)?")
_PIECE = 4 << 20  # bytes that are written at once
_SPARE = 64 << 20  # bytes to leave free in the file system
_LOCK_PATIENCE = 0.5  # seconds for a writer of a desired store, since requests for all models wait meanwhile


class UploadDirectory:
    """The directory of uploads, with a limit of their bytes."""

    def __init__(self, folder: str, most: int, piece_timeout: float, timeout: float) -> None:
        """piece_timeout, timeout: seconds for the next piece of an upload, and for all of it. Raises Unsupported."""
        self.folder = Path(os.path.realpath(folder))
        self._most, self._piece_timeout, self._timeout = most, piece_timeout, timeout
        self._lock = Lock()
        self._unfinished: dict[str, int] = {}  # announced or received bytes of each unfinished upload
        self._sent: dict[str, float] = {}  # when names were sent again that were there already
        if not self.folder.is_dir() or not os.access(self.folder, os.W_OK | os.X_OK):
            raise Unsupported(f"--upload-dir {folder}: expected a writable directory")
        if removed := remove_abandoned(self.folder, ""):
            log.info("%s: removed %d unfinished uploads", folder, len(removed))

    def listing(self) -> Uploads:
        return Uploads(files=self._files(), limit=self._most)

    def remove(self, name: str) -> None:
        """Remove an upload. Weights that were loaded from it stay. Raises NotThere and BadRequest."""
        path = self.folder / _checked(name)
        try:
            with self._lock:
                path.unlink()
                self._sent.pop(name, None)
        except FileNotFoundError as error:
            raise NotThere(f"no upload is named {name}") from error

    def remove_unneeded(self, models: Collection[ModelOperations], files: FilesInUse, keep: int) -> None:
        """Remove uploads that models have served, or desired stores named, and that none needs any more.

        keep: earlier weights of each history whose files stay. If it cannot be decided, nothing is removed, and the
        reason is logged.
        """
        try:
            with files.frozen() as used:
                removed = self._remove_unneeded(models, used, keep)
        except (WeightswapError, OSError) as error:
            log.warning("%s: older uploads were not removed: %s: %s", self.folder, type(error).__name__, text_of(error))
        else:
            if removed:
                log.info("%s: removed %s", self.folder, ", ".join(path.name for path in removed))

    def _remove_unneeded(self, models: Collection[ModelOperations], used: Set[str], keep: int) -> list[Path]:
        if watching := [each.name for each in models if each.followed.watches(self.folder)]:
            raise Unsupported(f"{', '.join(watching)} watches this directory, and may be reading any file of it")
        stamps, stores = stamps_in(self.folder), [each.followed.desired_store for each in models]
        with _unchanging([each for each in stores if each is not None]) as states:
            # what is staged first: it is served next
            used = {*used, *(os.path.realpath(path) for each in models for path in each.open_sources)}
            needed = [
                each.needed(keep, store, states[_folder(store)] if store else None)
                for each, store in zip(models, stores, strict=True)
            ]
            last: dict[tuple[str, str], float] = {}
            for source, weights_id, moment in (entry for _, known in needed for entry in known):
                key = os.path.realpath(source), weights_id
                last[key] = max(moment, last.get(key, -math.inf))

            def may_go(path: Path, stamp: AnyStamp) -> bool:
                is_read = any(path.is_relative_to(each) for each in used)
                return not is_read and self._is_older(path, last.get((str(path), stamp.weights_id), -math.inf))

            with self._lock:  # no upload begins
                removed = unused(stamps, set().union(*(ids for ids, _ in needed)), may_go)
                for path in removed:
                    remove(path)
                    for each in _with_companions(path):
                        self._sent.pop(each.name, None)
        return removed

    def _is_older(self, path: Path, moment: float) -> bool:
        """Return whether neither a file nor what is beside it was sent again after that time."""
        return all(
            each.name not in self._unfinished
            and self._sent.get(each.name, -math.inf) <= moment
            and (not each.exists() or each.stat().st_mtime <= moment)
            for each in _with_companions(path)
        )

    async def receive(self, name: str, pieces: AsyncIterator[bytes], length: int | None, digest: str) -> Uploaded:
        """Receive an upload. length: its announced bytes; digest: its BLAKE3, or "".

        Raises BadRequest, Conflict if the name is taken, NoRoom, BodyTooLarge, BodyTooSlow and UploadMismatch, and then
        leaves no file.
        """
        path = self.folder / _checked(name)
        if digest and not DIGEST.fullmatch(digest):
            raise BadRequest("the digest is not a BLAKE3 digest of 64 hexadecimal digits")
        self._begin(name, path)
        try:
            self._grow(name, length or 0)
            return await self._write(name, path, pieces, length, digest)
        except OSError as error:
            raise NoRoom(f"{name}: cannot be written ({error.strerror})") from error
        finally:
            with self._lock:
                del self._unfinished[name]

    async def _write(
        self, name: str, path: Path, pieces: AsyncIterator[bytes], length: int | None, digest: str
    ) -> Uploaded:
        with ExitStack() as stack:
            file = stack.enter_context(new_file(path, only_new=True))
            size, computed = await self._copy(name, pieces, file)
            if length is not None and size != length:
                raise BadRequest(f"{name}: ended after {size} of {length} bytes")
            if digest and computed != digest:
                raise UploadMismatch(f"{name}: its BLAKE3 is {computed}, expected {digest}; send it again")
            try:
                await in_thread(stack.pop_all().close)  # it waits for fsync
            except FileExistsError as error:  # since the upload began; others may write to the directory, too
                with self._lock:
                    raise self._taken(name) from error
        return Uploaded(source=UPLOAD + name, size=size, blake3=computed)

    async def _copy(self, name: str, pieces: AsyncIterator[bytes], file: BinaryIO) -> tuple[int, str]:
        hasher, size, buffer = blake3(), 0, bytearray()

        def write(piece: bytearray) -> None:
            file.write(piece)
            hasher.update(piece)

        try:
            async with asyncio.timeout(self._timeout):
                while (piece := await self._next(pieces)) is not None:
                    size += len(piece)
                    self._grow(name, size)
                    buffer += piece
                    if len(buffer) >= _PIECE:
                        await asyncio.to_thread(write, buffer)
                        buffer = bytearray()
        except TimeoutError as error:
            raise BodyTooSlow(f"{name}: nothing arrived for {self._piece_timeout:g} s, or it was too slow") from error
        await asyncio.to_thread(write, buffer)
        return size, hasher.hexdigest()

    async def _next(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        async with asyncio.timeout(self._piece_timeout):
            return await anext(pieces, None)

    def _begin(self, name: str, path: Path) -> None:
        with self._lock:
            if name in self._unfinished or os.path.lexists(path):
                raise self._taken(name)
            self._unfinished[name] = 0

    def _taken(self, name: str) -> Conflict:
        """Return the refusal of a name that is taken. Under the lock."""
        self._sent[name] = time.time()
        return Conflict(f"an upload named {name} already exists; choose another name, or delete it")

    def _grow(self, name: str, size: int) -> None:
        with self._lock:
            if size <= self._unfinished[name]:
                return
            self._unfinished[name] = size
            if size > self._most:
                raise BodyTooLarge(f"{name}: has more than {self._most} bytes, the limit for uploads")
            others = sum(self._files().values()) + sum(self._unfinished.values()) - size
        system = os.statvfs(self.folder)
        free = system.f_bavail * system.f_frsize - _SPARE
        if others + size > self._most:
            raise NoRoom(f"{name}: uploads are limited to {self._most} bytes, and {others} are in use; delete some")
        if free < 0:
            raise NoRoom(f"{name}: the disk for uploads is full")

    def _files(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # it was removed meanwhile
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(sizes.items()))


def _with_companions(path: Path) -> tuple[Path, ...]:
    return (path, *(path.with_name(name) for name in companions(path.name)))


@contextmanager
def _unchanging(stores: Collection[DesiredStore]) -> Iterator[dict[str, DesiredState]]:
    """Yield the states of desired stores, by their folders, which nobody changes in the block. Raises DesiredError."""
    if remote := [store.where for store in stores if not store.is_local]:
        raise DesiredError(f"{', '.join(remote)}: has no lock, and could name an upload while it is removed")
    folders = {_folder(store): store for store in stores}
    with ExitStack() as stack:
        yield {
            folder: stack.enter_context(unchanging(store, _LOCK_PATIENCE)) for folder, store in sorted(folders.items())
        }


def _folder(store: DesiredStore) -> str:
    return os.path.realpath(store.where)


class Body:
    """The body of a request, which the event loop receives, and a thread takes."""

    def __init__(self, pieces: AsyncIterator[bytes], size: int, piece_timeout: float, timeout: float) -> None:
        """size: the announced bytes. piece_timeout, timeout: seconds for the next piece, and for all of it."""
        self._pieces, self._size, self._piece_timeout = pieces, size, piece_timeout
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + timeout
        self._received = 0
        self._at_hand: deque[bytes] = deque()
        self._coming: Future[deque[bytes]] | None = None  # received while a thread works on what came before

    def receive(self, check: Check) -> memoryview:
        """Return what has come, at least a byte. check: called while it waits.

        Raises BodyTooSlow, BadRequest if the client has gone, and what `check` raises.
        """
        if not self._at_hand:
            coming = self._coming or self._begin()
            while not wait((coming,), POLL_SECONDS).done:
                check()
            self._at_hand = coming.result()
            self._begin()
        return memoryview(self._at_hand.popleft())

    def _begin(self) -> Future[deque[bytes]]:
        self._coming = asyncio.run_coroutine_threadsafe(self._gather(), self._loop)
        return self._coming

    async def _gather(self) -> deque[bytes]:
        """Return a few MB, or all that is left."""
        pieces: deque[bytes] = deque()
        until = min(self._size, self._received + _PIECE)
        try:
            async with asyncio.timeout(None) as limit:
                while self._received < until:
                    limit.reschedule(min(self._until, self._loop.time() + self._piece_timeout))
                    pieces.append(await anext(self._pieces))
                    self._received += len(pieces[-1])
        except StopAsyncIteration as error:
            raise BadRequest(f"the body ended after {self._received} of {self._size} bytes") from error
        except TimeoutError as error:
            raise BodyTooSlow(f"nothing arrived for {self._piece_timeout:g} s, or all of it took too long") from error
        return pieces

    def close(self) -> None:
        """Receive nothing more."""
        if self._coming is not None:
            self._coming.cancel()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r}: expected up to 200 letters, digits, dots, dashes and underscores, ending in .safetensors"
        )
    return name
