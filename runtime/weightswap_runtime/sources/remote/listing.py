"""Listing of a folder behind a URL: the names of its files, and fingerprints that show when a file changes."""

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
from .opening import file_system, find_object, loop_of, missing, never_cancel, unknown
from .retries import persist


class ListedFile(NamedTuple):
    """File of a folder. `modified` is in seconds since the epoch, 0 if unknown.

    Files with equal fingerprints have the same content, as far as their store tells.
    """

    name: str
    url: str
    fingerprint: Hashable
    modified: float


def check_listable(url: Url) -> None:
    """Raise Unsupported or MissingExtra for a kind of URL whose folders cannot be listed here."""
    if url.is_web:
        raise Unsupported(f"{url}: a web server cannot list files; watch a folder in a bucket, or a local one")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(url.protocol)
    except ImportError as error:
        raise missing(url, error, f"watching {url.protocol}:// URLs ({error})") from error
    except ValueError as error:
        raise unknown(url, error) from error


def list_files(url: Url) -> list[ListedFile]:
    """Return the files of a folder, in no order. Raises WeightFileError.

    The request is not retried: callers that poll have their own timeouts, and can be stopped.
    """
    import fsspec.core

    try:
        fs, folder = fsspec.core.url_to_fs(url.raw)  # from fsspec's cache, so that not every poll logs in again
        fs.invalidate_cache(folder)
        files = [info for info in fs.ls(folder, detail=True) if info.get("type") == "file"]
        return [_listed(info, fs.unstrip_protocol(info["name"])) for info in files]
    except Exception as error:  # each kind of store has its own errors; `from None`: the text may show credentials
        text = redact(str(error), url.raw)
        raise WeightFileError(f"{url}: cannot be listed ({type(error).__name__}: {text})") from None


def list_names(url: Url, likely: Sequence[str], check: Check | None = None) -> list[str] | None:
    """Return the names of the files of a folder; None if the URL is not that of a folder.

    Web servers cannot list files. There a folder's URL ends with a slash, and the result is those of the `likely` names
    that exist.
    """
    if url.is_web:
        return None if url.name else [name for name in likely if find_object(url / name, check)]
    fs, path = file_system(url)
    work = persist(GenericObject(fs, path, url).entries, lambda: f"{url}: cannot be listed")
    try:
        entries = wait_for(loop_of(fs, url)(), work, check or never_cancel)
    except FileNotFoundError:
        return None
    folder = path.strip("/") + "/"
    files = [info["name"].strip("/") for info in entries if info.get("type") == "file"]  # a file lists itself
    return sorted(name.removeprefix(folder) for name in files if name.startswith(folder)) or None


def _listed(info: Mapping[str, Any], url: str) -> ListedFile:
    tags, times = ([info[key] for key in keys if info.get(key)] for keys in (CONTENT_KEYS, TIME_KEYS))
    fingerprint = (info.get("size"), *map(str, tags + times))
    return ListedFile(info["name"].rpartition("/")[2], url, fingerprint, _seconds(times[0] if times else None))


def _seconds(modified: Any) -> float:
    """Return the seconds of a store's time, which is a number, a datetime, a string, or on the Hub a commit."""
    if isinstance(modified, Mapping):
        modified = modified["date"]
    if isinstance(modified, str):
        with suppress(ValueError):
            return datetime.fromisoformat(modified).timestamp()
        return 0.0
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0.0)
