"""The inference server: exported models behind the Open Inference Protocol, over HTTP and gRPC."""

from weightswap_runtime.errors import MissingExtra

try:
    from weightswap_server.admin.access import AdminSettings

    from .methods import ServedMethod
    from .serving import ModelSource, Server
    from .settings import Settings
except ModuleNotFoundError as error:
    raise MissingExtra("weightswap serve", "serve") from error


__all__ = ["AdminSettings", "ModelSource", "ServedMethod", "Server", "Settings"]
