"""What has happened to a model: the journal of its events and reasons, what it follows, and its load by second."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from prometheus_client.core import Metric

from weightswap_runtime.errors import NothingToRollBack
from weightswap_runtime.following.desired_state import DesiredState, DesiredWeights
from weightswap_runtime.following.desired_store import DesiredStore
from weightswap_runtime.following.file_queue import is_transient
from weightswap_runtime.following.watching import Follower, Watcher, request_for
from weightswap_runtime.live.receipt import Event, SwapReceipt
from weightswap_runtime.live.staged import Staged
from weightswap_runtime.model.model import Model
from weightswap_runtime.sources.location import as_location
from weightswap_server.errors import Conflict, NotServed

from .documents import Change, Refusal, refusal_of

T = TypeVar("T")
KEPT, EVERY = 600, 1.0  # points of load of each model, and seconds between two
_REFUSALS, _EVENTS = 100, 200  # the latest that are kept
_REFUSED = ("refused", "skipped", "unreachable", "failed", "cancelled", "discarded")  # kinds of events
_TIMEOUT = 60.0  # seconds to wait for the weights of a followed desired store
_RECEIPT_TIMEOUT = 1.0  # seconds to wait for a receipt, once its weights are served
_Series = tuple[str, str]  # the requested name, and the weights id


class Journal:
    """The journal of one model, written by its events until `close()`."""

    def __init__(self, model: Model, name: str, followed: Followed) -> None:
        self._model, self._name, self._followed = model, name, followed
        self.refusals: deque[Refusal] = deque(maxlen=_REFUSALS)
        self._events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_EVENTS)
        self._numbers = count(1)
        self._committing = "", ""  # user and reason of the current commit
        self._whys: dict[int, str] = {}  # by generation
        self.on_change: Callable[[JournalState], object] = lambda _: None  # for the process that replaces this one
        self.close = model.listen(self._on_event)

    def inherit(self, earlier: JournalState) -> None:
        """Continue the journal of an earlier process, which may have noted a commit that was never made."""
        last = self._model.generation
        self._whys = {number: why for number, why in earlier.whys.items() if last is not None and number <= last}
        self.refusals.extend(earlier.refusals)
        self._notify()

    def refuse(self, refusal: Refusal) -> None:
        """Note a refusal."""
        if (generation := self._model.generation) is not None:
            refusal = msgspec.structs.replace(refusal, generation=generation)
        self.refusals.append(refusal)
        self._notify()

    def _notify(self) -> None:
        self.on_change(JournalState(self._whys, list(self.refusals)))

    def events(self, after: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the events after that number, oldest first."""
        return [(number, event) for number, event in list(self._events) if number > after]

    @property
    def last_event(self) -> int:
        events = self._events
        return events[-1][0] if events else 0

    def find_served(self, beginning: str) -> SwapReceipt:
        """Return the receipt of earlier weights that came as a full file, by the beginning of their id.

        Raises NothingToRollBack, and Conflict if they are served.
        """
        history, name = self._model.history, self._name
        receipts = {receipt.weights_id: receipt for receipt in history if receipt.weights_id.startswith(beginning)}
        if len(receipts) != 1:
            what = "no" if not receipts else "more than one"
            raise NothingToRollBack(f"{name}: {beginning}: matches {what} served weights id; the history has the ids")
        weights_id, _ = receipts.popitem()
        if weights_id == self._model.weights_id:
            raise Conflict(f"{name}: already serves {weights_id[:12]}")
        full = [
            receipt
            for receipt in history
            if receipt.weights_id == weights_id and receipt.kind == "full" and receipt.reloadable
        ]
        if not full:
            raise NothingToRollBack(
                f"{name}: {beginning}: came from a delta, a part or memory, and cannot be read again; swap a full file"
            )
        return full[-1]

    def refused(self, weights_id: str) -> str:
        """Return why weights were refused last; empty if they were not, or have been served since."""
        served = (receipt.generation for receipt in self._model.history if receipt.weights_id == weights_id)
        last = max(served, default=-1)  # not times, as clocks are set back
        refusals = [each for each in list(self.refusals) if each.weights_id == weights_id and each.generation >= last]
        return refusals[-1].error if refusals else ""

    @contextmanager
    def committing(self, by: str, why: str) -> Iterator[None]:
        """Note the reason of a block's commit, before it is made: the process may die right after it."""
        before, self._committing, last = self._committing, (by, why), self._model.generation
        self.on_change(JournalState(self._whys | {0 if last is None else last + 1: why}, list(self.refusals)))
        try:
            yield
        finally:
            self._committing = before  # of a commit under way, which this one was too late for
            self._notify()

    def why(self, receipt: SwapReceipt) -> str:
        """Return the reason of a commit: the operator's, or the followed desired store's."""
        return self._whys.get(receipt.generation, self._why_by_now(receipt))

    def _why_by_now(self, receipt: SwapReceipt) -> str:
        """Return the desired store's reason for weights, unless it was written after their commit, as by a rollback to
        them."""
        state = self._followed.desired
        known = state.known if state else ()
        whys = {weights.weights_id: weights.why for weights in known if weights.since <= receipt.committed_at}
        return whys.get(receipt.weights_id, "")

    def _note(self, receipt: SwapReceipt) -> None:
        by, why = self._committing
        desired = state.weights if (state := self._followed.desired) else None
        if (not by or receipt.by != by) and desired and desired.weights_id == receipt.weights_id:
            by, why = receipt.by, desired.why
        if receipt.by == by:
            kept = {earlier.generation for earlier in self._model.history}
            known = {number: reason for number, reason in self._whys.items() if number in kept}
            self._whys = known | {receipt.generation: why}
            self._notify()

    def _on_event(self, event: Event) -> None:
        if event.kind in _REFUSED:
            self.refuse(refusal_of(event))
        if event.receipt is not None:
            self._note(event.receipt)
        self._events.append((next(self._numbers), event.as_dict()))


class JournalState(msgspec.Struct, frozen=True):
    """The parts of the history that a model does not keep."""

    whys: dict[int, str] = {}  # reasons of commits, by generation
    refusals: list[Refusal] = []


class Followed:
    """The follower and watcher of one model; operators may start and stop them."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name

    @property
    def follower(self) -> Follower | None:
        return self._find(Follower)

    @property
    def watcher(self) -> Watcher | None:
        return self._find(Watcher)

    @property
    def desired(self) -> DesiredState | None:
        """The desired state as last read: the desired store may be unreachable."""
        follower = self.follower
        return follower.desired if follower else None

    @property
    def desired_store(self) -> DesiredStore | None:
        """The desired store that changes are written to, if the model has one."""
        return next((source.desired_store for source in self._model.watching if source.desired_store is not None), None)

    @property
    def where(self) -> str:
        """Where the desired store is; empty if the model has none."""
        desired_store = self.desired_store
        return desired_store.where if desired_store is not None else ""

    def require_desired_store(self, what: str) -> DesiredStore:
        """Return the desired store. Raises Conflict if there is none."""
        if (desired_store := self.desired_store) is None:
            raise Conflict(f"{self._name}: {what} is written to a desired state, but the model follows none")
        return desired_store

    @staticmethod
    def seen(desired_store: DesiredStore, request: Change) -> int:
        """Return the revision that an operator has seen, by default the desired store's."""
        return desired_store.read().revision if request.revision is None else request.revision

    def stage(self, desired_store: DesiredStore, weights: DesiredWeights, by: str) -> Staged:
        """Begin to stage weights of the desired store as its follower would. Raises Conflict if that has ended."""
        source = next((source for source in self._model.watching if source.desired_store is desired_store), None)
        if source is None:
            raise Conflict(f"{self._name}: no longer follows {desired_store.where}; look again")
        request = request_for(source.request, desired_store.locate(weights), desired_store.located(weights), by)
        return self._model._stage(request, background=True)

    def interrupt(self) -> None:
        """Cancel what the follower or watcher stages, until its next poll, and what a sender has sent."""
        for watching in self._model.watching:
            watching.interrupt()
        for receiver in self._model.receivers:
            receiver.interrupt()

    def watches(self, folder: Path) -> bool:
        """Return whether new files of a local folder are served as they come."""
        directory = as_location(watcher.directory) if (watcher := self.watcher) is not None else None
        return isinstance(directory, Path) and os.path.realpath(directory) == str(folder)

    def check_free(self) -> None:
        """Raise Conflict if the model follows or watches something."""
        if self._model.watching:
            raise Conflict(f"{self._name}: already follows or watches something; unfollow it first")

    def _find(self, kind: type[T]) -> T | None:
        return next((source for source in self._model.watching if isinstance(source, kind)), None)

    def await_served(self, state: DesiredState) -> SwapReceipt | None:
        """Wait, with a timeout, until this process serves the desired weights. Raises NotServed if it refuses them."""
        desired = state.weights.weights_id if state.weights else None

        def refused(follower: Follower) -> Exception | None:
            read = (follower.status.revision or 0) >= state.revision
            error = follower.last_error if read else None
            return error if isinstance(error, Exception) and not is_transient(error) else None

        self._poll_until(lambda follower: self._model.weights_id == desired or refused(follower) is not None)
        follower = self.follower
        if desired and self._model.weights_id != desired and follower and (error := refused(follower)) is not None:
            where = follower.desired_store.where
            raise NotServed(f"{self._name}: {where} now desires {desired[:12]}, which was refused here: {error}")
        return self._await_receipt() if self._model.weights_id == desired else None

    def _await_receipt(self) -> SwapReceipt | None:
        """Return the receipt of the served weights, which follows the commit; None if an owner was killed between."""
        deadline = time.monotonic() + _RECEIPT_TIMEOUT
        while time.monotonic() < deadline:
            history = self._model.history
            if history and history[-1].generation == self._model.generation:
                return history[-1]
            time.sleep(0.005)
        return None

    def await_read(self, state: DesiredState) -> None:
        """Wait, with a timeout, until this process has read a written state, which the response contains."""
        self._poll_until(lambda follower: (follower.status.revision or 0) >= state.revision)

    def _poll_until(self, reached: Callable[[Follower], bool]) -> None:
        self.poll_now()
        deadline = time.monotonic() + _TIMEOUT
        while (follower := self.follower) and not reached(follower) and time.monotonic() < deadline:
            time.sleep(0.005)

    def poll_now(self) -> None:
        """Let the follower and the watcher poll now."""
        for source in self._model.watching:
            source.poll_now()


class LoadSeries:
    """The latest points of each model. `sample` is called by one thread, `after` by any."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]], models: Mapping[str, Iterable[str]]) -> None:
        """metrics: returns the metrics so far. models: by model, the names that requests use."""
        self._metrics = metrics
        self._models = {name: frozenset(names) for name, names in models.items()}
        self._points: dict[str, deque[tuple[int, LoadPoint]]] = {name: deque(maxlen=KEPT) for name in models}
        self._numbers = count(1)
        self._at, self._totals = time.monotonic(), _totals(metrics())

    def sample(self) -> None:
        """Add a point to each model."""
        before, began = self._totals, self._at
        self._totals, self._at = _totals(self._metrics()), time.monotonic()
        number = next(self._numbers)
        for model, names in self._models.items():
            self._points[model].append((number, _point(before, self._totals, names, self._at - began)))

    def after(self, model: str, number: int) -> list[tuple[int, LoadPoint]]:
        """Return the points after the one with that number, oldest first; their times may go back, as clocks do."""
        return [each for each in list(self._points[model]) if each[0] > number]


class LoadPoint(Struct, kw_only=True):
    """The requests of about one second. Latencies are estimated from the buckets of
    `weightswap_server_request_seconds`."""

    time: float  # of its end, since the epoch
    seconds: float
    answered: int
    refused: int  # with 4xx
    failed: int  # with 5xx
    p50: float | None  # seconds; None without answers
    p99: float | None
    weights: dict[str, int]  # answers by weights id


class _Totals(NamedTuple):
    """Totals since the server's start."""

    buckets: dict[_Series, dict[float, float]]  # calls by the limit of their bucket
    refusals: dict[str, Counter[str]]  # by status, of each requested name


def _totals(metrics: Iterable[Metric]) -> _Totals:
    totals = _Totals({}, {})
    for sample in (sample for metric in metrics for sample in metric.samples):
        if sample.name == "weightswap_server_request_seconds_bucket":
            series = sample.labels["model"], sample.labels["weights_id"]
            totals.buckets.setdefault(series, {})[float(sample.labels["le"])] = sample.value
        elif sample.name == "weightswap_server_requests_total" and sample.labels["status"] != "200":
            refusals = totals.refusals.setdefault(sample.labels["model"], Counter())
            refusals[sample.labels["status"]] += int(sample.value)
    return totals


def _point(before: _Totals, after: _Totals, names: frozenset[str], seconds: float) -> LoadPoint:
    weights: Counter[str] = Counter()
    buckets: Counter[float] = Counter()
    for series, now in after.buckets.items():
        if series[0] in names:
            then = before.buckets.get(series, {})
            grown = {limit: int(value - then.get(limit, 0.0)) for limit, value in now.items()}
            weights[series[1]] += max(grown.values())
            buckets.update(grown)
    refusals: Counter[str] = Counter()
    for name in names & after.refusals.keys():
        refusals += after.refusals[name] - before.refusals.get(name, Counter())
    ordered = sorted(buckets.items())
    return LoadPoint(
        time=time.time(),
        seconds=seconds,
        answered=weights.total(),
        refused=sum(count for status, count in refusals.items() if status < "500"),
        failed=sum(count for status, count in refusals.items() if status >= "500"),
        p50=quantile(ordered, 0.5),
        p99=quantile(ordered, 0.99),
        weights={weights_id: count for weights_id, count in weights.items() if count},
    )


def quantile(buckets: Sequence[tuple[float, int]], share: float) -> float | None:
    """Estimate a quantile of a histogram, with values spread evenly over their bucket, as Prometheus does.

    buckets: ascending upper limits with cumulative counts. None if they are empty.
    """
    total = buckets[-1][1] if buckets else 0
    if total == 0:
        return None
    rank, low, below = share * total, 0.0, 0
    for limit, seen in buckets:
        if seen >= rank and seen > below:
            return low if limit == float("inf") else low + (limit - low) * (rank - below) / (seen - below)
        low, below = limit, seen
    return low
