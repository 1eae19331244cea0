"""A fleet as an application of Ray Serve."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from weightswap_fleet.coordinator.actors import find_spec
from weightswap_runtime.errors import GraphMismatch, NoWeights, Unsupported
from weightswap_runtime.following.desired_state import SHOWN
from weightswap_runtime.following.desired_store import DesiredStore, known_weights
from weightswap_runtime.following.watching import check_interval
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import check_mode
from weightswap_runtime.format.identity import as_allowed
from weightswap_runtime.format.manifest import Manifest
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.model.loading import load
from weightswap_runtime.process_groups import free_address, process_group
from weightswap_runtime.sources.location import Url, as_location, fixed, fixed_text, printable
from weightswap_server.serving import default_name
from weightswap_server.settings import Settings
from weightswap_server.signed_weights import requires

from .documents import DeploymentSpec, UnknownFleet
from .replica import Replica

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_Path = str | os.PathLike[str]
_ROUTER = RequestRouterConfig(
    request_router_class="weightswap_fleet.replica:FreshRouter",
    request_routing_stats_period_s=0.2,
    request_routing_stats_timeout_s=5.0,
)


def deployment(
    artifact: _Path,
    weights: _Path | None = None,
    *,
    follow: _Path | None = None,
    name: str = "weightswap",
    model: str | None = None,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    max_ongoing_requests: int = 64,
    max_queued_requests: int = 256,
    batch: int = 1,
    verify: str = "goldens",
    allow_nonfinite: bool | str | Sequence[str] = False,
    require_signature: _Path | Sequence[_Path] | None = None,
    op_libraries: Sequence[str] = (),
    settings: Settings | None = None,
    interval: float = 1.0,
    relay: bool = True,
    ranks: int = 1,
) -> serve.Application:
    """Return an application for `serve.run`, whose replicas serve the desired weights of a desired store, and change
    together.

    artifact: a path that all nodes see. follow: the desired store, a directory that all nodes see or the URL of a
    folder;
      None: the directory of `weights`.
    weights: a packed file, which becomes desired if the desired store wants nothing yet.
    name: the fleet's, for `connect`. model: the model's name in HTTP requests; None: the artifact's name.
    num_replicas, autoscaling_config, ray_actor_options, max_ongoing_requests, max_queued_requests: as for Ray Serve.
      Requests beyond the last that wait in one proxy or handle are refused at once with 503 or BackPressureError; -1
      sets no limit.
    batch: the most rows that one batch may have; 1 disables batching. verify: as for `Model.stage`.
    allow_nonfinite: True, or patterns of FQNs, for weights that may have NaN or infinities where the served ones have
      none. Others are refused.
    require_signature: one or more public keys; weights that none of them has signed are refused. op_libraries: as for
      `load`.
    settings: limits of the server; ports and timeouts of connections are those of Serve's proxies.
    interval: seconds between two reads of the desired store. relay: one node reads weights behind a URL and passes them
      on to the others; False: each node reads for itself.
    ranks: the processes that have the model together, for an artifact that was exported for so many. Each replica has
      so many, on one node, each with the resources of `ray_actor_options`, and counts as a node of its own in changes.

    Replicas run on the CPU, with the engine "torch"; those of one node share one copy of the weights, without ranks.

    The first weights are loaded here once, to verify them, before they become desired. Raises Unsupported,
    ArtifactError, MissingExtra, NoWeights if none are given and none are desired, GraphMismatch for weights of another
    graph, and what `load` and `DesiredStore.set` raise.
    """
    if weights is None and follow is None:
        raise Unsupported("a fleet needs weights, or the store of a desired state to follow")
    if num_replicas is not None and autoscaling_config is not None:
        raise Unsupported(f"num_replicas={num_replicas!r} and autoscaling_config: give only one of them")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise Unsupported(f"name={name!r}: expected at most 64 letters, digits, underscores, dots and hyphens")
    if isinstance(op_libraries, str):
        raise Unsupported(f"op_libraries={op_libraries!r}: expected a list of package names or shared library paths")
    check_mode(verify)
    check_interval(interval)
    path = fixed_text(as_location(artifact))
    opened = Artifact.open(path)
    placement = _placement(opened.manifest, path, ranks, ray_actor_options or {})
    desired_store = fixed_text(as_location(follow)) if follow is not None else _folder(weights)
    keys = _keys(require_signature)
    limits = settings or Settings(max_batch=batch)
    limits.check()
    spec = DeploymentSpec(
        fleet=name,
        artifact=path,
        graph_id=opened.graph_id,
        desired_store=desired_store,
        model=model or default_name(path),
        since=_since(name),
        verify=verify,
        allow_nonfinite=_allowed(allow_nonfinite, opened.manifest),
        require_signature=keys,
        interval=interval,
        relay=relay,
        op_libraries=tuple(op_libraries),
        settings=limits,
        ranks=ranks,
    )
    scaling: dict[str, Any] = {"num_replicas": 1 if num_replicas is None else num_replicas}
    if autoscaling_config is not None:
        scaling = {"autoscaling_config": dict(autoscaling_config)}
    deployed = serve.deployment(
        name=name,
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=max_queued_requests,
        ray_actor_options=dict(ray_actor_options or {}),
        request_router_config=_ROUTER,
        **placement,
        **scaling,
    )(Replica)
    _desire(spec, weights, opened.manifest)
    return deployed.bind(spec)


def _since(name: str) -> float:
    """Return the current time, but later than the present deployment's, which a clock that is ahead may have set."""
    known = 0.0
    if ray.is_initialized():
        with suppress(UnknownFleet):
            known = find_spec(name).since
    return max(time.time(), known + 0.001)


def _placement(manifest: Manifest, path: str, ranks: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement of a replica's ranks, each with the resources of a replica, on one node."""
    size = manifest.ranks.size if manifest.ranks else 1
    if ranks != size:
        what = f"exported for {size} ranks" if size > 1 else "for one process"
        raise Unsupported(f"ranks={ranks!r}: {path} is {what}; give ranks={size}, or an artifact for {ranks!r}")
    if size == 1:
        return {}
    bundle = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    if memory := options.get("memory"):
        bundle["memory"] = memory
    needed = {name: amount for name, amount in bundle.items() if amount}
    if not needed:
        raise Unsupported("ray_actor_options: each rank needs a resource, such as num_cpus=1, by which it is placed")
    return {"placement_group_bundles": [needed] * size, "placement_group_strategy": "STRICT_PACK"}


def _desire(spec: DeploymentSpec, weights: _Path | None, manifest: Manifest) -> None:
    """Write the first weights to the desired store, verified as a replica does.

    Raises GraphMismatch if others are desired that no replica could serve, and what `load` raises.
    """
    desired_store = DesiredStore(spec.desired_store)
    if desired_store.is_local and not Path(desired_store.where).is_dir():
        raise Unsupported(
            f"{desired_store.where}: not a directory; make it where all machines see it, or follow another desired "
            "store"
        )
    state = desired_store.read()
    if state.weights is not None:
        _check_graph(
            f"{desired_store.where}: the desired weights {printable(state.weights.source)}",
            state.weights.graph_id,
            manifest.packed_for,
        )
    elif weights is not None:
        source = fixed_text(as_location(weights))
        known = known_weights(source)
        _check_graph(printable(source), known.graph_id, manifest.packed_for)
        _verify(spec, source)
        desired_store.set(source, revision=state.revision, why="the fleet's first weights", known=known)
    else:
        raise NoWeights(f"{desired_store.where}: nothing is desired there yet for replicas to start with; give weights")


def _verify(spec: DeploymentSpec, source: str) -> None:
    """Load weights once, before they are desired. Raises what a replica would, on ranks that of the first of them."""
    if spec.ranks == 1:
        _load(spec, source, None)
        return
    address = free_address()

    def join(number: int) -> None:
        _load(spec, source, Ranks(process_group(address, number, spec.ranks), check_calls=False))

    with ThreadPoolExecutor(spec.ranks) as pool:  # all ranks at once, which need the memory of one whole model
        list(pool.map(join, range(spec.ranks)))


def _load(spec: DeploymentSpec, source: str, ranks: Ranks | None) -> None:
    load(
        spec.artifact,
        source,
        ranks=ranks,
        residency="single",
        verify=spec.verify,  # type: ignore[arg-type]
        allow_nonfinite=spec.allow_nonfinite,
        admit=requires(*spec.require_signature) if spec.require_signature else None,
        op_libraries=spec.op_libraries,
    ).close()


def _check_graph(what: str, graph_id: str, expected: str) -> None:
    if graph_id and graph_id != expected:
        raise GraphMismatch(
            f"{what}: packed for another graph, {graph_id[:SHOWN]}; the artifact has {expected[:SHOWN]}. Nothing was "
            "deployed: pack their checkpoint for this artifact, or follow another desired store"
        )


def _allowed(patterns: bool | str | Sequence[str], manifest: Manifest) -> bool | tuple[str, ...]:
    """Resolve patterns into names, so that wrong ones fail here and not in replicas."""
    allowed = as_allowed(patterns, manifest)
    return allowed if isinstance(allowed, bool) else tuple(sorted(allowed or ()))


def _keys(option: _Path | Sequence[_Path] | None) -> tuple[str, ...]:
    """Return the paths of public keys, and check them here and not in replicas."""
    paths = [option] if isinstance(option, str | os.PathLike) else option or ()
    keys = tuple(fixed_text(as_location(path)) for path in paths)
    if keys:
        requires(*keys)
    return keys


def _folder(weights: _Path | None) -> str:
    assert weights is not None
    location = as_location(weights)
    return location.parent.raw if isinstance(location, Url) else str(Path(fixed(location)).parent)
