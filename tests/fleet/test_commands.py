"""What `weightswap fleet` refuses without a cluster, and how it says what others refuse."""

from __future__ import annotations

import json
import socket
import time
from contextlib import nullcontext
from unittest.mock import MagicMock, PropertyMock

import pytest

from tests.support.commands import run as run_command
from tests.support.packages import needs
from weightswap_fleet import Deadlines, FleetPlan, FleetRefused
from weightswap_fleet.coordinator.agreement import DEADLINES
from weightswap_fleet.documents import DeploymentSpec, NodeStatus, TrialReport
from weightswap_runtime import DesiredState, DesiredWeights, WeightsMismatch
from weightswap_tools.commands import fleet as commands
from weightswap_tools.commands.fleet import _reasons

pytestmark = [needs("ray"), pytest.mark.filterwarnings("ignore")]  # Ray's


def run(*arguments: object, status: int) -> str:
    return run_command("fleet", *arguments, status=status).output


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status", "--address", "local"], "ends with this command"),
        (["status", "--address", ""], "ends with this command"),
        (["deploy", "a", "--weights", "x", "--replicas", 3, "--max-replicas", 2], "--max-replicas 2"),
        (["canary", "--share", "0.1"], "give the weights"),
        (["canary", "v2.safetensors", "--step-seconds", "5"], "give --steps, too"),
        (["canary", "v2.safetensors", "--steps", "0.1,half"], "expected shares"),
    ],
)
def test_what_cannot_be_meant(arguments: list[object], says: str) -> None:
    assert says in run(*arguments, status=2)


@pytest.mark.parametrize(
    ("arguments", "given"), [([], DEADLINES), (["--prepare-seconds", 2000], DEADLINES._replace(prepare=2000.0))]
)
@pytest.mark.parametrize(
    "command",
    [["swap", "v2.safetensors"], ["rollback"], ["canary", "v2.safetensors"], ["promote"]],
    ids=lambda command: command[0],
)
def test_how_long_a_change_is_prepared_can_be_said(
    command: list[str], arguments: list[object], given: Deadlines, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MagicMock(trial=None)
    monkeypatch.setattr(commands, "connected", lambda name, address: nullcontext(fleet))
    monkeypatch.setattr(commands, "say_fleet_receipt", lambda receipt, as_json: None)
    run(*command, *arguments, status=0)
    (called,) = fleet.method_calls
    assert called.kwargs["deadlines"] == given


@pytest.mark.parametrize("then", [None, "promoted", "another"])
def test_only_the_trial_that_was_begun_is_waited_for(then: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"requests": 5.0}
    begun = TrialReport("1" * 64, "v2", "ana", "", 7.0, FleetPlan(), {}, values, 0.0, 0, "", "")
    ended = begun._replace(since=8.0, outcome="promoted") if then == "another" else begun._replace(outcome=then or "")
    fleet = MagicMock()
    fleet.canary.return_value = begun
    type(fleet).trial = PropertyMock(side_effect=[begun, None if then is None else ended])
    monkeypatch.setattr(commands, "connected", lambda name, address: nullcontext(fleet))
    monkeypatch.setattr(commands, "_CANARY_POLL_SECONDS", 0.0)
    said = run("canary", "v2.safetensors", "--wait", status=0 if then == "promoted" else 1)
    assert ("another one has begun since" in said) == (then == "another")


def test_what_several_problems_of_a_node_read_like() -> None:
    refused = FleetRefused("v2", {"n0": WeightsMismatch("v2", ["a: too long", "b: missing"], "Give another.")})
    assert str(refused).splitlines()[1:] == [
        "  - n0: WeightsMismatch: v2: refused, 2 problems; a: too long; b: missing; Give another."
    ]


def test_what_serve_says_is_told_without_its_traceback() -> None:
    traceback = "Traceback:\n  File x\n    raise\na.b.NoWeights: nothing\n  - here\n"
    assert _reasons(f"The deployment failed to start.\n{traceback}") == ["  a.b.NoWeights: nothing", "  - here"]
    assert _reasons("1 replica waits for {'CPU': 1}") == ["  1 replica waits for {'CPU': 1}"]


def test_what_was_withdrawn_or_refused_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = ("1" * 64, "2" * 64, "3" * 64)
    weights = {each: DesiredWeights(source=f"v{each[0]}", weights_id=each, since=0.0) for each in (one, two, three)}
    state = DesiredState(revision=5, weights=weights[one], history=(weights[two],), withdrawn=(weights[three],))
    spec = DeploymentSpec("fleet", "a", "", "desired_store", "tiny", 0.0)
    node = NodeStatus.unknown("n0", spec, "")._replace(
        weights_id=one, replicas=(7,), refused={two: "v2: refused\n  - bias: 5 NaN"}
    )
    fleet = MagicMock(desired=state, nodes={"n0": node}, replicas=1, trial=None)
    monkeypatch.setattr(commands, "connected", lambda name, address: nullcontext(fleet))
    history, _, withdrawn = run("status", status=0).partition("withdrawn")
    assert "by n0: v2: refused; bias: 5 NaN" in next(line for line in history.splitlines() if two[:12] in line)
    assert three[:12] in withdrawn
    assert "refused" not in withdrawn


@pytest.mark.parametrize(
    ("nodes", "replicas", "says"),
    [
        ({"n0": ("1", 1), "n1": ("1", 1)}, 2, "2 of 2 replicas"),
        ({"n0": ("1", 1), "n1": ("2", 1)}, 2, "1 of 2 replicas"),
        ({"n0": ("1", 1)}, 2, "1 of 2 replicas"),  # the other waits for a machine
        ({"n0": ("1", 1), "n1": ("2", 0)}, 1, "1 of 1 replica"),  # an agent that is behind
        ({"n0": ("1", 0)}, 0, "0 of 0 replicas"),
    ],
)
def test_a_fleet_agrees_if_all_its_replicas_serve_what_is_desired(
    nodes: dict[str, tuple[str, int]], replicas: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = DesiredState(revision=1, weights=DesiredWeights(source="v1", weights_id="1" * 64, since=0.0))
    spec = DeploymentSpec("fleet", "a", "", "desired_store", "tiny", 0.0)
    known = {
        name: NodeStatus.unknown(name, spec, "")._replace(weights_id=digit * 64, replicas=tuple(range(count)))
        for name, (digit, count) in nodes.items()
    }
    fleet = MagicMock(desired=state, nodes=known, replicas=replicas, trial=None)
    fleet.name = "tagger"
    monkeypatch.setattr(commands, "connected", lambda name, address: nullcontext(fleet))
    agree = says == "2 of 2 replicas"
    assert f"serve it    {says}\n" in run("status", status=not agree)
    document = json.loads(run("status", "--json", status=not agree))
    assert (document["agrees"], document["replicas"]["of"]) == (agree, replicas)
