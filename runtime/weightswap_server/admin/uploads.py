"""Weight files that operators send: streamed to a temporary file, and there under their name when all is right."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from blake3 import blake3

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.sources.atomic import new_file, remove_abandoned
from weightswap_runtime.tensors.digests import DIGEST
from weightswap_runtime.threads.awaiting import in_thread
from weightswap_server.errors import BadRequest, BodyTooLarge, BodyTooSlow, log

from .allowing import UPLOAD
from .documents import Uploaded, Uploads
from .errors import Conflict, NoRoom, NotThere, UploadMismatch

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors(?:\.sig)?")
_PIECE = 4 << 20
_SPARE = 64 << 20  # bytes that are left free in the file system


class UploadDirectory:
    """A directory with uploads, and how many bytes they may take together."""

    def __init__(self, folder: str, most: int, patience: float, timeout: float) -> None:
        """patience: seconds between two pieces of an upload; timeout: of all. Raises Unsupported."""
        self.folder = Path(os.path.realpath(folder))
        self._most, self._patience, self._timeout = most, patience, timeout
        self._lock = Lock()
        self._coming: dict[str, int] = {}  # bytes that were promised, or came, of each upload that has not ended
        if not self.folder.is_dir() or not os.access(self.folder, os.W_OK | os.X_OK):
            raise Unsupported(f"--upload-dir {folder}: expected a directory that can be written to")
        if removed := remove_abandoned(self.folder, ""):
            log.info("%s: removed %d uploads that had broken off", folder, len(removed))

    def listing(self) -> Uploads:
        return Uploads(files=self._files(), limit=self._most)

    def remove(self, name: str) -> None:
        """Raises NotThere and BadRequest. Weights that are served from it stay."""
        path = self.folder / _checked(name)
        try:
            path.unlink()
        except FileNotFoundError as error:
            raise NotThere(f"no upload is called {name}") from error

    async def receive(self, name: str, pieces: AsyncIterator[bytes], length: int | None, digest: str) -> Uploaded:
        """Write an upload. length: what its header promises; digest: its BLAKE3, or "".

        Raises BadRequest, Conflict where the name is taken, NoRoom, BodyTooLarge, BodyTooSlow and UploadMismatch; then
        nothing is left of it.
        """
        path = self.folder / _checked(name)
        if digest and not DIGEST.fullmatch(digest):
            raise BadRequest("the digest is no BLAKE3 in 64 hexadecimal digits")
        self._begin(name, path)
        try:
            self._grow(name, length or 0)
            return await self._write(name, path, pieces, length, digest)
        except OSError as error:
            raise NoRoom(f"{name}: cannot be written ({error.strerror})") from error
        finally:
            with self._lock:
                del self._coming[name]

    async def _write(
        self, name: str, path: Path, pieces: AsyncIterator[bytes], length: int | None, digest: str
    ) -> Uploaded:
        with ExitStack() as stack:
            file = stack.enter_context(new_file(path))
            size, computed = await self._copy(name, pieces, file)
            if length is not None and size != length:
                raise BadRequest(f"{name}: broke off after {size} of {length} bytes")
            if digest and computed != digest:
                raise UploadMismatch(f"{name}: has the BLAKE3 {computed}, and {digest} was named; send it again")
            await in_thread(stack.pop_all().close)  # which waits for the disk
        return Uploaded(source=UPLOAD + name, size=size, blake3=computed)

    async def _copy(self, name: str, pieces: AsyncIterator[bytes], file: BinaryIO) -> tuple[int, str]:
        hashed, size, waiting = blake3(), 0, bytearray()

        def write(piece: bytearray) -> None:
            file.write(piece)
            hashed.update(piece)

        try:
            async with asyncio.timeout(self._timeout):
                while (piece := await self._next(pieces)) is not None:
                    size += len(piece)
                    self._grow(name, size)
                    waiting += piece
                    if len(waiting) >= _PIECE:
                        await asyncio.to_thread(write, waiting)
                        waiting = bytearray()
        except TimeoutError as error:
            raise BodyTooSlow(f"{name}: nothing came for {self._patience:g} s, or it was too slow") from error
        await asyncio.to_thread(write, waiting)
        return size, hashed.hexdigest()

    async def _next(self, pieces: AsyncIterator[bytes]) -> bytes | None:
        async with asyncio.timeout(self._patience):
            return await anext(pieces, None)

    def _begin(self, name: str, path: Path) -> None:
        with self._lock:
            if name in self._coming or os.path.lexists(path):
                raise Conflict(f"an upload is called {name} already; choose another name, or delete it")
            self._coming[name] = 0

    def _grow(self, name: str, size: int) -> None:
        with self._lock:
            if size <= self._coming[name]:
                return
            self._coming[name] = size
            if size > self._most:
                raise BodyTooLarge(f"{name}: has more than {self._most} bytes, which uploads may take")
            others = sum(self._files().values()) + sum(self._coming.values()) - size
        system = os.statvfs(self.folder)
        free = system.f_bavail * system.f_frsize - _SPARE
        if others + size > self._most:
            raise NoRoom(f"{name}: uploads may take {self._most} bytes, and have {others}; delete some")
        if free < 0:
            raise NoRoom(f"{name}: the disk of the uploads is full")

    def _files(self) -> dict[str, int]:
        with os.scandir(self.folder) as entries:
            found = [entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
            return dict(sorted((entry.name, entry.stat(follow_symlinks=False).st_size) for entry in found))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{name!r}: expected up to 200 letters, digits, dots, dashes and underscores, and .safetensors at the end"
        )
    return name
