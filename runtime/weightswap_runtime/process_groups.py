"""Process groups of torch.distributed, whose members do the same steps: what a group does is paired by its order.

Whoever is gone or late is noticed by the group's timeout; a group is of no use after that.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from .decoding import from_json
from .errors import TransferFailed, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

MOST_DOCUMENT = 64 << 20  # bytes of a document: a receipt names each weight that is not finite
_EXCHANGE = 1  # the tag of these messages, apart from others between two ranks, is this and their size
_SHORT_NAP, _LONG_NAP = 1e-4, 5e-3  # seconds between two looks whether something has ended
T = TypeVar("T", bound=msgspec.Struct | str)


_numbers = count()  # of groups that were made here


def process_group(address: str, rank: int, size: int, *, timeout: float = 60.0) -> ProcessGroup:
    """Return a new gloo group for weights, beside whatever groups the process has. It waits until all ranks are there.

    address: `tcp://HOST:PORT` of a free port on the machine of rank 0, the sender; give the same to all. size: of the
    group. timeout: seconds to wait for the others, here and in each step of a transfer, such as the staging of all.

    Raises Unsupported, and TransferFailed if the others do not come in time.
    """
    distributed: Any = import_module("torch.distributed")  # whose hints leave out what follows
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise Unsupported(f"{address}: expected tcp://HOST:PORT")
    if not 0 <= rank < size or size < 2:
        raise Unsupported(f"rank {rank} of {size}: expected two ranks or more, of which 0 sends")
    try:
        limit = timedelta(seconds=timeout)
        store = distributed.TCPStore(parts.hostname, parts.port, size, rank == 0, limit)
        store = distributed.PrefixStore("weightswap", store)
        return _named(store, rank, size, limit)
    except RuntimeError as error:
        raise TransferFailed(f"{address}: the group of {size} did not come together ({_brief(error)})") from error


def groups_of_threads(size: int) -> list[ProcessGroup]:
    """Return a gloo group for each of several threads of this process, which are its ranks."""
    distributed: Any = import_module("torch.distributed")
    store, limit = distributed.HashStore(), timedelta(seconds=60.0)
    with ThreadPoolExecutor(size) as pool:  # each waits for the others
        return list(pool.map(lambda rank: _named(store, rank, size, limit), range(size)))


def _named(store: Any, rank: int, size: int, limit: timedelta) -> ProcessGroup:
    """Return a group that has a name, by which graphs find it. Raises torch's errors."""
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    kind = distributed.ProcessGroup.BackendType.GLOO
    group: Any = distributed.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, distributed.ProcessGroupGloo(store, rank, size, limit))
    group._set_group_name(f"weightswap-{next(_numbers)}")
    made: ProcessGroup = group
    return made


def free_address() -> str:
    """Return an address of this machine for `process_group`, with a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


class Members:
    """The members of a group, one of which is this process. Used by one thread at a time."""

    def __init__(self, group: ProcessGroup, sends: bool | None = None) -> None:
        """sends: whether this must be the rank that sends weights to all others; None: it may be any.

        Raises Unsupported for another rank, a group of one or in use, and for what is none.
        """
        if not all(hasattr(group, name) for name in ("rank", "size", "broadcast", "allgather")):
            raise Unsupported(f"{group!r:.200}: expected a text such as unix:PATH, or a process group")
        self._group: Any = group
        self.rank, self.size = int(group.rank()), int(group.size())
        self.where = f"process group, rank {self.rank} of {self.size}"
        if self.size < 2:
            raise Unsupported(f"{self.where}: has no other rank; make one of the sender and all receivers")
        if sends is not None and sends != (self.rank == 0):
            raise Unsupported(f"{self.where}: rank 0 sends, all others receive")
        if id(group) in _used:
            raise Unsupported(f"{self.where}: is in use already, by a sender or a receiver; make another group")
        _used.add(id(group))
        self._forget = weakref.finalize(self, _used.discard, id(group))
        self.device = _device_of(group)
        self.failure: TransferFailed | None = None  # after which the group is of no use
        self.check: Callable[[], None] | None = (
            None  # called while others are waited for; what it raises ends the group
        )
        # gloo's threads let go of what has ended a moment later; the last reference to tensors must not be theirs, as
        # they need the interpreter to drop it, and end the process if that is ending
        self._recent: deque[Any] = deque(maxlen=8)

    def gather_documents(self, document: T) -> list[T]:
        """Tell the others a document, and return those of all, by rank. Raises TransferFailed."""
        raw = msgspec.json.encode(document)
        try:
            most = max(int.from_bytes(length, "little") for length in self.gather(len(raw).to_bytes(8, "little")))
            if most > MOST_DOCUMENT:
                raise ValueError(f"a message of {most} bytes")
            return [from_json(each, type(document)) for each in self.gather(raw.ljust(most))]
        except Exception as error:
            raise self.fail(error) from error

    def gather(self, raw: bytes) -> list[bytes]:
        """Tell the others bytes, of the same number on all ranks; return those of all, by rank.

        Raises TransferFailed, and torch's errors."""
        import torch

        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(self._begin(lambda: self._group.allgather([all_ranks], [mine])), self.check)
        return [bytes(each.cpu().numpy()) for each in all_ranks]

    def exchange(self, raw: bytes, timeout: float) -> list[bytes]:
        """Do what `gather` does, with each rank by itself: if one dies, all know at once, not only its neighbours.

        timeout: seconds to wait for all; on a device, the group's own is used. Messages of different sizes do not meet:
        whoever gave them waits in vain, where gloo would end the process.
        """
        if self.device.type != "cpu":
            return self.gather(raw)
        import torch

        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        others = {rank: torch.empty_like(mine) for rank in range(self.size) if rank != self.rank}
        tag = _EXCHANGE + len(raw)
        works = [self._begin(partial(self._group.send, [mine], rank, tag)) for rank in others]
        works += [self._begin(partial(self._group.recv, [one], rank, tag)) for rank, one in others.items()]
        deadline = time.monotonic() + timeout
        for work in works:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                work.wait(left)
            except RuntimeError as error:
                raise self.fail(error) from error
        return [bytes(others.get(rank, mine).numpy()) for rank in range(self.size)]

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send rank 0's tensor of bytes to the same of all others; return what to wait for."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        return self._begin(lambda: self._group.broadcast([tensor], options))

    def empty(self, size: int) -> torch.Tensor:
        """Return memory for bytes that come."""
        import torch

        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def send(self, content: memoryview) -> None:
        """Send bytes to rank 0. Raises TransferFailed."""
        import torch

        tensor = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        self.wait(self._begin(lambda: self._group.send([tensor], 0, 0)))

    def receive(self, buffer: torch.Tensor, rank: int) -> Any:
        """Begin to fill memory with what a rank gives; return what to wait for."""
        return self._begin(lambda: self._group.recv([buffer], rank, 0))

    def _begin(self, work: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        try:
            begun = work()
        except RuntimeError as error:
            raise self.fail(error) from error
        self._recent.append(begun)
        return begun

    def wait(self, work: Any, check: Callable[[], None] | None = None) -> None:
        """Wait until something that was begun has ended. Raises TransferFailed, and what `check` raises meanwhile."""
        start = time.monotonic()
        while check is not None and not work.is_completed():
            check()
            time.sleep(min(max(_SHORT_NAP, (time.monotonic() - start) / 8), _LONG_NAP))
        try:
            work.wait()
        except RuntimeError as error:
            raise self.fail(error) from error

    def fail(self, error: BaseException) -> TransferFailed:
        """End the group, whose members are no longer at the same step, and return the error that says so."""
        if self.failure is None:
            text = f"{self.where}: another rank is gone, or late ({_brief(error)}); make a new group"
            self.failure = TransferFailed(text)
            with suppress(Exception):
                self._group.abort()  # else its threads may end this process with it
        return self.failure

    def close(self) -> None:
        """Let go of the group, whose threads end with its last reference."""
        self.failure = self.failure or TransferFailed(f"{self.where}: was left; make a new group")
        self._group = None
        self._forget()


_used: set[int] = set()  # ids of groups that a member refers to


def _device_of(group: Any) -> torch.device:
    """Return a device whose tensors a group takes."""
    import torch

    devices = getattr(group, "_device_types", None)  # a single backend has a name only
    kinds = (
        {device.type for device in devices} if devices is not None else {"cpu" if group.name() == "gloo" else "cuda"}
    )
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rpartition("] ")[2].partition(". ")[0][:200]
