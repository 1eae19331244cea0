"""Objects of all other fsspec file systems, through their public methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weightswap_runtime.errors import AccessDenied, WeightFileError
from weightswap_runtime.sources.location import Url

from .transport import HEAD_BYTES, STALL, ObjectPin, Opened, Write, changed, connection_lost, read_failed, status_error

CALL_TIMEOUT = 3 * STALL  # seconds for one call, whose progress cannot be observed
CONTENT_KEYS = (
    "generation",
    "VersionId",
    "version_id",
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "xet_hash",
)
TIME_KEYS = ("LastModified", "last_modified", "modified", "mtime", "updated", "created", "last_commit")


class GenericObject:
    """Transport that compares an object's pin before and after a read; Google's objects are read by generation.

    File systems without an event loop get one call at a time, each in a thread: few of them are thread-safe.
    """

    def __init__(self, fs: Any, path: str, url: Url) -> None:
        self._fs = fs
        self._path = path
        self._url = url
        self._where = str(url)
        self._call_lock = asyncio.Lock()

    async def open(self) -> Opened | None:
        pin = await self.probe(ObjectPin(0))
        if pin is None:
            return None
        head = bytearray()
        if pin.size:
            await self.fetch(pin, 0, min(pin.size, HEAD_BYTES), head.extend)
        return Opened(pin, bytes(head))

    async def fetch(self, pin: ObjectPin, start: int, stop: int, write: Write) -> None:
        kind, _, version = pin.tag.partition("=")
        options = {"generation": version} if kind == "generation" else {}
        if self._url.protocol == "hf":
            options["cache_type"] = "none"  # the default cache reads 5 MB ahead of each range
        try:
            data = await self.call("cat_file", self._path, start=start, end=stop, **options)
        except FileNotFoundError:
            raise changed(self._where) from None
        write(data)

    async def probe(self, pin: ObjectPin) -> ObjectPin | None:
        self._fs.invalidate_cache()
        try:
            info = await self.call("info", self._path)
        except FileNotFoundError:
            return None
        if info.get("type") == "directory":
            return None
        size = info.get("size")
        if not isinstance(size, int):
            raise WeightFileError(f"{self._where}: its file system does not report its size")
        return ObjectPin(size, *_identity(info))

    async def entries(self) -> list[Mapping[str, Any]]:
        """Return the store's information on each entry of a folder. Raises FileNotFoundError."""
        self._fs.invalidate_cache()
        return list(await self.call("ls", self._path, detail=True))

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system. Raises FileNotFoundError, WeightFileError and Transient."""
        try:
            if not self._fs.async_impl:
                async with self._call_lock:  # no timeout: a thread cannot be stopped
                    return await asyncio.to_thread(getattr(self._fs, name), *arguments, **options)
            async with asyncio.timeout(CALL_TIMEOUT):
                # fsspec's coroutines have the names of its methods with an underscore
                return await getattr(self._fs, f"_{name}")(*arguments, **options)
        except (FileNotFoundError, MemoryError):
            raise
        except PermissionError as error:  # `from None`: the texts of the causes may show credentials
            raise AccessDenied(str(read_failed(self._url, error))) from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise read_failed(self._url, error) from None
        except OSError as error:
            raise self._translate(error) from None
        except Exception as error:
            raise read_failed(self._url, error) from None

    def _translate(self, error: OSError) -> Exception:
        """Translate an error; some carry an HTTP response, like the errors of requests and httpx."""
        response: Any = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status is None:
            return connection_lost(self._url, error)
        if status in (404, 410):
            return FileNotFoundError(self._where)
        return status_error(self._where, status, type(error).__name__, response.headers.get("Retry-After"))


def _identity(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return tags of an object's content and of its time; a change of either shows that the object changed."""
    exact = (key for key in CONTENT_KEYS if info.get(key) and not str(info[key]).startswith("W/"))
    tag = next((f"{key}={info[key]}" for key in exact), "")
    return tag, next((f"{key}={info[key]}" for key in TIME_KEYS if info.get(key)), "")
