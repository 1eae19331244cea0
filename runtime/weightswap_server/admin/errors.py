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
    (422, (NotServed, UploadMismatch, SwapError)),  # the last: some that are above are of it
)


def refused(error: BaseException) -> Refused:
    """What an operator is told. What nobody foresaw is logged, and told without its text."""
    for status, kinds in _STATUSES:
        if isinstance(error, kinds):
            return Refused(status, str(error), type(error).__name__)
    told = failure(error)
    text = told.text if told.status != 500 else "the server failed; its log says more"
    return Refused(told.status, text, type(error).__name__)
