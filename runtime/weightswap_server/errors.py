"""Why a request is refused, and what that is called over HTTP and gRPC.

WeightswapError
`-- RequestError          the request was not answered
    |-- BadRequest        it is not what the protocol, or the model's signature, says
    |-- UnknownModel      no such model or version is served
    |-- BodyTooLarge      it has more bytes than the server takes
    |-- BodyTooSlow       its bytes did not come in time
    |-- Overloaded        too much waits already; later it may fit
    |-- NotReady          nothing can be answered yet, or any more
    `-- TookTooLong       the answer was not there in time
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
    """A request was not answered; no weights have changed."""


class BadRequest(RequestError):
    """A request is not what the protocol, or the model's signature, says."""


class UnknownModel(RequestError):
    """No model, version or page of that name is served."""


class BodyTooLarge(RequestError):
    """A request has more bytes than the server takes."""


class BodyTooSlow(RequestError):
    """The bytes of a request did not come in time."""


class Overloaded(RequestError):
    """Too many requests wait already; the same request may be sent again."""


class NotReady(RequestError):
    """The model has nothing to answer with: no weights yet, or the server is stopping."""


class TookTooLong(RequestError):
    """The answer was not there in time."""


class Failure(NamedTuple):
    """How a failure is told: the status of HTTP, the code of gRPC, and a sentence."""

    status: int
    code: str
    text: str

    @property
    def retry(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 503


_TOLD: tuple[tuple[int, str, tuple[type[WeightswapError], ...]], ...] = (
    (404, "NOT_FOUND", (UnknownModel, UnknownVariant)),
    (408, "DEADLINE_EXCEEDED", (BodyTooSlow,)),
    (413, "RESOURCE_EXHAUSTED", (BodyTooLarge,)),
    (503, "UNAVAILABLE", (Overloaded, NotReady, NoWeights, ModelFailed, ModelClosed)),
    (504, "DEADLINE_EXCEEDED", (TookTooLong,)),
    (400, "INVALID_ARGUMENT", (BadRequest, CallError, Unsupported)),  # the last: some that are above are of them
)


def failure(error: BaseException) -> Failure:
    """What a client is told. What nobody foresaw is logged here, and told without its text."""
    for status, code, kinds in _TOLD:
        if isinstance(error, kinds):
            return Failure(status, code, str(error))
    log.error("a request failed", exc_info=error)
    return Failure(500, "INTERNAL", f"the model failed with {type(error).__name__}; the server's log says more")
