"""Descriptions that the keeper writes to the control page: the weights in each arena, and the receipts of commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from weightswap_runtime.errors import WeightFileError
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.format.nonfinite import Counts
from weightswap_runtime.live.receipt import SwapReceipt

from .control import Control


class Summary(msgspec.Struct, frozen=True):
    """The part of a description that workers need: a generation and its weights. `terms`: those of `begin_trial`."""

    generation: int
    weights_id: str
    labels: Mapping[str, str]
    terms: bytes = b""

    @property
    def identity(self) -> Identity:
        return Identity(self.weights_id, {}, dict(self.labels))


class Description(Summary, frozen=True):
    """A full description of the weights in an arena, as the next keeper needs it."""

    digests: Mapping[str, tuple[bytes, ...]] = {}
    nonfinite: Mapping[str, Counts] = {}

    @property
    def identity(self) -> Identity:
        return Identity(self.weights_id, dict(self.digests), dict(self.labels), dict(self.nonfinite))


class _History(msgspec.Struct, frozen=True):
    written: int
    receipts: list[SwapReceipt]


D = TypeVar("D", bound=Summary)
_history = msgspec.msgpack.Decoder(_History)
_encoder = msgspec.msgpack.Encoder()


def describe(control: Control, generation: int, identity: Identity, terms: bytes = b"") -> None:
    """Describe the weights in the arena of a generation. Raises WeightFileError if the description is too large."""
    record = _encoder.encode(
        Description(generation, identity.weights_id, identity.labels, terms, identity.digests, identity.nonfinite)
    )
    cell = control.descriptions[generation % 2]
    if len(record) > cell.capacity:
        raise WeightFileError(
            f"the weights {identity.weights_id[:12]}: their labels and digests take {len(record)} bytes, but workers "
            f"share at most {cell.capacity}. Pack the file with shorter labels."
        )
    cell.write(record)


def read_description(control: Control, generation: int, kind: type[D]) -> D | None:
    """Return the description of a generation; None if its arena holds another one, or is being written."""
    description = _read(control, generation, kind)
    return description if description is not None and description.generation == generation else None


def read_trial(control: Control, trial: int) -> Summary | None:
    """Return the summary of the weights that the word of a trial names; None once the trial is over."""
    summary = _read(control, trial, Summary) if trial else None
    return summary if control.trial == trial else None


def _read(control: Control, number: int, kind: type[D]) -> D | None:
    record = control.descriptions[number % 2].read()
    return msgspec.msgpack.decode(record, type=kind) if record else None


def write_history(control: Control, receipts: Iterable[SwapReceipt]) -> None:
    """Write receipts, oldest first: as many of the last ones as fit."""
    kept = list(receipts)
    number = max((history.written for history in _histories(control)), default=0) + 1
    cell = control.histories[number % 2]  # the other cell keeps the last history, should this process be killed here
    while len(record := _encoder.encode(_History(number, kept))) > cell.capacity:
        del kept[0]
    cell.write(record)


def read_history(control: Control) -> list[SwapReceipt]:
    """Return the receipts that were written last."""
    histories = _histories(control)
    return max(histories, key=lambda history: history.written).receipts if histories else []


def _histories(control: Control) -> list[_History]:
    records = [cell.read() for cell in control.histories]
    return [_history.decode(record) for record in records if record]
