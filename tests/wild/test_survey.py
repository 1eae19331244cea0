"""Some of transformers' model types, others every day: each ends with a word of ours, never with a traceback."""

from __future__ import annotations

import random
import time
from datetime import date

import pytest

from tests.wild import page
from tests.wild.survey import (
    BROKEN,
    EQUAL,
    FOUND,
    LARGE,
    REFUSED,
    SLOW,
    TRACED,
    UNBUILT,
    UNKNOWN,
    Outcome,
    model_types,
    survey,
)

_CALLED_SECONDS = 100
_EXPORTED_SECONDS = 60


@pytest.mark.slow
def test_no_type_ends_in_a_traceback() -> None:
    types = model_types()
    random.Random(date.today().toordinal()).shuffle(types)
    found = surveyed(types, exporting=False, seconds=_CALLED_SECONDS)
    found |= surveyed(types[::-1], exporting=True, seconds=_EXPORTED_SECONDS)
    assert len(found) > 3
    assert {name: outcome for name, outcome in found.items() if outcome.what == BROKEN} == {}


def surveyed(types: list[str], *, exporting: bool, seconds: int) -> dict[str, Outcome]:
    """As many types as there is time for."""
    end, found = time.monotonic() + seconds, {}
    for name in types:
        if time.monotonic() > end:
            break
        found[name] = survey(name, exporting=exporting, seconds=30)
    return found


@pytest.mark.slow
def test_a_type_is_exported_and_served() -> None:
    assert survey("albert", exporting=True, seconds=60) == Outcome(
        EQUAL, "input_ids [2, 16], attention_mask [2, 16], token_type_ids [2, 16]"
    )


def test_a_type_that_nothing_can_be_given_to_is_named() -> None:
    outcome = survey("edgetam_video", exporting=False, seconds=60)
    assert outcome.what == UNKNOWN
    assert "it takes inference_session" in outcome.reason


def test_the_page_has_every_type_and_is_as_the_survey_prints_it() -> None:
    outcomes = page.read(page.TRANSFORMERS)
    assert list(outcomes) == model_types()
    assert {outcome.what for outcome in outcomes.values()} <= {
        EQUAL,
        TRACED,
        FOUND,
        REFUSED,
        LARGE,
        UNKNOWN,
        UNBUILT,
        SLOW,
    }
    assert page.text(page.TRANSFORMERS, outcomes) == page.TRANSFORMERS.read_text()
