"""Requests for a staging, what it works with, and what was staged."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.goldens import Mode, check_mode
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.name_matching import KEYS, NAMES, UNAMBIGUOUS, Keys, Readings
from weightswap_runtime.format.nonfinite import Allowed, Nonfinite
from weightswap_runtime.memory.arena import Arena
from weightswap_runtime.memory.host import IN_PLACE, StagedIn
from weightswap_runtime.memory.patch import HostPatch
from weightswap_runtime.options import check_timeout
from weightswap_runtime.sources.location import Location
from weightswap_runtime.tensors.digests import DIGEST
from weightswap_runtime.threads.job import Job
from weightswap_runtime.threads.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from .transforms import Transforms

LEASE_TIMEOUT = 60.0  # seconds
Busy = Literal["refuse", "wait"]
Kind = Literal["full", "partial", "delta", "rollback"]
Admit = Callable[[Location, str], None]
"""Given a path or URL, and the weights id that the file claims; raises a SwapError to refuse it."""
READINGS: dict[str | None, Readings] = {None: UNAMBIGUOUS, "checkpoint": KEYS, "fqn": NAMES}


class BaseFile(NamedTuple):
    """A file that leads to the weights over which a delta is laid: a full set, or an earlier delta."""

    path: str | os.PathLike[str]
    weights_id: str


class SwapRequest(NamedTuple):
    """What a caller wants staged, and how. `only` are patterns of FQNs; empty: everything. `ignore` are patterns of
    names in the file, which are as if they were not there.

    `allow_nonfinite`: the weights that may have values that are not finite where the served ones have none: all, none,
    or some; None: all, but whoever swaps does not say so. `by` who asks. `rate_limit` in bytes per second. `busy`: what
    is done where another staging is open. `timeout` in seconds, for that and for leases; None: for ever. `onto`: what
    is read first for a delta whose base is not served, a full set and then deltas.
    """

    path: str | os.PathLike[str]
    keys: Keys | None = None
    only: tuple[str, ...] = ()
    expect: str | None = None
    allow_other_graph: bool = False
    verify: Mode = "goldens"
    allow_nonfinite: Allowed = None
    by: str = ""
    rate_limit: float | None = None
    busy: Busy = "refuse"
    timeout: float | None = LEASE_TIMEOUT
    ignore: tuple[str, ...] = ()
    onto: tuple[BaseFile, ...] = ()

    @property
    def patience(self) -> float | None:
        """For how many seconds another staging is waited for; None: not at all."""
        return patience(self.busy, self.timeout)

    def check(self) -> None:
        """Raise Unsupported for what cannot be meant."""
        if not isinstance(self.keys, str | None) or self.keys not in READINGS:
            raise Unsupported(f"keys={self.keys!r}: the names of a file are read as {', '.join(map(repr, READINGS))}")
        if self.expect is not None and not (isinstance(self.expect, str) and DIGEST.fullmatch(self.expect)):
            raise Unsupported(f"expect={self.expect!r}: a weights id has 64 hexadecimal digits")
        check_mode(self.verify)
        check_busy(self.busy)
        check_timeout(self.timeout)


def check_busy(busy: str) -> None:
    """Raise Unsupported for what `busy=` cannot be."""
    if busy not in ("refuse", "wait"):
        raise Unsupported(f'busy={busy!r}: expected "refuse" or "wait"')


def patience(busy: Busy, timeout: float | None) -> float | None:
    """For how many seconds another staging is waited for; None: not at all."""
    if busy == "refuse":
        return None
    return math.inf if timeout is None else timeout


class Staging(NamedTuple):
    """What one staging works with. `manifest`: of the graph that the file is for. `replaces`: the weights that are
    served; None: none yet. `open_transforms` raises ArtifactError, and MissingExtra without torch.
    """

    request: SwapRequest
    manifest: Manifest
    replaces: Identity | None
    open_transforms: Callable[[], Transforms]
    workers: WorkerThreads
    job: Job


class Contents(NamedTuple):
    """What was staged. Times in seconds: reading and hashing, then comparing. `verified`: how goldens were.

    `nonfinite`: the weights that have NaN or infinities which those that are served have not. `base`: of a delta, the
    weights that it starts from.
    """

    identity: Identity
    kind: Kind
    source: str
    ignored: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds_staged: float = 0.0
    seconds_verified: float = 0.0
    verified: str = "none"
    only: tuple[str, ...] = ()
    staged_in: StagedIn = IN_PLACE
    nonfinite: Mapping[str, Nonfinite] = MappingProxyType({})
    base: str = ""

    def proven(self, verified: str, seconds: float) -> Contents:
        """The same after goldens were tried for `seconds`."""
        return self._replace(verified=verified, seconds_verified=self.seconds_verified + seconds)


class Base(NamedTuple):
    """The weights over which a part or a delta is laid: which, and where they lie."""

    arena: Arena
    identity: Identity


class StagedChange(NamedTuple):
    """A verified full set of weights, as what changes in the live arena."""

    contents: Contents
    patch: HostPatch
