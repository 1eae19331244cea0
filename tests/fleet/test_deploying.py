"""Wrong deployments of a fleet are refused before anything is written."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightswap_fleet
from tests.support.damage import damaged
from tests.support.packages import needs
from tests.support.ranks import split_artifact, write_goldens, write_set
from tests.support.tiny import TinyArtifact, WriteWeights
from weightswap_fleet import Deadlines, FleetPlan, FleetReceipt
from weightswap_fleet.documents import DeploymentSpec
from weightswap_runtime import (
    DesiredStore,
    DigestMismatch,
    GraphMismatch,
    NonFiniteWeights,
    NoWeights,
    RanksRefused,
    StageClosed,
    StagingBusy,
    Unsupported,
    WeightFileError,
)

from .nodes import Fleet, FleetTrial, serving_zero

pytestmark = [needs("ray"), pytest.mark.filterwarnings("ignore")]  # Ray's


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": ""}, "name='': expected at most 64 letters"),
        ({"name": "taggers:eu"}, "name='taggers:eu': expected"),  # it would be found beside "taggers"
        ({"name": "a" * 65}, "expected at most 64"),
        ({"name": 3}, "name=3: expected"),
        ({"verify": "all"}, "verify='all': expected 'goldens', 'finite', 'off'"),
        ({"interval": 0}, "interval=0: expected seconds"),
        ({"interval": math.nan}, "interval=nan: expected seconds"),
        ({"batch": 0}, "max_batch=0: expected"),
        ({"op_libraries": "torchvision"}, "op_libraries='torchvision': expected a list"),
        ({"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}}, "num_replicas=2 and autoscaling_config"),
        ({"allow_nonfinite": "nothing*"}, "matches no weight"),
        ({"require_signature": "no.pem"}, "not a public key"),
        ({"require_signature": ["no.pem", "nor.pem"]}, r"no\.pem: not a public key"),
    ],
)
def test_odd_options(options: dict[str, Any], why: str, tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    weights = weight_file(1)
    with pytest.raises(Unsupported, match=why):
        weightswap_fleet.deployment(tiny.path, weights, **options)
    assert DesiredStore(weights.parent).read().weights is None


def test_weights_are_where_nothing_is_desired_yet(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    first, second = weight_file(1), weight_file(2)
    for weights in (first, second):
        weightswap_fleet.deployment(tiny.path, weights)
        desired = DesiredStore(first.parent).read()
        assert desired.revision == 1
        assert desired.weights is not None
        assert Path(first.parent / desired.weights.source) == first


def write(tiny: TinyArtifact, folder: Path, what: str) -> Path:
    """Write weights, or name them."""
    path = folder / f"{what}.safetensors"
    if what == "missing":
        return path
    values = tiny.values(1) | ({"bias": torch.full((5,), torch.nan)} if what == "nan" else {})
    tiny.write(path, values, graph_id="0" * 64 if what == "of another graph" else None)
    return damaged(path) if what == "damaged" else path


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("missing", WeightFileError),
        ("of another graph", GraphMismatch),
        ("nan", NonFiniteWeights),
        ("damaged", DigestMismatch),
    ],
)
def test_weights_that_no_replica_would_serve_are_not_desired(
    what: str, error: type[Exception], tiny: TinyArtifact, tmp_path: Path
) -> None:
    weights = write(tiny, tmp_path, what)
    with pytest.raises(error):
        weightswap_fleet.deployment(tiny.path, weights)
    assert DesiredStore(tmp_path).read().weights is None
    if what == "nan":
        weightswap_fleet.deployment(tiny.path, weights, allow_nonfinite="bias")
        assert DesiredStore(tmp_path).read().weights is not None


def test_a_desired_store_of_another_graph_is_refused(tiny: TinyArtifact, tmp_path: Path) -> None:
    DesiredStore(tmp_path).set(write(tiny, tmp_path, "of another graph"), revision=0)
    with pytest.raises(GraphMismatch):
        weightswap_fleet.deployment(tiny.path, follow=tmp_path)
    assert DesiredStore(tmp_path).read().revision == 1


@pytest.mark.parametrize(
    ("follow", "error", "says"),
    [
        (None, Unsupported, "a fleet needs weights"),
        (".", NoWeights, "nothing is desired there yet"),
        ("nowhere", Unsupported, "nowhere: not a directory; make it"),
    ],
)
def test_a_desired_store_without_weights_is_refused(
    follow: str | None, error: type[Exception], says: str, tiny: TinyArtifact, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        weightswap_fleet.deployment(tiny.path, follow=tmp_path / follow if follow else None)


def test_nodes_are_those_of_the_latest_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while each node has an agent of an earlier desired store or graph, which is left out."""
    from weightswap_fleet.coordinator import actors

    fleet = Fleet(tmp_path, 2, monkeypatch)
    now = [agent.status() for agent in fleet.agents.values()]
    before = [each._replace(spec=each.spec._replace(desired_store="/elsewhere", since=-1.0)) for each in now]
    answers = {
        actors.agent_name(each.spec, each.node): each if known else TimeoutError("late")
        for each, known in ((before[0], True), (before[1], False), (now[0], True), (now[1], False))
    }
    monkeypatch.setattr(actors, "_agents", lambda fleet: list(answers))
    monkeypatch.setattr(actors, "_call", lambda *arguments, **options: list(answers.values()))
    first, silent = actors.statuses("fleet")
    assert first == now[0]
    assert (silent.node, silent.weights_id, silent.error) == (now[1].node, None, "TimeoutError: late")
    assert actors.find_spec("fleet") == fleet.spec
    fleet.close()


def test_who_waits_for_a_change_waits_no_longer_than_for_its_own(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a change does not begin once its caller has given up."""
    from weightswap_fleet.coordinator.actors import Coordinator

    monkeypatch.setattr(Coordinator, "_lead", lambda coordinator: None)
    coordinator, deadlines = Coordinator("fleet"), Deadlines(prepare=0.01)
    with coordinator._exclusively(time.monotonic(), Deadlines()) as left:
        assert left.prepare <= Deadlines().prepare
        for change in (coordinator.swap, coordinator.publish):
            with pytest.raises(StagingBusy):
                change(str(weight_file(1)), "ana", "", deadlines)
        with pytest.raises(StagingBusy):
            coordinator.promote("ana", "", deadlines)


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_coordinator_that_begins_again_ends_the_trial_of_the_one_before_at_once(
    is_promoted: bool, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever aborts it must not hear that there is none, and then see it go on."""
    from weightswap_fleet.coordinator import actors

    monkeypatch.setattr(actors, "find_spec", lambda name: fleet.spec)
    monkeypatch.setattr(actors, "RayNodes", lambda spec: fleet)
    monkeypatch.setattr(actors.Coordinator, "_lead", lambda coordinator: None)
    FleetTrial(fleet.trial(1, share=0.5), fleet).begin(5.0)
    coordinator = actors.Coordinator("fleet")
    if is_promoted:
        assert coordinator.promote("ana", "", Deadlines()).late == {}
    else:
        assert coordinator.abort("ana", "").outcome == "aborted"
    assert (fleet.trying(), fleet.all_serve(int(is_promoted))) == ({""}, True)
    with pytest.raises(StageClosed, match="nothing is on trial; the last trial was"):
        coordinator.abort("ana", "")


@pytest.mark.parametrize("decided_by", ["steps", "a rule", "an operator"])
def test_a_trial_is_not_promoted_to_a_deployment_with_another_desired_store(
    decided_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents of the deployment before live on for minutes, without requests, where its trial goes on."""
    from weightswap_fleet.coordinator import actors

    folders = tmp_path / "before", tmp_path / "now"
    for folder in folders:
        folder.mkdir()
    with serving_zero(folders[0], 1, monkeypatch) as before, serving_zero(folders[1], 1, monkeypatch) as now:
        fleets = {fleet.spec: fleet for fleet in (before, now)}
        monkeypatch.setattr(actors, "find_spec", lambda name: before.spec)
        monkeypatch.setattr(actors, "RayNodes", fleets.__getitem__)
        monkeypatch.setattr(actors.Coordinator, "_lead", lambda coordinator: None)
        coordinator = actors.Coordinator("fleet")
        plan = FleetPlan(steps=(0.5,), step_seconds=0.01) if decided_by == "steps" else FleetPlan(share=0.5)
        coordinator.begin_trial(str(before.file(1)), plan, "ana", "", Deadlines())
        trial = coordinator._trial
        assert trial is not None

        monkeypatch.setattr(actors, "find_spec", lambda name: now.spec)
        if decided_by == "an operator":
            with pytest.raises(StageClosed, match="deployed with another graph or desired store"):
                coordinator.promote("ana", "", Deadlines())
        else:
            coordinator._act_on(("promote", decided_by), trial)
        assert now.all_serve(0)
        assert now.desired_store.read().revision == 1
        report = coordinator.trial()
        assert report is not None
        assert (report.outcome, before.trying()) == ("ended", {""})
        assert coordinator.begin_trial(str(now.file(2)), FleetPlan(), "ana", "", Deadlines()).outcome == ""


def test_of_two_rollbacks_at_the_same_time_one_is_made(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not none: each ends on a node what the other one has prepared there."""
    from weightswap_fleet.coordinator import actors

    monkeypatch.setattr(actors, "find_spec", lambda name: fleet.spec)
    monkeypatch.setattr(actors, "RayNodes", lambda spec: fleet)
    monkeypatch.setattr(actors.Coordinator, "_lead", lambda coordinator: None)
    coordinator = actors.Coordinator("fleet")
    for number in (1, 2):
        fleet.swap(number)
    is_first, is_prepared, made = threading.local(), threading.Event(), []

    def roll_back(first: bool) -> FleetReceipt:
        is_first.value = first
        return coordinator.rollback(None, "bo", "", False, Deadlines())

    def meet(method: str, node: str) -> str:
        """Let the second prepare all nodes when the first has prepared one, which then prepares the other."""
        first = getattr(is_first, "value", None)
        if (method, node, first) == ("prepare", "n1", True):
            made.append(pool.submit(roll_back, False))
            is_prepared.wait(1.0)
        elif (method, node, first) == ("renew", "n0", False):
            is_prepared.set()
            time.sleep(0.5)
        return ""

    with ThreadPoolExecutor(2) as pool:
        fleet.fate = meet
        first = pool.submit(roll_back, True).result(60)
        second = made[0].result(60)  # goes back from what was desired when it was asked for, and so does nothing more
    assert (first.revision, first.late) == (second.revision, second.late) == (4, {})
    assert fleet.all_serve(1)


def test_a_deployment_counts_also_where_the_clock_is_behind(
    tiny: TinyArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightswap_fleet import UnknownFleet, deploying

    ahead = time.time() + 3600.0
    known = DeploymentSpec("fleet", str(tiny.path), tiny.manifest.graph_id, str(tmp_path), "tiny", ahead)
    monkeypatch.setattr(deploying, "find_spec", lambda name: known)
    assert deploying._since("fleet") < ahead  # there is no cluster that could be asked
    monkeypatch.setattr(deploying.ray, "is_initialized", lambda: True)
    assert deploying._since("fleet") > ahead

    def unknown(name: str) -> DeploymentSpec:
        raise UnknownFleet(name)

    monkeypatch.setattr(deploying, "find_spec", unknown)
    assert 0 < deploying._since("fleet") < ahead


def test_a_replica_whose_model_failed_says_so_also_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayError

    from weightswap_fleet import StaleReplica, replica

    def gone(spec: DeploymentSpec) -> None:
        raise RayError

    monkeypatch.setattr(replica, "agent_of_this_node", gone)
    spec = DeploymentSpec("fleet", "a", "", "desired_store", "tiny", 0.0)
    attachment = SimpleNamespace(check=lambda: replica._NodeAttachment.check(SimpleNamespace(_spec=spec)))
    one = SimpleNamespace(_spec=spec, _model=SimpleNamespace(failed=""), _attachment=attachment)
    asyncio.run(replica.Replica.check_health(one))
    one._model.failed = "an arena is half written"
    with pytest.raises(StaleReplica):
        asyncio.run(replica.Replica.check_health(one))


def test_a_plan_or_its_fields() -> None:
    with pytest.raises(Unsupported, match="a plan and share"):
        weightswap_fleet.Fleet("fleet").canary("v2.safetensors", FleetPlan(), share=0.5)


def test_all_names_of_the_package_are_there() -> None:
    assert {getattr(weightswap_fleet, name).__name__ for name in weightswap_fleet.__all__} == {
        *weightswap_fleet.__all__
    }


@pytest.mark.parametrize(
    ("ranks", "options", "why"),
    [
        (1, {}, "ranks=1: .*two is exported for 2 ranks; give ranks=2"),
        (4, {}, "ranks=4: .*two is exported for 2 ranks; give ranks=2"),
        (2, {"ray_actor_options": {"num_cpus": 0}}, "each rank needs a resource, such as num_cpus=1"),
        (2, {"artifact": "tiny.artifact"}, "ranks=2: .* is for one process; give ranks=1, or an artifact for 2"),
    ],
)
def test_ranks_are_those_of_the_artifact(
    ranks: int, options: dict[str, Any], why: str, tiny: TinyArtifact, tmp_path: Path
) -> None:
    weights = write_set(tmp_path / "1.safetensors", 1)
    artifact = tmp_path / options.pop("artifact", "two")
    if artifact != tiny.path:
        split_artifact(artifact)
    with pytest.raises(Unsupported, match=why):
        weightswap_fleet.deployment(artifact, weights, ranks=ranks, **options)
    assert DesiredStore(tmp_path).read().weights is None


def test_first_weights_of_ranks_are_tried_on_all_of_them(tmp_path: Path) -> None:
    artifact = split_artifact(tmp_path / "two")
    with pytest.raises(RanksRefused, match="digest"):
        weightswap_fleet.deployment(artifact, damaged(write_set(tmp_path / "1.safetensors", 1)), ranks=2)
    wrong = write_set(tmp_path / "2.safetensors", 2)
    write_goldens(wrong, 2, outputs_of=1)
    with pytest.raises(RanksRefused, match="rank 1: GoldenMismatch"):
        weightswap_fleet.deployment(artifact, wrong, ranks=2)
    assert DesiredStore(tmp_path).read().weights is None
    deployed = weightswap_fleet.deployment(
        artifact, write_set(tmp_path / "3.safetensors", 3), ranks=2, ray_actor_options={"num_cpus": 2}
    )
    options = deployed._bound_deployment._replica_config
    assert options.placement_group_bundles == [{"CPU": 2}] * 2
    assert options.placement_group_strategy == "STRICT_PACK"
    assert DesiredStore(tmp_path).read().revision == 1
