"""The operators' page. Its files are not secret, and need no token; the data that they show does."""

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


def _files(folder: Path) -> dict[str, Path]:
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.suffix in _TYPES}
    return {"/" if name == "index.html" else f"/page/{name}": file for name, file in files.items()}


OPEN_PATHS = frozenset(_files(_FOLDER))


def page_routes(*others: Path) -> list[Route]:
    """Return a route for each file. Files of `others`, a page built on this one, replace those of the same name."""
    files = {path: file for folder in (_FOLDER, *others) for path, file in _files(folder).items()}

    async def send(request: Request) -> Response:
        file = files[request.url.path]
        return Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS)

    return [Route(path, send, methods=["GET"]) for path in files]
