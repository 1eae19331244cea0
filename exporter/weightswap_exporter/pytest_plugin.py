"""The pytest plugin: the fixture `assert_parity` and its options. torch is imported when a test uses the fixture."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightswap_runtime import Artifact
from weightswap_runtime.engines.choosing import ENGINES, available_engines
from weightswap_runtime.errors import ParityError
from weightswap_runtime.format.weight_set import GOLDENS_SUFFIX

if TYPE_CHECKING:
    from torch import nn

    from weightswap_exporter.parity.executions import Cases, PathLike
    from weightswap_runtime.tensors import Tolerance

    from .parity import ParityReport


_ENGINES = "--weightswap-engines"
_UPDATE = "--weightswap-update-goldens"
_ADVICE = "Outputs are recorded in files to commit, beside the tests."
_RECORDED = "weightswap recorded"  # property of a test's report: the path of a recorded file
_FILES = pytest.StashKey[dict[Path, str]]()  # ids of tests, by the file that each has recorded in this run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightswap", "weightswap: exported graphs against the eager model")
    group.addoption(_ENGINES, metavar="NAMES", help="Engines to compare, such as torch,onnx; no test runs others.")
    group.addoption(_UPDATE, action="store_true", help="Record the outputs anew that assert_parity(goldens=...) names.")


def pytest_configure(config: pytest.Config) -> None:
    engines = _engines_option(config)
    unknown = sorted(set(engines or ()) - set(ENGINES))
    if unknown or engines == []:
        raise pytest.UsageError(f"{_ENGINES}: expected {', '.join(ENGINES)}, got {', '.join(unknown) or 'none'}")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    _keep_torch_from_tracing()
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    _keep_torch_from_tracing()
    return (yield)


def _keep_torch_from_tracing() -> None:
    """Remove pytest's handlers from torch's trace logger.

    pytest adds handlers to loggers that do not propagate. With a handler, torch writes trace records, which take time
    and would bury a failure.
    """
    logger = logging.getLogger("torch.__trace")
    for handler in list(logger.handlers):
        if type(handler).__module__.startswith("_pytest."):
            logger.removeHandler(handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    files = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == _RECORDED]
    for text in sorted(set(files)):
        terminalreporter.write_line(f"{_RECORDED} {text}")


def _engines_option(config: pytest.Config) -> list[str] | None:
    names = config.getoption(_ENGINES)
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


@pytest.fixture
def assert_parity(request: pytest.FixtureRequest) -> AssertParity:
    """Callable that fails the test if an exported graph does not compute what the eager model does."""
    return AssertParity(request)


class AssertParity:
    """Value of the fixture `assert_parity`."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._config = request.config
        self._test = request.node
        self._engines = _engines_option(request.config)

    def __call__(
        self,
        model: nn.Module | None,
        artifact: PathLike | Artifact,
        weights: PathLike | None = None,
        cases: Cases | None = None,
        engines: Sequence[str] | None = None,
        devices: Sequence[str] = ("cpu",),
        *,
        tolerance: Tolerance | None = None,
        functions: Mapping[str, str] | None = None,
        goldens: PathLike | None = None,
        seed: int = 0,
    ) -> ParityReport:
        """Compare with `weightswap_exporter.parity.compare`, which has the same arguments; fail if anything differs.

        engines: engines that `--weightswap-engines` leaves out are not run; the test is skipped if none is left.
        goldens: a file below pytest's root directory, for this call alone, with earlier outputs of the eager model. The
        model must still give them for the recorded inputs, which are then those that are compared.
        `--weightswap-update-goldens` writes the file, with `cases` or with generated inputs.

        Raises AssertionError that says what differs, by how much, and from which module on; ParityError if nothing can
        be compared.
        """
        __tracebackhide__ = True
        from .parity import compare

        opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        chosen = self._choose_engines(opened, engines, model)
        problems: list[str] = []
        try:
            if goldens is not None:
                path = self._config.rootpath / goldens
                cases, problems = self._recorded_cases(path, model, opened, cases, tolerance, functions, seed)
            more: dict[str, Any] = {"tolerance": tolerance, "functions": functions, "seed": seed}
            report = compare(model, opened, weights, cases, chosen, devices, **more)
        except ParityError as error:
            raise error.with_traceback(None) from error.__cause__  # the test is where to look
        if problems or not report.same:
            recorded = [f"{goldens}: the eager model gives outputs other than those recorded", *problems]
            raise AssertionError("\n".join([*(recorded if problems else []), *([] if report.same else [report.text])]))
        return report

    def _choose_engines(
        self, artifact: Artifact, engines: Sequence[str] | None, model: nn.Module | None
    ) -> Sequence[str] | None:
        if self._engines is None:
            return engines
        offered = available_engines(artifact) if engines is None else engines
        reference = "torch" if model is None else ""
        chosen = [name for name in offered if name in self._engines and name != reference]
        if not chosen:
            pytest.skip(f"{_ENGINES}={','.join(self._engines)}, but this test has {', '.join(offered)}")
        return chosen

    def _recorded_cases(
        self,
        path: Path,
        model: nn.Module | None,
        artifact: Artifact,
        cases: Cases | None,
        tolerance: Tolerance | None,
        functions: Mapping[str, str] | None,
        seed: int,
    ) -> tuple[Any, list[str]]:
        """Return the recorded calls, and where the eager model's outputs differ from the recorded ones."""
        from weightswap_exporter.parity.executions import recorded_calls

        from .parity import check_outputs, record_outputs

        if model is None:
            raise ParityError(["goldens= records what the eager model gave, but there is no model"], "Give the model.")
        self._check_name(path)
        if self._config.getoption(_UPDATE):
            self._claim(path)
            record_outputs(path, model, artifact, cases, tolerance=tolerance, functions=functions, seed=seed)
            self._test.user_properties.append((_RECORDED, str(path)))
        opened, problems = check_outputs(path, model, artifact, functions=functions)
        calls: dict[str, list[Any]] = {}
        for case in recorded_calls(artifact, [opened]):
            calls.setdefault(case.call.method, []).append((case.call.args, case.call.kwargs))
        return calls, problems

    def _check_name(self, path: Path) -> None:
        """Raise ParityError unless the path names a goldens file below pytest's root directory."""
        root, path = self._config.rootpath.resolve(), path.resolve()
        if not path.name.endswith(GOLDENS_SUFFIX) or not path.is_relative_to(root):
            raise ParityError([f"goldens={str(path)!r}: expected a name *{GOLDENS_SUFFIX} under {root}"], _ADVICE)

    def _claim(self, path: Path) -> None:
        """Raise ParityError if another call of this process has recorded the file."""
        path = path.resolve()
        recorded = self._config.stash.setdefault(_FILES, {})
        if path in recorded:
            advice = "Give each call a file of its own; a parametrised test can put its parameters into the name."
            raise ParityError([f"{path}: was already recorded by {recorded[path]} in this run"], advice)
        recorded[path] = self._test.nodeid
