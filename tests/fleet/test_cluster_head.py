"""The machine of Ray's head is lost, and all of the cluster with it: what is desired is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.packages import needs

from .clusters import INPUT, Files, cluster, deployed_on

pytestmark = [
    needs("ray"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's
]


class Lost(Exception): ...


def test_the_next_cluster_serves_what_is_desired(tmp_path: Path) -> None:
    from ray import serve

    from weightswap_fleet import connect, deployment

    with pytest.raises(Lost), deployed_on(tmp_path, 2) as made:
        made.fleet.swap(made.files.weights[3])
        made.fleet.swap(made.files.weights[4])
        before = made.fleet.rollback(by="ana", why="worse")
        raise Lost  # nobody ends the application first
    files: Files = made.files
    with cluster(1):
        serve.run(deployment(files.artifact, files.weights[0], name="numbered"), name="numbered")
        fleet = connect("numbered")
        with fleet.client() as client:
            answer = client.infer({"x": INPUT})
        assert (answer.weights_id, answer.revision) == (before.weights_id, before.revision)
        assert files.number(answer.weights_id) == 3
        assert fleet.desired.hold.by == "ana"
        assert files.number(fleet.rollback("", by="eve").weights_id) != 4
