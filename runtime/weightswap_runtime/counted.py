"""Numbers of things in words."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
