"""Bearer tokens of the admin plane, and the guard that requires one for every request."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightswap_runtime.errors import Unsupported

ENVIRONMENT = "WEIGHTSWAP_ADMIN_TOKEN"
LEAST = 16  # characters of a token
ANYBODY = "token"  # the name of an unnamed token
_LINE = re.compile(r"(?:([\w.@-]{1,64})[ \t]+)?(\S+)")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)


class Tokens:
    """Named tokens, compared in constant time."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """tokens: by name. Raises Unsupported without tokens, and for one that is too short."""
        if not tokens:
            raise Unsupported(f"the admin plane needs a token: --admin-token-file FILE, or {ENVIRONMENT}")
        if short := [name for name, token in tokens.items() if len(token) < LEAST]:
            raise Unsupported(
                f"the token {short[0]!r} is shorter than {LEAST} characters; `openssl rand -hex 32` makes a good one"
            )
        self._tokens = {name: token.encode() for name, token in tokens.items()}

    def name_of(self, candidate: bytes) -> str | None:
        """Return the name of a token, or None if it is unknown."""
        match = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(token, candidate):
                match = name
        return match


def read_tokens(path: str | None) -> Tokens:
    """Read the tokens of a file, or without one, of the environment. Raises Unsupported."""
    if path is None:
        token = os.environ.get(ENVIRONMENT, "").strip()
        return Tokens({ANYBODY: token} if token else {})
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"{path}: the tokens cannot be read ({error})") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None or (match[1] or ANYBODY) in tokens:
            raise Unsupported(f"{path}, line {number}: expected a token, or a new name and a token")
        tokens[match[1] or ANYBODY] = match[2]
    return Tokens(tokens)


class TokenGuard:
    """An ASGI application that passes requests with a token on to another application, and refuses all others.

    `scope["state"]["who"]` is the token's name. open_paths: paths that need no token, such as a page without data.
    """

    def __init__(
        self, app: ASGIApp, tokens: Tokens, refuse: Callable[[Scope], Response], open_paths: frozenset[str]
    ) -> None:
        self._app, self._tokens, self._refuse, self._open = app, tokens, refuse, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who = self._who(scope)
        if who is None and scope["path"] not in self._open:
            await self._refuse(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["who"] = who or ""
        await self._app(scope, receive, send)

    def _who(self, scope: Scope) -> str | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        match = _BEARER.fullmatch(values[0]) if len(values) == 1 else None
        return self._tokens.name_of(match[1]) if match else None
