"""Check of a staged session: it must reproduce the goldens, or at least give finite outputs for their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from weightswap_runtime.engines.engine import Bound, Engine
from weightswap_runtime.errors import (
    GoldenMismatch,
    OutOfMemory,
    Unsupported,
    WeightFileError,
    WeightswapError,
    is_of_device,
    lacks_memory,
)
from weightswap_runtime.format.goldens import Case, Environment, Goldens, Mode, check_mode
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.format.signature import Integer, Leaf, Tensor, leaves
from weightswap_runtime.tensors import (
    DEFAULT_TOLERANCES,
    EXACT,
    TensorBytes,
    Tolerance,
    describe,
    difference,
    not_finite,
)

OTHER_KERNELS = 10  # factor of the tolerances on another device or with other kernels, which sum in another order
_Compare = Callable[[TensorBytes, TensorBytes], str | None]


def verify(
    goldens: Goldens,
    bound: Bound,
    engine: Engine,
    manifest: Manifest,
    weights_id: str,
    *,
    mode: Mode = "goldens",
    check: Callable[[], None] = lambda: None,
) -> Mode:
    """Run every case of the goldens on a session that serves no calls yet, and check its outputs.

    bound: the graphs of the session, bound by `engine` to the weights `weights_id`. Each case starts from the initial
    state.
    mode "goldens": outputs must equal the recorded ones within the recorded tolerance. Without one, they must be equal
    bit for bit if the engine's environment is that of the recording, and otherwise within the tolerances of
    torch.testing for their dtype, or ten times those on another kind of device or with other kernels. Bit for bit, NaN
    equals NaN and 0.0 does not equal -0.0. Integers are always exact.
    mode "finite": outputs must be finite wherever the recorded ones are, or everywhere if the goldens have inputs only.
    An artifact's own goldens of other weights are checked in this mode, and so are goldens of another graph.
    mode "off": nothing is run.
    check: a callback, called before each case; an exception that it raises ends the verification.

    Returns the mode of the check that was done. Raises GoldenMismatch with the worst element of every wrong output,
    WeightFileError for a file of other weights, Unsupported for an unknown mode, and whatever `check` raises.
    """
    check_mode(mode)
    if mode == "off":
        return mode
    compare = _comparison(goldens, weights_id, mode, engine.environment())
    problems: list[str] = []
    for number, case in enumerate(goldens.cases):
        check()
        outputs = leaves(manifest.methods[case.method].signature.output)
        with engine.default_torch_modes():
            of_case = list(_case_problems(goldens, case, bound, engine, outputs, compare))
        problems += [f"case {number}, {case.method}{problem}" for problem in of_case]
    checked: Mode = "goldens" if compare else "finite"
    if problems:
        raise GoldenMismatch(goldens.where, problems, _ADVICE[checked])
    return checked


_ADVICE: dict[Mode, str] = {
    "goldens": "These weights do not compute what the eager model did. Pack them again. If they "
    "differ by rounding errors alone, record the goldens with a tolerance=(rtol, atol) of that size.",
    "finite": "These weights give values that are not finite. Do not serve them.",
}


def _comparison(goldens: Goldens, weights_id: str, mode: Mode, here: Environment | None) -> _Compare | None:
    """Return the comparison of outputs with the recorded ones; None if they only have to be finite."""
    if mode == "finite" or not goldens.same_graph or goldens.weights_id is None:
        return None
    if goldens.weights_id != weights_id:
        if goldens.bundled:
            return None
        raise WeightFileError(
            f"{goldens.where}: recorded for the weights {goldens.weights_id[:12]}, but those beside it are "
            f"{weights_id[:12]}. Record the goldens again with pack(..., goldens=...), or remove the file.",
            reason="damaged",
        )
    stated, there = goldens.record.tolerance, goldens.record.environment
    if stated is None and there == here:
        return lambda expected, found: difference(expected, found, None)
    factor = 1 if here and there and here.device == there.device else OTHER_KERNELS
    return lambda expected, found: difference(expected, found, stated or default_tolerance(expected.dtype, factor))


def default_tolerance(dtype: str, factor: int = 1) -> Tolerance:
    """Return the (rtol, atol) for outputs of a dtype if the goldens record none."""
    rtol, atol = DEFAULT_TOLERANCES.get(dtype, EXACT)
    return factor * rtol, factor * atol


def _case_problems(
    goldens: Goldens, case: Case, bound: Bound, engine: Engine, outputs: list[Leaf], compare: _Compare | None
) -> Iterator[str]:
    try:
        inputs = [engine.tensor(goldens.tensors[value]) if isinstance(value, str) else value for value in case.inputs]
        values = bound.run(case.method, inputs)
    except Exception as error:
        if not _is_of_graph(error, goldens.where):
            raise
        yield f": the graph raised {type(error).__name__}: {error}"
        return
    if not goldens.record.has_outputs:
        tensors = ((leaf, value) for leaf, value in zip(outputs, values, strict=True) if isinstance(leaf, Tensor))
        problems = ((leaf, _tensor_problem(engine, None, value, not_finite)) for leaf, value in tensors)
        yield from (f", {leaf.name}{text}" for leaf, text in problems if text)
        return
    for leaf, recorded, value in zip(outputs, case.outputs, values, strict=True):
        if isinstance(recorded, str):
            text = _tensor_problem(engine, goldens.tensors[recorded], value, compare or not_finite)
        else:
            wrong = isinstance(leaf, Integer) and compare is not None and recorded != value
            text = f": expected {recorded}, found {value}" if wrong else None
        if text:
            yield f", {leaf.name}{text}"


def _is_of_graph(error: Exception, where: str) -> bool:
    """Return True if an operator raised the error, such as an index out of range. Raises OutOfMemory."""
    if isinstance(error, WeightswapError | MemoryError) or is_of_device(error):
        return False
    if lacks_memory(error):
        raise OutOfMemory(f"{where}: no memory for a trial call ({error})") from error
    return True


def _tensor_problem(
    engine: Engine, recorded: TensorBytes | None, value: Any, compare: Callable[[Any, TensorBytes], str | None]
) -> str | None:
    try:
        content = engine.content(value)
    except Unsupported as error:  # files cannot hold the dtype
        return f": expected {describe(recorded)}, but {error}" if recorded else None
    return compare(recorded, content)
