"""`compare()`: the same calls, run by the eager model and by every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from torch import nn

from weightswap_exporter.models.tensors import unwrapped
from weightswap_exporter.models.user_errors import first_line
from weightswap_exporter.packing import pack
from weightswap_runtime import Artifact
from weightswap_runtime.engines.choosing import available_engines
from weightswap_runtime.errors import InputMismatch, ParityError, WeightswapError
from weightswap_runtime.format.signature import leaves
from weightswap_runtime.memory.device_choice import HOST
from weightswap_runtime.tensors.comparing import Tolerance

from .compared_calls import Cases, Given, PathLike, calls_to_compare
from .divergence import locate_divergence
from .executions import EagerSide, EngineSide, Run, Side, eager_side, taken
from .measuring import Tolerances, compared, tolerances
from .preconditions import check_request, checked_model, other_values, recorded_inputs, servable
from .report import CaseParity, Divergence, EngineParity, OutputParity, ParityReport
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
    """Run the eager model and every engine on the same inputs, and measure how far their outputs are apart.

    model: the reference, with the values that it has now, called as goldens are recorded: without gradients, from the
    initial state, with copies of the inputs; None: the engine `torch` is the reference. weights: what the engines get,
    a weight file or a checkpoint; None: the model's. Where they differ from the model's, that is compared, too.

    cases: calls, as `goldens=` of `export()` has them; "goldens", the inputs that were recorded for the artifact or
    beside the weights; "generated", random inputs with ordinary sizes and with those at the ends of the dynamic ranges;
    None: the latter two. seed: of random inputs. engines: None, all that the artifact and this machine offer.
    devices: of the engines; on another one than "cpu" there is the engine `torch`, and the model is copied there.

    tolerance: (rtol, atol) for all engines. None: the engine `torch` must equal eager bit for bit, others within ten
    times the tolerances of `torch.testing` for the dtype of the output. functions: a method's name -> the model's
    attribute, where those differ. locate: whether to find the first point where a call diverges, for each engine.

    Raises ParityError where nothing can be compared: inputs that the signature refuses, a model that is not that of the
    artifact or has no values, one that raises, or whose outputs change from one run to the next; and what `load` and
    `pack` raise.
    """
    for name, given in (("engines", engines), ("devices", devices)):
        if isinstance(given, str):
            raise ParityError([f"{name}: expected a list of names, got {given!r}"], f"Say {name}=[{given!r}].")
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
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
    given: Sequence[Given],
    engines: Sequence[str] | None = None,
    devices: Sequence[str] = (HOST,),
    *,
    tolerance: Tolerance | None = None,
    functions: Mapping[str, str] | None = None,
    locate: bool = True,
) -> ParityReport:
    """As `compare`, for a model that was checked, and calls that were."""
    check_request(model, artifact, given, functions, devices, tolerance)
    comparison = _EngineComparison(artifact, weights, given, tolerance, locate)
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
    """The model's weights as a file."""
    if model is None:
        raise ParityError(["there are no weights"], "Give a weight file, a model, or both.")
    return pack(model, artifact, out=folder / "weights.safetensors").path


def _engines(artifact: Artifact, engines: Sequence[str] | None, device: str, model: nn.Module | None) -> Sequence[str]:
    offered = available_engines(artifact) if device == HOST else ("torch",)
    wanted = list(offered if engines is None else engines)
    if model is None:
        wanted = [name for name in wanted if name != "torch"]  # the reference itself
    if not wanted:
        raise ParityError(
            ["there is nothing to compare the engine 'torch' with"],
            "Give the eager model (a recipe), or compile the artifact for another engine: weightswap compile.",
        )
    return wanted


@dataclass
class _EngineComparison:
    """Collects what the engines give, device by device."""

    artifact: Artifact
    weights: PathLike
    given: Sequence[Given]
    tolerance: Tolerance | None
    locate: bool
    engines: list[EngineParity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    weights_id: str = ""

    def run(self, reference: Side, names: Sequence[str], device: str) -> None:
        """Compare engines with the reference on one device. Raises ParityError, and what `load` raises."""
        expected = self._expected(reference)
        for name in names:
            self.engines.append(self._engine(reference, Run(self.weights, name), expected, device))

    def _expected(self, reference: Side) -> list[tuple[Given, list[Any]]]:
        """What the reference gives to each call that it can take."""
        expected = []
        for given in self.given:
            found = taken(reference, given, self.artifact)
            if isinstance(found, str):
                self.skipped[given.where] = found
            else:
                expected.append((given, found))
        if lost := {given.call.method for given in self.given} - {given.call.method for given, _ in expected}:
            problems = [f"{method}: no call could be compared" for method in sorted(lost)]
            advice = "Random inputs are nothing that this model takes; give cases=[(args, kwargs)]."
            raise ParityError([*problems, *self.skipped.values()], advice)
        return expected

    def _engine(self, reference: Side, run: Run, expected: list[tuple[Given, list[Any]]], device: str) -> EngineParity:
        side = EngineSide(self.artifact, run, device)
        self.weights_id = side.model.weights_id or ""
        limits = tolerances(run.engine, self.tolerance)
        cases = [self._case(side, given, values, limits) for given, values in expected]
        wrong = next((given for (given, _), case in zip(expected, cases, strict=True) if not case.same), None)
        divergence, note = None, ""
        if wrong is not None and self.locate:
            divergence, note = self._located(reference, side.run_of(wrong.call.method), wrong, limits, device)
        return EngineParity(
            engine=run.engine,
            device=device,
            tolerance=self.tolerance,
            default_tolerance=limits.by_dtype,
            cases=tuple(cases),
            divergence=divergence,
            note=note,
        )

    def _case(self, side: EngineSide, given: Given, expected: list[Any], limits: Tolerances) -> CaseParity:
        case = CaseParity(case=given.name, origin=given.origin, method=given.call.method)
        try:
            found = side.run(given)
        except Exception as error:
            if isinstance(error, WeightswapError) and not isinstance(error, InputMismatch):
                raise
            return msgspec.structs.replace(case, **{"refused" if given.may_be_refused else "error": first_line(error)})
        described = leaves(self.artifact.manifest.methods[case.method].signature.output)
        paired = zip(described, expected, found, strict=True)
        judged = [(leaf.name, *compared(one, other, limits.of)) for leaf, one, other in paired]
        outputs = tuple(OutputParity(name=name, measure=measured, problem=text) for name, measured, text in judged)
        wrong = [f"{output.name}: {output.problem}" for output in outputs if output.problem]
        if wrong and limits.by_dtype and given.may_be_refused:
            return msgspec.structs.replace(case, refused=wrong[0])
        return msgspec.structs.replace(case, outputs=outputs)

    def _located(
        self, reference: Side, run: Run, given: Given, limits: Tolerances, device: str
    ) -> tuple[Divergence | None, str]:
        if device != HOST:
            return None, f"the first divergence is looked for on the CPU alone, not on {device}"
        model = reference if isinstance(reference, EagerSide) else None
        try:
            return locate_divergence(model, self.artifact, run, given, limits)
        except NodeFailed as error:
            return None, str(error)
        except Exception as error:  # of what is only there to explain
            return None, f"the first divergence cannot be found: {first_line(error)}"
