"""weightswap's server: models of artifacts behind the Open Inference Protocol, over HTTP and gRPC, in one process."""

from .serving import Server, Source
from .settings import Settings

__all__ = ["Server", "Settings", "Source"]
