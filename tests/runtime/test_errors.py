"""Every error of the family: its copies, also in other processes, and the escaping of its text."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import torch

from weightswap_runtime import Event, WeightswapError, errors
from weightswap_runtime.errors import MOST_SHOWN, brief, visible
from weightswap_runtime.transfer.messages import Refusal
from weightswap_server.admin.documents import refusal_of
from weightswap_server.errors import admin_failure_of

for subpackage in ("fleet.documents", "server.errors", "server.workers.manager", "runtime.transfer.admin_client"):
    import_module(f"weightswap_{subpackage}")  # each has errors of its own
EVIL = "layer\n  - forged: all is well\r\x1b[31m\x9b2J\u202e\udcff"
COPIES: tuple[Callable[[Any], Any], ...] = (
    *(lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)),
    copy.copy,
    copy.deepcopy,
)


def family(kind: type[WeightswapError] = WeightswapError) -> Iterator[type[WeightswapError]]:
    """Yield all classes of the family, in every package."""
    yield kind
    for each in kind.__subclasses__():
        yield from family(each)


FAMILY = sorted(set(family()), key=lambda kind: kind.__qualname__)


def example(kind: type[WeightswapError], text: str = "a text") -> WeightswapError:
    """Make an error of a class by its constructor, with a text, or problems, for each argument."""
    kinds = get_type_hints(kind.__init__)
    parameters = list(inspect.signature(kind).parameters.values())
    if parameters[0].kind is parameters[0].VAR_POSITIONAL:
        reasons = get_args(kinds.get("reason"))
        return kind(text, **({"reason": reasons[0]} if reasons else {}))
    samples: dict[Any, Any] = {
        str: text,
        Sequence[str]: [text, f"{text} again"],
        Mapping[str, BaseException]: {text: OSError("away")},
        Mapping[int, str]: {1: text},
    }
    return kind(*(samples[kinds[parameter.name]] for parameter in parameters))


def raised(kind: type[WeightswapError]) -> WeightswapError:
    """Raise and catch an error, so that it has a cause, a traceback, a field of its own and notes."""
    try:
        try:
            raise OSError(5, "the cause")
        except OSError as cause:
            raise example(kind) from cause
    except WeightswapError as error:
        error.add_note("a note")
        error.shard = {"of": 3}  # type: ignore[attr-defined]
        return error


def same(one: BaseException, other: BaseException) -> bool:
    """Compare two errors by their texts: an error in a field is not equal to its copy."""
    return (type(one), str(one), one.args, repr(vars(one))) == (type(other), str(other), other.args, repr(vars(other)))


def test_the_walk_meets_the_whole_family() -> None:
    assert {kind.__name__ for kind in FAMILY} >= set(errors.__all__)


@pytest.mark.parametrize("kind", FAMILY)
def test_copies_have_the_text_the_fields_and_the_notes(kind: type[WeightswapError]) -> None:
    error = raised(kind)
    assert vars(error).keys() >= {"shard", "__notes__"}
    for copied in COPIES:
        twice = copied(copied(error))
        assert same(twice, error)
        assert getattr(twice, "msg", str(error)) == str(error)  # of an ImportError
        with pytest.raises(kind, match=r"a text"):
            raise twice


REASONS: dict[Any, tuple[str, ...]] = {
    errors.WeightFileError: ("unreadable", "damaged", "truncated", "denied"),
    errors.NotPromoted: ("held", "superseded", "unproven"),
    errors.ContextError: ("busy", "interrupted", "closed", "mismatch", "file"),
}


@pytest.mark.parametrize(("kind", "reason"), [(kind, reason) for kind in REASONS for reason in REASONS[kind]])
def test_a_reason_stays_in_copies_and_in_documents(kind: Any, reason: str) -> None:
    error = kind("a text", reason=reason)
    copied = [make_copy(error) for make_copy in COPIES]
    if isinstance(error, errors.SwapError):
        sent = msgspec.json.encode(Refusal.of(error))
        copied.append(msgspec.json.decode(sent, type=Refusal).as_error())
    assert {(type(each), str(each), each.reason) for each in copied} == {(kind, "a text", reason)}
    event = Event("refused", "v1", "", "0" * 64, error=error)
    assert event.as_dict()["error"] == {"error": kind.__name__, "reason": reason, "message": "a text", "problems": ()}
    assert (refusal_of(event).reason, admin_failure_of(error).reason) == (reason, reason)


def test_the_reasons_are_all_that_are_declared() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    declared = {kind: get_args(get_type_hints(kind.__init__).get("reason")) for kind in kinds}
    assert {kind: reasons for kind, reasons in declared.items() if reasons} == REASONS


@pytest.mark.slow
def test_every_error_crosses_the_border_of_a_process() -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        for kind in FAMILY:
            found = executor.submit(fail, kind).exception(timeout=120)
            assert found is not None
            assert same(found, raised(kind))
            assert "the cause" in str(found.__cause__)  # the other process's traceback
    with context.Pool(1) as pool:
        for kind in FAMILY:
            with pytest.raises(kind) as caught:
                pool.apply_async(fail, (kind,)).get(timeout=120)
            assert same(caught.value, raised(kind))


def fail(kind: type[WeightswapError]) -> None:
    raise raised(kind)


@pytest.mark.parametrize("kind", FAMILY)
def test_what_an_error_quotes_adds_no_lines_and_steers_no_terminal(kind: type[WeightswapError]) -> None:
    error, plain = example(kind, EVIL), example(kind)
    assert str(error).replace("\n", "").isprintable()
    assert len(str(error).split("\n")) == len(str(plain).split("\n"))
    assert str(error) == str(plain).replace("a text", visible(EVIL))
    assert all(problem.isprintable() for problem in getattr(error, "problems", ()))


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("letter", ["n", "\x1b"])
def test_a_huge_name_gives_a_short_error(kind: type[WeightswapError], letter: str) -> None:
    error = example(kind, f"begin {letter * 200_000} end")
    assert len(str(error)) < 10_000
    assert "begin " in str(error)
    assert " end" in str(error)
    assert all(len(problem) <= errors.MOST_OF_A_PROBLEM for problem in getattr(error, "problems", ()))
    assert len(pickle.dumps(error)) < 50_000


@pytest.mark.parametrize("length", [MOST_SHOWN, MOST_SHOWN + 1, 10 * MOST_SHOWN])
def test_brief_texts_have_both_ends(length: int) -> None:
    text = f"<{'x' * (length - 2)}>"
    shown = brief(text)
    assert (shown == text) == (length <= MOST_SHOWN)
    assert len(shown) <= MOST_SHOWN
    assert shown[0] + shown[-1] == "<>"
    assert brief(shown) == shown


def test_an_event_is_one_line_whatever_it_is_of() -> None:
    event = Event("refused", EVIL, EVIL, "0" * 64, error=ValueError(EVIL))
    assert str(event) == f"refused for {visible(EVIL)}: {visible(EVIL)}: ValueError: {visible(EVIL)}"
    assert str(event).isprintable()


@pytest.mark.parametrize(
    ("error", "of_device", "memory"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True, False),
        (RuntimeError("CUDA driver error: device not ready"), True, False),
        (torch.AcceleratorError("an illegal memory access was encountered"), True, False),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False, True),
        (RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"), False, False),
        (ValueError("CUDA error: said by somebody else"), False, False),
    ],
)
def test_errors_of_a_device_and_of_memory_are_known(error: Exception, of_device: bool, memory: bool) -> None:
    assert (errors.is_of_device(error), errors.lacks_memory(error)) == (of_device, memory)
