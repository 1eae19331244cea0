"""The weight files of a directory, local or behind a URL: their names, their order, and what shows that one changed."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from .errors import MissingExtra, Unsupported, WeightFileError
from .places import Url, is_url, printable, redact
from .weightset import GOLDENS_SUFFIX, SUFFIX

_PUBLISHED = re.compile(r"(step-[0-9]+)-[0-9a-f]{12}\.safetensors")
_DIGITS = re.compile(r"([0-9]+)")
_TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modified", "created")
_VERSIONS = ("ETag", "etag", "generation", "ino")
MOST_REQUESTS = 10  # at once, for the files of one page
UNKNOWN = None  # the fingerprint of a file of which nothing but the name could be found out at this look


class Entry(NamedTuple):
    """A weight file. `path` is what a swap takes; `modified` in seconds since the epoch, 0 where that is not known.

    Files with equal fingerprints and equal `changed` have the same content, as far as a listing can tell, and so have
    the goldens beside them; UNKNOWN says nothing. `changed`, a local file's ctime, alone differs after a write that set
    the time of modification back, and after a change of the file's mode or names.
    """

    name: str
    path: str | Path
    fingerprint: Hashable
    modified: float
    changed: Hashable = None


Listing = Callable[[], list[Entry]]


def open_directory(directory: str | os.PathLike[str]) -> Listing:
    """A function that lists the weight files of a directory or of a URL's, in no order; none of them is opened.

    The function raises WeightFileError where the directory cannot be listed, from the OSError where it is a local one.
    This one raises MissingExtra and Unsupported for a URL that is not supported here.
    """
    if not isinstance(directory, str | os.PathLike):
        raise Unsupported(f"expected a directory's path or URL, got a {type(directory).__qualname__}")
    if isinstance(directory, str) and is_url(directory):
        _check_protocol(directory)
        return lambda: _list_url(directory)
    path = _fixed(Path(directory))
    return lambda: _list_local(path)


def _fixed(path: Path) -> Path:
    """The same directory whatever the working directory becomes. Without one, as given."""
    try:
        return path.absolute()
    except OSError:
        return path


def is_looked_at(name: str) -> bool:
    """Whether a file of that name is a weight file, or goldens. Those of writers that have not finished are hidden."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def with_goldens(found: Iterable[Entry]) -> list[Entry]:
    """The weight files; each has the fingerprint of its goldens, too, as these decide whether it is taken."""
    weights, goldens = [], {}
    for entry in found:
        if entry.name.endswith(GOLDENS_SUFFIX):
            goldens[entry.name.removesuffix(GOLDENS_SUFFIX)] = entry
        else:
            weights.append(entry)
    return [_with(entry, goldens.get(entry.name.removesuffix(SUFFIX))) for entry in weights]


def _with(entry: Entry, goldens: Entry | None) -> Entry:
    if goldens is None or UNKNOWN in (entry.fingerprint, goldens.fingerprint):
        return entry
    changed = None if entry.changed is None else (entry.changed, goldens.changed)
    return entry._replace(fingerprint=(entry.fingerprint, goldens.fingerprint), changed=changed)


def order(entry: Entry) -> tuple[Any, ...]:
    """Where a file comes among the others: by name, numbers by their value; the later of one published step last."""
    published = _PUBLISHED.fullmatch(entry.name)
    stem = published[1] if published else entry.name.removesuffix(SUFFIX)
    parts = _DIGITS.split(stem)  # text, digits, text, ...
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], entry.modified, entry.name


def _list_local(directory: Path) -> list[Entry]:
    try:
        with os.scandir(directory) as found:
            entries = [_local(directory, file) for file in found if is_looked_at(file.name)]
    except (OSError, ValueError) as error:
        raise WeightFileError(f"{directory!s:.200}: cannot be listed ({error})") from error
    return with_goldens(entry for entry in entries if entry is not None)


def _local(directory: Path, file: os.DirEntry[str]) -> Entry | None:
    try:
        status = file.stat()
        regular = file.is_file()
    except FileNotFoundError:  # it has gone meanwhile
        return None
    except OSError:
        return Entry(file.name, directory / file.name, UNKNOWN, 0.0)
    fingerprint = (status.st_size, status.st_mtime_ns, status.st_ino)
    path = directory / file.name
    return Entry(file.name, path, fingerprint, status.st_mtime, status.st_ctime_ns) if regular else None


def _check_protocol(url: str) -> None:
    try:
        import fsspec

        for part in url.split("::"):
            fsspec.get_filesystem_class(part.partition("://")[0])
    except ImportError as error:
        raise MissingExtra(f"watching {url.partition('://')[0]}:// URLs ({error})", "remote") from error
    except ValueError as error:
        raise Unsupported(f"{url.partition('://')[0]}://: {error}") from error


def _list_url(url: str) -> list[Entry]:
    import fsspec.core

    try:
        if Url(url).is_web:
            return _list_web(Url(url))
        system, root = fsspec.core.url_to_fs(url)
        system.invalidate_cache(root)
        return with_goldens(_remote(system.ls(root, detail=True), system.unstrip_protocol))
    except Exception as error:  # each kind of store has its own
        found = f"{type(error).__name__}: {redact(str(error), url)}"
        raise WeightFileError(f"{printable(url)}: cannot be listed ({found})") from None


def _list_web(url: Url) -> list[Entry]:
    """The files to which a page links; a HEAD request for each, as links do not tell what changes."""
    from fsspec.asyn import sync
    from fsspec.core import url_to_fs

    page, _, query = url.raw.partition("#")[0].partition("?")
    # beside the URL: links are resolved against that, and the query comes behind the paths of the files, too
    system, root = url_to_fs(page, **({"params": query} if query else {}))
    links = (link.rpartition("/") for link in system.ls(root, detail=False))
    found = [name for folder, _, name in links if _place(folder) == _place(page) and is_looked_at(unquote(name))]
    status = sync(system.loop, _ask, system, [f"{page.rstrip('/')}/{name}" for name in found])
    return with_goldens(
        _web(url / unquote(name), unquote(name), each) for name, each in zip(found, status, strict=True)
    )


def _place(url: str) -> str:
    """Without the protocol: a page may link to https://."""
    return url.partition("://")[2].rstrip("/")


async def _ask(system: Any, urls: list[str]) -> list[Mapping[str, Any] | BaseException]:
    turns = asyncio.Semaphore(MOST_REQUESTS)

    async def ask(url: str) -> Mapping[str, Any]:
        async with turns:
            found: Mapping[str, Any] = await system._info(url)
            return found

    return await asyncio.gather(*map(ask, urls), return_exceptions=True)


def _web(url: Url, name: str, found: Mapping[str, Any] | BaseException) -> Entry:
    if isinstance(found, BaseException):
        return Entry(name, url.raw, UNKNOWN, 0.0)
    return _entry(name, url.raw, found)


def _remote(found: Iterable[Mapping[str, Any]], url_of: Callable[[str], str]) -> Iterable[Entry]:
    for info in found:
        name = info["name"].rpartition("/")[2]
        if info.get("type") == "file" and is_looked_at(name):
            yield _entry(name, url_of(info["name"]), info)


def _entry(name: str, url: str, info: Mapping[str, Any]) -> Entry:
    modified = _first(info, _TIMES)
    fingerprint = (info.get("size"), _first(info, _VERSIONS), str(modified))
    # fsspec calls a local file's ctime so
    return Entry(name, url, fingerprint, _seconds(modified), info.get("created") if "ino" in info else None)


def _first(info: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((info[key] for key in keys if info.get(key) is not None), None)


def _seconds(modified: Any) -> float:
    """Stores give times as numbers, as datetimes, or as texts."""
    if isinstance(modified, str):
        modified = _parsed(modified)
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0.0)


def _parsed(text: str) -> datetime | None:
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError):
            return parse(text)
    return None
