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
    DesiredError,
    Held,
    LeaseTimeout,
    MissingExtra,
    ModelClosed,
    ModelFailed,
    NothingToRollBack,
    NoWeights,
    OutOfMemory,
    RevisionConflict,
    StageCancelled,
    StageClosed,
    StagingBusy,
    Superseded,
    SwapError,
    UnknownVariant,
    Unproven,
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


class Unauthorised(RequestError):
    """A request without a token, or with an unknown one."""


class Forbidden(RequestError):
    """A path or URL that the server does not allow."""


class NotThere(RequestError):
    """An upload that does not exist."""


class Conflict(RequestError):
    """A change that conflicts with the source that the model follows, or with another change."""


class NotServed(RequestError):
    """A change whose weights the followed place now desires, and this process refuses."""


class UploadMismatch(RequestError):
    """An upload whose bytes do not have the given digest."""


class NoRoom(RequestError):
    """An upload for which the directory of uploads has no room."""


class AdminFailure(NamedTuple):
    """A failure as operators see it: HTTP status, sentence, and the error's class."""

    status: int
    text: str
    kind: str


_STATUSES: tuple[tuple[int, tuple[type[WeightswapError], ...]], ...] = (
    (401, (Unauthorised,)),
    (403, (Forbidden,)),
    (404, (NotThere,)),
    (409, (Conflict, StagingBusy, StageClosed, StageCancelled, Superseded)),
    (409, (NothingToRollBack, RevisionConflict, Held, Unproven)),
    (501, (MissingExtra,)),
    (502, (DesiredError,)),
    (503, (LeaseTimeout,)),
    (507, (NoRoom, OutOfMemory)),
    (422, (NotServed, UploadMismatch, SwapError)),  # last: some errors above are subclasses
)


def admin_failure_of(error: BaseException) -> AdminFailure:
    """Return what an operator sees of an error. Unforeseen errors are logged, and their text is not sent."""
    for status, kinds in _STATUSES:
        if isinstance(error, kinds):
            return AdminFailure(status, str(error), type(error).__name__)
    failure = failure_of(error)
    text = failure.text if failure.status != 500 else "the server failed; see its log"
    return AdminFailure(failure.status, text, type(error).__name__)
