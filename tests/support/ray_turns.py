"""Turns of tests, in several processes, that have Ray clusters: clusters find each other, and want the same ports."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # read as Ray is imported: what outlives a cluster would look for another
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # else Serve kills proxies that a busy machine is slow to start
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}


@contextmanager
def ray_turn() -> Iterator[None]:
    """A block in which this process, and those that it starts, alone have Ray clusters on this machine."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (
        (Path(tempfile.gettempdir()) / "weightswap-tests-ray.lock").open("w") as file,
        patch.dict(os.environ, {**_ENVIRONMENT, "PATH": path}),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
