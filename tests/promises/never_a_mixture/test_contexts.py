"""Contexts over changing weights: no answer mixes generations, and no context sees another's state."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import torch

from tests.support.context_machine import ContextMachine
from tests.support.machines import run_in_any_order
from tests.support.remembering import POLICIES, Files, Policy, X
from tests.support.storm import storm
from weightswap_runtime import StaleState, load


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("contexts"))


@pytest.mark.parametrize(
    ("examples", "steps"), [(25, 30), pytest.param(200, 60, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_any_order_of_steps(files: Files, examples: int, steps: int) -> None:
    given = {"artifact": files.artifact.path, "weights": files.weights, "folder": files.folder, "x": X}
    eager = staticmethod(lambda base, variant: files.eager(base))
    run_in_any_order(ContextMachine, examples, steps, eager=eager, **given)


def test_contexts_of_each_policy_in_a_storm(files: Files) -> None:
    """No answer mixes generations, and no context sees another's state."""
    model = load(files.artifact, files.weights[0])
    ids = [model.swap(path).weights_id for path in files.weights]

    @torch.no_grad()
    def stream(number: int) -> int:
        """Compare the steps of one context with an eager model's, and return how many answers it got."""
        policy: Policy = POLICIES[number % len(POLICIES)]
        eager, made_with, answers = None, -1, 0
        stale = suppress(StaleState) if policy == "invalidate" else nullcontext()
        with model.new_context(on_swap=policy) as context, stale:
            for step in range(8):
                answer, before = model(X * step, context=context), made_with
                made_with = ids.index(str(context.weights_id))
                following = files.eager(made_with)
                if eager is not None and (policy != "reset" or made_with == before):
                    following.total, following.calls = eager.total, eager.calls
                assert torch.equal(answer, following(X * step)), f"step {step} of the weights {made_with}"
                eager, answers = following, answers + 1
        return answers

    with storm(stream, 2 * len(POLICIES)) as answers:
        for number in range(60):
            model.swap(files.weights[number % 3])
    assert all(sum(each) > 8 for each in answers)
