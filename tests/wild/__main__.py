"""`python -m tests.wild [NAME...]`: what happens to models of others, into docs/transformers.md or libraries.md."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers

from tests.wild import page
from tests.wild.survey import EQUAL, REFUSED, TRACED, Outcome, model_types, survey, warm

Tried = tuple[str, Callable[[], Outcome]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="by default those that the page does not have, then all others")
    parser.add_argument("--export", action="store_true", help="also export them, and compare with eager")
    parser.add_argument("--minutes", type=float, default=60, help="no type is begun later than that")
    parser.add_argument("--seconds", type=int, default=60, help="of processor time for each type")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--libraries", action="store_true", help="models of others than transformers, always exported")
    parser.add_argument("--recommenders", action="store_true", help="of those, the ones of recommenders")
    wanted = parser.parse_args()
    end = time.monotonic() + 60 * wanted.minutes
    path, tried = _libraries(wanted) if wanted.libraries or wanted.recommenders else _transformers(wanted)
    for name, look in tried:
        if time.monotonic() > end:
            break
        found = look()
        print(name, *found, sep="\t", flush=True)
        page.add(path, {name: found})


def _libraries(wanted: argparse.Namespace) -> tuple[Path, list[Tried]]:
    from tests.wild import libraries, recommenders

    found = recommenders.cases() if wanted.recommenders else libraries.cases()
    order = wanted.types or _order(list(found), page.read(page.LIBRARIES), wanted.seed)
    return page.LIBRARIES, [
        (name, partial(libraries.survey_case, found[name], seconds=wanted.seconds)) for name in order
    ]


def _transformers(wanted: argparse.Namespace) -> tuple[Path, list[Tried]]:
    transformers.logging.set_verbosity_error()
    warm()
    order = wanted.types or _order(model_types(), page.read(page.TRANSFORMERS), wanted.seed)
    looks = [(name, partial(survey, name, exporting=wanted.export, seconds=wanted.seconds)) for name in order]
    return page.TRANSFORMERS, looks


def _order(names: list[str], outcomes: dict[str, Outcome], seed: int) -> list[str]:
    """What is not known first, what was exported last."""
    random.Random(seed).shuffle(names)
    exported = {name for name, outcome in outcomes.items() if outcome.what in (EQUAL, TRACED, REFUSED)}
    return sorted(names, key=lambda name: (name in outcomes, name in exported))


if __name__ == "__main__":
    main()
