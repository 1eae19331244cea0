"""weightswap, the build side: capture a model's graph without its weights, and pack checkpoints for it.

Names are imported on first use, so that the command line can list its commands without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weightswap_runtime import MissingExtra, __version__

if TYPE_CHECKING:
    from weightswap_exporter.capture.capture import MethodSpec
    from weightswap_exporter.commands.hf_directory import directory_recipe
    from weightswap_exporter.engines.compiling import compile_engines
    from weightswap_exporter.engines.onnx_external import export_onnx
    from weightswap_exporter.modules.parallel import Parallel
    from weightswap_exporter.modules.stand_ins import skeleton

    from .exporting import export, export_decoder
    from .packing import Packed, pack
    from .publishing import Publication, publish
    from .row_tracker import RowTracker


_HOMES = {
    "MethodSpec": "capture.capture",
    "Packed": "packing",
    "Parallel": "modules.parallel",
    "Publication": "publishing",
    "RowTracker": "row_tracker",
    "compile_engines": "engines.compiling",
    "directory_recipe": "commands.hf_directory",
    "export": "exporting",
    "export_decoder": "exporting",
    "export_onnx": "engines.onnx_external",
    "pack": "packing",
    "publish": "publishing",
    "skeleton": "modules.stand_ins",
}

__all__ = [
    "MethodSpec",
    "Packed",
    "Parallel",
    "Publication",
    "RowTracker",
    "__version__",
    "compile_engines",
    "directory_recipe",
    "export",
    "export_decoder",
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
