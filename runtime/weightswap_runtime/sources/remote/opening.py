"""Opening what is behind a URL: which file system, and how its objects are read."""

from __future__ import annotations

import asyncio
from typing import Any

from weightswap_runtime.errors import MissingExtra, Unsupported, WeightFileError
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.location import Url, redact

from .objects import Loop, RemoteObject, wait_for
from .retries import persist
from .transport import Replaceable, Transport

_OURS = ("aiohttp", "fsspec", "gcsfs", "huggingface_hub", "s3fs")  # what the extra installs


def find_object(url: Url, check: Check | None = None) -> RemoteObject | None:
    """Open what is behind a URL, and pin its content; None if nothing is there.

    Raises WeightFileError, Unsupported, MissingExtra and what `check` raises.
    """
    fs, path = file_system(url)
    loop, check = loop_of(fs, url), check or go_on
    transport = _transport(fs, path, url)
    opened = wait_for(loop(), persist(transport.open, lambda: f"{url}: cannot be opened"), check)
    return RemoteObject(str(url), transport, opened, loop, check) if opened else None


def replace_object(url: Url, content: bytes, tag: str | None, check: Check | None = None) -> bool:
    """Replace the small object that has a tag, or put one where nothing is (None), in one step.

    False where something else is there. Raises Unsupported for a store that cannot promise that, or whose way of doing
    so is not known here, and what `find_object` raises.
    """
    fs, path = file_system(url)
    transport = _transport(fs, path, url)
    if not isinstance(transport, Replaceable):
        raise Unsupported(
            f"{url}: {url.protocol}:// is not written to, as two writers could not be told apart there. Write to a "
            "local directory, or to s3://"
        )
    work = persist(lambda: transport.replace(content, tag), lambda: f"{url}: cannot be written")
    return wait_for(loop_of(fs, url)(), work, check or go_on)


def go_on() -> None:
    """The check of those who do not cancel."""


def _transport(fs: Any, path: str, url: Url) -> Transport:
    if url.is_web:
        from .web import WebObject

        return WebObject(fs, url)
    if url.protocol in ("s3", "s3a"):
        from .s3 import S3Object

        return S3Object(fs, path, url)
    from .generic import GenericObject

    return GenericObject(fs, path, url)


def file_system(url: Url) -> tuple[Any, str]:
    """The file system of a URL, with the options that fsspec's configuration has for it, and the path in that."""
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        # one that works in threads may still be at work for somebody who has given up
        shared = getattr(get_filesystem_class(url.protocol), "async_impl", False)
        fs, path = url_to_fs(url.raw, skip_instance_cache=not shared)
    except ImportError as error:
        raise missing(url, error) from error
    except ValueError as error:
        raise unknown(url, error) from None
    except Exception as error:  # a constructor may look for credentials, or connect
        text = f"{type(error).__name__}: {redact(str(error), url.raw)}"
        raise WeightFileError(f"{url}: cannot be opened ({text}). Check the options of its file system.") from None
    return fs, path


def missing(url: Url, error: ImportError, wanted: str = "") -> Exception:
    """What to say of a protocol whose package is not there. `wanted`: what needs it, if that is not reading."""
    if error.name in _OURS or any(name in str(error) for name in _OURS):
        return MissingExtra(wanted or f"reading {url.protocol}://", "remote")
    return Unsupported(f"{url}: reading {url.protocol}:// needs another package ({redact(str(error), url.raw)})")


def unknown(url: Url, error: ValueError) -> Exception:
    """What to say of a protocol that there is not, or of a URL that is not one of its own."""
    from fsspec.registry import known_implementations

    if url.protocol in known_implementations:
        return WeightFileError(f"{url}: not a URL of its kind ({redact(str(error), url.raw)})")
    known = ", ".join(sorted(known_implementations))
    return Unsupported(f"{url}: {url.protocol}:// is not known to fsspec. Known are {known}.")


def loop_of(fs: Any, url: Url) -> Loop:
    """What gives the event loop on which a file system works; it is asked for each time, as it may be gone."""
    from fsspec.asyn import get_loop

    def loop() -> asyncio.AbstractEventLoop:
        try:
            found: asyncio.AbstractEventLoop = fs.loop if fs.async_impl else get_loop()
        except RuntimeError:
            raise WeightFileError(f"{url}: was opened before this process was forked; open it again") from None
        return found

    return loop
