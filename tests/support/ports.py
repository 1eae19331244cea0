"""Free ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
