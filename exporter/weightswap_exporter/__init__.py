"""weightswap, the build side: capture a model's graph without its weights, and pack checkpoints for it.

The names are loaded on first use, so that the command line can list its commands without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weightswap_runtime import MissingExtra, __version__

if TYPE_CHECKING:
    from .capture import MethodSpec
    from .compiling import compile_engines
    from .exporting import export
    from .external import export_onnx
    from .packing import Packed, pack
    from .publishing import Publication, publish
    from .skeletons import skeleton

_HOMES = {
    "MethodSpec": "capture",
    "Packed": "packing",
    "Publication": "publishing",
    "compile_engines": "compiling",
    "export": "exporting",
    "export_onnx": "external",
    "pack": "packing",
    "publish": "publishing",
    "skeleton": "skeletons",
}

__all__ = [
    "MethodSpec",
    "Packed",
    "Publication",
    "__version__",
    "compile_engines",
    "export",
    "export_onnx",
    "pack",
    "publish",
    "skeleton",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("torch") is None:
        raise MissingExtra("the build side", "export")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
