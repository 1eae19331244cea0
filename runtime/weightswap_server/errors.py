"""Errors of requests, and what clients and operators see of errors.

WeightswapError
`-- RequestError          the request was not answered
    |-- BadRequest        it does not follow the protocol or the model's signature
    |-- UnknownModel      no such model, version or path is served
    |-- BodyTooLarge      it has more bytes than the server accepts
    |-- BodyTooSlow       its bytes did not arrive in time
    |-- Overloaded        too many requests wait already; it may be sent again later
    |-- NotReady          the model cannot answer yet, or the server is stopping
    |-- TookTooLong       the answer was not ready in time
    |                   and at the admin plane:
    |-- Unauthorised      it has no token, or an unknown one
    |-- Forbidden         the server does not allow the path or URL
    |-- NotThere          there is no such upload
    |-- Conflict          the change conflicts with what the model follows, or with another change
    |-- NotServed         the followed desired store now wants the weights, and this process refuses them
    |-- UploadMismatch    the uploaded bytes do not have the given digest
    `-- NoRoom            the directory of uploads has no room
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from weightswap_runtime.errors import (
    CallError,
    DesiredError,
    MissingExtra,
    ModelClosed,
    ModelFailed,
    NothingToRollBack,
    NotPromoted,
    NoWeights,
    OutOfMemory,
    RanksLost,
    RevisionConflict,
    StageCancelled,
    StageClosed,
    StagingBusy,
    SwapError,
    UnknownName,
    Unsupported,
    WaitTimeout,
    WeightswapError,
    reason_of,
)

log = logging.getLogger("weightswap.server")


class Failure(NamedTuple):
    """A failure as clients and operators see it."""

    status: int  # of HTTP
    code: str  # the name of the gRPC status code; "" at the admin plane
    text: str
    kind: str = ""  # the error's class and reason, which operators see
    reason: str = ""

    @property
    def retry(self) -> bool:
        """True if the same request may succeed later."""
        return self.status == 503


def failure_of(error: BaseException) -> Failure:
    """Return what a client sees of an error. Unforeseen errors are logged, and their text is not sent."""
    for status, code, kinds in _FAILURES:
        if isinstance(error, kinds):
            return Failure(status, code, str(error))
    log.error("a request failed", exc_info=error)
    return Failure(500, "INTERNAL", f"the model failed with {type(error).__name__}; see the server's log")


def is_foreseen(error: BaseException) -> bool:
    """Return whether a request is to blame for an error, or the moment at which it came."""
    return any(isinstance(error, kinds) for _, _, kinds in _FAILURES)


def admin_failure_of(error: BaseException) -> Failure:
    """Return what an operator sees of an error. Unforeseen errors are logged, and their text is not sent."""
    kind = type(error).__name__
    for status, kinds in _ADMIN_FAILURES:
        if isinstance(error, kinds):
            return Failure(status, "", str(error), kind, error.reason)
    failure = failure_of(error)
    text = failure.text if failure.status != 500 else "the server failed; see its log"
    return failure._replace(text=text, kind=kind, reason=reason_of(error))


class RequestError(WeightswapError):
    """A request that was not answered; no weights have changed."""


class BadRequest(RequestError):
    """A request that does not follow the protocol or the model's signature."""


class NotInJson(BadRequest):
    """A request for an answer in JSON that has NaN or infinities."""


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


class Unauthorised(RequestError):
    """A request without a token, or with an unknown one."""


class Forbidden(RequestError):
    """A path or URL that the server does not allow."""


class NotThere(RequestError):
    """An upload that does not exist."""


class Conflict(RequestError):
    """A change that conflicts with the source that the model follows, or with another change."""


class NotServed(RequestError):
    """A change whose weights the followed desired store now wants, and this process refuses."""


class UploadMismatch(RequestError):
    """An upload whose bytes do not have the given digest."""


class NoRoom(RequestError):
    """An upload for which the directory of uploads has no room."""


# in each table, rows of subclasses come before those of their bases
_FAILURES: tuple[tuple[int, str, tuple[type[WeightswapError], ...]], ...] = (
    (404, "NOT_FOUND", (UnknownModel, UnknownName)),
    (408, "DEADLINE_EXCEEDED", (BodyTooSlow,)),
    (413, "RESOURCE_EXHAUSTED", (BodyTooLarge,)),
    (503, "UNAVAILABLE", (Overloaded, NotReady, NoWeights, ModelFailed, ModelClosed, RanksLost)),
    (504, "DEADLINE_EXCEEDED", (TookTooLong,)),
    (400, "INVALID_ARGUMENT", (BadRequest, CallError, Unsupported)),
)
_ADMIN_FAILURES: tuple[tuple[int, tuple[type[WeightswapError], ...]], ...] = (
    (401, (Unauthorised,)),
    (403, (Forbidden,)),
    (404, (NotThere,)),
    (409, (Conflict, StagingBusy, StageClosed, StageCancelled)),
    (409, (NothingToRollBack, NotPromoted, RevisionConflict)),
    (501, (MissingExtra,)),
    (502, (DesiredError,)),
    (503, (WaitTimeout,)),
    (507, (NoRoom, OutOfMemory)),
    (422, (NotServed, UploadMismatch, SwapError)),
)
