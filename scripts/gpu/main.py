"""Runs the steps that need a GPU within a time limit, for `scripts/test_cuda`. It does not import torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import report
from running import ROOT, Run
from steps import all_steps, first_steps

SHARED_MEMORY = Path("/dev/shm")
FIGURES = ("facts.json", "bench.json", "ceilings.json", "cuda.svg")
SETS = 4  # times SIZE_MB: files of the benchmarks, which measure nothing larger where there is no room for it


def main() -> int:
    """Return 0 if every step has passed that can pass here."""
    end = time.monotonic() + float(os.environ.get("TIME_S", "470"))
    parser = _parser()
    options = parser.parse_args()
    chosen = list(filter(None, options.steps.split(",")))
    out = options.folder.resolve()
    groups = all_steps(out)
    known = [step.name for group in groups for step in group]
    if unknown := set(chosen) - set(known):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:  # those of an earlier run
        (out / name).unlink(missing_ok=True)
    with TemporaryDirectory(prefix="weightswap-gpu-") as folder:
        site = Path(folder, "site")
        _prepare(site)
        wheels = sorted((ROOT / os.environ.get("WHEELS", ".whl")).glob("*.whl"))
        groups = [[step for step in group if step.name in (chosen or known)] for group in groups]
        run = Run([first_steps(out, site, wheels), *groups], Path(folder), out, end)
        run.report = partial(report.write, out, run.results)
        try:
            run.report()
            run.go()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        run.report()
    print((out / "report.md").read_text(), end="")
    return 0 if all(result.is_right for result in run.results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/test_cuda", description="What needs a GPU: docs/cuda.md.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("cuda-report"), help="for the report (%(default)s)"
    )
    parser.add_argument("--steps", default="", help="the names of some, with commas; else all")
    return parser


def _prepare(site: Path) -> None:
    """Set the environment of the steps' processes: paths of the sources, and of packages that the interpreter lacks."""
    site.mkdir()
    paths = [str(path) for path in (ROOT / "exporter", ROOT / "runtime", ROOT / "scripts" / "gpu", site)]
    sys.path[:0] = paths  # the steps' needs are looked for there first, as their processes do
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # with it results differ from the CPU's
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits in every stream
    if _free(SHARED_MEMORY) > SETS * int(os.environ.get("SIZE_MB", "4000")) * 1_000_000:
        os.environ["TMPDIR"] = str(SHARED_MEMORY)  # writing to a disk would take most of the time


def _free(folder: Path) -> int:
    if not folder.exists():
        return 0
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


if __name__ == "__main__":
    sys.exit(main())
