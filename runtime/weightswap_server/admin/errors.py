"""Why an operator's call is refused, and with which status.

RequestError
|-- Unauthorised      no token, or no known one
|-- Forbidden         a path or URL that nobody has allowed
|-- NotThere          no such upload
|-- Conflict          it would fight with what the model follows, or with another change
|-- NotServed         the followed place desires what is refused here
|-- UploadMismatch    the bytes are not those whose digest was named
`-- NoRoom            uploads may take no more
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
from weightswap_server.errors import RequestError, failure


class Unauthorised(RequestError):
    """A call without a token, or with one that is not known."""


class Forbidden(RequestError):
    """A path or URL that is not in what was allowed."""


class NotThere(RequestError):
    """No upload of that name."""


class Conflict(RequestError):
    """The change would fight with what the model follows, or with another change."""


class NotServed(RequestError):
    """What the followed place desires by now is refused in this process."""


class UploadMismatch(RequestError):
    """What was uploaded is not what its digest says."""


class NoRoom(RequestError):
    """The directory of uploads may hold no more."""


class Refused(NamedTuple):
    """How a refusal is told."""

    status: int
    text: str
    kind: str


_STATUSES: tuple[tuple[type[WeightswapError], int], ...] = (
    (Unauthorised, 401),
    (Forbidden, 403),
    (NotThere, 404),
    (Conflict, 409),
    (NotServed, 422),
    (UploadMismatch, 422),
    (NoRoom, 507),
    (MissingExtra, 501),
    (StagingBusy, 409),
    (StageClosed, 409),
    (StageCancelled, 409),
    (Superseded, 409),
    (NothingToRollBack, 409),
    (RevisionConflict, 409),
    (Held, 409),
    (Unproven, 409),
    (DesiredError, 502),
    (LeaseTimeout, 503),
    (OutOfMemory, 507),
    (SwapError, 422),
)


def refused(error: BaseException) -> Refused:
    """What an operator is told. What nobody foresaw is logged, and told without its text."""
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return Refused(status, str(error), type(error).__name__)
    told = failure(error)
    text = told.text if told.status != 500 else "the server failed; its log says more"
    return Refused(told.status, text, type(error).__name__)
