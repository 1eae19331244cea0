"""The demo: a CNN learns to read digits, and a server takes each checkpoint live, under traffic.

With `--live` the trainer sends its weights from memory, every few steps, is killed once while it sends, and diverges
once. With `--ranks` two processes have the model together, each a part of the weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from live import Live
from processes import Children, DemoError
from ranks import Ranks
from report import Document, summarise, write_summary
from screen import Screen
from story import Options, Outcome, Story
from timeline import draw_timeline


def _parse() -> Options:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="folder of the report (demo-report)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs to train (8)")
    parser.add_argument("--residency", choices=("double", "single"), default="double", help="of the server (double)")
    parser.add_argument("--pace", type=float, default=2.5, help="minimum seconds of an epoch (2.5)")
    parser.add_argument("--rate", type=float, default=150.0, help="requests per second of each client (150)")
    parser.add_argument("--live", action="store_true", help="the trainer sends from memory, every few steps; no files")
    parser.add_argument("--ranks", action="store_true", help="two processes have the model together, under torchrun")
    parser.add_argument("--serve", action="store_true", help="serve over HTTP, too, and keep the operator's page up")
    options = parser.parse_args()
    if options.serve and not importlib.util.find_spec("starlette"):
        parser.error("--serve: needs the extra `serve`; scripts/setup demo,serve (or: pip install 'weightswap[serve]')")
    if options.ranks and (options.live or options.serve):
        parser.error("--ranks: not together with --live or --serve")
    if options.epochs < 1:
        parser.error("--epochs: must be at least 1, or there is nothing to roll back to")
    if options.pace <= 0 or options.rate <= 0:
        parser.error("--pace and --rate: must be greater than 0")
    return Options(**vars(options))


@contextmanager
def _played(options: Options, started: float) -> Iterator[Outcome]:
    """Play the story; a server with an operator's page stays up during the block."""
    with tempfile.TemporaryDirectory(prefix="weightswap-demo-") as name, Children(Path(name)) as children:
        with Screen(started) as screen:
            outcome = _story(options)(options, Path(name), children, screen).play()
            screen.close(outcome.ledger)
        yield outcome


def _story(options: Options) -> type[Story]:
    if options.ranks:
        return Ranks
    return Live if options.live else Story


def _keep_up(page: dict[str, str]) -> None:
    with suppress(KeyboardInterrupt):
        print(f"the operator's page: {page['address']}  token: {page['token']}  (Ctrl-C ends it)", flush=True)
        signal.pause()


def _conclude(summary: Document, options: Options) -> str:
    totals, refused = summary["totals"], ", ".join(each["error"] for each in summary["refused"])
    counts = ", ".join(f"{totals[kind]} {kind}" for kind in ("wrong", "mixed", "stale"))
    lines = [
        "passed" if summary["ok"] else "FAILED",
        *(f"  - {failure}" for failure in summary["failures"]),
        f"{totals['requests']} answers checked: {counts}; refused: {refused or 'nothing'}",
        *(_about_sending(summary["sending"]) if options.live else []),
        f"report: {options.out}/summary.json, {options.out}/timeline.png",
    ]
    return "\n".join(lines)


def _about_sending(sending: Document) -> list[str]:
    return [
        f"{sending['steps_served']} steps served, {sending['superseded']} overtaken by later ones before they had left",
        f"from `send` until served: {sending['until_served_p50_ms']:.1f} ms (median); "
        f"the trainer was held for {sending['trainer_held_p50_ms']:.1f} ms of that (median), "
        f"{sending['trainer_held_ms']:.0f} ms in all",
        f"killed in the middle of sending step {sending['killed_at_step']}: "
        f"{sending['answers_without_trainer']} answers until another one went on",
    ]


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Run the demo. Exit status: 0 if every promise was kept, else 1."""
    started = time.monotonic()
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    summary_path, timeline_path = options.out / "summary.json", options.out / "timeline.png"
    for old in (summary_path, timeline_path):
        old.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what they start in the background
    try:
        with _played(options, started) as outcome:
            draw_timeline(timeline_path, outcome.ledger, f"weightswap: live swaps, residency {options.residency}")
            summary = summarise(outcome, options, time.monotonic() - started)
            write_summary(summary_path, summary)
            print(_conclude(summary, options), flush=True)
            if outcome.page is not None:
                _keep_up(outcome.page)
            else:
                print("the server's side: `scripts/demo --serve` keeps it up, with a page for its operator")
    except DemoError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
