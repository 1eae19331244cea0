"""torchrl's actors, sent by the scheme to weightswap in another process: each update, refusals, nobody there."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.administered import TOKEN, administered
from tests.support.pages import page, python, served
from weightswap_exporter import export
from weightswap_runtime import Model, NonFiniteWeights, TransferFailed, WeightsMismatch, load

pytest.importorskip("torchrl.weight_update", reason="torchrl is not installed: pip install 'weightswap[torchrl]'")

from tensordict import TensorDict
from torchrl.modules import MLP, Actor

from weightswap_torchrl import WeightswapScheme

SERVER = """
import torch
from weightswap_runtime import load
from weightswap_torchrl import WeightswapScheme

model = load("actor.artifact")
scheme = WeightswapScheme("unix:x.sock", "actor.artifact")
scheme.init_on_receiver(model_id="policy", model=model)
scheme.connect()
print("listens", flush=True)
while input() == "receive":
    receipt = scheme.receive(20.0)
    assert scheme.receive(0.0) is None
    print(receipt.generation, model(torch.ones(3, 4)).double().flatten().tolist(), flush=True)
scheme.shutdown()
"""


def new_actor(inputs: int = 4, outputs: int = 2) -> Actor:
    return Actor(MLP(in_features=inputs, out_features=outputs, num_cells=[8, 8]))


def step(actor: torch.nn.Module) -> None:
    """Move every weight, as an optimizer does: in place."""
    with torch.no_grad():
        for weight in actor.parameters():
            weight.add_(torch.randn_like(weight))


def spoiled(actor: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    state["module.2.bias"][3] = torch.nan
    return state


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Actor:
    monkeypatch.chdir(tmp_path)
    actor = new_actor()
    export(actor, (torch.zeros(3, 4),), out="actor.artifact")
    return actor


@pytest.fixture
def scheme() -> Iterator[WeightswapScheme]:
    scheme = WeightswapScheme("unix:x.sock", "actor.artifact", timeout=20.0)
    yield scheme
    scheme.shutdown()


@pytest.fixture
def model(actor: Actor) -> Iterator[Model]:
    with load("actor.artifact") as model:
        yield model


@pytest.fixture
def receiving(model: Model) -> Iterator[WeightswapScheme]:
    scheme = WeightswapScheme("unix:x.sock", "actor.artifact")
    scheme.init_on_receiver(model_id="policy", model=model)
    scheme.connect()
    yield scheme
    scheme.shutdown()


FORMS: list[Callable[[Actor], Any]] = [
    lambda actor: None,  # of the model that it knows
    lambda actor: actor,
    TensorDict.from_module,
    lambda actor: actor.state_dict(),
]


def test_each_update_is_served_by_another_process(actor: Actor, scheme: WeightswapScheme) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-W", "error", "-c", SERVER], **pipes) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"

            def check(generation: int) -> None:
                print("receive", file=process.stdin, flush=True)
                found, outputs = process.stdout.readline().split(maxsplit=1)  # type: ignore[union-attr]
                assert int(found) == generation
                assert outputs.strip() == str(actor(torch.ones(3, 4)).double().flatten().tolist())

            scheme.init_on_sender(model_id="policy", model=actor)
            scheme.connect()
            check(0)
            for generation, form in enumerate(FORMS, 1):
                step(actor)
                scheme.send(form(actor))
                check(generation)
            with pytest.raises(NonFiniteWeights, match=r"module\.2\.bias: 1 NaN of 8 values"):
                scheme.send(spoiled(actor))
            step(actor)
            scheme.send()
            check(len(FORMS) + 1)
            print("end", file=process.stdin, flush=True)
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_what_is_refused_is_not_received(
    actor: Actor, model: Model, receiving: WeightswapScheme, scheme: WeightswapScheme
) -> None:
    scheme.init_on_sender(model=actor)
    scheme.connect()
    assert receiving.receive(20.0) == model.history[-1]
    for wrong, error in ((spoiled(actor), NonFiniteWeights), (new_actor(5), WeightsMismatch)):
        with pytest.raises(error):
            scheme.send(wrong)
    assert receiving.receive(0.0) is None
    assert model.generation == 0
    assert torch.equal(model(torch.ones(3, 4)), actor(torch.ones(3, 4)))


def test_of_several_commits_the_latest_is_received(
    actor: Actor, model: Model, receiving: WeightswapScheme, scheme: WeightswapScheme
) -> None:
    scheme.init_on_sender(model=actor)
    scheme.connect()
    step(actor)
    scheme.send()
    receipt = receiving.receive()
    assert (receipt.generation, receipt.weights_id) == (1, model.weights_id)
    assert receiving.receive(0.0) is None


def test_nobody_is_there_yet(actor: Actor, model: Model, scheme: WeightswapScheme) -> None:
    scheme.init_on_sender(model=actor)
    with pytest.raises(TransferFailed, match=r"unix:x\.sock: nobody receives there"):
        scheme.connect()
    with model.receive("unix:x.sock"):
        scheme.connect()
        assert model.generation == 0
    with pytest.raises(TransferFailed):
        scheme.send()


@pytest.mark.filterwarnings("ignore:Creating .*Updater:DeprecationWarning")  # when torchrl is imported
def test_a_collector_sends_by_itself(actor: Actor) -> None:
    from torchrl.collectors import Collector
    from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

    policy = new_actor(7, 7)
    export(policy, (torch.zeros(3, 7),), out="policy.artifact")
    with load("policy.artifact") as served, served.receive("unix:y.sock"):
        scheme = WeightswapScheme("unix:y.sock", "policy.artifact")
        options = {"frames_per_batch": 2, "total_frames": 4, "auto_register_policy_transforms": False}
        collector = Collector(ContinuousActionVecMockEnv(), policy, **options, weight_sync_schemes={"policy": scheme})
        for generation, _ in enumerate(collector):
            assert served.generation == generation
            assert torch.equal(served(torch.ones(3, 7)), policy(torch.ones(3, 7)))
            step(policy)
            collector.update_policy_weights_()
        collector.shutdown()
        scheme.shutdown()


def test_each_server_commits_for_itself(actor: Actor, model: Model) -> None:
    scheme = WeightswapScheme(["unix:x.sock", "unix:y.sock"], "actor.artifact")
    scheme.init_on_sender(model=actor)
    with load("actor.artifact") as other, model.receive("unix:x.sock"), other.receive("unix:y.sock"):
        scheme.connect()
        assert model.weights_id == other.weights_id is not None
        step(actor)
        scheme.send(worker_ids=1)
        assert (model.generation, other.generation) == (0, 1)
    scheme.shutdown()


def test_a_server_elsewhere_is_sent_to_by_http(actor: Actor, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    with administered({"actor": model}, warm=False) as server:
        assert server.admin is not None
        monkeypatch.delenv("WEIGHTSWAP_ADMIN_TOKEN")
        scheme = WeightswapScheme(server.admin.where, "actor.artifact", token=TOKEN)
        scheme.init_on_sender(model=actor)
        scheme.connect()
        with pytest.raises(NonFiniteWeights):
            scheme.send(spoiled(actor))
        step(actor)
        scheme.send()
        assert model.generation == 1
        assert torch.equal(model(torch.ones(3, 4)), actor(torch.ones(3, 4)))
        scheme.shutdown()


def test_names_that_the_graph_does_not_have(actor: Actor, model: Model, receiving: WeightswapScheme) -> None:
    given = TensorDict.from_module(actor)
    given["__extra_state__"] = TensorDict({"count": torch.ones(())})
    for ignore, error in (("__extra_state__.*", None), ((), WeightsMismatch)):
        scheme = WeightswapScheme("unix:x.sock", "actor.artifact", ignore=ignore)
        scheme.init_on_sender()
        if error is None:
            scheme.connect(weights=given)
        else:
            with pytest.raises(error, match=r"__extra_state__\.count"):
                scheme.connect(weights=given)
        scheme.shutdown()
    assert model.generation == 0


def test_what_is_not_given_or_not_served_is_said(actor: Actor, scheme: WeightswapScheme) -> None:
    with pytest.raises(TypeError, match=r"expected a weightswap_runtime\.Model"):
        scheme.init_on_receiver(model_id="policy", model=actor)
    scheme.init_on_sender()
    for wrong in (None, "policy"):
        with pytest.raises(TypeError, match="give a module, a TensorDict or a state dict"):
            scheme.connect(weights=wrong)


def test_a_scheme_travels_without_its_sockets(actor: Actor, model: Model, scheme: WeightswapScheme) -> None:
    scheme.init_on_sender(model=actor)
    there = pickle.loads(pickle.dumps(scheme))
    there.init_on_receiver(model_id="policy", model=model)
    there.connect()
    scheme.connect()
    assert there.receive(20.0).generation == 0
    there.shutdown()


def test_the_page_on_memory(tmp_path: Path) -> None:
    here, *parts = re.findall(r"```python\n(.*?)```", page("memory"), re.DOTALL)
    (torchrl,) = (part for part in parts if "weightswap_torchrl" in part)
    command, *_ = re.findall(r"```sh\n(.*?)```", page("memory"), re.DOTALL)
    python(tmp_path, here)
    with served(tmp_path, command.strip() + " --port 0"):
        python(tmp_path, here + torchrl)
