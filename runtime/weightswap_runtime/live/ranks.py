"""Several processes, the *ranks*, that have one model together, and do everything with it in one order.

torch.distributed pairs what ranks do by its order alone. Hence calls, swaps and rollbacks are collective: every rank
makes the same ones, one after another. Each begins with a *vote*, in which a rank says what it is about to do, or why
it cannot. If all say the same, all go on; else all raise the same error, and nothing has happened anywhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from blake3 import blake3

from weightswap_runtime.decoding import from_json
from weightswap_runtime.errors import RanksLost, RanksRefused, Unsupported, is_number, text_of
from weightswap_runtime.process_groups import Members
from weightswap_runtime.threads import Background

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_VOTE = 4096  # bytes: one size for all votes, as ranks that gather different sizes would end the process
_PATIENCE = 0.5  # seconds
_MOST_REFUSAL = 2000  # characters
_MOST_COMPARED = 1 << 20  # bytes of an input whose values are compared; of larger ones, types are
T = TypeVar("T")


class Vote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank is about to do."""

    step: str
    facts: dict[str, str] = {}  # that must be the same on all ranks
    about: str = ""  # more about the facts, for messages
    refusal: str = ""  # why it cannot
    waits: bool = False  # it does not know yet


class Ranks:
    """The ranks of a model, one of which is this process; for `load(artifact, ranks=Ranks(group))`.

    rank, size: the number of this process, from 0, and of all.
    lost: the error that says why a group is of no use any more; None while it is.
    """

    def __init__(self, group: ProcessGroup, *, timeout: float = 10.0, check_calls: bool = True) -> None:
        """group: a process group of torch.distributed (gloo; NCCL for a model on GPUs) that nothing else uses, such as
        `torch.distributed.new_group()`. Its timeout is set to `timeout`: seconds after which a rank that does not come
        to a vote, or does not answer in a call, is taken for lost. check_calls: compare the inputs of each call before
        it runs, in one exchange of 4 KiB; without it, inputs that differ give wrong numbers or end the process.

        Raises Unsupported.
        """
        if not (is_number(timeout) and 0 < timeout < inf):
            raise Unsupported(f"timeout={timeout!r:.100}: expected seconds, more than 0")
        self._members = Members(group)
        self.rank, self.size = self._members.rank, self._members.size
        self.timeout, self.check_calls = timeout, check_calls
        self.group_name = _registered(group, self)
        self.lost: RanksLost | None = None
        self._user: weakref.ref[object] | None = None
        group.set_timeout(timedelta(seconds=timeout))
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose turn it is

    @property
    def patience(self) -> float:
        """Seconds after which a rank that is busy says so in a vote, so that the others do not take it for lost."""
        return min(_PATIENCE, self.timeout / 4)

    def check_unused(self) -> None:
        """Raise Unsupported if another model uses the ranks: calls of both could be taken for one another."""
        if self._user is not None and self._user() is not None:
            raise Unsupported("ranks: another model has them; make a group of its own for each model")

    def serve(self, user: object) -> None:
        """Note that something uses the ranks, until it leaves them or is dropped."""
        self._user = weakref.ref(user)

    def leave(self, user: object) -> None:
        """Note that something uses the ranks no more, though an error or its owner may still refer to it."""
        if self._user is not None and self._user() is user:
            self._user = None

    @contextmanager
    def turn(self, step: str) -> Iterator[None]:
        """Let this thread alone do something with the ranks within the block. Raises Unsupported, and RanksLost."""
        thread = threading.get_ident()
        with self._lock:
            if self.lost is not None:
                raise RanksLost(str(self.lost))
            if self._owner not in (None, thread):
                raise Unsupported(
                    f"{step}: another thread is using this model. Its ranks do one thing at a time, each in the same "
                    "order: use the model in one thread of each rank."
                )
            before, self._owner = self._owner, thread
        try:
            yield
        finally:
            self._owner = before

    def without_changes(self) -> AbstractContextManager[object]:
        """Return the block of a pin. Whoever calls and changes a model in several threads must keep changes out of it:
        else its calls would run with other weights than those of ranks that have made the change."""
        return nullcontext()

    def agree(self, step: str, prepare: Callable[[], Mapping[str, str] | None], about: str = "") -> None:
        """Return once all ranks are about to do the same step with the same facts.

        prepare: returns the facts; None if it has to be called again; it waits `patience` at most. What it raises is
        the refusal of this rank. about: where the facts come from, for messages. Raises RanksRefused, the same on all
        ranks, and RanksLost.
        """
        while True:
            facts, error = None, None
            try:
                facts = prepare()
            except Exception as failure:
                error = failure
            except BaseException as interrupt:
                self._gather(Vote(step, refusal=f"was interrupted ({type(interrupt).__name__})"))
                raise
            refusal = "" if error is None else f"{type(error).__name__}: {' '.join(text_of(error).split())}"
            is_waiting = facts is None and error is None
            votes = self._gather(Vote(step, dict(facts or {}), about, refusal, is_waiting))
            if reasons := _reasons(votes):
                try:
                    raise RanksRefused(step, reasons) from error
                finally:
                    del error  # else the cycle with its traceback would keep this frame
            if not any(vote.waits for vote in votes):
                return

    def agree_after(self, step: str, work: Callable[[], Mapping[str, str]]) -> None:
        """Agree as `agree` does, on what some work returns that may take long, as it does on a cold disk."""
        outcome: Future[Mapping[str, str]] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # which the vote tells of
                outcome.set_exception(error)

        def prepare() -> Mapping[str, str] | None:
            try:
                return outcome.result(self.patience)
            except FutureTimeout:
                if outcome.done():  # the work raised one
                    raise
                return None

        Background(run, "weightswap-ranks", lambda: None).start()
        self.agree(step, prepare)

    def call(
        self, name: str, check: Callable[[], list[Any]], weights_id: Callable[[], str], run: Callable[[list[Any]], T]
    ) -> T:
        """Call a method of the model on all ranks. check: returns its flat inputs; run: calls it with these.

        Raises what both raise, if they do so on all ranks; else RanksRefused and RanksLost.
        """
        step = f"call of {name}"
        with self.turn(step):
            flat: list[Any] = []

            def prepare() -> Mapping[str, str]:
                flat[:] = check()
                return {"weights": weights_id(), "inputs": _described(flat)}

            if self.check_calls:
                self.agree(step, prepare)
            else:
                flat[:] = check()
            try:
                return run(flat)
            except Exception:
                self.agree(f"{step} that failed", dict)  # another rank may wait for what this one did not do
                raise
            except BaseException as error:
                self._lose(error)
                raise

    def _gather(self, vote: Vote) -> list[Vote]:
        """Tell all ranks a vote, and return those of all. Raises RanksLost."""
        return self.exchange(lambda tell: [from_json(raw.rstrip(b"\0"), Vote) for raw in tell(_encoded(vote))])

    def exchange(self, work: Callable[[Callable[[bytes], list[bytes]]], T]) -> T:
        """Return what some work returns, with a function that tells all ranks bytes, as many on each, and returns those
        of all. Raises RanksLost, also if the work fails, as others may wait for what it would have told."""
        if self.lost is not None:
            raise RanksLost(str(self.lost))
        try:
            return work(lambda raw: self._members.exchange(raw, self.timeout))
        except BaseException as error:
            lost = self._lose(error)
            if not isinstance(error, Exception):
                raise
            raise lost from error

    def _lose(self, error: BaseException) -> RanksLost:
        self._members.fail(error)
        if self.lost is None:
            is_mine = not isinstance(error, Exception)
            why = "was interrupted" if is_mine else f"another rank is gone, or took more than {self.timeout:g} s"
            self.lost = RanksLost(
                f"rank {self.rank} of {self.size}: {why} "
                f"({type(error).__name__}: {text_of(error):.300}). Calls and swaps are refused: start all ranks again, "
                "and load the weights that shall be served"
            )
        return self.lost


def _registered(group: Any, user: Ranks) -> str:
    """Return the name under which graphs find a group; it is registered if it is not yet, until the user is dropped."""
    c10d: Any = import_module("torch._C._distributed_c10d")
    try:
        name = str(group.group_name)
    except (AttributeError, RuntimeError) as error:  # a backend alone
        raise Unsupported(
            f"{group!r:.200}: has no name, by which graphs find it; make it with torch.distributed.new_group(), or "
            "with weightswap_runtime.process_group()"
        ) from error
    try:
        c10d._resolve_process_group(name)
    except RuntimeError:
        c10d._register_process_group(name, group)
        weakref.finalize(user, c10d._unregister_process_group, name).atexit = False
    return name


def _encoded(vote: Vote) -> bytes:
    most = _MOST_REFUSAL
    while len(raw := msgspec.json.encode(vote)) > _VOTE:
        most //= 2
        facts = {name: fact[:most] for name, fact in vote.facts.items()}
        vote = msgspec.structs.replace(vote, about=vote.about[:most], refusal=vote.refusal[:most], facts=facts)
    return raw.ljust(_VOTE, b"\0")


def _reasons(votes: Sequence[Vote]) -> dict[int, str]:
    """Return why a step is not done, by rank; nothing if all ranks can do the same."""
    if refusals := {rank: vote.refusal for rank, vote in enumerate(votes) if vote.refusal}:
        return refusals
    if len({vote.step for vote in votes}) > 1:
        return {rank: f"is at another step: {vote.step}" for rank, vote in enumerate(votes)}
    if any(vote.waits for vote in votes):
        return {}
    names = dict.fromkeys(name for vote in votes for name in vote.facts)
    for name in names:
        found = [vote.facts.get(name, "none") for vote in votes]
        if len(set(found)) > 1:
            return {
                rank: f"{name} {fact}" + (f" ({vote.about})" if vote.about else "")
                for rank, (vote, fact) in enumerate(zip(votes, found, strict=True))
            }
    return {}


def _described(flat: Sequence[Any]) -> str:
    """Return the types of inputs, and a digest of these and of the values on the host."""
    texts, hasher = [], blake3()
    for value in flat:
        shape = getattr(value, "shape", None)
        if shape is None:
            texts.append(f"{value!r:.40}")
            hasher.update(repr(value).encode())
            continue
        texts.append(f"{str(value.dtype).removeprefix('torch.')}{list(shape)}")
        hasher.update(texts[-1].encode())
        if getattr(value, "is_cpu", False) and value.nbytes <= _MOST_COMPARED:
            from weightswap_runtime.torch_tensors import tensor_bytes

            hasher.update(tensor_bytes(value.detach()))
    return f"{', '.join(texts)[:300]} ({hasher.hexdigest()[:16]})"
