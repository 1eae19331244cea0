"""Whether a model that was swapped to weights computes, bit for bit, what one that was loaded with them does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from weightswap_exporter.models.user_errors import first_line
from weightswap_runtime import Artifact, Model, load
from weightswap_runtime.errors import WeightswapError
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.live.residency.residency import ResidencyName
from weightswap_runtime.tensors.comparing import difference
from weightswap_runtime.tensors.content import TensorBytes

from .compared_calls import Given, PathLike
from .executions import call

_Outputs = list[Any] | str  # what a call gives, or raises


class SwapCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A swap from other weights to these on one engine, and in double residency the way back.

    calls: how many were compared on each side. Times in seconds, sizes in bytes, of the swap.
    """

    engine: str
    residency: ResidencyName
    calls: int
    problems: tuple[str, ...]
    bytes_read: int
    bytes_copied: int
    seconds_staged: float
    seconds_paused: float


def check_swap(
    artifact: Artifact, engine: str, residency: ResidencyName, before: PathLike, after: PathLike, given: Sequence[Given]
) -> SwapCheck:
    """Swap a model from the weights `before` to `after`, and compare. Raises what `load` and `swap` raise."""
    expected = _answers(_loaded(artifact, engine, residency, after), given)
    warm = _loaded(artifact, engine, residency, before)
    earlier = _answers(warm, given)
    receipt = warm.swap(after, verify="off")
    problems = list(_problems("after the swap", artifact, given, expected, _answers(warm, given)))
    if residency == "double":
        warm.rollback()
        problems += _problems("after the rollback", artifact, given, earlier, _answers(warm, given))
    return SwapCheck(
        engine=engine,
        residency=residency,
        calls=len(given),
        problems=tuple(problems),
        bytes_read=receipt.bytes_read,
        bytes_copied=receipt.bytes_copied,
        seconds_staged=receipt.seconds_staged,
        seconds_paused=receipt.seconds_paused,
    )


def _loaded(artifact: Artifact, engine: Any, residency: ResidencyName, weights: PathLike) -> Model:
    return load(artifact, weights, engine=engine, residency=residency, verify="off")


def _answers(model: Model, given: Sequence[Given]) -> list[_Outputs]:
    return [_answer(model, each) for each in given]


def _answer(model: Model, given: Given) -> _Outputs:
    try:
        return call(model, given)
    except WeightswapError:
        raise
    except Exception as error:  # an operator's own: random weights may lead out of a table
        return first_line(error)


def _problems(
    when: str, artifact: Artifact, given: Sequence[Given], expected: list[_Outputs], found: list[_Outputs]
) -> Iterator[str]:
    for each, wanted, got in zip(given, expected, found, strict=True):
        if isinstance(wanted, str) or isinstance(got, str):
            if wanted != got:
                yield f"{when}, {each.where}: {_told(got)} instead of {_told(wanted)}"
            continue
        outputs = leaves(artifact.manifest.methods[each.call.method].signature.output)
        for leaf, one, other in zip(outputs, wanted, got, strict=True):
            if text := _difference(one, other):
                yield f"{when}, {each.where}, {leaf.name}{text}"


def _told(outputs: _Outputs) -> str:
    return f"it raised {outputs}" if isinstance(outputs, str) else "it gave outputs"


def _difference(expected: Any, found: Any) -> str | None:
    if isinstance(expected, TensorBytes) and isinstance(found, TensorBytes):
        return difference(expected, found, None)
    return None if expected == found else f": expected {expected!r:.80}, found {found!r:.80}"
