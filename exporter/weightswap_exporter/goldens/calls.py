"""The calls that `goldens=` asks for, checked as a server checks them."""

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
_FORM = "Give a list of (args, kwargs) or of tuples of args, or a dict from methods to such lists."


class GoldenCall(NamedTuple):
    """What the user wants recorded."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class GoldensRequest(NamedTuple):
    """The calls to record, and the tolerance (rtol, atol) within which a server is to reproduce them; None: exactly."""

    calls: list[GoldenCall]
    tolerance: Tolerance | None


def wanted_goldens(
    goldens: Requested | None, tolerance: Tolerance | None, methods: Sequence[str]
) -> GoldensRequest | None:
    """What `goldens=` and `tolerance=` of `export()` and `pack()` stand for. Raises RecordingError."""
    if goldens is not None:
        return GoldensRequest(_calls(goldens, methods), None if tolerance is None else _limits(tolerance))
    if tolerance is not None:
        raise RecordingError(["tolerance: says how goldens are compared, and there are none"], "Give `goldens`, too.")
    return None


def _calls(goldens: Requested, methods: Sequence[str]) -> list[GoldenCall]:
    if isinstance(goldens, Mapping):
        by_method = dict(goldens)
    else:
        by_method = {methods[0] if len(methods) == 1 else "forward": goldens}
    calls: list[GoldenCall] = []
    problems: list[str] = []
    for method, given in by_method.items():
        if method not in methods:
            problems.append(f"no method {method!r}; there are {', '.join(methods)}")
        elif not isinstance(given, list):
            problems.append(f"{method}: expected a list of calls, got a {type(given).__qualname__}")
        else:
            found = [(number, _call(method, item), item) for number, item in enumerate(given)]
            calls += [call for _, call, _ in found if call is not None]
            kinds = [(number, type(item).__qualname__) for number, call, item in found if call is None]
            problems += [f"{method}, call {number}: expected (args, kwargs), got a {kind}" for number, kind in kinds]
    if problems or not calls:
        raise RecordingError(problems or ["no calls to record"], _FORM)
    return calls


def _call(method: str, given: Any) -> GoldenCall | None:
    """`(args, kwargs)`, or else a tuple of args. A tuple and a dict are always the former."""
    if not isinstance(given, tuple):
        return None
    if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return GoldenCall(method, given[0], dict(given[1]))
    return GoldenCall(method, given, {})


def _limits(tolerance: Any) -> Tolerance:
    if problem := tolerance_problem(tolerance):
        raise RecordingError([problem], "Leave it out where the outputs are to be reproduced exactly.")
    rtol, atol = tolerance
    return float(rtol), float(atol)


def tolerance_problem(tolerance: Any) -> str | None:
    """Why something is no tolerance; None if it is one."""
    numbers = isinstance(tolerance, tuple | list) and all(type(part) in (int, float) for part in tolerance)
    if numbers and len(tolerance) == 2 and all(math.isfinite(part) and part >= 0 for part in tolerance):
        return None
    return f"tolerance: expected (rtol, atol), finite and not negative, got {tolerance!r:.80}"


def checked_inputs(calls: Sequence[GoldenCall], manifest: Manifest) -> list[list[Any]]:
    """The flat inputs of each call, as a server takes them."""
    flat: list[list[Any]] = []
    problems: list[str] = []
    for number, call in enumerate(calls):
        signature = manifest.methods[call.method].signature
        check = CallCheck(call.method, signature, torch.Tensor, DTYPE_NAMES, TorchEngine.misplaced, TorchEngine.kind)
        try:
            args, kwargs = (unflatten(*plain_tree(given)) for given in (call.args, call.kwargs))
            flat.append([_copied(value) for value in check.flatten(args, kwargs)])
        except InputMismatch as error:
            problems += [f"case {number}, {call.method}: {problem}" for problem in error.problems]
    if problems:
        raise RecordingError(problems, "Give inputs that the method was exported for; a server would refuse these.")
    return flat


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def with_literals(call: GoldenCall, manifest: Manifest) -> GoldenCall:
    """The call with the literals that it may leave out, as keyword arguments: the graph has its own values for them."""
    signature = manifest.methods[call.method].signature
    rest = (*signature.args[len(call.args) :], *signature.kwargs)
    literals = {name: unflatten(node, list(leaves(node))) for name, node in rest if name not in call.kwargs}
    return call._replace(kwargs=literals | call.kwargs)
