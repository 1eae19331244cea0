"""State machines: rules in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies._internal.featureflags import FeatureFlags


def run_in_any_order(machine: type[RuleBasedStateMachine], examples: int, steps: int, **fixed: Any) -> None:
    """Run the rules of a machine, with `fixed` as its attributes.

    Of each example, hypothesis leaves out many rules, which finds what it takes a few rules for, many times. What it
    takes several rules in a row for would be hardly ever reached, so there are as many examples with all rules.
    """
    bound = type(machine.__name__, (machine,), fixed)
    chosen = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(bound, settings=chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureFlags, "is_enabled", lambda flags, rule: True)
        run_state_machine_as_test(bound, settings=chosen)
