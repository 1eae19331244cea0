"""The machine of Ray's head is lost, and all of the cluster with it: what is desired is not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.packages import needs
from weightswap_fleet import FleetReceipt

from .clusters import INPUT, Files, cluster, deployed_on

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]


class Lost(Exception): ...


def rolled_back_and_lost(folder: Path) -> tuple[Files, FleetReceipt]:
    """The files of a fleet, and its last change. Nobody ends its application."""
    with suppress(Lost), deployed_on(folder, 2) as made:
        made.fleet.swap(made.files.weights[3])
        made.fleet.swap(made.files.weights[4])
        receipt = made.fleet.rollback(by="ana", why="worse")
        raise Lost
    return made.files, receipt


def test_the_next_cluster_serves_what_is_desired(tmp_path: Path) -> None:
    from ray import serve

    from weightswap_fleet import connect, deployment

    files, before = rolled_back_and_lost(tmp_path)
    with cluster(1):
        serve.run(deployment(files.artifact, files.weights[0], name="numbered"), name="numbered")
        fleet = connect("numbered")
        with fleet.client() as client:
            answer = client.infer({"x": INPUT})
        assert (answer.weights_id, answer.revision) == (before.weights_id, before.revision)
        assert files.number(answer.weights_id) == 3
        hold = fleet.desired.hold
        assert hold is not None
        assert hold.by == "ana"
        assert files.number(fleet.rollback(by="eve").weights_id) == 0
