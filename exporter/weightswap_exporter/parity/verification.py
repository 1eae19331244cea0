"""`verify()`: recorded calls, parity and swaps of an artifact with weights, each check that can be made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from weightswap_exporter.engines.compiling import OnStep, ignore_step
from weightswap_exporter.engines.engine_check import MOST_BYTES
from weightswap_exporter.modules.stand_ins import first_line
from weightswap_exporter.modules.tensors import unwrapped
from weightswap_runtime import Artifact, GoldenMismatch, Model, load
from weightswap_runtime.engines.choosing import available_engines
from weightswap_runtime.errors import Unsupported, WeightFileError, WeightswapError
from weightswap_runtime.format.delta import delta_stamp
from weightswap_runtime.format.merging import write_merged_set
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.format.weight_set import open_weights
from weightswap_runtime.live.residency import RESIDENCIES, ResidencyName
from weightswap_runtime.tensors import TensorBytes, Tolerance, difference
from weightswap_tools.inputs import write_random_weights

from .checks import check_one_process, checked_model, fill_model, recorded_inputs, servable
from .compare import compare_calls
from .executions import CallCase, PathLike, call, calls_to_compare
from .report import ParityReport

_Outcome = list[Any] | str  # flat outputs, or the message of the error


def verify(
    artifact: PathLike | Artifact,
    weights: PathLike,
    recipe: Mapping[str, Any] | None = None,
    *,
    engines: Sequence[str] | None = None,
    before: PathLike | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Verification:
    """Check everything that can be checked about an artifact with weights, on the CPU.

    Every engine must reproduce recorded calls. Every engine's outputs must be those of the eager model that a recipe
    builds, or without one of the engine `torch`, on recorded inputs, the recipe's sample inputs, and generated ones. A
    model swapped from other weights to these must give the same bits as a model loaded with them, in both residencies.

    recipe: the result of a recipe, with `model`, which gets the weights: by name from a weight file, by its own loading
    code from a checkpoint. weights: a weight file, any source that `pack` takes, or a delta from `before`. engines:
    None, all that the artifact and this machine offer. before: weights to swap from; None: random ones, if they take at
    most 2 GB. tolerance, seed: as for `parity.compare`. on_step: a callback that gets the name of each step.

    Raises ParityError as `parity.compare` does, Unsupported for an artifact of several ranks, and the errors of `load`,
    `pack` and loading the model's weights.
    """
    start = time.perf_counter()
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    check_one_process(opened)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="weightswap-")))
        model = unwrapped(recipe["model"]) if recipe is not None else None
        load_function = recipe.get("load") if recipe is not None else None
        whole = _result_of_delta(weights, before, folder)
        file = whole or servable(weights, opened, folder, model if load_function else None, load_function)
        names = tuple(available_engines(opened) if engines is None else engines)
        checks = _Checks(opened, file, weights if whole else file, names, on_step or ignore_step)
        cases = checks.cases(recipe or {}, seed)
        if model is not None:
            fill_model(model, opened, whole or weights, load_function)
        checks.check_goldens()
        checks.check_parity(recipe, cases, tolerance)
        checks.check_swaps(cases, _other_weights(opened, before, folder, checks.notes))
    return Verification(
        artifact=str(opened.path),
        graph_id=opened.graph_id,
        weights=str(weights),
        weights_id=checks.weights_id,
        before="random weights" if before is None else str(before),
        goldens=tuple(checks.goldens),
        parity=checks.parity,
        swaps=tuple(checks.swaps),
        notes=tuple(checks.notes),
        seconds=time.perf_counter() - start,
    )


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `verify`."""

    artifact: str
    graph_id: str
    weights: str
    weights_id: str
    before: str
    goldens: tuple[GoldensCheck, ...]
    parity: ParityReport | None
    swaps: tuple[SwapCheck, ...]
    notes: tuple[str, ...]  # checks that were not made, and why
    seconds: float

    @property
    def same(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """All problems, one sentence each."""
        problems = [f"goldens, {check.engine}: {problem}" for check in self.goldens for problem in check.problems]
        for engine in self.parity.engines if self.parity else ():
            problems += [f"parity, {engine.engine}: {problem}" for case in engine.cases for problem in case.problems]
        return problems + [
            f"swap, {check.engine}, {check.residency} residency: {problem}"
            for check in self.swaps
            for problem in check.problems
        ]


class GoldensCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of recorded calls on one engine."""

    engine: str
    verified: str  # as in `SwapReceipt`; "none" if nothing was recorded
    problems: tuple[str, ...] = ()


class SwapCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a swap from other weights on one engine, and in double residency of the rollback."""

    engine: str
    residency: ResidencyName
    calls: int  # on each side
    problems: tuple[str, ...]
    bytes_read: int
    bytes_copied: int
    seconds_staged: float
    seconds_paused: float


def _samples(recipe: Mapping[str, Any]) -> dict[str, list[Any]]:
    methods = recipe.get("methods")
    if methods:
        return {name: [(tuple(spec.args), dict(spec.kwargs))] for name, spec in methods.items()}
    if recipe.get("args") is None and not recipe.get("kwargs"):
        return {}
    return {"forward": [(tuple(recipe.get("args") or ()), dict(recipe.get("kwargs") or {}))]}


def _result_of_delta(weights: PathLike, before: PathLike | None, folder: Path) -> Path | None:
    """Return a file of the full set to which a delta leads from the weights `before`; None if `weights` is no delta.

    Raises Unsupported without `before`, and what `write_merged_set` raises.
    """
    try:
        with open_weights(weights) as opened:
            if delta_stamp(opened) is None:
                return None
    except WeightFileError:  # such as a checkpoint of torch
        return None
    if before is None:
        raise Unsupported(
            f"{weights}: a delta; give the weights from which it starts, too: --from FILE, or verify(before=)"
        )
    write_merged_set(before, [weights], folder / "whole" / "weights.safetensors")
    return folder / "whole" / "weights.safetensors"


def _other_weights(artifact: Artifact, before: PathLike | None, folder: Path, notes: list[str]) -> PathLike | None:
    if before is not None:
        (folder / "before").mkdir()
        return servable(before, artifact, folder / "before")
    if artifact.manifest.total_bytes > MOST_BYTES:
        notes.append(f"no swap was tried: random weights would take more than {MOST_BYTES >> 30} GB; give others")
        return None
    path = folder / "before.safetensors"
    write_random_weights(artifact.manifest, path, np.random.default_rng(0))
    return path


@dataclass
class _Checks:
    """Results of the checks made so far."""

    artifact: Artifact
    weights: PathLike  # a full set
    swapped: PathLike  # what swaps take: the same, or a delta that leads to it
    engines: Sequence[str]
    on_step: OnStep
    goldens: list[GoldensCheck] = field(default_factory=list)
    parity: ParityReport | None = None
    swaps: list[SwapCheck] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights_id: str = ""

    def cases(self, recipe: Mapping[str, Any], seed: int) -> list[CallCase]:
        """Return the recipe's inputs, recorded ones and generated ones. Raises ParityError and WeightFileError."""
        samples = _samples(recipe)
        sample_cases = calls_to_compare(self.artifact, samples, [], seed) if samples else []
        return sample_cases + calls_to_compare(self.artifact, None, recorded_inputs(self.artifact, self.weights), seed)

    def check_goldens(self) -> None:
        for engine in self.engines:
            self.on_step(f"recorded calls on {engine}")
            chosen: Any = engine
            model = load(self.artifact, engine=chosen, residency="single")
            try:
                receipt = model.swap(self.weights)
            except GoldenMismatch as error:
                self.goldens.append(GoldensCheck(engine=engine, verified="none", problems=error.problems))
            else:
                self.weights_id = receipt.weights_id
                self.goldens.append(GoldensCheck(engine=engine, verified=receipt.verified))

    def check_parity(
        self, recipe: Mapping[str, Any] | None, cases: Sequence[CallCase], tolerance: Tolerance | None
    ) -> None:
        if recipe is None and set(self.engines) <= {"torch"}:
            self.notes.append("the engines were not compared: there is no recipe, and no engine besides torch")
            return
        self.on_step("calls on every engine")
        model = None if recipe is None else checked_model(unwrapped(recipe["model"]), self.artifact)
        functions = {name: spec.fn_name for name, spec in ((recipe or {}).get("methods") or {}).items()}
        self.parity = compare_calls(
            model, self.artifact, self.weights, cases, self.engines, tolerance=tolerance, functions=functions
        )
        self.notes += self.parity.notes
        self.notes += [text for engine in self.parity.engines for text in engine.refusals]
        self.weights_id = self.weights_id or self.parity.weights_id

    def check_swaps(self, cases: Sequence[CallCase], before: PathLike | None) -> None:
        if before is None:
            return
        accepted = self._accepted(cases)
        for engine, residency in product(self.engines, RESIDENCIES):
            self.on_step(f"a swap on {engine}, {residency} residency")
            self.swaps.append(
                check_swap(self.artifact, engine, residency, before, self.swapped, self.weights, accepted)
            )

    def _accepted(self, cases: Sequence[CallCase]) -> list[CallCase]:
        """Return the cases that the reference and all engines accept: compiled code may do anything with others."""
        if self.parity is None:
            return list(cases)
        results = [result for engine in self.parity.engines for result in engine.cases]
        refused = {(result.method, result.case) for result in results if result.refused}
        compared = {(result.method, result.case) for result in results} - refused
        return [case for case in cases if (case.call.method, case.name) in compared]


# A swap.


def check_swap(
    artifact: Artifact,
    engine: str,
    residency: ResidencyName,
    before: PathLike,
    swapped: PathLike,
    after: PathLike,
    cases: Sequence[CallCase],
) -> SwapCheck:
    """Swap `swapped` into a model with the weights `before`, and compare its outputs with those of `after`.

    Raises the errors of `load` and `swap`.
    """
    expected = _outcomes(_loaded(artifact, engine, residency, after), cases)
    model = _loaded(artifact, engine, residency, before)
    earlier = _outcomes(model, cases)
    receipt = model.swap(swapped, verify="off")
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
