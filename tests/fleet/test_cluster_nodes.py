"""Whole nodes of a fleet that are lost, and others that join."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .clusters import Deployed, calling, served, soon, until
from .deaths import VICTIMS, other_node, survive

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]
DEATHS = st.lists(st.tuples(st.sampled_from(VICTIMS), st.floats(0.0, 0.3)), max_size=2)


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(after=st.floats(0.0, 0.3), deaths=DEATHS)
@example(after=0.02, deaths=[("coordinator's process", 0.01)])
def test_a_node_that_is_lost_and_replaced(deployed: Deployed, after: float, deaths: list[tuple[str, float]]) -> None:
    """Anywhere in a change."""
    survive(deployed, [("node", after), *deaths])


def test_a_lost_node(deployed: Deployed) -> None:
    """The others go on, and change; Serve starts its replicas elsewhere, with the weights that are desired."""
    fleet, files, made = deployed
    with calling(deployed) as clients:
        node = other_node(made)
        lost = {each.node for each in fleet.nodes.values() if node.node_id.startswith(each.node)}
        made.remove_node(node, allow_graceful=False)
        receipt = soon(lambda: fleet.swap(files.weights[2]))
        until(lambda: all(client.has_seen(receipt.revision) for client in clients))
    assert set(receipt.late) <= lost  # as long as Ray has not noticed
    assert fleet.wait(120)
    assert served(fleet) == {receipt.weights_id}
