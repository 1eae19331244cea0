"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of `path` when the block ends without an error.

    A reader sees the old file or the new one. The bytes are on disk before the name is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path, "tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _put_in_place(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; what is there is moved aside, and back if that fails. Another may do the same."""
    for last in (False, False, False, True):
        old = _sibling(path, "old")
        try:
            if path.exists():
                path.rename(old)
            folder.rename(path)
        except OSError:
            if old.exists() and not path.exists():
                old.rename(path)
            if last:
                raise
        else:
            break
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes the place of `path` when the block ends without an error.

    A folder cannot be replaced in one system call: an old one is moved aside first and removed afterwards.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            _sync(written)
        _put_in_place(temporary, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
