"""Packages that register operators of their own."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from weightswap_runtime.errors import MissingExtra, Unsupported

try:
    import torch
except ImportError as error:
    raise MissingExtra("op_libraries", "torch") from error


def import_libraries(names: Iterable[str]) -> None:
    """Import each package, or load each shared library (a path that ends in .so), so that its operators exist.

    Raises Unsupported if one cannot be loaded.
    """
    libraries = [] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in libraries):
        raise Unsupported(f"op_libraries={names!r}: expected names of packages, or paths of shared libraries")
    for name in libraries:
        try:
            if name.endswith(".so"):
                torch.ops.load_library(name)  # type: ignore[no-untyped-call]
            else:
                importlib.import_module(name)
        except Exception as error:
            raise Unsupported(f"op_libraries: {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
