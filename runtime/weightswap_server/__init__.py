"""weightswap's server: models of artifacts behind the Open Inference Protocol, over HTTP and gRPC."""

from .admin.settings import AdminSettings
from .methods import ServedMethod
from .serving import ModelSource, Server
from .settings import Settings

__all__ = ["AdminSettings", "ModelSource", "ServedMethod", "Server", "Settings"]
