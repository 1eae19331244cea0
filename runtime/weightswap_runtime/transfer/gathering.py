"""Weights of a trainer whose ranks each hold some rows of them (FSDP2): rank 0 gets the rows of all, to send them.

All ranks call `Sender.send` at the same step, and do the same:

    Held      all tell all which rows of which tensors they hold
    Outcome   rank 0 tells whether such tensors can be the weights
    rows      each sends its own to rank 0, in the order of a file without a name, which rank 0 stages as it arrives
    digest    of what each has sent
    Outcome   rank 0 tells what became of it

No rank but 0 ever has more than its own part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from blake3 import blake3

from weightswap_runtime.decoding import converted
from weightswap_runtime.errors import DigestMismatch, WeightsMismatch
from weightswap_runtime.format.canonical import pack_ranges, render_header
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.process_groups import Members
from weightswap_runtime.sources.byte_source import Check
from weightswap_runtime.sources.memory import MemorySource
from weightswap_runtime.staging.given import MEMORY, as_arriving, tensors_of
from weightswap_runtime.staging.request import check_labels
from weightswap_runtime.tensors import nbytes

from .group import BUCKET, vote
from .messages import Outcome, Refusal

if TYPE_CHECKING:
    import torch

    from weightswap_runtime.staging.given import Given, GivenWeights


_ADVICE = "Give what the module's state_dict() returns on each rank, of one step."


class Rows(msgspec.Struct, frozen=True):
    """Rows of a tensor that a rank holds: all of the first dimension from `first` up to `stop`."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    first: int
    stop: int


class Held(msgspec.Struct, frozen=True):
    """What a rank holds, by name; or why it cannot be sent."""

    rows: dict[str, Rows] = {}
    labels: dict[str, str] = {}
    refusal: Refusal | None = None


class Part(NamedTuple):
    """Bytes of the file that one rank has."""

    rank: int
    name: str
    begin: int  # from that of the rank's rows of the tensor
    end: int


def held(weights: Given, labels: Mapping[str, str]) -> tuple[Held, dict[str, memoryview]]:
    """Return what this rank holds, and the bytes of its rows, by name.

    Raises WeightsMismatch, WeightFileError and Unsupported.
    """
    from weightswap_runtime.torch_tensors import tensor_bytes  # needs torch

    check_labels(labels)
    rows: dict[str, Rows] = {}
    content: dict[str, memoryview] = {}
    problems: list[str] = []
    for name, value in tensors_of(weights).items():
        try:
            whole, first, local = _part_of(value)
            found = MemorySource(name, local).type
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        shape = whole if whole is not None else found.shape
        stop = first + (found.shape[0] if found.shape else 1)
        if stop > first or not shape[0]:  # a tensor without rows is whole everywhere
            rows[name] = Rows(found.dtype, shape, first, stop)
            content[name] = tensor_bytes(local)
    if problems:
        raise WeightsMismatch(MEMORY, problems, _ADVICE)
    return Held(rows, dict(labels)), content


def _part_of(value: Any) -> tuple[tuple[int, ...] | None, int, Any]:
    """Return the shape of the whole tensor, the first row of what this rank holds of it, and that.

    The shape is None for a tensor that is whole. Raises ValueError for parts that are no rows.
    """
    if not hasattr(value, "__create_chunk_list__"):
        return None, 0, value
    if not hasattr(value, "to_local") or any(placement.is_partial() for placement in value.placements):
        raise ValueError(f"a {type(value).__qualname__} whose values are in several places; give its full_tensor()")
    (chunk,) = value.__create_chunk_list__()
    whole = tuple(value.shape)
    if any(chunk.offsets[1:]) or tuple(chunk.sizes[1:]) != whole[1:]:
        raise ValueError(f"cut along other dimensions than the first ({value.placements}); give its full_tensor()")
    return whole, chunk.offsets[0] if whole else 0, value.to_local()


class Joined:
    """The file that the rows of all ranks make up."""

    def __init__(self, all_held: list[Held]) -> None:
        """Raises WeightsMismatch, with the same problems on all ranks, unless each row is there."""
        for each in all_held:
            if each.refusal is not None:
                raise each.refusal.as_error()
        problems = [] if len({tuple(sorted(each.labels.items())) for each in all_held}) == 1 else ["labels differ"]
        names = sorted({name for each in all_held for name in each.rows})
        owners = {name: _owners(name, all_held, problems) for name in names}
        if problems:
            raise WeightsMismatch(MEMORY, [f"{problem} between the trainer's ranks" for problem in problems], _ADVICE)
        types = [(name, owners[name][0][1].dtype, owners[name][0][1].shape) for name in names]
        self.header = render_header(pack_ranges(types), {})
        self.parts = [part for name in names for part in _parts(name, owners[name])]
        self.size = len(self.header) + sum(part.end - part.begin for part in self.parts)


def _owners(name: str, all_held: list[Held], problems: list[str]) -> list[tuple[int, Rows]]:
    """Return the ranks whose rows make up a tensor, in their order; of those with the same rows the first."""
    found: dict[tuple[int, int], tuple[int, Rows]] = {}
    for rank, each in enumerate(all_held):
        if (rows := each.rows.get(name)) is not None:
            found.setdefault((rows.first, rows.stop), (rank, rows))
    owners = [found[key] for key in sorted(found)]
    _, first = owners[0]
    if any((rows.dtype, rows.shape) != (first.dtype, first.shape) for _, rows in owners):
        problems.append(f"{name}: dtypes or shapes differ")
    ends = [(rows.first, rows.stop) for _, rows in owners]
    count = first.shape[0] if first.shape else 1
    if ends[0][0] or ends[-1][1] != count or any(one[1] != other[0] for one, other in pairwise(ends)):
        problems.append(f"{name}: rows {ends} of {count}, which are not each there once,")
    return owners


def _parts(name: str, owners: list[tuple[int, Rows]]) -> Iterator[Part]:
    for rank, rows in owners:
        size = nbytes(rows.dtype, (rows.stop - rows.first, *rows.shape[1:])) or 0
        for begin in range(0, size, BUCKET):
            yield Part(rank, name, begin, min(begin + BUCKET, size))


def send_together(
    members: Members, weights: Given, labels: Mapping[str, str], send: Callable[[GivenWeights], SwapReceipt]
) -> SwapReceipt:
    """Send the weights of which each rank has some rows. send: of rank 0, which sends whole ones.

    Raises the same on all ranks: what `Sender.send` raises, and TransferFailed.
    """
    try:
        mine, content = held(weights, labels)
    except Exception as error:
        members.gather_documents(Held(refusal=Refusal.of(error)))
        raise
    joined = Joined(members.gather_documents(mine))
    if members.rank:
        return _give(members, joined, content)
    gathering = Gathering(members, joined, content)
    try:
        receipt = send(gathering.weights)
    except BaseException as error:
        gathering.end(Outcome(refusal=Refusal.of(error)))
        raise
    gathering.end(Outcome(receipt.as_dict()))
    return receipt


def _give(members: Members, joined: Joined, content: Mapping[str, memoryview]) -> SwapReceipt:
    """Send the rows of a rank other than 0, and return the receipt of the commit."""
    hasher = blake3()
    if (refusal := vote(members)) is not None:
        raise refusal.as_error()
    for part in joined.parts:
        if part.rank == members.rank:
            rows = content[part.name][part.begin : part.end]
            hasher.update(rows)
            members.send(rows)
    members.gather_documents(hasher.hexdigest())
    outcome = members.gather_documents(Outcome())[0]
    if outcome.refusal is not None:
        raise outcome.refusal.as_error()
    return converted(outcome.receipt, SwapReceipt)


class Gathering:
    """The part of rank 0, which gets the rows of all as a file that arrives."""

    def __init__(self, members: Members, joined: Joined, content: Mapping[str, memoryview]) -> None:
        self._members, self._content = members, content
        self._header: memoryview | None = memoryview(joined.header)
        self._parts = deque(joined.parts)  # that have not come yet
        self._has_voted = self._has_digests = False
        self._coming: tuple[Part, torch.Tensor, Any] | None = None  # with what to wait for
        self._buffers: list[torch.Tensor] = []
        self._hashers = {rank: blake3() for rank in range(1, members.size)}
        self.weights = as_arriving(MEMORY, joined.size, self._receive)

    def _receive(self, check: Check) -> memoryview:
        check()
        if self._header is not None:
            header, self._header = self._header, None
            return header
        self._vote(None)
        return self._receive_part()

    def _vote(self, refusal: Refusal | None) -> None:
        if not self._has_voted:
            self._has_voted = True
            self._members.gather_documents(Outcome(refusal=refusal))

    def _receive_part(self) -> memoryview:
        """Return the next part, while the one after it may be on its way."""
        self._begin()
        part = self._parts.popleft()
        if part.rank == 0:
            content = self._content[part.name][part.begin : part.end]
        else:
            assert self._coming is not None
            _, buffer, work = self._coming
            self._members.wait(work)
            self._coming = None
            content = buffer.cpu().numpy().data
            self._hashers[part.rank].update(content)
        self._begin()
        if not self._parts:
            self._check_digests()
        return content

    def _begin(self) -> None:
        """Let the next part come, into the memory of the one before the last, which was read by now."""
        part = self._parts[0] if self._parts else None
        if part is not None and part.rank and self._coming is None:
            if len(self._buffers) < 2:
                self._buffers.append(self._members.empty(BUCKET))
            self._buffers.reverse()
            buffer = self._buffers[0][: part.end - part.begin]
            self._coming = part, buffer, self._members.receive(buffer, part.rank)

    def _check_digests(self) -> None:
        self._has_digests = True
        told = self._members.gather_documents("")
        for rank, hasher in self._hashers.items():
            if told[rank] != hasher.hexdigest():
                text = f"what rank {rank} of the trainer has sent is not what has come"
                raise DigestMismatch(MEMORY, [text], "Send it again.")

    def end(self, outcome: Outcome) -> None:
        """Tell the other ranks what became of the weights. Raises TransferFailed."""
        if self._members.failure is not None:
            return
        if not self._has_voted:
            self._vote(outcome.refusal)
            if outcome.refusal is not None:  # they have sent nothing
                return
        with suppress(DigestMismatch):  # then it was not served
            while self._parts:
                self._receive_part()
            if not self._has_digests:
                self._check_digests()
        self._members.gather_documents(outcome)
