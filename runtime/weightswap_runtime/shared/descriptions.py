"""Descriptions in the control page, by the keeper: which weights lie in an arena, and the receipts of commits."""

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
    """A generation, and which weights it is: of a description what workers need. `terms`: of their trial, as whoever
    began it has written them."""

    generation: int
    weights_id: str
    labels: Mapping[str, str]
    terms: bytes = b""

    @property
    def identity(self) -> Identity:
        return Identity(self.weights_id, {}, dict(self.labels))


class Description(Summary, frozen=True):
    """All that the next keeper needs."""

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
    """Say what lies in the arena of a generation. Raises WeightFileError where that takes too much room."""
    text = _encoder.encode(
        Description(generation, identity.weights_id, identity.labels, terms, identity.digests, identity.nonfinite)
    )
    cell = control.descriptions[generation % 2]
    if len(text) > cell.most:
        raise WeightFileError(
            f"the weights {identity.weights_id[:12]}: their labels and digests take {len(text)} bytes, and workers "
            f"share {cell.most}. Pack the file with shorter labels."
        )
    cell.write(text)


def read_description(control: Control, generation: int, kind: type[D]) -> D | None:
    """What lies in the arena of a generation, if that is this generation, whole. kind: all of it, or the summary."""
    found = _read(control, generation, kind)
    return found if found is not None and found.generation == generation else None


def read_trial(control: Control, trial: int) -> Summary | None:
    """What the word of a trial has named; None once it is over."""
    found = _read(control, trial, Summary) if trial else None
    return found if control.trial == trial else None


def _read(control: Control, number: int, kind: type[D]) -> D | None:
    text = control.descriptions[number % 2].read()
    return msgspec.msgpack.decode(text, type=kind) if text else None


def write_history(control: Control, receipts: Iterable[SwapReceipt]) -> None:
    """Keep receipts, oldest first: as many of the last as there is room for."""
    kept = list(receipts)
    number = max((each.written for each in _histories(control)), default=0) + 1
    cell = control.histories[number % 2]  # the other has the last ones, should this process end here
    while len(text := _encoder.encode(_History(number, kept))) > cell.most:
        del kept[0]
    cell.write(text)


def read_history(control: Control) -> list[SwapReceipt]:
    """The receipts that were kept."""
    found = _histories(control)
    return max(found, key=lambda each: each.written).receipts if found else []


def _histories(control: Control) -> list[_History]:
    texts = [cell.read() for cell in control.histories]
    return [_history.decode(text) for text in texts if text]
