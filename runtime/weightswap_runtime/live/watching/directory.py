"""The weight files of a directory, local or behind a URL: their names, their order, and what shows that one changed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from weightswap_runtime.errors import MissingExtra, Unsupported, WeightFileError
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SUFFIX
from weightswap_runtime.sources.location import Url, as_location, fixed, redact

_PUBLISHED = re.compile(r"(step-[0-9]+)-[0-9a-f]{12}\.safetensors")
_DIGITS = re.compile(r"([0-9]+)")
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
    location = as_location(directory)
    if isinstance(location, Url):
        _check_protocol(location)
        return lambda: _list_url(location)
    path = fixed(location)
    return lambda: _list_local(path)


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
    return order_of_names(entry.name), entry.modified, entry.name


def order_of_names(name: str) -> list[Any]:
    """As `order`, as far as the names tell."""
    published = _PUBLISHED.fullmatch(name)
    stem = published[1] if published else name.removesuffix(SUFFIX)
    parts = _DIGITS.split(stem)  # text, digits, text, ...
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


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


def _check_protocol(url: Url) -> None:
    if url.is_web:
        raise Unsupported(f"{url}: a web server lists no files; watch a folder of a bucket, or a local one")
    try:
        import fsspec

        fsspec.get_filesystem_class(url.protocol)
    except ImportError as error:
        raise MissingExtra(f"watching {url.protocol}:// URLs ({error})", "remote") from error
    except ValueError as error:
        from weightswap_runtime.sources.remote.opening import unknown

        raise unknown(url, error) from error


def _list_url(url: Url) -> list[Entry]:
    import fsspec.core

    try:
        system, root = fsspec.core.url_to_fs(url.raw)
        system.invalidate_cache(root)
        return with_goldens(_remote(system.ls(root, detail=True), system.unstrip_protocol))
    except Exception as error:  # each kind of store has its own
        found = f"{type(error).__name__}: {redact(str(error), url.raw)}"
        raise WeightFileError(f"{url}: cannot be listed ({found})") from None


def _remote(found: Iterable[Mapping[str, Any]], url_of: Callable[[str], str]) -> Iterable[Entry]:
    for info in found:
        name = info["name"].rpartition("/")[2]
        if info.get("type") == "file" and is_looked_at(name):
            yield _entry(name, url_of(info["name"]), info)


def _entry(name: str, url: str, info: Mapping[str, Any]) -> Entry:
    from weightswap_runtime.sources.remote.generic import CONTENT_KEYS, TIME_KEYS  # only for a URL

    tags, times = ([info[key] for key in keys if info.get(key)] for keys in (CONTENT_KEYS, TIME_KEYS))
    return Entry(name, url, (info.get("size"), *map(str, tags + times)), _seconds(times[0] if times else None))


def _seconds(modified: Any) -> float:
    """Stores give times as numbers, as datetimes, or as texts."""
    if isinstance(modified, str):
        with suppress(ValueError):
            return datetime.fromisoformat(modified).timestamp()
        return 0.0
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0.0)
