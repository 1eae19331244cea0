"""Lock for test processes with Ray clusters, which would find each other and use the same ports."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

# read when Ray is imported: leftovers of a cluster would connect to another one
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # otherwise Serve kills proxies that start slowly on a busy machine
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}


@contextmanager
def ray_turn() -> Iterator[None]:
    """Let only this process, and those that it starts, run Ray clusters on this machine during the block."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (
        (Path(tempfile.gettempdir()) / "weightswap-tests-ray.lock").open("w") as file,
        patch.dict(os.environ, {**_ENVIRONMENT, "PATH": path}),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
