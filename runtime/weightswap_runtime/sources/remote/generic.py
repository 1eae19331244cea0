"""Objects of any other fsspec file system, through its public methods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weightswap_runtime.errors import AccessDenied, WeightFileError
from weightswap_runtime.sources.location import Url

from .transport import HEAD_BYTES, STALL, ObjectPin, Opened, Write, changed, failed, lost, refused

PATIENCE = 3 * STALL  # seconds for one call: there is no telling whether it makes progress
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
    """A Transport. What an object is pinned to is compared before and after; Google's is asked for by generation.

    File systems without an event loop get one call at a time, each in a thread: few of them promise more.
    """

    def __init__(self, fs: Any, path: str, url: Url) -> None:
        self._fs = fs
        self._path = path
        self._url = url
        self._where = str(url)
        self._alone = asyncio.Lock()

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
            options["cache_type"] = "none"  # it would read 5 MB ahead of each range
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
            raise WeightFileError(f"{self._where}: its file system does not say how large it is")
        return ObjectPin(size, *_identity(info))

    async def entries(self) -> list[Mapping[str, Any]]:
        """What the store says of each entry of a folder. Raises FileNotFoundError if there is none."""
        self._fs.invalidate_cache()
        return list(await self.call("ls", self._path, detail=True))

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system. Raises FileNotFoundError, WeightFileError and Transient."""
        try:
            if not self._fs.async_impl:
                async with self._alone:  # without a limit of time: a thread cannot be stopped
                    return await asyncio.to_thread(getattr(self._fs, name), *arguments, **options)
            async with asyncio.timeout(PATIENCE):
                # fsspec's names for its coroutines
                return await getattr(self._fs, f"_{name}")(*arguments, **options)
        except (FileNotFoundError, MemoryError):
            raise
        except PermissionError as error:  # `from None`: the texts of the causes may show credentials
            raise AccessDenied(str(failed(self._url, error))) from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise failed(self._url, error) from None
        except OSError as error:
            raise self._meaning(error) from None
        except Exception as error:
            raise failed(self._url, error) from None

    def _meaning(self, error: OSError) -> Exception:
        """Some are answers over HTTP, and carry them as those of requests and httpx do."""
        response: Any = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status is None:
            return lost(self._url, error)
        if status in (404, 410):
            return FileNotFoundError(self._where)
        return refused(self._where, status, type(error).__name__, response.headers.get("Retry-After"))


def _identity(info: Mapping[str, Any]) -> tuple[str, str]:
    """What shows that an object has changed: of its content, and of its time."""
    exact = (key for key in CONTENT_KEYS if info.get(key) and not str(info[key]).startswith("W/"))
    tag = next((f"{key}={info[key]}" for key in exact), "")
    return tag, next((f"{key}={info[key]}" for key in TIME_KEYS if info.get(key)), "")
