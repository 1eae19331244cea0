"""Opening of a path or a URL as a byte source."""

from __future__ import annotations

import os
from pathlib import Path

from weightswap_runtime.errors import OutOfMemory, WeightFileError

from .byte_source import ByteSource, Check, LocalFile
from .location import Location, Url, as_location


class GivenUrl(Url):
    """URL whose content, and that of its neighbours, comes from a subclass in this process."""

    def find(self, check: Check | None) -> ByteSource | None:
        """Open the content, like `find_source`."""
        raise NotImplementedError


def open_source(path: str | os.PathLike[str] | Url, check: Check | None = None) -> ByteSource:
    """Open a local file, or the object behind a URL; its content is pinned.

    check: a callback, called every few milliseconds while waiting for a remote response; an exception that it raises
    ends the wait. Raises WeightFileError, and Unsupported or MissingExtra for a kind of URL that cannot be read here.
    """
    source = find_source(path, check)
    if source is None:
        raise WeightFileError(f"{as_location(path)}: cannot be opened (no such object)")
    return source


def find_source(path: str | os.PathLike[str] | Url, check: Check | None = None) -> ByteSource | None:
    """Like `open_source`, but return None if there is no object behind a URL."""
    location = as_location(path)
    if isinstance(location, Path):
        return LocalFile(location)
    if isinstance(location, GivenUrl):
        return location.find(check)
    from .urls import find_object  # needs fsspec

    return find_object(location, check)


def read_small(path: str | os.PathLike[str] | Url, limit: int, check: Check | None = None) -> bytes | None:
    """Read a file or object of at most `limit` bytes; None if there is none.

    Raises OutOfMemory, what `open_source` raises, and WeightFileError for a link to nothing.
    """
    content = _read(as_location(path), limit, check)
    return None if content is None else bytes(content)


def _read(location: Location, limit: int, check: Check | None) -> bytearray | None:
    try:
        source = find_source(location, check)
    except WeightFileError as error:
        missing = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
        if missing and not (isinstance(location, Path) and location.is_symlink()):
            return None
        raise
    if source is None:
        return None
    try:
        if source.size > limit:
            raise WeightFileError(
                f"{source.where}: has {source.size} bytes, expected at most {limit}", reason="damaged"
            )
        content = bytearray(source.size)
        source.read_into([memoryview(content)], 0)
        source.check_unchanged()
        return content
    except (MemoryError, OverflowError) as error:
        raise OutOfMemory(f"{source.where}: no memory for {source.size} bytes") from error
    finally:
        source.close()


def read_beside(weights: Location, name: str, limit: int, check: Check | None = None) -> bytearray | None:
    """Read a file in the folder of weights, like `read_small`; None, too, if a server denies access to it.

    A signed URL opens one object only, and S3 denies access to a missing object if the client may not list the bucket.
    """
    try:
        return _read(weights.with_name(name), limit, check)
    except WeightFileError as error:
        if error.reason != "denied":
            raise
        return None
