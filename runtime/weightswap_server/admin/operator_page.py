"""The operator's page: files that hold nothing secret, and are served to anybody. What they show needs a token."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _path(file: Path) -> str:
    name = file.relative_to(_FOLDER).as_posix()
    return "/" if name == "index.html" else f"/page/{name}"


_FILES = {_path(file): file for file in sorted(_FOLDER.rglob("*")) if file.suffix in _TYPES}
OPEN_PATHS = frozenset(_FILES)


async def _send(request: Request) -> Response:
    file = _FILES[request.url.path]
    return Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS)


def page_routes() -> list[Route]:
    """A route for each file."""
    return [Route(path, _send, methods=["GET"]) for path in _FILES]
