"""Listings of weight files in a directory, local or behind a URL: their names, their order and their fingerprints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from weightswap_runtime.errors import Unsupported, WeightFileError
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX, SUFFIX
from weightswap_runtime.sources.location import Url, as_location, fixed

_PUBLISHED = re.compile(r"(step-[0-9]+)-[0-9a-f]{12}\.safetensors")
_DIGITS = re.compile(r"([0-9]+)")
UNKNOWN = None  # the fingerprint of a file of which only the name could be found out at this look


class Entry(NamedTuple):
    """A weight file in a listing. `path`: the argument of a swap. `modified`: seconds since the epoch; 0 if unknown.

    Files with equal fingerprints and equal `changed` have the same content, as far as a listing can tell, and so have
    the goldens beside them; a fingerprint UNKNOWN says nothing. `changed`, a local file's ctime, alone differs after a
    write that restored the time of modification, and after a change of the file's mode or hard links.
    """

    name: str
    path: str | Path
    fingerprint: Hashable
    modified: float
    changed: Hashable = None


Listing = Callable[[], list[Entry]]


def open_directory(directory: str | os.PathLike[str]) -> Listing:
    """Return a function that lists the weight files of a directory, local or behind a URL, in no order.

    The listing opens no file. It raises WeightFileError, caused by an OSError for a local directory, if the directory
    cannot be listed. `open_directory` itself raises MissingExtra and Unsupported for a URL that is not supported.
    """
    if not isinstance(directory, str | os.PathLike):
        raise Unsupported(f"expected a directory's path or URL, got a {type(directory).__qualname__}")
    location = as_location(directory)
    if isinstance(location, Url):
        from weightswap_runtime.sources.remote.listing import check_listable  # needs fsspec

        check_listable(location)
        return lambda: _list_url(location)
    path = fixed(location)
    return lambda: _list_local(path)


def is_weight_file_or_goldens(name: str) -> bool:
    """Return whether a file of that name is a weight file or goldens. Unfinished files begin with a dot."""
    return name.endswith(SUFFIX) and not name.startswith(".")


def with_goldens(entries: Iterable[Entry]) -> list[Entry]:
    """Return the weight files. Each fingerprint includes that of its goldens, which may decide whether it is taken."""
    weights, goldens = [], {}
    for entry in entries:
        if entry.name.endswith(GOLDENS_SUFFIX):
            goldens[entry.name.removesuffix(GOLDENS_SUFFIX)] = entry
        else:
            weights.append(entry)
    return [_combined(entry, goldens.get(entry.name.removesuffix(SUFFIX))) for entry in weights]


def _combined(entry: Entry, goldens: Entry | None) -> Entry:
    if goldens is None or UNKNOWN in (entry.fingerprint, goldens.fingerprint):
        return entry
    changed = None if entry.changed is None else (entry.changed, goldens.changed)
    return entry._replace(fingerprint=(entry.fingerprint, goldens.fingerprint), changed=changed)


def order(entry: Entry) -> tuple[Any, ...]:
    """Return the sort key of a file: by name, with numbers by value; of one published step, the latest last."""
    return order_of_names(entry.name), entry.modified, entry.name


def order_of_names(name: str) -> list[Any]:
    """Return the part of the sort key that depends on the name alone."""
    published = _PUBLISHED.fullmatch(name)
    stem = published[1] if published else name.removesuffix(SUFFIX)
    parts = _DIGITS.split(stem)  # text, digits, text, ...
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _list_local(directory: Path) -> list[Entry]:
    try:
        with os.scandir(directory) as files:
            entries = [_local(directory, file) for file in files if is_weight_file_or_goldens(file.name)]
    except (OSError, ValueError) as error:
        raise WeightFileError(f"{directory!s:.200}: cannot be listed ({error})") from error
    return with_goldens(entry for entry in entries if entry is not None)


def _local(directory: Path, file: os.DirEntry[str]) -> Entry | None:
    try:
        status = file.stat()
        regular = file.is_file()
    except FileNotFoundError:  # removed meanwhile
        return None
    except OSError:
        return Entry(file.name, directory / file.name, UNKNOWN, 0.0)
    fingerprint = (status.st_size, status.st_mtime_ns, status.st_ino)
    path = directory / file.name
    return Entry(file.name, path, fingerprint, status.st_mtime, status.st_ctime_ns) if regular else None


def _list_url(url: Url) -> list[Entry]:
    from weightswap_runtime.sources.remote.listing import list_files  # needs fsspec

    return with_goldens(Entry(*file) for file in list_files(url) if is_weight_file_or_goldens(file.name))
