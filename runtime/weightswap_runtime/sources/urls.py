"""What a URL names: an object to open or to replace, or a folder to list."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from weightswap_runtime.errors import MissingExtra, Unsupported, WeightFileError

from .byte_source import Check
from .location import Url, redact
from .remote import CONTENT_KEYS, TIME_KEYS, GenericObject, Loop, RemoteObject, Transport, retry, wait_for

_S3 = ("s3", "s3a")
_OF_EXTRA = ("aiohttp", "fsspec", "gcsfs", "huggingface_hub", "s3fs")  # packages that the extra installs


def find_object(url: Url, check: Check | None = None) -> RemoteObject | None:
    """Open the object behind a URL, and pin its content; None if there is no object.

    Raises WeightFileError, Unsupported, MissingExtra and what `check` raises.
    """
    fs, path = _file_system(url)
    loop, check = _loop_of(fs, url), check or _never_cancel
    transport = _transport(fs, path, url)
    opened = wait_for(loop(), retry(transport.open, lambda: f"{url}: cannot be opened"), check)
    return RemoteObject(str(url), transport, opened, loop, check) if opened else None


def _transport(fs: Any, path: str, url: Url) -> Transport:
    if url.is_web:
        from .web import WebObject

        return WebObject(fs, url)
    if url.protocol in _S3:
        from .s3 import S3Object

        return S3Object(fs, path, url)
    return GenericObject(fs, path, url)


def replace_object(url: Url, content: bytes, tag: str | None) -> bool:
    """Replace a small object if it has the given tag, or create it if `tag` is None, atomically.

    Returns False on a conflict. Raises Unsupported for a store without such a write, or for which it is not implemented
    here, and what `find_object` raises.
    """
    fs, path = _file_system(url)
    if url.protocol not in _S3:
        raise Unsupported(
            f"{url}: {url.protocol}:// is not written to, because concurrent writers would go unnoticed. Write to "
            "a local directory, or to s3://"
        )
    from .s3 import S3Object

    target = S3Object(fs, path, url)
    work = retry(lambda: target.replace(content, tag), lambda: f"{url}: cannot be written")
    return wait_for(_loop_of(fs, url)(), work, _never_cancel)


class ListedFile(NamedTuple):
    """File of a folder."""

    name: str
    url: str
    fingerprint: Hashable  # equal ones stand for the same content, as far as the store tells
    modified: float  # seconds since the epoch, 0 if unknown


def check_listable(url: Url) -> None:
    """Raise Unsupported or MissingExtra for a kind of URL whose folders cannot be listed here."""
    if url.is_web:
        raise Unsupported(f"{url}: a web server cannot list files; watch a folder in a bucket, or a local one")
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(url.protocol)
    except ImportError as error:
        raise _missing_package(url, error, f"watching {url.protocol}:// URLs ({error})") from error
    except ValueError as error:
        raise _unknown_protocol(url, error) from error


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


def list_names(url: Url, likely: Sequence[str], check: Check | None = None) -> list[str] | None:
    """Return the names of the files of a folder; None if the URL is not that of a folder.

    Web servers cannot list files. There a folder's URL ends with a slash, and the result is those of the `likely` names
    that exist.
    """
    if url.is_web:
        return None if url.name else [name for name in likely if find_object(url / name, check)]
    fs, path = _file_system(url)
    work = retry(GenericObject(fs, path, url).entries, lambda: f"{url}: cannot be listed")
    try:
        entries = wait_for(_loop_of(fs, url)(), work, check or _never_cancel)
    except FileNotFoundError:
        return None
    folder = path.strip("/") + "/"
    files = [info["name"].strip("/") for info in entries if info.get("type") == "file"]  # a file lists itself
    return sorted(name.removeprefix(folder) for name in files if name.startswith(folder)) or None


def _file_system(url: Url) -> tuple[Any, str]:
    """Return the file system of a URL, with the options of fsspec's configuration, and the path in it."""
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        # a synchronous file system is not shared: a thread of a cancelled caller may still use it
        shared = getattr(get_filesystem_class(url.protocol), "async_impl", False)
        fs, path = url_to_fs(url.raw, skip_instance_cache=not shared)
    except ImportError as error:
        raise _missing_package(url, error, f"reading {url.protocol}://") from error
    except ValueError as error:
        raise _unknown_protocol(url, error) from None
    except Exception as error:  # a constructor may look for credentials, or connect
        text = f"{type(error).__name__}: {redact(str(error), url.raw)}"
        raise WeightFileError(f"{url}: cannot be opened ({text}). Check the options of its file system.") from None
    return fs, path


def _missing_package(url: Url, error: ImportError, feature: str) -> Exception:
    """Return the error for a protocol whose package, which `feature` needs, is not installed."""
    if error.name in _OF_EXTRA or any(name in str(error) for name in _OF_EXTRA):
        return MissingExtra(feature, "remote")
    return Unsupported(f"{url}: reading {url.protocol}:// needs another package ({redact(str(error), url.raw)})")


def _unknown_protocol(url: Url, error: ValueError) -> Exception:
    """Return the error for an unknown protocol, or for a URL that its protocol does not accept."""
    from fsspec.registry import known_implementations

    if url.protocol in known_implementations:
        return WeightFileError(f"{url}: not a valid {url.protocol}:// URL ({redact(str(error), url.raw)})")
    known = ", ".join(sorted(known_implementations))
    return Unsupported(f"{url}: fsspec does not know {url.protocol}://. It knows {known}.")


def _loop_of(fs: Any, url: Url) -> Loop:
    """Return a function that returns a file system's event loop; it is called for each use, as a fork ends the loop."""
    from fsspec.asyn import get_loop

    def loop() -> asyncio.AbstractEventLoop:
        try:
            event_loop: asyncio.AbstractEventLoop = fs.loop if fs.async_impl else get_loop()
        except RuntimeError:
            raise WeightFileError(f"{url}: was opened before this process was forked; open it again") from None
        return event_loop

    return loop


def _never_cancel() -> None:
    """Do nothing: the default check."""
