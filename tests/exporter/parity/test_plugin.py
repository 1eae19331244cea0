"""The pytest plugin, in pytest processes of its own: a module of tests, run with several options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.tiny import TinyArtifact

QUIET = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
SOURCE = """
from pathlib import Path
import pytest, torch
from torch import nn
from weightswap_exporter import export, pack

X = torch.ones(3, 4)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

@pytest.fixture
def model():
    return Net().eval()

@pytest.fixture
def artifact(model, tmp_path):
    return export(model, (X,), out=tmp_path / "net.artifact", dynamic_shapes={"x": {0: torch.export.Dim("rows")}})

def test_net(model, artifact, assert_parity):
    report = assert_parity(model, artifact)
    assert [each.engine for each in report.engines] == ["torch"]
    assert len(report.engines[0].cases) == 6  # sizes, those at the ends of their ranges, and signs

def test_wrong_weights(model, artifact, assert_parity, tmp_path):
    weights = pack(model, artifact, out=tmp_path / "v.safetensors").path
    model.second.bias.data[1] += 0.5
    assert_parity(model, artifact, weights, cases=[(X,)])

def test_named(model, artifact, assert_parity):
    assert_parity(model, artifact, engines=["onnx"])

def test_another_model(artifact, assert_parity):
    assert_parity(nn.Sequential(), artifact)

def test_dropout(tmp_path, assert_parity):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    artifact = export(model.eval(), (X,), out=tmp_path / "a")
    assert_parity(model.train(), artifact)

def test_recorded(model, artifact, assert_parity):
    if Path("changed").exists():
        model.second.bias.data += 0.25
    assert_parity(model, artifact, cases=[(X,)], goldens=Path("kept/net.goldens.safetensors"))

@pytest.mark.parametrize("value", [1, 2])
def test_shared_file(model, artifact, assert_parity, value):
    assert_parity(model, artifact, cases=[(X * value,)], goldens="kept/shared.goldens.safetensors")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin")
    (path / "test_net.py").write_text(SOURCE)
    return path


def run(folder: Path, *options: str) -> tuple[dict[str, str], str]:
    """The outcome of each test, and everything that was printed."""
    command = [warm.python(), "-m", "pytest", *QUIET, "-rA", "--color=no", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    told = [(words[0], words[1]) for words in lines if len(words) == 2 and words[0] in ("PASSED", "FAILED", "SKIPPED")]
    return {place.partition("::")[2].partition(" ")[0]: outcome for outcome, place in told}, text


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[dict[str, str], str]:
    """A run without options, before anything was recorded."""
    return run(folder)


@pytest.mark.slow
def test_a_model_that_agrees_passes(plain: tuple[dict[str, str], str]) -> None:
    assert plain[0]["test_net"] == "PASSED"


@pytest.mark.slow
def test_a_failure_says_which_output_where_how_far_and_from_which_module_on(plain: tuple[dict[str, str], str]) -> None:
    outcomes, text = plain
    assert outcomes["test_wrong_weights"] == "FAILED"
    for line in (
        "torch: 1 of 1 calls differ (compared bit for bit)",
        "  forward, case 0, output: [0, 1]: expected ",
        "3 of 6 elements differ, by at most 0.5 ",
        "  first divergence: second (Linear)",
        "    node linear_1, aten.linear.default of second.weight, second.bias",
        "the model's values differ from the engines' for second.bias",
    ):
        assert line in text
    assert "raise AssertionError(" not in text  # the traceback ends in the test
    assert "    assert_parity(model, artifact, weights, cases=[(X,)])" in text


@pytest.mark.slow
def test_an_invalid_comparison_is_an_error_of_its_own(plain: tuple[dict[str, str], str]) -> None:
    outcomes, text = plain
    assert (outcomes["test_another_model"], outcomes["test_dropout"]) == ("FAILED", "FAILED")
    assert "ParityError: parity: refused" in text
    assert "the model has no such tensor" in text
    assert "not deterministic: two runs of the eager model differ" in text
    assert "pytest_plugin.py" not in text  # the traceback ends in the test
    assert outcomes["test_named"] == "FAILED"
    assert "was not compiled for the engine 'onnx'" in text


@pytest.mark.slow
def test_recorded_outputs_are_kept_and_updated(plain: tuple[dict[str, str], str], folder: Path) -> None:
    outcomes, text = plain
    assert outcomes["test_recorded"] == "FAILED"
    assert "no such file" in text
    assert "--weightswap-update-goldens" in text
    assert "weightswap recorded" not in text
    options = ("-k", "recorded or named", "--weightswap-engines=torch")
    outcomes, text = run(folder, *options, "--weightswap-update-goldens")
    assert outcomes["test_recorded"] == "PASSED"
    assert "SKIPPED [1]" in text
    assert "--weightswap-engines=torch, but this test has onnx" in text
    assert f"weightswap recorded {folder / 'kept' / 'net.goldens.safetensors'}\n" in text
    kept = (folder / "kept" / "net.goldens.safetensors").read_bytes()
    (folder / "changed").touch()
    outcomes, text = run(folder, *options)
    assert outcomes["test_recorded"] == "FAILED"
    assert "the eager model gives outputs other than those recorded" in text
    assert "forward, golden 0, output: [0, 0]: expected " in text
    assert "recorded with weights other than the model has now" in text
    assert (folder / "kept" / "net.goldens.safetensors").read_bytes() == kept


@pytest.mark.parametrize("workers", [0, 1], ids=["one process", "a worker"])
@pytest.mark.slow
def test_one_call_does_not_overwrite_what_another_has_recorded(folder: Path, workers: int) -> None:
    distributed = ("--dist=load", f"--tx=popen//python={warm.python()}") if workers else ()
    outcomes, text = run(folder, "-k", "shared", "--weightswap-update-goldens", *distributed)
    assert outcomes == {"test_shared_file[1]": "PASSED", "test_shared_file[2]": "FAILED"}
    assert "was already recorded by test_net.py::test_shared_file[1]" in text
    assert text.count("weightswap recorded ") == 1


WRITTEN = """
import pytest, torch

@pytest.mark.parametrize("path", ["net.py", "../net.goldens.safetensors", "kept/net.npz"])
def test_it(path, assert_parity):
    assert_parity(torch.nn.Identity(), "tiny.artifact", goldens=path)
"""


def test_only_goldens_of_the_project_are_written(tmp_path: Path) -> None:
    root = tmp_path / "written"
    root.mkdir()
    TinyArtifact(root / "tiny.artifact")
    (root / "test_written.py").write_text(WRITTEN)
    outcomes, text = run(root, "--rootdir=.", "--weightswap-update-goldens")
    assert list(outcomes.values()) == ["FAILED"] * 3
    assert text.count("expected a name *.goldens.safetensors under") >= 3
    assert "torch.__trace" not in text
    assert [path.name for path in tmp_path.rglob("*net*")] == []


def test_unknown_engines_are_refused(folder: Path) -> None:
    _, text = run(folder, "--weightswap-engines=torch,tensorrt")
    assert "--weightswap-engines: expected torch, aoti, onnx, got tensorrt" in text
    assert "passed" not in text


def test_the_plugin_brings_in_no_torch() -> None:
    source = "import sys, weightswap_exporter.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
