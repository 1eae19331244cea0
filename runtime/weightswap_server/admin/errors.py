"""Errors of operators' requests, and their HTTP status.

RequestError
|-- Unauthorised      no token, or an unknown one
|-- Forbidden         a path or URL that the server does not allow
|-- NotThere          no such upload
|-- Conflict          the change conflicts with a followed source or another change
|-- NotServed         the followed place now desires weights that this process refuses
|-- UploadMismatch    the uploaded bytes have another digest
`-- NoRoom            the directory of uploads is full
"""

from __future__ import annotations

from typing import NamedTuple

from weightswap_runtime.errors import (
    DesiredError,
    Held,
    LeaseTimeout,
    MissingExtra,
    NothingToRollBack,
    OutOfMemory,
    RevisionConflict,
    StageCancelled,
    StageClosed,
    StagingBusy,
    Superseded,
    SwapError,
    Unproven,
    WeightswapError,
)
from weightswap_server.errors import RequestError, failure_of


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
