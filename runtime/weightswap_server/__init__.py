"""weightswap's server: models of artifacts behind the Open Inference Protocol, over HTTP and gRPC, in one process."""

from .admin.settings import AdminSettings
from .serving import Server, Source
from .settings import Settings

__all__ = ["AdminSettings", "Server", "Settings", "Source"]
