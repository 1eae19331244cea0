"""Compiles native.c beside itself when the package is built or installed, where there is a C compiler."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("runtime/weightswap_runtime/native.c")


class NativeBuild(BuildHookInterface[Any]):
    """Without a compiler the package is complete, but updates of rows take longer."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        source = Path(self.root) / SOURCE
        target = source.with_name("libnative.so")
        command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O3", "-shared", "-fPIC", str(source), "-o", str(target)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            self.app.display_warning(f"native.c was not compiled: {getattr(error, 'stderr', None) or error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    from packaging.tags import platform_tags

    return next(iter(platform_tags()))
