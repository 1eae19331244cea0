"""The command for machines with a GPU, on one without."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT

SCRIPT, EMULATED = ROOT / "scripts" / "test_cuda", ROOT / "scripts" / "test_emulated"
GPU = ROOT / "scripts" / "gpu"
RUN = f"""
import sys
sys.path.insert(0, {str(GPU)!r})
import main, running
from steps import Step

running.GRACE = 1.0

first = main.first_steps
steps = lambda group: [Step(**fields) for fields in group]
main.first_steps = lambda *arguments: steps(FIRST) if FIRST is not None else first(*arguments)[1:]
main.all_steps = lambda out: [steps(group) for group in PLAN]
sys.exit(main.main())
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so that it would run for minutes")
@pytest.mark.slow
def test_without_a_gpu_nothing_is_reported_as_passed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(SCRIPT), str(tmp_path / "report")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "scripts/test_cuda needs a GPU, but torch finds none here" in done.stdout
    found = states(done.stdout)
    assert found.pop("facts") == "**failed**"
    assert set(found.values()) == {"**not reached**"}


Fields = dict[str, Any]


def step(name: str, text: str = "true", limit: float = 30, **others: Any) -> Fields:
    """Return the fields of a step that runs a text in a shell."""
    return {"name": name, "command": ("bash", "-c", text), "limit": limit, "needs": (), **others}


class Running:
    """The program with steps of the test's own; `first` is its first group, which None leaves as it is."""

    def __init__(
        self,
        folder: Path,
        *groups: list[Fields],
        first: Sequence[Fields] | None = (),
        steps: str = "",
        **environment: str,
    ) -> None:
        self.folder = folder / "report"
        code = RUN.replace("FIRST", repr(first)).replace("PLAN", repr(groups))
        known = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), "--steps", steps],
            env=known,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

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
        """Wait until the report contains a text."""
        until = time.monotonic() + 120
        while text not in self.report:
            assert time.monotonic() < until, self.report
            time.sleep(0.05)

    def archived(self) -> dict[str, str]:
        """Return the contents of the archive."""
        if not (self.folder / "all.tar.gz").exists():
            return {}
        with tarfile.open(self.folder / "all.tar.gz") as archive:
            files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
            return {name: file.read().decode() for name, file in files.items() if file is not None}


def states(report: str) -> dict[str, str]:
    """Return the states of the steps in a report."""
    heads, table, *_ = report.split("\n\n")
    assert heads == "# A run on a GPU"
    head, _, *rows, sums = table.splitlines()
    assert head == "| step | result | tests passed | failed | skipped | not reached | seconds |  |"
    assert sums.startswith("|  |  | ")
    return {row.split(" | ")[0].strip("| "): row.split(" | ")[1].strip() for row in rows}


def row(report: str, name: str) -> list[str]:
    """Return the cells of a step behind its name."""
    [line] = re.findall(rf"^\| {name} \| (.*) \|$", report, re.MULTILINE)
    return [cell.strip() for cell in line.split(" | ")]


SUITE = """
import atexit, os, time, pytest

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def late():
    yield
    raise ValueError

def test_passes(): pass
def test_fails(): raise ValueError
@pytest.mark.skip
def test_is_skipped(): pass
def test_of_a_broken_setup(broken): pass
def test_of_a_broken_end(late): pass
def test_hangs(): time.sleep(300)
def test_after(): pass
def test_dies(): os._exit(3)
def test_stays(): atexit.register(time.sleep, 300)
"""


def suite(folder: Path, name: str, names: str, *options: str, limit: float = 30) -> Fields:
    """Return the fields of a step with those tests of SUITE that match a pattern of names."""
    path = folder / "test_suite.py"
    path.write_text(SUITE)
    lone = ("-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder), "-p", "outcomes")
    command = (sys.executable, "-m", "pytest", *lone, str(path), "-k", names, *options)
    return {"name": name, "command": command, "limit": limit, "needs": (), "tests": True}


def test_facts_that_are_late_or_fail_keep_nothing_from_running(tmp_path: Path) -> None:
    for late, state in ((step("facts", "sleep 60", 1), "ended"), (step("facts", "kill -SEGV $$"), "failed")):
        code, report = Running(tmp_path, [step("one")], first=[late]).end()
        assert (code, states(report)) == (1, {"facts": f"**{state}**", "one": "passed"})


def test_without_a_gpu_nothing_else_runs(tmp_path: Path) -> None:
    first = [step("facts", "echo no GPU here; exit 69"), step("packages")]
    code, report = Running(tmp_path, [step("one")], first=first).end()
    assert (code, states(report)) == (1, {"facts": "**failed**", "packages": "passed", "one": "**not reached**"})
    assert "```\nno GPU here\n```" in report


def test_a_step_that_hangs_or_fails_keeps_no_other_from_its_place_in_the_report(tmp_path: Path) -> None:
    failing, hanging = step("one", "echo wrong output; exit 3"), step("two", "echo begun; exec sleep 300", 1)
    code, report = Running(tmp_path, [step("zero"), failing], [hanging], [step("three")]).end()
    assert code == 1
    assert states(report) == {"zero": "passed", "one": "**failed**", "two": "**ended**", "three": "passed"}
    assert (row(report, "one")[-1], row(report, "two")[-1]) == ("exit code 3", "after 1 s")
    assert "## one: **failed**\n\n```\nwrong output\n```\n" in report
    assert "## two: **ended**\n\n```\nbegun\n```\n" in report


@pytest.mark.slow
def test_what_has_no_time_left_is_not_reached(tmp_path: Path) -> None:
    plan = [step("two", "exec sleep 300")], [step("one")], [suite(tmp_path, "three", "passes")]
    code, report = Running(tmp_path, *plan, TIME_S="10").end()
    assert code == 1
    assert states(report) == {"two": "**ended**", "one": "**not reached**", "three": "**not reached**"}
    assert row(report, "three") == ["**not reached**", "", "", "", "all", "", "no time was left"]


def test_every_test_has_its_place_in_the_report(tmp_path: Path) -> None:
    dying, hanging = suite(tmp_path, "die", "passes or dies"), suite(tmp_path, "hang", "not dies and not stays")
    running = Running(tmp_path, [dying], [hanging])
    running.wait_for("- `test_suite.py::test_hangs`\n")
    assert row(running.report, "hang")[0] == "**running**"
    running.process.terminate()
    code, report = running.end()
    assert code == 1
    died, hung = row(report, "die"), row(report, "hang")
    assert died[:5] == ["**failed**", "1", "0", "0", "1"], report
    assert died[6] == "exit code 3, in test_suite.py::test_dies"
    assert hung[:5] == ["**ended**", "1", "3", "1", "2"], report
    assert hung[6] == "with the run, in test_suite.py::test_hangs"
    failed = "\n".join(f"- `test_suite.py::test_{name}`" for name in ("fails", "of_a_broken_setup", "of_a_broken_end"))
    assert f"## Failed\n\n{failed}\n" in report
    assert "## Begun and not ended\n\n- `test_suite.py::test_dies`\n- `test_suite.py::test_hangs`\n" in report


@pytest.mark.slow
def test_tests_of_several_workers_are_counted_once(tmp_path: Path) -> None:
    some = suite(tmp_path, "some", "passes or fails or skipped", "-p", "xdist", "-n", "2")
    _, report = Running(tmp_path, [some]).end()
    assert row(report, "some")[:5] == ["**failed**", "1", "1", "1", "0"], report


@pytest.mark.slow
def test_a_process_that_does_not_end_after_its_tests_has_passed_them(tmp_path: Path) -> None:
    code, report = Running(tmp_path, [suite(tmp_path, "stays", "passes or stays", limit=15)]).end()
    assert (code, states(report)) == (0, {"stays": "passed"})
    assert row(report, "stays")[-1] == "its process was ended after 15 s"


def test_what_lacks_something_or_ran_no_test_is_skipped_and_never_passed(tmp_path: Path) -> None:
    steps = [
        step("package", needs=("pytest", "no-such", "torch>=99.1")),
        step("file", needs=("/bin/true", "/nowhere/program")),
        suite(tmp_path, "all", "skipped"),
        suite(tmp_path, "none", "nothing"),
        suite(tmp_path, "failed", "fails"),
        suite(tmp_path, "broken", "passes", "--no-such-option"),
    ]
    code, report = Running(tmp_path, steps).end()
    assert code == 1
    skipped = dict.fromkeys(("package", "file", "all", "none"), "**skipped**")
    assert states(report) == {**skipped, "failed": "**failed**", "broken": "**failed**"}
    assert row(report, "package")[-1] == "missing here: no-such, torch>=99.1"
    assert row(report, "file")[-1] == "missing here: /nowhere/program"
    assert (row(report, "all")[-1], row(report, "none")[-1]) == ("no test ran", "no test ran")


def test_what_cannot_pass_here_is_left_out_and_is_no_failure(tmp_path: Path) -> None:
    newer = step("two", "false", needs=("no-such",), only_with=("pytest>=7", "torch>=99", "nor-this"))
    code, report = Running(tmp_path, [step("one"), newer]).end()
    assert (code, states(report)) == (0, {"one": "passed", "two": "left out"})
    assert row(report, "two")[-1] == "needs torch>=99, nor-this"


@pytest.mark.slow
def test_steps_of_a_group_run_beside_each_other_each_within_its_own_limit(tmp_path: Path) -> None:
    one, other = (
        step(mine, f"cd {tmp_path}; touch {mine}; while [ ! -e {its} ]; do sleep 0.05; done", 20)
        for mine, its in ("ab", "ba")
    )
    code, report = Running(tmp_path, [one, other], [step("first", "sleep 1.5")], [step("second", "sleep 1.5", 2)]).end()
    assert code == 0, report


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_run_that_is_killed_at_any_time_leaves_a_whole_report(seed: int, tmp_path: Path) -> None:
    figures = json.dumps([{"what": "cores", "value": 16, "unit": ""}] * 50)
    loud = f"cd {tmp_path}; for i in $(seq 100); do echo line $i; echo '{figures}' >new; "
    steps = [step(f"step {index}", f"{loud}mv new report/ceilings.json; sleep 0.02; done") for index in range(3)]
    running = Running(tmp_path, *([each] for each in steps))
    running.wait_for("# A run on a GPU")
    time.sleep(random.Random(seed).random() * (8 if seed else 2))
    running.process.kill()
    running.process.communicate()
    report, archived = running.report, running.archived()
    assert list(states(report)) == [each["name"] for each in steps]
    assert report.endswith("\n")
    assert report.count("```") % 2 == 0
    assert list(states(archived["report.md"])) == list(states(report))
    assert set(archived) <= {"report.md", "ceilings.json", *(f"steps/step-{index}.txt" for index in range(3))}


def test_an_interrupted_run_ends_its_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    running = Running(tmp_path, [step("two", f'trap "" INT; echo $$ >{pid}; sleep 300; true')])
    running.wait_for("**running**")
    while not pid.exists() or not pid.read_text().strip():
        time.sleep(0.05)
    running.process.terminate()
    code, report = running.end()
    assert (code, states(report)) == (1, {"two": "**ended**"})
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_some_steps_alone_are_run_if_they_are_named(tmp_path: Path) -> None:
    code, report = Running(tmp_path, [step("one"), step("two", "exit 1")], steps="one").end()
    assert (code, states(report)) == (0, {"one": "passed"})


def test_a_step_that_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    process = Running(tmp_path, [step("one"), step("slow streams")], steps="one,slow stream").process
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.endswith("error: no step is called slow stream; there are one, slow streams\n")
    assert not (tmp_path / "report").exists()


def test_figures_are_tables_of_the_report_as_far_as_they_were_measured(tmp_path: Path) -> None:
    goal = {"figure": "ratio", "sense": "at most", "limit": 0.25}
    measured = {
        "what": "swap",
        "unit": "ms",
        "median": 12.345,
        "p99": None,
        "peer": "a copy",
        "peer_median": 100,
        "ratio": 0.12,
    }
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [measured | {"goal": goal, "met": True}]}))
    (tmp_path / "ceilings.json").write_text(json.dumps([{"what": "cores", "value": 16, "unit": ""}]))
    (tmp_path / "facts.json").write_text(json.dumps({"GPU": "none | at all"}))
    _, report = Running(tmp_path, [step("benchmarks", f"cp {tmp_path}/*.json {tmp_path}/report; sleep 300", 1)]).end()
    assert "| GPU | none \\| at all |" in report
    assert "| cores | 16 |  |" in report
    assert "| swap | 12.35 |  | ms | ratio at most 0.25 | yes | a copy | 100 | 0.12 |" in report


def test_figures_of_an_earlier_run_are_not_reported(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    for name, content in (("ceilings.json", '[{"what": "old", "value": 1, "unit": ""}]'), ("mine.json", "{}")):
        (tmp_path / "report" / name).write_text(content)
    _, report = Running(tmp_path, [step("one")]).end()
    assert "old" not in report
    assert (tmp_path / "report" / "mine.json").exists()


@pytest.mark.slow
def test_packages_that_are_missing_come_from_wheels(tmp_path: Path) -> None:
    contents = {
        "lent_package.py": "print('lent')",
        "lent_package-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lent-package\nVersion: 1.0\n",
        "lent_package-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "lent_package-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "lent_package-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in contents.items():
            wheel.writestr(name, text)
    shutil.copy(tmp_path / "lent_package-1.0-py3-none-any.whl", tmp_path / "a_package-1.0-cp27-cp27m-win32.whl")
    lent = step("lent", f"{sys.executable} -c 'import lent_package'", needs=("lent-package",))
    code, report = Running(tmp_path, [lent], first=None, WHEELS=str(tmp_path)).end()
    assert code == 0, report
    assert "## packages: passed" in report
    assert "a_package-1.0-cp27-cp27m-win32.whl is not installed" in report
    assert "## lent: passed\n\n```\nlent\n```" in report


@cache
def planned() -> list[list[Fields]]:
    """Return the groups of steps as they are."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import dataclasses, json, pathlib, steps\n"
    code += "groups = steps.all_steps(pathlib.Path('out'))\n"
    code += "print(json.dumps([[dataclasses.asdict(step) for step in group] for group in groups]))"
    done = subprocess.run([sys.executable, "-c", code, str(GPU)], capture_output=True, text=True, check=True)
    groups: list[list[Fields]] = json.loads(done.stdout)
    return groups


def test_what_matters_most_comes_first_and_what_measures_time_is_alone() -> None:
    names = [[each["name"] for each in group] for group in planned()]
    first = [
        "slow streams",
        "storm",
        "large swaps",
        "hashing on the device",
        "benchmarks",
        "rows",
        "given tensors",
        "devices",
        "ceilings",
    ]
    assert names[: len(first)] == [[name] for name in first]
    flat = [name for group in names for name in group]
    assert len(set(flat)) == len(flat)
    before = sum(group[0]["limit"] for group in planned()[: first.index("benchmarks")])
    assert before <= 360, "the benchmarks would have no time"


def test_tests_beside_each_other_leave_processors_to_each_other() -> None:
    commands = [each["command"] for group in planned() for each in group if len(group) > 1]
    assert len(commands) > 3
    assert all("OMP_NUM_THREADS=4" in command for command in commands)


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
