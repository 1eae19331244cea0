"""Damaged files."""

from __future__ import annotations

from pathlib import Path


def damaged(path: Path, to: Path | None = None) -> Path:
    """Change the last bit of a file, or of its copy `to`, which changes as a whole; return its path."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    hidden = path.with_name("hidden")
    hidden.write_bytes(raw)
    return hidden.replace(to or path)
