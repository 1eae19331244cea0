"""Check that a model swapped to weights computes the same bits as a model loaded with them."""

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

from .compared_calls import CallCase, PathLike
from .executions import call

_Outcome = list[Any] | str  # flat outputs, or the message of the error


class SwapCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a swap from other weights on one engine, and in double residency of the rollback.

    calls: number of calls on each side. Times of the swap are in seconds, sizes in bytes.
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
    artifact: Artifact,
    engine: str,
    residency: ResidencyName,
    before: PathLike,
    after: PathLike,
    cases: Sequence[CallCase],
) -> SwapCheck:
    """Swap a model from `before` to `after` and compare its outputs. Raises the errors of `load` and `swap`."""
    expected = _outcomes(_loaded(artifact, engine, residency, after), cases)
    model = _loaded(artifact, engine, residency, before)
    earlier = _outcomes(model, cases)
    receipt = model.swap(after, verify="off")
    problems = list(_problems("after the swap", artifact, cases, expected, _outcomes(model, cases)))
    if residency == "double":
        model.rollback()
        problems += _problems("after the rollback", artifact, cases, earlier, _outcomes(model, cases))
    return SwapCheck(
        engine=engine,
        residency=residency,
        calls=len(cases),
        problems=tuple(problems),
        bytes_read=receipt.bytes_read,
        bytes_copied=receipt.bytes_copied,
        seconds_staged=receipt.seconds_staged,
        seconds_paused=receipt.seconds_paused,
    )


def _loaded(artifact: Artifact, engine: Any, residency: ResidencyName, weights: PathLike) -> Model:
    return load(artifact, weights, engine=engine, residency=residency, verify="off")


def _outcomes(model: Model, cases: Sequence[CallCase]) -> list[_Outcome]:
    return [_outcome(model, case) for case in cases]


def _outcome(model: Model, case: CallCase) -> _Outcome:
    try:
        return call(model, case)
    except WeightswapError:
        raise
    except Exception as error:  # raised by an operator: random weights may give an index beyond a table
        return first_line(error)


def _problems(
    when: str, artifact: Artifact, cases: Sequence[CallCase], expected: list[_Outcome], found: list[_Outcome]
) -> Iterator[str]:
    for case, ours, theirs in zip(cases, expected, found, strict=True):
        if isinstance(ours, str) or isinstance(theirs, str):
            if ours != theirs:
                yield f"{when}, {case.where}: {_text(theirs)} instead of {_text(ours)}"
            continue
        outputs = leaves(artifact.manifest.methods[case.call.method].signature.output)
        for leaf, one, other in zip(outputs, ours, theirs, strict=True):
            if text := _difference(one, other):
                yield f"{when}, {case.where}, {leaf.name}{text}"


def _text(outcome: _Outcome) -> str:
    return f"it raised {outcome}" if isinstance(outcome, str) else "it gave outputs"


def _difference(expected: Any, found: Any) -> str | None:
    if isinstance(expected, TensorBytes) and isinstance(found, TensorBytes):
        return difference(expected, found, None)
    return None if expected == found else f": expected {expected!r:.80}, found {found!r:.80}"
