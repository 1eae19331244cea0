"""The command for machines with a GPU, on one without."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests import ROOT

SCRIPT, EMULATED = ROOT / "scripts" / "test_cuda", ROOT / "scripts" / "test_emulated"
GPU = ROOT / "scripts" / "gpu"
RUN = f"""
import sys
sys.path.insert(0, {str(GPU)!r})
import main
from steps import Step

def step(name, text, limit=30, packages=(), files=(), tests=False):
    return Step(name, ("bash", "-c", text), limit, packages, files, tests)

main._facts = lambda: {{"GPU": "none | at all"}}
main.all_steps = lambda out: PLAN
sys.exit(main.main())
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so that it would run for minutes")
@pytest.mark.slow
def test_without_a_gpu_nothing_is_reported_as_passed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(SCRIPT), str(tmp_path / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "scripts/test_cuda needs a GPU, but torch finds none here"
    assert not (tmp_path / "report").exists()


class Running:
    """The program with steps of the test's own."""

    def __init__(self, folder: Path, plan: str, *arguments: str, **environment: str) -> None:
        self.folder = folder / "report"
        command = [sys.executable, "-c", RUN.replace("PLAN", plan), str(self.folder), *arguments]
        known = os.environ | environment
        self.process = subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def end(self) -> tuple[int, str]:
        """Wait for the end. Return the exit code, and the report that was printed."""
        said, _ = self.process.communicate(timeout=120)
        assert said.endswith(self.report), said
        return self.process.returncode, self.report

    @property
    def report(self) -> str:
        path = self.folder / "report.md"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str) -> None:
        """Wait until the report contains a text, and the archive that report."""
        until = time.monotonic() + 60
        while text not in (report := self.report) or self.archived().get("report.md") != report:
            assert time.monotonic() < until, self.report
            time.sleep(0.05)

    def archived(self) -> dict[str, str]:
        """Return the contents of the archive."""
        if not (self.folder / "all.tar.gz").exists():
            return {}
        with tarfile.open(self.folder / "all.tar.gz") as archive:
            files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
            return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_facts_that_are_late_keep_nothing_from_running(tmp_path: Path) -> None:
    late = "main.FACTS, main.FACTS_LIMIT = ('sleep', '60'), 0.1"
    code = RUN.replace("PLAN", f"[[{PASSING}]]")
    code = re.sub(r"main\._facts = .*", late, code)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| facts | none: scripts/gpu/facts.py took longer than 0 s |" in done.stdout
    assert "| one | passed |" in done.stdout


PASSING = "step('one', 'echo ==== 3 passed, 1 skipped in 0.12s ====', tests=True)"


@pytest.mark.slow
def test_a_step_that_hangs_or_fails_keeps_no_other_from_its_place_in_the_report(tmp_path: Path) -> None:
    hanging = "step('two', 'echo begun; exec sleep 300')"
    failing = "step('three', 'echo wrong output; exit 3')"
    code, report = Running(tmp_path, f"[[{PASSING}, {failing}], [{hanging}], [{PASSING}]]", TIME_S="14").end()
    assert code == 1
    assert "| one | passed | 0 | 3 passed, 1 skipped in 0.12s |" in report
    assert re.search(r"^\| two \| \*\*ended after \d+ s\*\* \| \d+ \|  \|$", report, re.MULTILINE)
    assert re.search(r"^## two: \*\*ended after \d+ s\*\*\n\n```\nbegun\n```$", report, re.MULTILINE)
    assert "## three: **failed (3)**\n\n```\nwrong output\n```\n" in report
    assert "| one | **skipped** | 0 | missing here: time |" in report
    assert "| GPU | none \\| at all |" in report


def test_what_lacks_something_or_ran_no_test_is_skipped_and_never_passed(tmp_path: Path) -> None:
    steps = [
        "step('package', 'echo 1 passed in 1.00s', packages=('json', 'no_such', 'nor_this'))",
        "step('file', 'echo 1 passed in 1.00s', files=('README.md', 'tests/nowhere.py'))",
        "step('all', 'echo 12 skipped, 3 deselected in 0.50s', tests=True)",
        "step('none', 'echo no tests ran in 0.01s; exit 5', tests=True)",
        "step('some', 'echo 1 passed, 12 skipped, 3 warnings in 71.50s \\(0:01:11\\)', tests=True)",
        "step('silent', 'true', tests=True)",
        "step('failed', 'echo 1 failed, 2 passed in 0.50s; exit 1', tests=True)",
        "step('broken', 'echo 1 error in 0.50s; exit 2', tests=True)",
    ]
    code, report = Running(tmp_path, f"[[{', '.join(steps)}]]").end()
    assert code == 1
    found = dict(re.findall(r"^\| (\w+) \| (.*) \| \d+ \| ", report, re.MULTILINE))
    skipped = dict.fromkeys(("package", "file", "all", "none", "silent"), "**skipped**")
    assert found == {**skipped, "some": "passed", "failed": "**failed (1)**", "broken": "**failed (2)**"}
    assert "missing here: no_such, nor_this |" in report
    assert "missing here: tests/nowhere.py |" in report
    assert "no test ran: 12 skipped, 3 deselected in 0.50s |" in report


@pytest.mark.slow
def test_steps_of_a_group_run_beside_each_other_each_within_its_own_limit(tmp_path: Path) -> None:
    waiting = "step('a', 'touch a; while [ ! -e b ]; do sleep 0.05; done', 20)"
    other = "step('b', 'touch b; while [ ! -e a ]; do sleep 0.05; done', 20)"
    start = f"cd {tmp_path}; "
    late = "[step('first', 'sleep 1.5')], [step('second', 'sleep 1.5', 2)]"
    plan = f"[[{waiting}, {other}], {late}]".replace("'touch", f"'{start}touch")
    code, report = Running(tmp_path, plan).end()
    assert code == 0, report
    assert re.search(r"^\| second \| passed \| [12] \| ", report, re.MULTILINE)


def test_a_killed_run_leaves_its_report_and_an_archive(tmp_path: Path) -> None:
    running = Running(tmp_path, f"[[{PASSING}], [step('two', 'echo begun; exec sleep 5')], [{PASSING}]]")
    running.wait_for("| two | **running** |")
    running.process.kill()
    running.process.communicate()
    states = re.findall(r"^\| (?:one|two) \| (.*?) \|", running.report, re.MULTILINE)
    assert states == ["passed", "**running**", "**waiting**"]
    archived = running.archived()
    assert archived["steps/one.txt"] == "==== 3 passed, 1 skipped in 0.12s ====\n"
    assert archived["report.md"] == running.report
    assert len(list(running.folder.iterdir())) == 2


def test_an_interrupted_run_ends_its_processes(tmp_path: Path) -> None:
    running = Running(tmp_path, f"[[step('two', 'trap \"\" INT; echo $$ >{tmp_path}/pid; sleep 300; true')]]")
    running.wait_for("**running**")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.05)
    running.process.terminate()
    code, report = running.end()
    assert code == 1
    assert "| two | **ended** |" in report
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_some_steps_alone_are_run_if_they_are_named(tmp_path: Path) -> None:
    code, report = Running(tmp_path, f"[[{PASSING}, step('two', 'exit 1')]]", "--steps", "one").end()
    assert (code, "two" in report) == (0, False)


def test_figures_are_tables_of_the_report_as_far_as_they_were_measured(tmp_path: Path) -> None:
    goal = {"figure": "ratio", "sense": "at most", "limit": 0.25}
    row = {
        "what": "swap",
        "unit": "ms",
        "median": 12.345,
        "p99": None,
        "peer": "a copy",
        "peer_median": 100,
        "ratio": 0.12,
    }
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row | {"goal": goal, "met": True}]}))
    (tmp_path / "ceilings.json").write_text(json.dumps([{"what": "cores", "value": 16, "unit": ""}]))
    text = f"cp {tmp_path}/*.json {tmp_path}/report; exec sleep 300"
    _, report = Running(tmp_path, f"[[step('benchmarks', '{text}', 1)]]").end()
    assert "| cores | 16 |  |" in report
    assert "| swap | 12.35 |  | ms | ratio at most 0.25 | yes | a copy | 100 | 0.12 |" in report


@pytest.mark.slow
def test_packages_that_are_missing_come_from_wheels(tmp_path: Path) -> None:
    facts = {
        "lent_package.py": "print('lent')",
        "lent_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lent-package\nVersion: 1.0\n",
        "lent_package-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "lent_package-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "lent_package-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in facts.items():
            wheel.writestr(name, text)
    shutil.copy(tmp_path / "lent_package-1.0-py3-none-any.whl", tmp_path / "a_package-1.0-cp27-cp27m-win32.whl")
    text = f"{sys.executable} -c \\'import lent_package\\'"
    plan = f"[[step('lent', '{text}', packages=('lent_package',))]]"
    code, report = Running(tmp_path, plan, WHEELS=str(tmp_path)).end()
    assert code == 0, report
    # a wheel for another interpreter is ignored
    assert "## lent: passed\n\n```\nlent\n```" in report


def test_every_step_has_a_name_of_its_own_and_fits_the_time() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import steps, pathlib\n"
    code += "for group in steps.all_steps(pathlib.Path('out')): print([(step.name, step.limit) for step in group])"
    done = subprocess.run([sys.executable, "-c", code, str(GPU)], capture_output=True, text=True, check=True)
    groups: list[list[tuple[str, float]]] = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    names = [name for group in groups for name, _ in group]
    assert len(set(names)) == len(names)
    timed = next(place for place, group in enumerate(groups) if group[0][0] == "benchmarks")
    before = sum(max(limit for _, limit in group) for group in groups[:timed])
    assert before <= 300, "the benchmarks would have no time"


def test_tests_beside_each_other_leave_processors_to_each_other() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import steps, pathlib\n"
    code += "print([step.command[:2] for group in steps.all_steps(pathlib.Path('out')) for step in group[1:]])"
    done = subprocess.run([sys.executable, "-c", code, str(GPU)], capture_output=True, text=True, check=True)
    commands = ast.literal_eval(done.stdout)
    assert len(commands) > 3
    assert set(commands) == {("env", "OMP_NUM_THREADS=4")}


BARE = """
import importlib.machinery, importlib.metadata, re, sys

def closure(names):
    found, waiting = set(), list(names)
    while waiting:
        name = re.sub("[-_.]+", "-", waiting.pop().lower())
        if name not in found:
            found.add(name)
            try:
                needs = importlib.metadata.requires(name) or ()
                waiting += [re.match(r"[\\w.-]+", each)[0] for each in needs if "extra ==" not in each]
            except importlib.metadata.PackageNotFoundError:
                pass
    return found

known = closure(sys.argv.pop(1).split(","))
theirs = importlib.metadata.packages_distributions()
known |= {"weightswap", "setuptools"}
absent = {top for top, of in theirs.items() if not known & {re.sub("[-_.]+", "-", each.lower()) for each in of}}

class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in absent else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_tests_for_a_gpu_are_found_where_there_is_no_package_but_those_that_are_listed() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import steps; print(','.join(steps.TESTS))"
    listed = subprocess.run([sys.executable, "-c", code, str(GPU)], capture_output=True, text=True, check=True).stdout
    files = [
        f"tests/devices/test_{name}.py"
        for name in ("slow_streams", "large_swaps", "accelerator", "crossing_states", "device_digests")
    ]
    files += ["tests/promises/never_a_mixture/test_storm.py", "tests/exporter/parity/test_compare.py"]
    command = [sys.executable, "-c", BARE, listed.strip(), "-m", "cuda", "-p", "no:cacheprovider", "-q"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, "--collect-only", *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:
        assert re.search(rf"^{file}: \d+$", done.stdout, re.MULTILINE), done.stdout


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    asking = re.compile(r"^@(on_accelerator|on_every_device|pytest\.mark\.cuda)", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py") if asking.search(path.read_text())}
    assert found - named_in(GPU / "steps.py") == {"tests/devices/test_ceilings.py"}  # a step measures them
    assert {file for file in named_in(GPU / "steps.py") - found if (ROOT / file).exists()} == set()
    onnx = {
        "tests/devices/test_onnx.py",
        *(f"tests/runtime/engines/{name}.py" for name in ("test_methods_engines", "test_statistics")),
    }
    assert found - named_in(EMULATED) == onnx  # ONNX Runtime brings kernels of its own


def named_in(script: Path) -> set[str]:
    """The files with tests that a script names."""
    return set(re.findall(r"tests/[\w/]+\.py", script.read_text())) - {"tests/emulator/sitecustomize.py"}


def test_what_the_emulation_leaves_out_is_there() -> None:
    left_out = re.findall(r'"(tests/\S+\.py)::(\w+)\[', EMULATED.read_text())
    assert left_out
    for file, name in left_out:
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this is torch's CUDA build")
@pytest.mark.slow
def test_the_emulation_asks_for_the_cuda_build_of_torch() -> None:
    command = [str(EMULATED)]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"scripts/test_emulated needs the CUDA build of torch: this is {torch.__version__}"
