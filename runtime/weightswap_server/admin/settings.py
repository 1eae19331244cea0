"""Settings of an admin plane."""

from __future__ import annotations

import msgspec

from weightswap_runtime.errors import Unsupported
from weightswap_server.settings import Settings

from .tokens import read_tokens

_GIB = 1 << 30
_MIB = 1 << 20


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where operators are listened to, and what they may do. Times are seconds, sizes bytes.

    port, socket: a TCP port of `host`, 0 for any that is free, or the path of a Unix socket; one of the two.
    token_file: a token, or lines of a name and a token; None: WEIGHTSWAP_ADMIN_TOKEN of the environment.
    allow: directories, and prefixes of URLs, that operators may name. upload_dir: where uploads go; None: there are
      none. max_uploads: the bytes of all of them. upload_timeout: for one.
    audit_log: a file of JSON lines. staged_timeout: what is staged for longer is given up.
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
        """Raise Unsupported for what cannot be meant, and where there are no tokens."""
        if (self.port is None) == (self.socket is None):
            raise Unsupported("the admin plane listens on a port or on a socket: give one of them")
        for name in ("max_uploads", "upload_timeout", "staged_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise Unsupported(f"{name}={getattr(self, name)}: expected more than 0")
        read_tokens(self.token_file)

    @property
    def http(self) -> Settings:
        """Limits of its requests but for uploads."""
        return Settings(
            host=self.host, max_body=_MIB, body_timeout=self.body_timeout, max_connections=64, grace=self.grace
        )
