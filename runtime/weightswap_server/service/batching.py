"""The thread that calls a model: it processes a queue in order, and joins calls into batches if that is enabled.

A batch is answered by one version of the weights. The inputs of calls are already checked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from threading import Condition, Thread
from typing import Any

from weightswap_runtime.live.calls import Caller
from weightswap_runtime.live.variants import Choice
from weightswap_runtime.model.served import ServedModel, choice_of
from weightswap_runtime.tensors import TensorBytes
from weightswap_server.canary import Canary
from weightswap_server.errors import NotInJson, NotReady, Overloaded, UnknownModel, is_foreseen
from weightswap_server.methods import Flat, ServedMethod, split
from weightswap_server.protocol import Answer, json_problem, write_variants

# seconds: a call that takes no longer may run in the thread that received the request, whose other connections wait
QUICK = 1e-3
# in units of QUICK: the excess time that is taken for noise, and the most that later quick calls have to make up for
_TOLERATED, _MAX_OWED = 4, 1000

CallSoon = Callable[[Callable[[], None]], object]
Observe = Callable[["Call", Answer, float, int], object]  # the call, its answer, its start time, the batch's size
MayJoin = Callable[[Caller, ServedMethod, int, Choice | None], bool]  # the weights, a method, the most rows, variants
_MOST_TRIED = 256  # sets of weights, with their variants, of which is known whether calls may be joined


class Call:
    """One request's call of a method, and the future of its answer."""

    def __init__(
        self,
        method: ServedMethod,
        flat: Flat,
        version: str = "",
        *,
        traceparent: str = "",
        canary: Canary | None = None,
        variants: Mapping[str, str] | None = None,
        name: str = "",
        outputs: Sequence[str] = (),
        in_json: Sequence[str] = (),
    ) -> None:
        self.method = method
        self.flat = flat
        self.version = version  # the requested generation, or ""
        self.traceparent = traceparent  # the W3C trace context of its parent span
        self.canary = canary  # that answers it, instead of the served weights
        self.variants = dict(variants or {})  # names of the chosen ones, by group
        self.name = name  # the model's in the request
        self.outputs = outputs  # names of the requested ones; none: all
        self.in_json = in_json  # of those that are answered in JSON
        self.arrived = time.perf_counter()
        self.answer: Future[Answer] = Future()
        self.nbytes = sum([len(value.data) for value in _tensors(flat)])

    @property
    def rows(self) -> int:
        return self.method.rows(self.flat)

    @cached_property
    def kind(self) -> Hashable:
        """The batching key: calls with the same key differ in their rows alone."""
        variants, shapes = frozenset(self.variants.items()), tuple(value.shape[1:] for value in _tensors(self.flat))
        return self.method, self.version, self.canary, variants, shapes


class Task:
    """Work for the model's thread that is not a call, and the future of its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.answer: Future[Any] = Future()


class ModelThread:
    """The thread that calls one model. It is only one, as each calling thread has an OpenMP pool of its own; calls that
    are too quick for a pool may run in the event loop's thread."""

    def __init__(
        self, model: ServedModel, *, max_queue: int, max_delay: float, observe: Observe, may_join: MayJoin
    ) -> None:
        """may_join: tries whether the rows of a batch are independent."""
        self._model, self._may_join = model, may_join
        self._max_queue, self._max_delay, self._observe = max_queue, max_delay, observe
        self.limits: dict[ServedMethod, int] = {}  # the most rows of a batch, by batched method
        self._joinable: set[Hashable] = set()  # methods with the weights and variants for which that was tried
        self._seconds_tried = 0.0  # that took, which says nothing about calls
        self._queue: deque[Call | Task] = deque()
        self._changed = Condition()
        self._busy = self._stopped = False
        self._quick: dict[ServedMethod, int] = {}  # the largest input, in bytes, with which calls are quick
        self._owed: dict[ServedMethod, float] = {}  # excess seconds of slow calls, less what quick ones saved
        # a call may block otherwise, on several ranks for a change of all
        self._inline = model.device == "cpu" and model.residency == "double" and model.ranks is None
        self._thread = Thread(target=self._run, name="weightswap-model", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def try_out(self, method: ServedMethod, flat: Flat) -> None:
        """Call a method in the current thread, unobserved, and learn how long that takes."""
        began = time.perf_counter()
        call = Call(method, flat)
        self._run_calls([call])
        self._learn(method, call.nbytes, time.perf_counter() - began)

    def try_joining(self, caller: Caller, method: ServedMethod, choice: Choice | None, weights_id: str) -> bool:
        """Return whether calls of a method may be joined, with these weights. If not, they never are from now on.

        It is tried once for all weights: some hide what later ones show, such as a factor that is 0 at first.
        """
        if (limit := self.limits.get(method)) is None:
            return False
        key = method, weights_id, frozenset(choice.ids.items()) if choice is not None else None
        if key in self._joinable:
            return True
        began = time.perf_counter()
        may_join = self._may_join(caller, method, limit, choice)
        self._seconds_tried += time.perf_counter() - began
        if not may_join:
            with self._changed:
                self.limits.pop(method, None)
            return False
        if len(self._joinable) >= _MOST_TRIED:
            self._joinable.clear()
        self._joinable.add(key)
        return True

    def submit(self, work: Call | Task, call_soon: CallSoon | None = None) -> None:
        """Queue a call or a task. call_soon: that of an event loop, whose thread may run quick batches itself.

        Raises Overloaded if the queue is full, and NotReady after `stop`.
        """
        with self._changed:
            if self._stopped:
                raise NotReady("the server is stopping")
            if isinstance(work, Call) and len(self._queue) >= self._max_queue:
                self._queue = deque(queued for queued in self._queue if not queued.answer.cancelled())
                if len(self._queue) >= self._max_queue:
                    raise Overloaded(f"{len(self._queue)} requests are already waiting for this model; try again")
            self._queue.append(work)
            if call_soon is None or self._max_delay or not isinstance(work, Call) or work.method not in self.limits:
                self._changed.notify()
            elif len(self._queue) == 1:
                call_soon(partial(self._answer_quick, call_soon))  # the loop's other connections may add to the batch

    def do(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue a task, and return the future of its result."""
        task = Task(work)
        self.submit(task)
        return task.answer

    def run_here(self, call: Call) -> Answer | None:
        """Answer a call in this thread, or return None if it may be slow or others wait. Raises the call's errors."""
        if self._queue or call.method in self.limits or not self._is_quick(call.method, call.nbytes):
            return None
        return self._answers([call])[0]

    def _is_quick(self, method: ServedMethod, nbytes: int) -> bool:
        """True if the current thread may call the method itself."""
        return self._inline and not self._busy and not self._stopped and nbytes <= self._quick.get(method, -1)

    def _answer_quick(self, call_soon: CallSoon) -> None:
        """Answer one queued batch in this thread if it is quick, and schedule the next. Slow ones await the model's."""
        if batch := self._dequeue_quick():
            self._work(batch)
            if self._queue:  # the loop's other callbacks run in between
                call_soon(partial(self._answer_quick, call_soon))

    def _dequeue_quick(self) -> Sequence[Call]:
        with self._changed:
            first = self._queue[0] if self._queue else None
            if isinstance(first, Call) and first.method in self.limits and self._is_quick(first.method, 0):
                batch = [first]
                self._queue.popleft()
                self._gather(batch, self.limits[first.method] - first.rows)
                if self._is_quick(first.method, sum([call.nbytes for call in batch])):
                    return batch
                self._queue.extendleft(reversed(batch))  # before other kinds: the model's thread takes this batch next
            self._changed.notify()
        return ()

    def stop(self, timeout: float) -> None:
        """Refuse new work, and wait for at most `timeout` seconds until the queue is done."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while batch := self._dequeue():
            self._busy = True
            try:
                self._work(batch)
            finally:
                self._busy = False
                del batch  # or its tensors would stay alive while the queue is empty

    def _dequeue(self) -> list[Call | Task]:
        with self._changed:
            while not self._queue:
                if self._stopped:
                    return []
                self._changed.wait()
            first = self._queue.popleft()
            if isinstance(first, Task) or first.method not in self.limits:
                return [first]
            limit, batch, rows = self.limits[first.method], [first], first.rows
            while True:
                rows += self._gather(batch, limit - rows)
                seconds = first.arrived + self._max_delay - time.perf_counter()
                if rows >= limit or seconds <= 0 or self._stopped:
                    return list(batch)
                self._changed.wait(seconds)

    def _gather(self, batch: list[Call], free: int) -> int:
        """Move queued calls of the batch's kind into it, of at most `free` rows; return the number of rows moved."""
        added, kind = 0, batch[0].kind
        for work in list(self._queue):
            if isinstance(work, Call) and work.kind == kind and work.rows <= free - added:
                self._queue.remove(work)
                batch.append(work)
                added += work.rows
        return added

    def _work(self, batch: Sequence[Call | Task]) -> None:
        live = [work for work in batch if work.answer.set_running_or_notify_cancel()]
        if len(live) == 1 and isinstance(live[0], Task):
            _do(live[0])
        elif live:
            self._answer([work for work in live if isinstance(work, Call)])

    def _answer(self, calls: list[Call]) -> None:
        try:
            answers = self._answers(calls)
        except BaseException as error:
            if len(calls) == 1:
                calls[0].answer.set_exception(error)
                return
            for call in calls:  # one call's inputs may be at fault: answer each by itself
                self._answer([call])
            return
        for call, answer in zip(calls, answers, strict=True):
            call.answer.set_result(answer)

    def _answers(self, calls: list[Call]) -> list[Answer]:
        """Answer calls of one kind by one call. Raises its error; if a canary fails, the served weights answer."""
        began, tried = time.perf_counter(), self._seconds_tried
        try:
            answers = self._run_calls(calls)
        except BaseException as error:
            canary = calls[0].canary
            if canary is None or (len(calls) > 1 and isinstance(error, NotInJson)):  # `_answer` tries each by itself
                raise
            for call in calls:
                call.canary = None
            return self._answers_of_served(calls, canary, error)
        seconds = time.perf_counter() - began - (self._seconds_tried - tried)
        self._learn(calls[0].method, sum([call.nbytes for call in calls]), seconds)
        for call, answer in zip(calls, answers, strict=True):
            self._observe(call, answer, began, len(calls))
        return answers

    def _answers_of_served(self, calls: list[Call], canary: Canary, error: BaseException) -> list[Answer]:
        """Answer calls for which a canary has failed, and count that unless it is the requests' fault: the served
        weights refuse them, too, or have no answer either that JSON can represent."""
        is_of_canary = True
        try:
            answers = self._answers(calls)
            is_of_canary = not isinstance(error, NotInJson) or not _json_problem(calls, answers)
            return answers
        except BaseException as refused:
            is_of_canary = not is_foreseen(refused)
            raise
        finally:
            if is_of_canary:
                canary.failed(error, len(calls))

    def _run_calls(self, calls: list[Call]) -> list[Answer]:
        choice = choice_of(self._model, calls[0].variants) if calls[0].variants else None
        if (canary := calls[0].canary) is not None:
            answers = self._call(canary.staged, calls, choice, None, canary.weights_id)
            if problem := _json_problem(calls, answers):
                raise NotInJson(problem)  # which its client shall not see
            return answers
        with self._model.pin() as pinned:
            if calls[0].version not in ("", str(pinned.generation)):
                raise UnknownModel(f"version {calls[0].version}: only generation {pinned.generation} is served")
            return self._call(pinned, calls, choice, pinned.generation, pinned.weights_id)

    def _call(
        self, caller: Caller, calls: Sequence[Call], choice: Choice | None, generation: int | None, weights_id: str
    ) -> list[Answer]:
        """Answer calls of one kind by one call of the method, or each by itself if they may not be joined."""
        method, variant = calls[0].method, write_variants(choice.ids) if choice is not None else ""
        if len(calls) > 1 and self.try_joining(caller, method, choice, weights_id):
            outputs = method.call(caller, method.joined([call.flat for call in calls]), choice)
            parts = split(outputs, [call.rows for call in calls])
        else:
            parts = [method.call(caller, call.flat, choice) for call in calls]
        return [Answer(part, generation, weights_id, variant) for part in parts]

    def _learn(self, method: ServedMethod, nbytes: int, seconds: float) -> None:
        """Update the input size up to which calls are quick. A little excess time is taken for noise. More of it lowers
        the size, and later quick calls must make up for it first: how long a call takes may depend on its values."""
        known, owed = self._quick.get(method, -1), self._owed.get(method, 0.0)
        if seconds < QUICK or nbytes <= known:
            owed = self._owed[method] = min(max(0.0, owed + seconds - QUICK), _MAX_OWED * QUICK)
        if seconds < QUICK and not owed:
            self._quick[method] = max(known, nbytes)
        elif seconds >= QUICK and owed > _TOLERATED * QUICK:
            self._quick[method] = min(known, nbytes - 1)


def _json_problem(calls: Sequence[Call], answers: Sequence[Answer]) -> str:
    """Return why an answer cannot be written in JSON, if its client wants that; else empty."""
    contents = ((call.in_json, dict(answer.outputs)) for call, answer in zip(calls, answers, strict=True))
    return next(
        (text for names, by_name in contents for name in names if (text := json_problem(name, by_name[name]))), ""
    )


def _do(task: Task) -> None:
    try:
        task.answer.set_result(task.work())
    except BaseException as error:
        task.answer.set_exception(error)


def _tensors(flat: Flat) -> list[TensorBytes]:
    return [value for value in flat if isinstance(value, TensorBytes)]
