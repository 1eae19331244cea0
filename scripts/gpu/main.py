"""Runs the steps that need a GPU within a time limit, for `scripts/test_cuda`. It does not import torch."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import report
from running import ROOT, Run
from steps import all_steps

FACTS = (sys.executable, "scripts/gpu/facts.py")
FACTS_LIMIT = 180.0  # seconds


def main() -> int:
    """Return 0 if every step has passed, 1 if one has not or there is no GPU."""
    end = time.monotonic() + float(os.environ.get("TIME_S", "570"))
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with TemporaryDirectory(prefix="weightswap-gpu-") as folder:
        _prepare(Path(folder, "site"))
        facts = _facts()
        if facts is None:
            return 1
        out = options.folder.resolve()
        out.mkdir(parents=True, exist_ok=True)
        groups = [[step for step in group if _is_selected(step.name, options.steps)] for group in all_steps(out)]
        run = Run(groups, Path(folder), end)
        run.changed = partial(report.write, out, facts, run.results)
        try:
            run.go()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        report.write(out, facts, run.results)
    print((out / "report.md").read_text(), end="")
    return 0 if all(result.passed for result in run.results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/test_cuda", description="What needs a GPU: docs/cuda.md.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("cuda-report"), help="for the report (%(default)s)"
    )
    parser.add_argument("--steps", default="", help="the names of some, with commas; else all")
    return parser


def _is_selected(name: str, names: str) -> bool:
    return not names or name in names.split(",")


def _prepare(site: Path) -> None:
    """Set the environment of the steps' processes: paths of the sources and of packages that the interpreter lacks."""
    wheels = sorted(Path(os.environ["WHEELS"]).glob("*.whl")) if os.environ.get("WHEELS") else []
    if wheels and not _installed(wheels, site):
        for wheel in wheels:  # one by one, as a wheel for another interpreter would stop the others
            if not _installed([wheel], site):
                print(f"{wheel.name}: pip cannot install it; what needs it is skipped", file=sys.stderr)
    paths = [str(path) for path in (ROOT / "exporter", ROOT / "runtime", site)]
    sys.path += paths  # for `find_spec`
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # with it results differ from the CPU's
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits in every stream


def _installed(wheels: Sequence[Path], site: Path) -> bool:
    options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site))
    command = (sys.executable, "-m", "pip", "install", *options, *map(str, wheels))
    try:
        return subprocess.run(command, check=False, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _facts() -> dict[str, object] | None:
    """Return facts about the machine and its software. If there is no GPU, print why and return None."""
    try:
        done = subprocess.run(FACTS, cwd=ROOT, capture_output=True, text=True, timeout=FACTS_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        return {"facts": f"none: scripts/gpu/facts.py took longer than {error.timeout:.0f} s"}
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        return None
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


if __name__ == "__main__":
    sys.exit(main())
