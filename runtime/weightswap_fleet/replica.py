"""A replica of a fleet on Ray Serve: it answers requests, and the router sends none to one that is behind.

Reads are monotonic: a client that has seen a revision gets no answer of an older one.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray
from numpy.typing import NDArray
from ray import serve
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightswap_fleet.coordinator.actors import agent_of_this_node, coordinator_of, metrics, send
from weightswap_fleet.coordinator.rank_actors import RanksAttachment
from weightswap_fleet.node.memory import NodeMemory, RevisionPage, open_artifact
from weightswap_runtime.errors import NoWeights, WeightswapError
from weightswap_runtime.model.served import ServedModel
from weightswap_runtime.shared.control import Control
from weightswap_runtime.shared.worker import join
from weightswap_runtime.tensors import array_content, as_array
from weightswap_server.errors import Failure
from weightswap_server.http.app import http_app
from weightswap_server.http.bodies import refusal
from weightswap_server.service.service import Service
from weightswap_server.workers.trials import WorkerTrials

from .documents import DeploymentSpec, NodeMethods, NodeStatus, StaleReplica

MIN_REVISION = "weightswap-min-revision"  # request header: the least revision that may answer it
REVISION = "weightswap-revision"  # response header: the revision for later requests of the client
_PATIENCE = 2.0  # seconds to wait for a commit that other nodes have already made
_POLL = 0.002  # seconds between two looks at the served revision
_FIRST_WEIGHTS = 600.0  # seconds to wait for the node's first weights
_WARM_UP = 60.0  # seconds to wait until the model is warm
_REPORT_INTERVAL = 1.0  # seconds between two reports


class FleetAnswer(NamedTuple):
    """The outputs of a call, and the weights that have answered."""

    outputs: dict[str, NDArray[Any]]  # by name
    weights_id: str
    generation: int | None  # None for weights on trial
    revision: int  # of the fleet, and the least one for later calls


@serve.ingress()
class Replica:
    """One replica of a fleet. It starts with the desired weights, or not at all."""

    def __init__(self, spec: DeploymentSpec) -> None:
        if spec.op_libraries:
            from weightswap_runtime.engines.operators import import_libraries  # needs torch

            import_libraries(spec.op_libraries)
        self._spec = spec
        coordinator_of(spec.fleet)  # starts it, so that the first change need not wait
        self._attachment = RanksAttachment(spec) if spec.ranks > 1 else _NodeAttachment(spec)
        self._model: ServedModel = self._attachment.model
        self._service = Service({spec.model: self._model}, spec.settings)
        self._service.all_metrics = lambda: metrics(spec).encode()
        self._attachment.serve(self._service)
        self._freshness = Freshness(self._attachment.revision_page, self._model)
        self._await_warm()

    def _await_warm(self) -> None:
        deadline = time.monotonic() + _WARM_UP
        while not self._service.ready:
            if time.monotonic() >= deadline:
                raise NoWeights(f"{self._spec.model}: is not ready after {_WARM_UP:g} s")
            time.sleep(0.01)

    def __serve_build_asgi_app__(self) -> FreshApp:
        return FreshApp(http_app(self._service), self._freshness)

    async def infer(
        self, inputs: Mapping[str, NDArray[Any]], model: str = "", min_revision: int = 0, canary: bool | None = None
    ) -> FleetAnswer:
        """Call a method with arrays by the inputs' names. Arguments are as of `FleetClient.infer`.

        Raises StaleReplica, and the errors of requests over HTTP.
        """
        await self._freshness.wait(min_revision)
        contents = {name: array_content(array) for name, array in inputs.items()}
        routing = "" if canary is None else str(int(canary))
        model = model or self._spec.model
        call = self._service.call(model, "", contents, routing=routing)
        answer = await self._service.answer(call)
        self._service.answered(call, answer)
        outputs = {name: as_array(content) for name, content in answer.outputs}
        return FleetAnswer(outputs, answer.weights_id, answer.generation, self._freshness.revision)

    def record_routing_stats(self) -> dict[str, int]:
        """Return the served revision, by which the router leaves out replicas that are behind."""
        return {"revision": self._freshness.revision}

    async def check_health(self) -> None:
        """Raise StaleReplica if the agent has other memory, or the model failed. Restarts an agent that has ended."""
        if self._model.failed:
            raise StaleReplica(f"{self._spec.fleet}: the model of this replica has failed")
        await self._attachment.check()


class _NodeAttachment:
    """What a replica serves: the weights in the memory of its node's agent."""

    def __init__(self, spec: DeploymentSpec) -> None:
        attaching = send(agent_of_this_node(spec), NodeMethods.attach, os.getpid(), spec)
        agent, descriptors, slot = ray.get(attaching, timeout=_FIRST_WEIGHTS)
        memory = NodeMemory.from_process(agent, descriptors, read_only=True)
        self._spec, self._memory, self.revision_page = spec, memory, memory.revision_page
        self.model = join(open_artifact(spec), memory.segment, slot)

    def serve(self, service: Service) -> None:
        """Let the agent switch requests off, and report to it. service: what answers the replica's requests."""
        for served in service.served:
            served.switch = Control(self._memory.segment.control)
        report = partial(self._report_regularly, service)
        threading.Thread(target=report, name="weightswap-reports", daemon=True).start()

    def _report_regularly(self, service: Service) -> None:
        """Send metrics, measures of trials, and the deployment, which a restarted agent needs, to the agent."""
        trials, agent = WorkerTrials(service.served), agent_of_this_node(self._spec)
        while True:
            time.sleep(_REPORT_INTERVAL)
            text = service.metrics.text().decode()
            sent = [send(agent, NodeMethods.report, os.getpid(), text, self._spec)]
            sent += [send(agent, NodeMethods.add_measures, measures) for measures in trials.drain()]
            ray.wait(sent, num_returns=len(sent), timeout=_WARM_UP)  # send no more to an agent that is busy

    async def check(self) -> None:
        """Raise StaleReplica if the agent has other memory. Restarts an agent that has ended."""
        try:
            asked = send(agent_of_this_node(self._spec), NodeMethods.status)
            status: NodeStatus = await asyncio.wait_for(asked, _WARM_UP)
        except (WeightswapError, TimeoutError, ray.exceptions.RayError):
            return  # it can serve without an agent
        if os.getpid() not in status.replicas and status.weights_id is not None:
            raise StaleReplica(f"{self._spec.fleet}: this replica does not share the memory of its node's agent")


class Freshness:
    """The revision that a replica serves."""

    def __init__(self, revision_page: RevisionPage, model: ServedModel) -> None:
        self._revision_page, self._model = revision_page, model

    @property
    def revision(self) -> int:
        """The revision of a call that starts now, and not less than that of any call that has ended."""
        while True:
            generation = self._model.generation
            revision = self._revision_page.revision(generation)
            if self._model.generation == generation:  # otherwise its arena may have been overwritten
                return revision

    async def wait(self, revision: int) -> None:
        """Wait until a revision is served. Raises StaleReplica after _PATIENCE seconds."""
        deadline = time.monotonic() + _PATIENCE
        while self.revision < revision:
            if time.monotonic() >= deadline:
                raise StaleReplica(
                    f"this replica serves revision {self.revision}, but {revision} was requested; try again"
                )
            await asyncio.sleep(_POLL)


class FreshApp:
    """An ASGI application with the request header `MIN_REVISION` and the response header `REVISION`."""

    def __init__(self, app: ASGIApp, freshness: Freshness) -> None:
        self._app, self._freshness = app, freshness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_revision(message: Message) -> None:
            if message["type"] == "http.response.start":
                revision = str(self._freshness.revision).encode()
                message["headers"] = [*message.get("headers", ()), (REVISION.encode(), revision)]
            await send(message)

        failure = await self._failure(scope) if scope["type"] == "http" else None
        await (self._app if failure is None else refusal(failure))(scope, receive, send_with_revision)

    async def _failure(self, scope: Scope) -> Failure | None:
        """Wait for the requested revision. Returns a failure if it is not served here."""
        revision = next((value for name, value in scope["headers"] if name == MIN_REVISION.encode()), b"0")
        if not (revision.isdigit() and len(revision) < 20):
            return Failure(400, "", f"{MIN_REVISION}: expected a revision, as in the header {REVISION} of an answer")
        try:
            await self._freshness.wait(int(revision))
        except StaleReplica as error:
            return Failure(503, "", str(error))
        return None


class FreshRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """A router that chooses, of two random replicas with the newest revision, the one with the shorter queue.

    Power of two choices: Mitzenmacher 2001, as Serve's own router.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = _fresh(candidate_replicas)
        return [random.sample(candidates, min(2, len(candidates)))] if candidates else []


def _fresh(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Return the replicas that are not behind. One without a report has just started with the desired weights."""
    revisions = [replica.routing_stats.get("revision") for replica in replicas]
    newest = max((revision for revision in revisions if revision is not None), default=0)
    pairs = zip(replicas, revisions, strict=True)
    return [replica for replica, revision in pairs if revision is None or revision >= newest]
