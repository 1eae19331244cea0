"""`compare()`: the same calls on the eager model and on every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from torch import nn

from weightswap_exporter.modules.stand_ins import first_line
from weightswap_exporter.modules.tensors import unwrapped
from weightswap_exporter.packing import pack_to_compare
from weightswap_runtime import Artifact
from weightswap_runtime.engines.choosing import available_engines
from weightswap_runtime.errors import InputMismatch, ParityError, WeightswapError
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.memory.device_memory import HOST
from weightswap_runtime.tensors import Tolerance

from .checks import check_one_process, check_request, checked_model, other_values, recorded_inputs, servable
from .divergence import locate_divergence
from .executions import (
    CallCase,
    Cases,
    EagerSide,
    EngineSide,
    PathLike,
    Run,
    Side,
    calls_to_compare,
    eager_side,
    repeatable_outputs,
)
from .report import CaseParity, Divergence, EngineParity, OutputParity, ParityReport, Tolerances, compared, tolerances
from .steps import NodeFailed


def compare(
    model: nn.Module | None,
    artifact: PathLike | Artifact,
    weights: PathLike | None = None,
    cases: Cases | None = None,
    engines: Sequence[str] | None = None,
    devices: Sequence[str] = (HOST,),
    *,
    tolerance: Tolerance | None = None,
    functions: Mapping[str, str] | None = None,
    locate: bool = True,
    seed: int = 0,
) -> ParityReport:
    """Run the eager model and every engine on the same inputs, and measure how far apart their outputs are.

    model: the reference, with its current values. It is called as goldens are recorded: without gradients, from the
    initial state, with copies of the inputs. None: the engine `torch` is the reference. weights: a weight file or
    checkpoint for the engines. None: the model's weights. The report names the values in which they differ.

    cases: calls, as in `goldens=` of `export()`; "goldens", inputs that were recorded for the artifact or beside the
    weights; "generated", random inputs with ordinary sizes and with those at the ends of the dynamic ranges; None: the
    latter two. seed: of the random inputs. engines: None, all that the artifact and this machine offer. devices: of the
    engines; on devices other than "cpu" only the engine `torch` runs, and the model is copied there.

    tolerance: (rtol, atol) for all engines. None: the engine `torch` must equal eager bit for bit, and others must be
    within ten times the tolerances of `torch.testing` for the output's dtype. functions: the model's attribute for each
    method whose name differs. locate: find the first point where a call diverges, for each engine.

    Raises ParityError if nothing can be compared: the signature refuses the inputs, the model is not that of the
    artifact or has no values, it raises, or its outputs differ between two runs. Also raises the errors of `load` and
    `pack`.
    """
    for name, value in (("engines", engines), ("devices", devices)):
        if isinstance(value, str):
            raise ParityError([f"{name}: expected a list of names, got {value!r}"], f"Pass {name}=[{value!r}].")
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    check_one_process(opened)
    eager = None if model is None else checked_model(unwrapped(model), opened)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="weightswap-")))
        path = servable(weights, opened, folder) if weights is not None else _packed(folder, eager, opened)
        calls = calls_to_compare(opened, cases, recorded_inputs(opened, path), seed)
        report = compare_calls(
            eager, opened, path, calls, engines, devices, tolerance=tolerance, functions=functions, locate=locate
        )
    return msgspec.structs.replace(report, weights="the model's weights" if weights is None else str(weights))


def compare_calls(
    model: nn.Module | None,
    artifact: Artifact,
    weights: PathLike,
    cases: Sequence[CallCase],
    engines: Sequence[str] | None = None,
    devices: Sequence[str] = (HOST,),
    *,
    tolerance: Tolerance | None = None,
    functions: Mapping[str, str] | None = None,
    locate: bool = True,
) -> ParityReport:
    """Do the work of `compare` for a model and calls that were already checked."""
    check_request(model, artifact, cases, functions, devices, tolerance)
    comparison = _EngineComparison(artifact, weights, cases, tolerance, locate)
    for device in devices:
        names = _engines(artifact, engines, device, model)
        with ExitStack() as block:
            if model is None:
                reference: Side = EngineSide(artifact, Run(weights), device)
            else:
                reference = block.enter_context(eager_side(model, artifact, functions, device))
            comparison.run(reference, names, device)
    return ParityReport(
        artifact=str(artifact.path),
        graph_id=artifact.graph_id,
        weights=str(weights),
        weights_id=comparison.weights_id,
        reference="eager" if model is not None else "torch",
        engines=tuple(comparison.engines),
        other_values=tuple(other_values(model, artifact, weights)) if model is not None else (),
        skipped=tuple(comparison.skipped.values()),
    )


def _packed(folder: Path, model: nn.Module | None, artifact: Artifact) -> Path:
    if model is None:
        raise ParityError(["there are no weights"], "Give a weight file, a model, or both.")
    return pack_to_compare(model, artifact, folder / "weights.safetensors")


def _engines(artifact: Artifact, engines: Sequence[str] | None, device: str, model: nn.Module | None) -> Sequence[str]:
    offered = available_engines(artifact) if device == HOST else ("torch",)
    names = list(offered if engines is None else engines)
    if model is None:
        names = [name for name in names if name != "torch"]  # the reference itself
    if not names:
        raise ParityError(
            ["there is nothing to compare the engine 'torch' with"],
            "Give the eager model (a recipe), or compile the artifact for another engine: weightswap compile.",
        )
    return names


_Expected = list[tuple[CallCase, list[Any]]]  # cases with the reference's outputs


@dataclass
class _EngineComparison:
    """Results of the engines so far, device by device."""

    artifact: Artifact
    weights: PathLike
    cases: Sequence[CallCase]
    tolerance: Tolerance | None
    locate: bool
    engines: list[EngineParity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    weights_id: str = ""

    def run(self, reference: Side, names: Sequence[str], device: str) -> None:
        """Compare engines with the reference on one device. Raises ParityError, and the errors of `load`."""
        expected = self._expected(reference)
        for name in names:
            self.engines.append(self._engine(reference, Run(self.weights, name), expected, device))

    def _expected(self, reference: Side) -> _Expected:
        """Return the reference's outputs for each case that it accepts."""
        expected = []
        for case in self.cases:
            outputs = repeatable_outputs(reference, case, self.artifact)
            if isinstance(outputs, str):
                self.skipped[case.where] = outputs
            else:
                expected.append((case, outputs))
        if lost := {case.call.method for case in self.cases} - {case.call.method for case, _ in expected}:
            problems = [f"{method}: no call could be compared" for method in sorted(lost)]
            advice = "This model does not accept random inputs; give cases=[(args, kwargs)]."
            raise ParityError([*problems, *self.skipped.values()], advice)
        return expected

    def _engine(self, reference: Side, run: Run, expected: _Expected, device: str) -> EngineParity:
        side = EngineSide(self.artifact, run, device)
        self.weights_id = side.model.weights_id or ""
        limits = tolerances(run.engine, self.tolerance)
        results = [self._case(side, case, outputs, limits) for case, outputs in expected]
        wrong = next((case for (case, _), result in zip(expected, results, strict=True) if not result.same), None)
        divergence, note = None, ""
        if wrong is not None and self.locate:
            divergence, note = self._located(reference, side.run_of(wrong.call.method), wrong, limits, device)
        return EngineParity(
            engine=run.engine,
            device=device,
            tolerance=self.tolerance,
            default_tolerance=limits.by_dtype,
            cases=tuple(results),
            divergence=divergence,
            note=note,
        )

    def _case(self, side: EngineSide, case: CallCase, expected: list[Any], limits: Tolerances) -> CaseParity:
        result = CaseParity(case=case.name, origin=case.origin, method=case.call.method)
        try:
            found = side.run(case)
        except Exception as error:
            if isinstance(error, WeightswapError) and not isinstance(error, InputMismatch):
                raise
            return msgspec.structs.replace(result, **{"refused" if case.may_be_refused else "error": first_line(error)})
        outputs = []
        described = leaves(self.artifact.manifest.methods[result.method].signature.output)
        for leaf, one, other in zip(described, expected, found, strict=True):
            measured, problem = compared(one, other, limits.of)
            outputs.append(OutputParity(name=leaf.name, measure=measured, problem=problem))
        wrong = [f"{output.name}: {output.problem}" for output in outputs if output.problem]
        if wrong and limits.by_dtype and case.may_be_refused:
            return msgspec.structs.replace(result, refused=wrong[0])
        return msgspec.structs.replace(result, outputs=tuple(outputs))

    def _located(
        self, reference: Side, run: Run, case: CallCase, limits: Tolerances, device: str
    ) -> tuple[Divergence | None, str]:
        if device != HOST:
            return None, f"the first divergence is searched for only on the CPU, not on {device}"
        model = reference if isinstance(reference, EagerSide) else None
        try:
            return locate_divergence(model, self.artifact, run, case, limits)
        except NodeFailed as error:
            return None, str(error)
        except Exception as error:  # an explanation must not hide the report
            return None, f"the first divergence cannot be found: {first_line(error)}"
