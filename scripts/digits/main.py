"""The demo: a CNN learns to read digits, and a server takes each checkpoint live, under traffic."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from processes import Children, DemoError
from report import Document, summarise, write_summary
from screen import Screen
from story import Options, Outcome, Story
from timeline import draw_timeline


def _parse() -> Options:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="folder of the report (demo-report)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs to train (8)")
    parser.add_argument("--residency", choices=("double", "single"), default="double", help="(double)")
    parser.add_argument("--pace", type=float, default=2.5, help="seconds that an epoch takes at least (2.5)")
    parser.add_argument("--rate", type=float, default=150.0, help="requests per second of each client (150)")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs: at least 1, or there is nothing to roll back to")
    if options.pace <= 0 or options.rate <= 0:
        parser.error("--pace and --rate: more than 0")
    return Options(**vars(options))


def _run(options: Options, screen: Screen) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="weightswap-demo-") as name:
        folder = Path(name)
        with Children(folder) as children:
            return Story(options, folder, children, screen).play()


def _conclude(summary: Document, options: Options) -> str:
    totals = summary["totals"]
    if summary["ok"]:
        verdict = (
            f"passed: {totals['requests']} answers checked, 0 wrong, 0 mixed; "
            f"{len(summary['refused'])} damaged files refused; rollback correct; no model source in the server"
        )
    else:
        verdict = "\n".join(["FAILED", *(f"  - {failure}" for failure in summary["failures"])])
    return f"{verdict}\nreport: {options.out}/summary.json, {options.out}/timeline.png"


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Exit status: 0 if every promise was kept, else 1."""
    started = time.monotonic()
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    summary_path, timeline_path = options.out / "summary.json", options.out / "timeline.png"
    for old in (summary_path, timeline_path):
        old.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with Screen(started) as screen:
            outcome = _run(options, screen)
            screen.close(outcome.ledger)
    except DemoError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    draw_timeline(timeline_path, outcome.ledger, f"weightswap: live swaps, residency {options.residency}")
    summary = summarise(outcome, options, time.monotonic() - started)
    write_summary(summary_path, summary)
    print(_conclude(summary, options))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
