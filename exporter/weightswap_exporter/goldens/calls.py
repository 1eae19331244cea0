"""Calls to record, as given in `goldens=`, with their inputs checked as a server checks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weightswap_exporter.capture.trees import plain_tree
from weightswap_runtime.engines.torch.cpu import TorchEngine
from weightswap_runtime.errors import InputMismatch, RecordingError
from weightswap_runtime.format.call_check import CallCheck
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.signature import leaves, unflatten
from weightswap_runtime.tensors.comparing import Tolerance
from weightswap_runtime.tensors.torch_tensors import DTYPE_NAMES

Requested = Sequence[Any] | Mapping[str, Sequence[Any]]
_ADVICE = "Give a list of (args, kwargs) or of tuples of args, or a dict from methods to such lists."


class GoldenCall(NamedTuple):
    """A call to record: the method and its arguments."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GoldensRequest(NamedTuple):
    """Calls to record, and the tolerance (rtol, atol) for servers that reproduce them. None: bit for bit."""

    calls: list[GoldenCall]
    tolerance: Tolerance | None


def wanted_goldens(
    goldens: Requested | None, tolerance: Tolerance | None, methods: Sequence[str]
) -> GoldensRequest | None:
    """Parse the arguments `goldens` and `tolerance` of `export()` and `pack()`. Raises RecordingError."""
    if goldens is not None:
        return GoldensRequest(_parse_calls(goldens, methods), None if tolerance is None else _checked(tolerance))
    if tolerance is not None:
        raise RecordingError(["tolerance: sets how goldens are compared, but there are none"], "Give `goldens`, too.")
    return None


def _parse_calls(goldens: Requested, methods: Sequence[str]) -> list[GoldenCall]:
    if isinstance(goldens, Mapping):
        by_method = dict(goldens)
    else:
        by_method = {methods[0] if len(methods) == 1 else "forward": goldens}
    calls: list[GoldenCall] = []
    problems: list[str] = []
    for method, items in by_method.items():
        if method not in methods:
            problems.append(f"no method {method!r}; the methods are {', '.join(methods)}")
        elif not isinstance(items, list):
            problems.append(f"{method}: expected a list of calls, got a {type(items).__qualname__}")
        else:
            for number, item in enumerate(items):
                if isinstance(item, tuple):
                    calls.append(_parse_call(method, item))
                else:
                    kind = type(item).__qualname__
                    problems.append(f"{method}, call {number}: expected (args, kwargs), got a {kind}")
    if problems or not calls:
        raise RecordingError(problems or ["no calls to record"], _ADVICE)
    return calls


def _parse_call(method: str, item: tuple[Any, ...]) -> GoldenCall:
    """Parse `(args, kwargs)` or a tuple of args. A pair of a tuple and a dict is always the former."""
    if len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], Mapping):
        return GoldenCall(method, item[0], dict(item[1]))
    return GoldenCall(method, item, {})


def _checked(tolerance: Any) -> Tolerance:
    if problem := tolerance_problem(tolerance):
        raise RecordingError([problem], "Leave it out if the outputs must be reproduced exactly.")
    rtol, atol = tolerance
    return float(rtol), float(atol)


def tolerance_problem(tolerance: Any) -> str | None:
    """Return why the value is not a tolerance; None if it is one."""
    numbers = isinstance(tolerance, tuple | list) and all(type(part) in (int, float) for part in tolerance)
    if numbers and len(tolerance) == 2 and all(math.isfinite(part) and part >= 0 for part in tolerance):
        return None
    return f"tolerance: expected (rtol, atol), finite and not negative, got {tolerance!r:.80}"


def checked_inputs(calls: Sequence[GoldenCall], manifest: Manifest) -> list[list[Any]]:
    """Return copies of the flat inputs of each call. Raises RecordingError for those that a server would refuse."""
    flat: list[list[Any]] = []
    problems: list[str] = []
    for number, call in enumerate(calls):
        signature = manifest.methods[call.method].signature
        check = CallCheck(call.method, signature, torch.Tensor, DTYPE_NAMES, TorchEngine.misplaced, TorchEngine.kind)
        try:
            args, kwargs = (unflatten(*plain_tree(tree)) for tree in (call.args, call.kwargs))
            flat.append([_copied(value) for value in check.flatten(args, kwargs)])
        except InputMismatch as error:
            problems += [f"case {number}, {call.method}: {problem}" for problem in error.problems]
    if problems:
        raise RecordingError(problems, "Give inputs that the method was exported for; a server would refuse these.")
    return flat


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def with_literals(call: GoldenCall, manifest: Manifest) -> GoldenCall:
    """Return the call with the literals that it leaves out added as keyword arguments; the graph fixes their values."""
    signature = manifest.methods[call.method].signature
    rest = (*signature.args[len(call.args) :], *signature.kwargs)
    literals = {name: unflatten(node, list(leaves(node))) for name, node in rest if name not in call.kwargs}
    return call._replace(kwargs=literals | call.kwargs)
