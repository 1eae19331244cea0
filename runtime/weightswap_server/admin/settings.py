"""Settings of the admin plane."""

from __future__ import annotations

import msgspec

from weightswap_runtime.errors import Unsupported
from weightswap_server.settings import Settings

from .tokens import read_tokens

_GIB = 1 << 30
_MIB = 1 << 20


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the admin plane. Times are in seconds, sizes in bytes.

    port, socket: either a TCP port of `host`, 0 for any free one, or the path of a Unix socket.
    token_file: a token, or lines of a name and a token; None: the environment's WEIGHTSWAP_ADMIN_TOKEN.
    allow: directories and URL prefixes that operators may name. upload_dir: the directory of uploads; None: no uploads.
    max_uploads: the most bytes of all uploads together. upload_timeout: the time for one upload.
    audit_log: a file of JSON lines. staged_timeout: the time after which staged weights are discarded.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    socket: str | None = None
    token_file: str | None = None
    allow: tuple[str, ...] = ()
    upload_dir: str | None = None
    max_uploads: int = 64 * _GIB
    upload_timeout: float = 3600.0
    audit_log: str | None = None
    staged_timeout: float = 3600.0
    body_timeout: float = 30.0
    grace: float = 5.0

    def check(self) -> None:
        """Raise Unsupported for values out of range, without tokens, and unless there is one of port and socket."""
        if (self.port is None) == (self.socket is None):
            raise Unsupported("the admin plane listens on a port or on a socket: give exactly one of them")
        for name in ("max_uploads", "upload_timeout", "staged_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise Unsupported(f"{name}={getattr(self, name)}: expected more than 0")
        read_tokens(self.token_file)

    @property
    def http(self) -> Settings:
        """The HTTP limits of all requests but uploads."""
        return Settings(
            host=self.host, max_body=_MIB, body_timeout=self.body_timeout, max_connections=64, grace=self.grace
        )
