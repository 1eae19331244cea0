"""Verifying a staged session: it must reproduce the goldens, or at least give finite outputs on their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .cases import Case, Value
from .errors import GoldenMismatch, GoldensError, MissingExtra, WeightswapError
from .goldens import Environment, Goldens, Mode, Tolerance, check_mode
from .manifest import Manifest
from .signature import Integer, Leaf, Tensor, leaves

try:
    import torch
except ImportError as error:
    raise MissingExtra("comparing with goldens", "torch") from error

from .comparing import DEFAULT_TOLERANCES, EXACT, difference, not_finite
from .plainly import plainly
from .tensors import as_tensor

if TYPE_CHECKING:
    from .engines import Bound

_Compare = Callable[[torch.Tensor, torch.Tensor], str | None]


def environment_here(device: str = "cpu") -> Environment:
    """What decides the last bits of an output in this process, in this thread."""
    return Environment(
        torch=str(torch.__version__),
        device=device,
        capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
    )


def verify(
    goldens: Goldens,
    bound: Bound,
    manifest: Manifest,
    weights_id: str,
    *,
    mode: Mode = "goldens",
    engine: str = "torch",
    device: str = "cpu",
    check: Callable[[], None] = lambda: None,
) -> Mode:
    """Run every case of the goldens on a session that serves nobody, and judge its outputs.

    bound: the session's, with the weights `weights_id`. Its state starts from the initial values in each case, and has
    them afterwards. mode "goldens": outputs equal the recorded ones within the stated tolerance; without one, bit for
    bit on the engine `torch` where the environment is that of the recording, else within the tolerances of
    torch.testing for their dtype. Bit for bit, NaN equals NaN and 0.0 is not -0.0. Integers are always exact.
    mode "finite": outputs are finite wherever the recorded ones are. An artifact's own goldens of other weights are
    checked in this mode, and so are goldens of another graph. mode "off": nothing is run. check: called before each
    case; what it raises ends the verification.

    Returns the mode in which it was done. Raises GoldenMismatch with the worst element of every output that is wrong,
    GoldensError for a file of other weights, Unsupported for another mode; whatever `check` raises.
    """
    check_mode(mode)
    if mode == "off":
        return mode
    compare = _comparison(goldens, weights_id, mode, exact=engine == "torch", here=environment_here(device))
    problems: list[str] = []
    try:
        for number, case in enumerate(goldens.cases):
            check()
            bound.reset_state()
            outputs = leaves(manifest.methods[case.method].signature.output)
            with plainly():
                found = list(_case_problems(goldens, case, bound, outputs, compare))
            problems += [f"case {number}, {case.method}{problem}" for problem in found]
    finally:
        bound.reset_state()
    done: Mode = "goldens" if compare else "finite"
    if problems:
        raise GoldenMismatch(goldens.where, problems, _ADVICE[done])
    return done


_ADVICE: dict[Mode, str] = {
    "goldens": "These weights do not compute what the eager model did. Pack them again; if small differences are fine, "
    "record the goldens with a tolerance=(rtol, atol).",
    "finite": 'These weights give values that are not finite. Do not serve them; verify="off" would.',
}


def _comparison(goldens: Goldens, weights_id: str, mode: Mode, *, exact: bool, here: Environment) -> _Compare | None:
    """How outputs are compared with the recorded ones; None where they only have to be finite."""
    if mode == "finite" or not goldens.same_graph or (goldens.bundled and goldens.weights_id != weights_id):
        return None
    if goldens.weights_id != weights_id:
        raise GoldensError(
            f"{goldens.where}: recorded for other weights: {goldens.weights_id[:12]}, those beside it are "
            f"{weights_id[:12]}. Record the goldens again with pack(..., goldens=...), or remove the file."
        )
    stated = goldens.record.tolerance
    if stated is None and exact and goldens.record.environment == here:
        return lambda expected, found: difference(expected, found, None)
    return lambda expected, found: difference(expected, found, stated or _default(expected))


def _default(tensor: torch.Tensor) -> Tolerance:
    return DEFAULT_TOLERANCES.get(tensor.dtype, EXACT)


def _case_problems(
    goldens: Goldens, case: Case, bound: Bound, outputs: list[Leaf], compare: _Compare | None
) -> Iterator[str]:
    try:
        found = bound.run(case.method, [_value(goldens, value) for value in case.inputs])
    except (WeightswapError, MemoryError):
        raise
    except Exception as error:  # an operator's own, such as an index out of range
        yield f": the graph raised {type(error).__name__}: {error}"
        return
    for leaf, recorded, value in zip(outputs, case.outputs, found, strict=True):
        if isinstance(leaf, Tensor):
            text = (compare or not_finite)(_value(goldens, recorded), value)
        else:
            wrong = isinstance(leaf, Integer) and compare is not None and recorded != value
            text = f": expected {recorded}, found {value}" if wrong else None
        if text:
            yield f", {leaf.name}{text}"


def _value(goldens: Goldens, value: Value) -> Any:
    """A flat input or output. Tensors are in memory that torch has allocated, as kernels look at alignments."""
    if not isinstance(value, str):
        return value
    place = goldens.tensors[value]
    return as_tensor(bytearray(goldens.bytes_of(value)), place.dtype, place.shape).clone()
