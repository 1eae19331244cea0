"""Errors of requests, and their HTTP and gRPC status.

WeightswapError
`-- RequestError          the request was not answered
    |-- BadRequest        it does not follow the protocol or the model's signature
    |-- UnknownModel      no such model or version is served
    |-- BodyTooLarge      it has more bytes than the server accepts
    |-- BodyTooSlow       its bytes did not arrive in time
    |-- Overloaded        too many requests wait already; it may be sent again later
    |-- NotReady          the model cannot answer yet, or the server is stopping
    `-- TookTooLong       the answer was not ready in time
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from weightswap_runtime.errors import (
    CallError,
    ModelClosed,
    ModelFailed,
    NoWeights,
    UnknownVariant,
    Unsupported,
    WeightswapError,
)

log = logging.getLogger("weightswap.server")


class RequestError(WeightswapError):
    """A request that was not answered; no weights have changed."""


class BadRequest(RequestError):
    """A request that does not follow the protocol or the model's signature."""


class UnknownModel(RequestError):
    """A model, version or path that is not served."""


class BodyTooLarge(RequestError):
    """A request with more bytes than the server accepts."""


class BodyTooSlow(RequestError):
    """A request whose bytes did not arrive in time."""


class Overloaded(RequestError):
    """A request that came while too many others wait; it may be sent again."""


class NotReady(RequestError):
    """A model that cannot answer: it has no weights yet, or the server is stopping."""


class TookTooLong(RequestError):
    """An answer that was not ready in time."""


class Failure(NamedTuple):
    """A failure as clients see it: HTTP status, name of the gRPC status code, and a sentence."""

    status: int
    code: str
    text: str

    @property
    def retry(self) -> bool:
        """True if the same request may succeed later."""
        return self.status == 503


_FAILURES: tuple[tuple[int, str, tuple[type[WeightswapError], ...]], ...] = (
    (404, "NOT_FOUND", (UnknownModel, UnknownVariant)),
    (408, "DEADLINE_EXCEEDED", (BodyTooSlow,)),
    (413, "RESOURCE_EXHAUSTED", (BodyTooLarge,)),
    (503, "UNAVAILABLE", (Overloaded, NotReady, NoWeights, ModelFailed, ModelClosed)),
    (504, "DEADLINE_EXCEEDED", (TookTooLong,)),
    (400, "INVALID_ARGUMENT", (BadRequest, CallError, Unsupported)),  # last: some errors above are subclasses
)


def failure_of(error: BaseException) -> Failure:
    """Return what a client sees of an error. Unforeseen errors are logged, and their text is not sent."""
    for status, code, kinds in _FAILURES:
        if isinstance(error, kinds):
            return Failure(status, code, str(error))
    log.error("a request failed", exc_info=error)
    return Failure(500, "INTERNAL", f"the model failed with {type(error).__name__}; see the server's log")
