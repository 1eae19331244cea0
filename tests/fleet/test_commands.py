"""What `weightswap fleet` and a deployment refuse before there is a cluster, or anything is written."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.tiny import TinyArtifact
from weightswap_fleet import FleetPlan, FleetRefused
from weightswap_runtime import DesiredPlace
from weightswap_runtime.errors import GraphMismatch, NoWeights, Unsupported, WeightsMismatch
from weightswap_tools.commands.fleet import fleet_command
from weightswap_tools.commands.fleet_cluster import _reasons

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's


def run(*arguments: object, status: int) -> str:
    done = CliRunner().invoke(fleet_command, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_where_no_cluster_is_is_said_at_once(address: str, closed_port: int) -> None:
    began = time.monotonic()
    said = run("status", "--address", address.format(closed_port), status=2)
    assert "no Ray cluster at" in said
    assert str(closed_port) in said
    assert time.monotonic() - began < 30  # Ray alone goes on asking for minutes


@pytest.mark.parametrize("address", ["local", ""])
def test_a_cluster_that_ends_with_the_command_is_refused(address: str) -> None:
    assert "ends with this command" in run("status", "--address", address, status=2)


def test_fewer_replicas_at_most_than_at_least() -> None:
    said = run("deploy", "any.artifact", "--weights", "x", "--replicas", 3, "--max-replicas", 2, status=2)
    assert "--max-replicas 2" in said


def test_weights_of_another_graph_are_not_desired(tiny: TinyArtifact, tmp_path: Path) -> None:
    from weightswap_fleet import deployment

    weights = tiny.write(tmp_path / "other.safetensors", tiny.values(1), graph_id="0" * 64)
    with pytest.raises(GraphMismatch, match="was packed for the graph 000000000000, and the artifact has"):
        deployment(tiny.path, weights)
    assert DesiredPlace(tmp_path).read().weights is None


def test_a_place_of_another_graph_is_refused(tiny: TinyArtifact, tmp_path: Path) -> None:
    from weightswap_fleet import deployment

    DesiredPlace(tmp_path).set(
        tiny.write(tmp_path / "other.safetensors", tiny.values(1), graph_id="0" * 64), revision=0
    )
    with pytest.raises(GraphMismatch, match="which is desired"):
        deployment(tiny.path, follow=tmp_path)
    assert DesiredPlace(tmp_path).read().revision == 1


@pytest.mark.parametrize("options", [{"require_signature": "nowhere.pem"}, {"num_replicas": -1}, {"batch": 0}])
def test_what_is_refused_has_desired_nothing(tiny: TinyArtifact, tmp_path: Path, options: dict[str, Any]) -> None:
    from weightswap_fleet import deployment

    with pytest.raises(Exception, match=r"(?s)."):
        deployment(tiny.path, tiny.write(tmp_path / "1.safetensors", tiny.values(1)), **options)
    assert not (tmp_path / "desired.json").exists()


def test_a_place_where_nothing_is_desired(tiny: TinyArtifact, tmp_path: Path) -> None:
    from weightswap_fleet import deployment

    with pytest.raises(NoWeights, match="nothing is desired there yet"):
        deployment(tiny.path, follow=tmp_path)


def test_a_place_that_is_not_there(tiny: TinyArtifact, tmp_path: Path) -> None:
    from weightswap_fleet import deployment

    with pytest.raises(Unsupported, match="nowhere: is no folder; make it"):
        deployment(tiny.path, follow=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--share", "0.1"], "give the weights"),
        (["v2.safetensors", "--step-seconds", "5"], "give --steps, too"),
        (["v2.safetensors", "--steps", "0.1,half"], "expected shares"),
    ],
)
def test_a_canary_that_cannot_be_meant(options: list[str], says: str) -> None:
    assert says in run("canary", *options, status=2)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_none(tolerance: float) -> None:
    with pytest.raises(Unsupported, match="tolerance="):
        FleetPlan(tolerance=tolerance).check()


def test_what_several_problems_of_a_node_read_like() -> None:
    refused = FleetRefused("v2", {"n0": WeightsMismatch("v2", ["a: too long", "b: missing"], "Give another.")})
    assert str(refused).splitlines()[1:] == [
        "  - n0: WeightsMismatch: v2: refused, 2 problems; a: too long; b: missing; Give another."
    ]


def test_what_serve_says_is_told_without_its_traceback() -> None:
    traceback = "Traceback:\n  File x\n    raise\na.b.NoWeights: nothing\n  - here\n"
    assert _reasons(f"The deployment failed to start.\n{traceback}") == ["  a.b.NoWeights: nothing", "  - here"]
    assert _reasons("1 replica waits for {'CPU': 1}") == ["  1 replica waits for {'CPU': 1}"]
