"""`python -m tests.wild [TYPE...]`: what happens to model types of transformers, into docs/transformers.md."""

from __future__ import annotations

import argparse
import random
import time

import transformers

from tests.wild import page
from tests.wild.survey import EQUAL, REFUSED, TRACED, Outcome, model_types, survey, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="by default those that the page does not have, then all others")
    parser.add_argument("--export", action="store_true", help="also export them, and compare with eager")
    parser.add_argument("--minutes", type=float, default=60, help="no type is begun later than that")
    parser.add_argument("--seconds", type=int, default=60, help="of processor time for each type")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    wanted = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warm()
    end = time.monotonic() + 60 * wanted.minutes
    for name in wanted.types or _order(page.read(), wanted.seed):
        if time.monotonic() > end:
            break
        found = survey(name, exporting=wanted.export, seconds=wanted.seconds)
        print(name, *found, sep="\t", flush=True)
        page.add({name: found})


def _order(outcomes: dict[str, Outcome], seed: int) -> list[str]:
    """What is not known first, what was exported last."""
    types = model_types()
    random.Random(seed).shuffle(types)
    exported = {name for name, outcome in outcomes.items() if outcome.what in (EQUAL, TRACED, REFUSED)}
    return sorted(types, key=lambda name: (name in outcomes, name in exported))


if __name__ == "__main__":
    main()
