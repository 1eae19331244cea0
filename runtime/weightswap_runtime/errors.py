"""All errors that weightswap raises on purpose.

WeightswapError
|-- ArtifactError              the artifact is missing, altered, or not what its manifest says
|-- SwapError                  a swap was refused; the served weights are as they were
|   |-- WeightFileError        a weight file or goldens: unreadable, damaged, truncated, denied
|   |-- SourceChanged          weights in memory were written to while they were read
|   |-- TransferFailed         weights did not get from one process to another, or no receipt came back
|   |-- WeightsMismatch        the tensors are not those of the graph
|   |-- DigestMismatch         the bytes are not those that were packed
|   |-- GraphMismatch          the file was packed for another graph id
|   |-- BaseMismatch           a delta or a part is for other weights than those that are served
|   |-- UnexpectedWeights      the weights id is not the expected one
|   |-- NonFiniteWeights       the weights have NaN or infinities where the served ones have none
|   |-- GoldenMismatch         the staged weights do not reproduce the recorded outputs
|   |-- OutOfMemory            there is no memory to stage into
|   |-- DeviceError            the device reported an error while weights were staged
|   |-- StagingBusy            another staging is open, or calls use all variants of a group
|   |-- StageClosed            the staging was already committed or discarded
|   |-- StageCancelled         the staging was cancelled
|   |-- WaitTimeout            a staging, a file, or calls and pins that hold memory did not end in time
|   |-- NotPromoted            the weights are not taken or promoted: held, superseded, unproven
|   `-- NothingToRollBack      no previous weights are kept
|-- CallError                  a call was refused before it ran
|   |-- InputMismatch          the inputs do not fit the method's signature
|   |-- UnknownName            there is no such method, attribute, or resident variant
|   |-- NoWeights              no weights have been swapped in yet
|   |-- StaleState             a context's state, or a variant, is of other weights than those that are served
|   `-- ContextError           a context: busy, interrupted, closed, mismatch, file
|-- DesiredError               a desired state cannot be read or written, or is invalid; what is served stays
|   `-- RevisionConflict       the document was written by another writer since it was read
|-- RanksRefused               one of a model's ranks cannot do what all were about to do; nothing was done on any
|-- RanksLost                  one of a model's ranks is gone or late; all refuse calls and swaps
|-- ModelFailed                an in-place commit failed half-way; a swap or rollback repairs the model
|-- ModelClosed                the model was closed
|-- MissingExtra               an optional dependency is not installed
|-- Unsupported                the request is invalid, or this version cannot serve it
`-- ExportError                the build side refused, or a recipe cannot be used
    |-- CaptureError           the model cannot be captured as it is
    |-- CheckpointError        the checkpoint cannot be read or packed
    `-- ParityError            the eager model cannot be run, to record its outputs or to compare them

Words after a colon are values of the error's field `reason`.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from math import inf
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, Literal

import msgspec

MOST_LISTED = 5  # texts that a message names, before it says how many more there are
MOST_SHOWN = 2000  # characters of a line in a message


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 tensor` or `2 tensors`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share as `100 %` or `0.02 %`. A share that is not 0 never reads as 0."""
    return f"{_digits(100 * share)} %"


def duration(seconds: float) -> str:
    """Return a time as `2.5 s`, `12 ms` or `80 µs`."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    return f"{_digits(seconds / size)} {unit}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def listed(texts: Collection[str], most: int = MOST_LISTED, between: str = ", ") -> str:
    """Return the first texts, and how many more there are."""
    hidden = len(texts) - most
    more = f"{between.strip() if between != ', ' else ''} and {hidden} more" if hidden > 0 else ""
    return between.join(islice(texts, most)) + more


def lines_of(texts: Sequence[str], most: int) -> list[str]:
    """Return the first texts as lines, and a line that says how many more there are."""
    hidden = len(texts) - most
    return [*texts[:most], *([f"and {hidden} more"] if hidden > 0 else [])]


def visible(text: str) -> str:
    """Return a text on one line, with every unprintable character escaped as in `repr`."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def visible_lines(text: str) -> str:
    """Return a text as `visible` does, but keep the line breaks, which are our own."""
    return "\n".join(map(visible, text.split("\n")))


def brief(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text as `visible` does; of a text that is too long for a message, only the beginning and the end."""
    return _ends(visible(_ends(text, most)), most)


def _ends(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 20
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def encode_json(document: Any) -> bytes:
    """Return a document as one line of JSON. Lone surrogates, as in paths, are escaped; unknown types become text."""
    try:
        return msgspec.json.encode(document, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape_surrogates(msgspec.to_builtins(document, enc_hook=str)))


def _escape_surrogates(value: Any) -> Any:
    r"""Return plain Python values, in which a lone surrogate is written like \udcff."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return [_escape_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


MOST_PRINTED = 50  # problems of one refusal
MOST_OF_A_PROBLEM = 1000  # characters


class WeightswapError(Exception):
    """The base class of all errors of weightswap.

    Each argument becomes one line of the text. Quoted text can neither add lines nor send control characters to a
    terminal; very long lines are shortened. Copies, including pickled ones, keep the text, the fields and the notes.
    """

    reason: str = ""  # which of the cases that the class has; empty if it has one

    def __init__(self, *lines: object) -> None:
        super().__init__("\n".join(brief(str(line)) for line in lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _copied, (type(self), self.args), self.__dict__


def _copied(kind: type[WeightswapError], args: tuple[object, ...]) -> WeightswapError:
    """Restore an error without calling `__init__`, whose parameters differ by class."""
    error = kind.__new__(kind)
    super(WeightswapError, error).__init__(*args)
    return error


class ArtifactError(WeightswapError):
    """The artifact is missing, altered, of another format version, or not what its manifest says."""


class SwapError(WeightswapError):
    """A swap was refused before its commit; weights, addresses and outputs are as they were."""


class WeightFileError(SwapError):
    """A weight file, or the goldens beside it, cannot be used.

    reason: "unreadable", also if the file changed while it was read; "damaged" if its content is not that of such a
    file, so that reading it again would not help; "truncated" if it is shorter than its header says, and may still be
    being copied; "denied" if the server denies access: the credentials are wrong, or a signed URL has expired.
    """

    def __init__(
        self, *lines: object, reason: Literal["unreadable", "damaged", "truncated", "denied"] = "unreadable"
    ) -> None:
        self.reason = reason
        super().__init__(*lines)


def _refusal(where: str, problems: Sequence[str], advice: str) -> list[str]:
    """Return the lines of an error that lists all problems."""
    lines = [f"  - {line}" for line in lines_of(problems, MOST_PRINTED)]
    return [f"{where}: refused, {plural(len(problems), 'problem')}", *lines, advice]


def _sentences(problems: Sequence[str]) -> tuple[str, ...]:
    return tuple(brief(problem, MOST_OF_A_PROBLEM) for problem in problems)


class SourceChanged(SwapError):
    """Weights in this process's memory were written to while they were read, as by a step of an optimizer."""


class TransferFailed(SwapError):
    """Weights did not get from one process to another, or no receipt came back.

    The receiver's weights stay, unless only the receipt was lost. The next `send` works if the receiver does.
    """


class _Problems(SwapError):
    """A refusal that lists all problems. `problems` holds one sentence for each."""

    def __init__(self, where: str, problems: Sequence[str], advice: str) -> None:
        self.where = brief(where)
        self.problems = _sentences(problems)
        super().__init__(*_refusal(where, self.problems, advice))


class WeightsMismatch(_Problems):
    """The tensors of a file or checkpoint are not the weights of the graph."""


class DigestMismatch(_Problems):
    """The bytes that were read do not match the digests that the file records."""


class GraphMismatch(SwapError):
    """The weight file was packed for another graph id."""


class BaseMismatch(SwapError):
    """A delta, or a part of a set, cannot be applied to the weights that are served."""


class UnexpectedWeights(SwapError):
    """The weights id is not the one that the caller expects."""


class GoldenMismatch(_Problems):
    """The staged weights do not reproduce the eager model's outputs, or produce values that are not finite."""


class NonFiniteWeights(_Problems):
    """The weights have NaN or infinities where the served ones have none, and this is not allowed."""


class OutOfMemory(SwapError):
    """There is no memory to stage into."""


class DeviceError(SwapError):
    """The device reported an error while weights were staged."""


class StagingBusy(SwapError):
    """Another staging of this model is open, or calls use all variants of a group; the caller may try again."""


class StageClosed(SwapError):
    """This staging was already committed or discarded."""


class StageCancelled(SwapError):
    """The staging was cancelled before its commit."""


class WaitTimeout(SwapError, TimeoutError):
    """What was waited for did not end in time: a staging, the writing of a file, or calls and pins that hold memory.

    Nothing changed; the caller may wait, or try, again.
    """


class NotPromoted(SwapError):
    """The weights are not taken or promoted.

    reason: "held" until the desired state's hold is released; "superseded" if later ones were taken, or these were
    served and rolled back; "unproven" if no recorded calls have proven them, or they are not finite.
    """

    def __init__(self, *lines: object, reason: Literal["held", "superseded", "unproven"]) -> None:
        self.reason = reason
        super().__init__(*lines)


class NothingToRollBack(SwapError):
    """No previous weights are kept."""


class CallError(WeightswapError):
    """A call was refused before it ran."""


class InputMismatch(CallError, TypeError):
    """The inputs do not fit the method's signature. `problems` holds one sentence for each."""

    def __init__(self, method: str, problems: Sequence[str]) -> None:
        self.method = brief(method)
        self.problems = _sentences(problems)
        super().__init__(f"{method}: " + "; ".join(self.problems))


class UnknownName(CallError, AttributeError, LookupError):
    """The artifact has no such method, the object no such attribute; or the variant is not resident or declared."""


class NoWeights(CallError):
    """The model was loaded without weights, and none have been swapped in yet."""


class StaleState(CallError):
    """A context's state, or a variant, belongs to other weights than those that would answer the call."""

    def __init__(self, what: str, made_with: str, served: str, how: str = "is for", advice: str = "") -> None:
        self.what, self.made_with, self.served = brief(what), brief(made_with), brief(served)
        super().__init__(f"{self.what} {how} the weights {self.made_with}, but {self.served} would be used now{advice}")


class ContextError(CallError):
    """A context cannot be used, or not be loaded.

    reason: "busy" while another call uses it; "interrupted" if a call failed midway, so that its state may be half
    updated, which `reset()` repairs; "closed"; "mismatch" if it belongs to another model, or a saved one to another
    graph or other weights; "file" if what was loaded is not what `Context.save()` wrote, or cannot be read.
    """

    def __init__(self, *lines: object, reason: Literal["busy", "interrupted", "closed", "mismatch", "file"]) -> None:
        self.reason = reason
        super().__init__(*lines)


class DesiredError(WeightswapError):
    """The desired state cannot be read or written, or is not a valid one; the served weights are as they were."""


class RevisionConflict(DesiredError):
    """Another writer has changed the desired state since it was read; read it again, and decide again."""


class RanksRefused(WeightswapError):
    """What the ranks of a model were about to do, a call or a change of weights, was done on none of them.

    reasons: of the ranks that cannot do it, or of all if they differ, by rank. The same error is raised on all ranks.
    """

    def __init__(self, step: str, reasons: Mapping[int, str]) -> None:
        self.step = brief(step)
        self.reasons = {rank: brief(reason, MOST_OF_A_PROBLEM) for rank, reason in reasons.items()}
        lines = [f"  - rank {rank}: {reason}" for rank, reason in islice(self.reasons.items(), MOST_PRINTED)]
        super().__init__(f"{self.step}: refused, and nothing was done on any rank", *lines)


class RanksLost(WeightswapError):
    """One of a model's ranks is gone, or late. This rank refuses calls and swaps until all were started again."""


class ModelFailed(WeightswapError):
    """An in-place commit failed half-way; the model serves again after a swap or a rollback."""


class ModelClosed(WeightswapError):
    """The model was closed; it answers no more calls."""

    def __init__(self, *lines: object) -> None:
        super().__init__(*(lines or ("the model was closed; load() it again to call it or to swap weights",)))


class MissingExtra(WeightswapError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        self.extra = brief(extra)
        super().__init__(f"{feature} needs the extra `{extra}`: pip install 'weightswap[{extra}]'")


class Unsupported(WeightswapError):
    """The request is invalid, or valid but not one that this version can serve."""


class ExportError(WeightswapError):
    """The build side refused; nothing was written."""


class CaptureError(ExportError):
    """The model cannot be captured as it is."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read or packed."""


class ParityError(ExportError):
    """The eager model cannot be run to record or to compare, so nothing is known about equality.

    problems: one sentence for each.
    """

    def __init__(self, problems: Sequence[str], advice: str, where: str = "parity") -> None:
        self.problems = _sentences(problems)
        self.advice = brief(advice)
        super().__init__(*_refusal(where, self.problems, advice))


def text_of(error: BaseException) -> str:
    """Return the text of an error, with control characters escaped for logs and terminals."""
    return str(error) if isinstance(error, WeightswapError) else brief(str(error))


def reason_of(error: BaseException | None) -> str:
    """Return the reason that an error of weightswap has besides its class; empty without one."""
    return error.reason if isinstance(error, WeightswapError) else ""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error reports lack of memory; on the CPU torch has no class of its own for that."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(text in str(error) for text in ("allocate memory", "STATUS_ALLOC_FAILED"))  # the second is cuBLAS's
    )


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the application that led here: the innermost one outside of weightswap."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("weightswap_"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


_LIBRARY_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "cuDNN Frontend error", "cusolver error")
RESTART = "Most device errors last as long as the process: if calls fail too, restart it."


def is_of_device(error: BaseException) -> bool:
    """Return whether torch raised an error for a device or one of its libraries, rather than for the weights."""
    by_library = isinstance(error, RuntimeError) and str(error).startswith(_LIBRARY_ERRORS)
    return by_library or any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)


__all__ = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, WeightswapError) and not name.startswith("_")
]


MAX_TEXT = 4096  # characters of `by` and of `why`, which documents and responses repeat for each entry of a history


def check_said(by: Any, why: Any = "") -> None:
    """Raise Unsupported if `by` or `why` is too long."""
    for name, text in (("by", by), ("why", why)):
        if isinstance(text, str) and len(text) > MAX_TEXT:
            raise Unsupported(f"{name}: has {len(text)} characters, but at most {MAX_TEXT} are allowed; shorten it")


def with_rule(why: str, rule: str) -> str:
    """Return the reason of a promotion by a rule: what the operator said at its begin, and the rule."""
    return _ends(f"{why} ({rule})" if why else rule, MAX_TEXT)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can hold; a bool is not a number."""
    is_real = type(value) is not bool and isinstance(value, Real)
    return is_real and bool(abs(value) <= sys.float_info.max)


def check_timeout(timeout: Any) -> None:
    """Raise Unsupported for an invalid timeout. NaN is one: its deadline would never pass."""
    if timeout is not None and not ((is_number(timeout) and timeout >= 0) or timeout == inf):
        raise Unsupported(f"timeout={timeout!r:.100}: expected seconds, 0 or more, or None for no limit")


def join_seconds(timeout: float | None) -> float | None:
    """Return a timeout that `threading` accepts: it takes no infinity. Raises Unsupported."""
    check_timeout(timeout)
    return None if timeout is None else min(timeout, TIMEOUT_MAX)


def seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline, at most what sockets accept. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return min(left, 1e6)
