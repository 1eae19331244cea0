"""Listing a folder behind a URL: the names of its files, and what shows that one changed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from weightswap_runtime.errors import Unsupported, WeightFileError
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Url, redact

from .generic import CONTENT_KEYS, TIME_KEYS, GenericObject
from .objects import wait_for
from .opening import file_system, find_object, go_on, loop_of, missing, unknown
from .retries import persist


class ListedFile(NamedTuple):
    """A file of a folder. `modified` in seconds since the epoch, 0 where that is not known.

    Files with equal fingerprints have the same content, as far as their store tells.
    """

    name: str
    url: str
    fingerprint: Hashable
    modified: float


def check_listable(url: Url) -> None:
    """Raise Unsupported or MissingExtra for a URL of a kind whose folders cannot be listed here."""
    if url.is_web:
        raise Unsupported(f"{url}: a web server lists no files; watch a folder of a bucket, or a local one")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(url.protocol)
    except ImportError as error:
        raise missing(url, error, f"watching {url.protocol}:// URLs ({error})") from error
    except ValueError as error:
        raise unknown(url, error) from error


def list_files(url: Url) -> list[ListedFile]:
    """The files of a folder, in no order. Raises WeightFileError.

    They are asked for once: whoever looks again and again has a patience of its own, and may be stopped.
    """
    import fsspec.core

    try:
        fs, folder = fsspec.core.url_to_fs(url.raw)  # from fsspec's cache: no other login for each look
        fs.invalidate_cache(folder)
        found = [info for info in fs.ls(folder, detail=True) if info.get("type") == "file"]
        return [_listed(info, fs.unstrip_protocol(info["name"])) for info in found]
    except Exception as error:  # each kind of store has its own; `from None`: its text may show credentials
        text = redact(str(error), url.raw)
        raise WeightFileError(f"{url}: cannot be listed ({type(error).__name__}: {text})") from None


def list_names(url: Url, likely: Sequence[str], check: Check | None = None) -> list[str] | None:
    """The names of the files of a folder; None if the URL is not one's.

    A web server cannot be asked for them: of `likely`, those that exist, where the URL ends with a slash.
    """
    if url.is_web:
        return None if url.name else [name for name in likely if find_object(url / name, check)]
    fs, path = file_system(url)
    work = persist(GenericObject(fs, path, url).entries, lambda: f"{url}: cannot be listed")
    try:
        found = wait_for(loop_of(fs, url)(), work, check or go_on)
    except FileNotFoundError:
        return None
    folder = path.strip("/") + "/"
    files = [info["name"].strip("/") for info in found if info.get("type") == "file"]  # of a file: itself
    return sorted(name.removeprefix(folder) for name in files if name.startswith(folder)) or None


def _listed(info: Mapping[str, Any], url: str) -> ListedFile:
    tags, times = ([info[key] for key in keys if info.get(key)] for keys in (CONTENT_KEYS, TIME_KEYS))
    fingerprint = (info.get("size"), *map(str, tags + times))
    return ListedFile(info["name"].rpartition("/")[2], url, fingerprint, _seconds(times[0] if times else None))


def _seconds(modified: Any) -> float:
    """Stores give times as numbers, as datetimes, or as texts; the Hub gives the commit."""
    if isinstance(modified, Mapping):
        modified = modified["date"]
    if isinstance(modified, str):
        with suppress(ValueError):
            return datetime.fromisoformat(modified).timestamp()
        return 0.0
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0.0)
