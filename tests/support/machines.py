"""State machines: rules in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_in_any_order(machine: type[RuleBasedStateMachine], examples: int, steps: int, **fixed: Any) -> None:
    """Run the rules of a machine; `fixed` are attributes that all its examples share."""
    bound = type(machine.__name__, (machine,), fixed)
    run_state_machine_as_test(bound, settings=settings(max_examples=examples, stateful_step_count=steps))
