"""Every error that weightswap raises on purpose.

WeightswapError
|-- ArtifactError              the artifact is missing, altered, or not what its manifest says
|   `-- FormatVersionError     written by another format version
|-- SwapError                  a swap was refused; the served weights are as they were
|   |-- WeightFileError        not a readable safetensors file
|   |   |-- AccessDenied       a server does not give it to whoever asks
|   |   `-- DamagedFile        its header or metadata cannot be right, however often it is read
|   |       `-- TruncatedFile  shorter than its header says
|   |-- WeightsMismatch        its tensors are not those of the graph
|   |-- DigestMismatch         its bytes are not those that were packed
|   |-- GraphMismatch          packed for another graph id
|   |-- BaseMismatch           a delta or a part is for other weights than those that are served
|   |-- UnexpectedWeights      another weights id than was asked for
|   |-- GoldensError           the goldens are damaged, or were recorded for something else
|   |-- NonFiniteWeights       it has NaN or infinities where the served weights have none
|   |-- GoldenMismatch         the staged weights do not give the outputs that were recorded
|   |-- OutOfMemory            no memory to stage into
|   |-- DeviceError            the device reports an error while weights are staged
|   |-- StagingBusy            another staging is open
|   |-- VariantsBusy           calls use all variants of a group
|   |-- StageClosed            already committed or discarded
|   |-- StageCancelled         somebody has cancelled the staging
|   |-- Superseded             later weights were taken, or these were rolled back
|   |-- StageTimeout           a staging in the background has not ended yet
|   |-- LeaseTimeout           calls or pins still hold the memory that must be written
|   `-- NothingToRollBack      no previous weights are kept
|-- CallError                  a call was refused before it ran
|   |-- InputMismatch          the inputs do not fit the method's signature
|   |-- UnknownMethod          the artifact has no such method
|   |-- NoWeights              nothing has been swapped in yet
|   |-- StaleContext           its state was made with other weights than those that are served
|   |-- UnknownVariant         it is not resident, or of a group that the artifact does not declare
|   |-- StaleVariant           it goes with other weights than those that are served
|   |-- ContextBusy            another call is using it
|   |-- ContextBroken          a call on it broke off; its state may be half of two
|   |-- ContextClosed          the context was closed
|   |-- ContextMismatch        it is of another model, or of other weights
|   `-- PinReleased            the session was used after its `with` block
|-- ContextFileError           a saved context is damaged, or no such file
|-- DesiredError               a desired state cannot be read or written; it is as it was
|   |-- DesiredDamaged         its document is torn, of another version, or none
|   |-- RevisionConflict       somebody else has written it since it was read
|   |-- Held                   it is on hold: nothing is promoted until it is released
|   `-- Unproven               weights that no recorded calls have proven are not promoted
|-- ModelFailed                an in-place commit broke off; swap or roll back to revive
|-- ModelClosed                the model was closed
|-- MissingExtra               an optional dependency is not installed
|-- Unsupported                valid, but not something this version can do
`-- ExportError                raised on the build side
    |-- CaptureError           the model cannot be captured as it is
    |-- CheckpointError        the checkpoint cannot be read or packed
    |-- RecordingError         goldens cannot be recorded with the eager model
    |-- ParityError            executions cannot be compared: nothing is said about whether they are equal
    |-- PublishTimeout         a weight file is still being written
    `-- RecipeError            the recipe cannot be loaded
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import brief, lines_of, plural

MOST_PRINTED = 50
MOST_OF_A_PROBLEM = 1000  # letters


class WeightswapError(Exception):
    """The root of the family: catch this to catch them all.

    Each argument is one line of the text: what it quotes can neither add lines nor steer a terminal, and is cut short
    where it is very long. Copies, also those of `pickle` in other processes, have the text, the fields and the notes.
    """

    def __init__(self, *lines: object) -> None:
        super().__init__("\n".join(brief(str(line)) for line in lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _copied, (type(self), self.args), self.__dict__


def _copied(kind: type[WeightswapError], args: tuple[object, ...]) -> WeightswapError:
    """An error as it was, past the arguments that its class takes."""
    error = kind.__new__(kind)
    super(WeightswapError, error).__init__(*args)
    return error


class ArtifactError(WeightswapError):
    """The artifact is missing, altered, or not what its manifest says."""


class FormatVersionError(ArtifactError):
    """The artifact was written by a format version that this runtime does not read."""


class SwapError(WeightswapError):
    """A swap was refused before its commit; weights, addresses and outputs are as they were."""


class WeightFileError(SwapError):
    """The file is not a valid safetensors file, or changed while it was read."""


class DamagedFile(WeightFileError):
    """What the file holds is not what a weight file holds; reading it again would not help."""


class TruncatedFile(DamagedFile):
    """The file is shorter than its header says: it was cut off, or is still being copied."""


def _refusal(where: str, problems: Sequence[str], advice: str) -> list[str]:
    """The lines of an error that lists everything found."""
    lines = [f"  - {line}" for line in lines_of(problems, MOST_PRINTED)]
    return [f"{where}: refused, {plural(len(problems), 'problem')}", *lines, advice]


def _sentences(problems: Sequence[str]) -> tuple[str, ...]:
    return tuple(brief(problem, MOST_OF_A_PROBLEM) for problem in problems)


class AccessDenied(WeightFileError):
    """A server does not give an object to whoever asks: wrong credentials, or a signed URL that has expired."""


class _Problems(SwapError):
    """A refusal that lists everything found. `problems` holds one sentence each."""

    def __init__(self, where: str, problems: Sequence[str], advice: str) -> None:
        self.where = brief(where)
        self.problems = _sentences(problems)
        super().__init__(*_refusal(where, self.problems, advice))


class WeightsMismatch(_Problems):
    """The tensors of a file or checkpoint are not the weights of the graph."""


class DigestMismatch(_Problems):
    """The bytes that were read are not those whose digests the file records."""


class GraphMismatch(SwapError):
    """The weight file was packed for another graph id."""


class BaseMismatch(SwapError):
    """A delta, or a part of a set, cannot be put on the weights that are served."""


class UnexpectedWeights(SwapError):
    """The weights have another id than the caller expects."""


class GoldensError(SwapError):
    """A goldens file cannot be used: damaged, of another format version, or recorded for other weights."""


class GoldenMismatch(_Problems):
    """The staged weights do not give the outputs that the eager model gave, or give values that are not finite."""


class NonFiniteWeights(_Problems):
    """Weights have NaN or infinities where those that are served have none, and this is not allowed."""


class OutOfMemory(SwapError):
    """There is no memory to stage into."""


class DeviceError(SwapError):
    """The device has reported an error while weights were staged."""


class StagingBusy(SwapError):
    """Another staging of this model is open."""


class VariantsBusy(SwapError):
    """Calls use all variants of a group, so that none can make room for another."""


class StageClosed(SwapError):
    """This staging was already committed or discarded."""


class StageCancelled(SwapError):
    """The staging was cancelled before its commit."""


class Superseded(SwapError):
    """Weights are not taken, or promoted, again: later ones were, or they were served and rolled back."""


class StageTimeout(SwapError, TimeoutError):
    """A staging in the background has not ended yet; waiting for it again is fine."""


class LeaseTimeout(SwapError):
    """Calls or pins still hold the weights that would be overwritten."""


class NothingToRollBack(SwapError):
    """No previous weights are kept."""


class CallError(WeightswapError):
    """A call was refused before it ran."""


class InputMismatch(CallError, TypeError):
    """The inputs do not fit the method's signature. `problems` holds one sentence each."""

    def __init__(self, method: str, problems: Sequence[str]) -> None:
        self.method = brief(method)
        self.problems = _sentences(problems)
        super().__init__(f"{method}: " + "; ".join(self.problems))


class UnknownMethod(CallError, AttributeError):
    """The artifact has no such method, and the object no such attribute."""


class NoWeights(CallError):
    """The model was loaded without weights and nothing has been swapped in yet."""


class StaleContext(CallError):
    """A context's state was made with other weights than those that would answer."""

    def __init__(self, made_with: str, served: str) -> None:
        self.made_with, self.served = brief(made_with), brief(served)
        super().__init__(
            f"the context's state was made with the weights {self.made_with}, and {self.served} would answer now. "
            'Begin with a new one, reset() it, or make contexts with on_swap="reset", "keep" or "pin"'
        )


class UnknownVariant(CallError, LookupError):
    """A variant that is not resident, or of a group that the artifact does not declare."""


class StaleVariant(CallError):
    """A variant goes with other weights than those that would answer."""

    def __init__(self, variant: str, base: str, served: str) -> None:
        self.variant, self.base, self.served = brief(variant), brief(base), brief(served)
        super().__init__(f"{self.variant} goes with the weights {self.base}, and {self.served} would answer now")


class ContextBusy(CallError):
    """Another call is using the context; each caller needs one of its own."""


class ContextBroken(CallError):
    """A call on the context broke off, so that its state may be half of two; `reset()` makes it whole."""


class ContextClosed(CallError):
    """The context was closed."""


class ContextMismatch(CallError):
    """The context is of another model; or a saved one of another graph, or of other weights."""


class ContextFileError(WeightswapError):
    """The file is not one that `Context.save()` wrote, or its content is not what was saved."""


class DesiredError(WeightswapError):
    """A desired state cannot be read or written; it is as it was, and so is what is served."""


class DesiredDamaged(DesiredError):
    """What lies where a desired state should is none: torn, of another format version, or something else."""


class RevisionConflict(DesiredError):
    """A desired state was written by somebody else since it was read; read it again, and decide again."""


class Held(DesiredError):
    """A desired state is on hold: nothing is promoted until it is released."""


class Unproven(DesiredError):
    """Weights are not promoted, as no recorded calls have proven them, or as they are not finite."""


class ModelFailed(WeightswapError):
    """An in-place commit broke off half-way; the model serves again after a swap or a rollback."""


class ModelClosed(WeightswapError):
    """The model was closed; it serves nobody any more."""

    def __init__(self, *lines: object) -> None:
        super().__init__(*(lines or ("the model was closed; load() it again to call it or to swap weights",)))


class PinReleased(CallError):
    """A pinned session was used after its `with` block ended."""


class MissingExtra(WeightswapError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        self.extra = brief(extra)
        super().__init__(f"{feature} needs the extra `{extra}`: pip install 'weightswap[{extra}]'")


class Unsupported(WeightswapError):
    """A valid request that this version cannot serve."""


class ExportError(WeightswapError):
    """The build side refused; nothing was written."""


class CaptureError(ExportError):
    """The model cannot be captured as it is."""


class CheckpointError(ExportError):
    """The checkpoint cannot be read or packed."""


class RecordingError(ExportError):
    """Goldens cannot be recorded with the eager model. `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str], advice: str) -> None:
        self.problems = _sentences(problems)
        self.advice = brief(advice)
        super().__init__(*_refusal("goldens", self.problems, advice))


class ParityError(ExportError):
    """Executions cannot be compared, so that nothing is known of their outputs. `problems` holds one sentence each."""

    def __init__(self, problems: Sequence[str], advice: str) -> None:
        self.problems = _sentences(problems)
        super().__init__(*_refusal("parity", self.problems, advice))


class PublishTimeout(ExportError, TimeoutError):
    """A weight file is still being written; waiting for it again is fine."""


class RecipeError(ExportError):
    """The recipe cannot be loaded, or does not return what `export()` takes."""


def text_of(error: BaseException) -> str:
    """What an error says, with nothing in it that a log or a terminal would obey."""
    return str(error) if isinstance(error, WeightswapError) else brief(str(error))


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had; torch has no class of its own for it on the CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(said in str(error) for said in ("allocate memory", "STATUS_ALLOC_FAILED"))  # also that of cuBLAS
    )


_OF_LIBRARIES = ("CUDA error", "CUDA driver error", "cuDNN error", "cuDNN Frontend error", "cusolver error")
RESTART = "Most errors of a device last as long as the process: if calls fail, too, restart it."


def is_of_device(error: BaseException) -> bool:
    """Whether torch raised an error for a device, or for one of its libraries. It says nothing of the weights."""
    by_library = isinstance(error, RuntimeError) and str(error).startswith(_OF_LIBRARIES)
    return by_library or any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)


__all__ = [
    name
    for name, found in globals().items()
    if isinstance(found, type) and issubclass(found, WeightswapError) and not name.startswith("_")
]
