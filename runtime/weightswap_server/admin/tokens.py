"""Who may call the admin plane: bearer tokens, and a guard before everything that it serves."""

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
ANYBODY = "token"  # the name of a token that has none
_LINE = re.compile(r"(?:([\w.@-]{1,64})[ \t]+)?(\S+)")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)


class Tokens:
    """Tokens, each with a name. What is compared takes the same time whatever is right of it."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """tokens: by name. Raises Unsupported for one that is too short, and where there are none."""
        if not tokens:
            raise Unsupported(f"the admin plane needs a token: --admin-token-file FILE, or {ENVIRONMENT}")
        if short := [name for name, token in tokens.items() if len(token) < LEAST]:
            raise Unsupported(
                f"the token {short[0]!r} is shorter than {LEAST} characters; `openssl rand -hex 32` makes a good one"
            )
        self._tokens = {name: token.encode() for name, token in tokens.items()}

    def name_of(self, given: bytes) -> str | None:
        """Whose token it is; None: nobody's."""
        found = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(token, given):
                found = name
        return found


def read_tokens(path: str | None) -> Tokens:
    """The tokens of a file, or of the environment. Raises Unsupported."""
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
            raise Unsupported(f"{path}, line {number}: expected a token, or a name that is not there yet and a token")
        tokens[match[1] or ANYBODY] = match[2]
    return Tokens(tokens)


class TokenGuard:
    """An ASGI application that lets those with a token through to another, and nobody else to anything.

    `scope["state"]["who"]` is the token's name. open_paths: what is served to anybody, as a page without data.
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
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        match = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        return self._tokens.name_of(match[1]) if match else None
