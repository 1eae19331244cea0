"""The verbs with which RL trainers update other engines: SGLang's update from disk, and vLLM's lifecycle of an update.

They stage and commit as operators do, with the same tokens, allowed paths and audit log. What they can pass is a path:
tensors by NCCL, by handles of device memory or in pickles are refused, before anything has changed. A model that is not
the only one is named by the query, `?model=NAME`, as the verbs have no desired store for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from weightswap_runtime.errors import StagingBusy, WeightswapError, brief
from weightswap_runtime.following.controller import Lease
from weightswap_runtime.live.receipt import SwapReceipt
from weightswap_runtime.tensors import tensor_digest
from weightswap_runtime.threads import in_thread
from weightswap_server.errors import BadRequest, Conflict, NotServed, UnknownModel, admin_failure_of
from weightswap_server.http.app import Endpoint
from weightswap_server.http.bodies import Bodies, uncached
from weightswap_server.protocol import decoded

from .audit import AuditLog, audited, user_of
from .documents import AdminError, Change, CommitRequest, StageRequest
from .operations import ModelOperations

T = TypeVar("T")
VERSION = "weight_version"  # names the version in the reason of a trainer's commit, and in the labels of files
BACKENDS = ("weightswap", "disk", "file", "filesystem")
_FORMATS = (None, "auto", "safetensors")
_INSTEAD = (
    "Write the weights to a file and give its path, to /update_weights or /update_weights_from_disk; from memory, "
    "weightswap's Sender takes them to this address"
)
_COLLECTIVE = "comes by NCCL, from which no weights can be verified before they are served"
_HANDLES = "is a handle of another process's memory, which may change while it is read"
_PICKLE = "is a pickle, which can run code"
PAYLOADS = {
    **dict.fromkeys(("names", "dtype_names", "dtypes", "shapes", "group_name"), _COLLECTIVE),
    **dict.fromkeys(("master_address", "master_port", "rank_offset", "world_size"), _COLLECTIVE),
    **dict.fromkeys(("nccl_unique_id_b64", "packed", "packed_buffer_size_bytes", "packed_num_buffers"), _COLLECTIVE),
    **dict.fromkeys(("ipc_handles", "zmq_handles"), _HANDLES),
    **dict.fromkeys(("ipc_handles_pickled", "serialized_named_tensors"), _PICKLE),
}
"""Why each field of the other transports is refused."""
REFUSED = {
    "/init_weights_update_group": f"a group {_COLLECTIVE}",
    "/update_weights_from_distributed": f"what it announces {_COLLECTIVE}",
    "/update_weights_from_tensor": f"a serialised tensor {_PICKLE}",
    "/update_weights_from_ipc": f"what it passes {_HANDLES}",
}
"""SGLang's other verbs, and why they are refused."""
_Version = Annotated[str, Meta(max_length=900)] | None  # a reason may have 1,000 characters
_LONGEST = 4096  # characters of a path, as in `StageRequest`
_Path = Annotated[str, Meta(min_length=1, max_length=_LONGEST)]


class DiskUpdate(Struct, forbid_unknown_fields=True):
    """SGLang's update from disk. model_path: as `source` of `swap`. Calls are not paused, and generations that have
    begun go on with the weights that they began with, whatever the fields about requests and caches say."""

    model_path: _Path
    load_format: str | None = None
    weight_version: _Version = None
    manifest: Any = None
    target_modules: Any = None
    abort_all_requests: bool | None = None
    is_async: bool | None = None
    torch_empty_cache: bool | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None
    flush_cache: bool | None = None
    rid: Any = None
    http_worker_ipc: Any = None

    def __post_init__(self) -> None:
        if self.load_format not in _FORMATS:
            raise ValueError(f"load_format {brief(self.load_format)}: safetensors are read; leave it out")
        if self.manifest is not None:
            raise ValueError("manifest: the file's own header says what is in it; leave it out")
        if self.target_modules is not None:
            raise ValueError("target_modules: all weights are read; `only` of /admin/models/NAME/swap reads a part")


class DiskUpdated(Struct):
    """The outcome of SGLang's update from disk. No request waits for a swap."""

    success: bool
    message: str
    num_paused_requests: int = 0


class DiskRefused(AdminError):
    """The refusal of an SGLang verb, with its fields, too."""

    success: bool = False
    message: str = ""
    num_paused_requests: int = 0


class InitEngine(Struct):
    """The begin of a trainer. init_info: a `backend` that passes paths, or nothing."""

    init_info: dict[str, Any]

    def __post_init__(self) -> None:
        _check_fields("init_info", self.init_info, "backend")
        if (backend := self.init_info.get("backend", BACKENDS[0])) not in BACKENDS:
            raise ValueError(
                f"init_info: backend {brief(str(backend))}: expected one of {', '.join(BACKENDS)}. {_INSTEAD}"
            )


class UpdateWeights(Struct):
    """The weights of an update. update_info: their `path`, as `source` of `swap`; or a list with one such object."""

    update_info: dict[str, Any] | list[dict[str, Any]]

    def __post_init__(self) -> None:
        infos = self.update_info if isinstance(self.update_info, list) else [self.update_info]
        for info in infos:
            _check_fields("update_info", info, "path")
        if len(infos) != 1:
            raise ValueError(f"update_info: expected one path, which may be a directory of shards; got {len(infos)}")
        if not (isinstance(path := infos[0].get("path"), str) and 0 < len(path) <= _LONGEST):
            raise ValueError(f"update_info: expected a path of up to {_LONGEST} characters")

    @property
    def path(self) -> str:
        info = self.update_info[0] if isinstance(self.update_info, list) else self.update_info
        return str(info["path"])


class FinishUpdate(Struct):
    """The end of an update. weight_version: what /weight_info then says."""

    weight_version: _Version = None


class Message(Struct):
    """What was done."""

    message: str


class WeightInfo(Struct):
    """The served weights. weight_version: as the trainer named them, else their label of that name, else their id."""

    weight_version: str
    weights_id: str
    generation: int
    labels: dict[str, str]


class CheckWeights(Struct, forbid_unknown_fields=True):
    """A question about the served weights. baseline: digests by name, such as an earlier answer's `checksums`."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


class Checked(Struct, omit_defaults=True):
    """BLAKE3 digests of the served weights by name, as packed files record them; or the names that differ."""

    checksums: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    match: bool | msgspec.UnsetType = msgspec.UNSET
    mismatches: list[str] | msgspec.UnsetType = msgspec.UNSET


class Trainers:
    """The handlers of all verbs."""

    def __init__(
        self, models: Mapping[str, ModelOperations], bodies: Bodies, audit: AuditLog, staged_timeout: float
    ) -> None:
        self._bodies, self._audit = bodies, audit
        self._updates = {name: _Lifecycle(operations, staged_timeout) for name, operations in models.items()}

    def table(self) -> list[Endpoint]:
        post = partial(Endpoint, "POST", query="model")
        return [
            post("/update_weights_from_disk", self._from_disk, "Swap, as of SGLang.", DiskUpdated, DiskUpdate),
            post("/init_weight_transfer_engine", self._init, "Begin as a trainer, as of vLLM.", Message, InitEngine),
            post("/start_weight_update", self._start, "Start an update.", Message, {}, needed=False),
            post("/update_weights", self._update, "Stage weights.", Message, UpdateWeights),
            post("/finish_weight_update", self._finish, "Commit them.", Message, FinishUpdate, needed=False),
            Endpoint("GET", "/weight_info", self._info, "What is served.", WeightInfo, query="model"),
            post("/weight_checker", self._check, "Digests of what is served.", Checked, CheckWeights),
            *(
                post(path, partial(_refuse, why), "Refused.", Message, {}, needed=False)
                for path, why in REFUSED.items()
            ),
        ]

    async def _from_disk(self, request: Request) -> Response:
        try:
            lifecycle = self._lifecycle(request)
            document = await self._document(request, DiskUpdate)
            staging = StageRequest(source=document.model_path, why=_reason(document.weight_version))
            await self._do(request, "update_weights_from_disk", lifecycle, staging, lifecycle.swap)
        except WeightswapError as error:
            return _refused(error)
        return uncached(DiskUpdated(True, "Succeeded to update model weights."))

    async def _init(self, request: Request) -> Response:
        lifecycle, document = self._lifecycle(request), await self._document(request, InitEngine)
        await self._do(request, "init_weight_transfer_engine", lifecycle, document, lambda *_: lifecycle.end())
        return uncached(Message("Weight transfer initialized"))

    async def _start(self, request: Request) -> Response:
        lifecycle = self._lifecycle(request)
        await self._bodies.body_of(request)  # which trainers fill in several ways, about nothing that there is here
        await self._do(request, "start_weight_update", lifecycle, None, lambda _, by: lifecycle.start(by))
        return uncached(Message("Weight update started"))

    async def _update(self, request: Request) -> Response:
        lifecycle = self._lifecycle(request)
        document = await self._step(request, UpdateWeights, lifecycle)
        await self._do(request, "update_weights", lifecycle, StageRequest(source=document.path), lifecycle.stage)
        return uncached(Message("Weights updated"))

    async def _finish(self, request: Request) -> Response:
        lifecycle = self._lifecycle(request)
        document = await self._step(request, FinishUpdate, lifecycle)
        commit = CommitRequest(why=_reason(document.weight_version))
        await self._do(request, "finish_weight_update", lifecycle, commit, lifecycle.finish)
        return uncached(Message("Weight update finished"))

    async def _info(self, request: Request) -> Response:
        return uncached(await in_thread(partial(_info, self._lifecycle(request).operations)))

    async def _check(self, request: Request) -> Response:
        operations, question = self._lifecycle(request).operations, await self._document(request, CheckWeights)
        if question.action == "compare" and question.baseline is None:
            raise BadRequest("compare: needs a baseline, such as the checksums of an earlier answer")
        return uncached(await in_thread(partial(_checked, operations, question)))

    async def _do(
        self,
        request: Request,
        call: str,
        lifecycle: _Lifecycle,
        arguments: T,
        work: Callable[[T, str], object],
    ) -> None:
        """Do the work of a verb in a thread, and log it."""
        run = partial(work, arguments, user_of(request))
        await audited(self._audit, request, call, lifecycle.operations, arguments, run)

    async def _step(self, request: Request, kind: type[T], lifecycle: _Lifecycle) -> T:
        """Read the document of a step of an update, which ends if it is refused."""
        try:
            return await self._document(request, kind)
        except WeightswapError:
            await in_thread(partial(lifecycle.end, user_of(request)))
            raise

    async def _document(self, request: Request, kind: type[T]) -> T:
        return decoded(await self._bodies.body_of(request) or b"{}", kind)

    def _lifecycle(self, request: Request) -> _Lifecycle:
        name, names = request.query_params.get("model"), ", ".join(self._updates)
        if name is None and len(self._updates) != 1:
            raise BadRequest(f"which model? Add ?model=NAME to the URL; there are: {names}")
        if name is not None and name not in self._updates:
            raise UnknownModel(f"no model is named {name}; there are: {names}")
        return self._updates[name if name is not None else next(iter(self._updates))]


class _Update:
    """An update between its start and its finish, for which its lease lasts. by: the token's name."""

    def __init__(self, by: str, timeout: float) -> None:
        self.id, self.by = uuid4().hex, by
        self.lease = Lease(timeout)
        self.has_path = False


class _Lifecycle:
    """The updates of one model, of which one is open at a time. It belongs to the token that has started it.

    Whatever refuses a step ends the update and discards its weights: a trainer that goes on with its next one is not
    refused for the last, and never commits a part of what it has tried to send. What a trainer that has died leaves
    open ends with its lease, or with the `init` of the next.
    """

    def __init__(self, operations: ModelOperations, timeout: float) -> None:
        self.operations, self._timeout = operations, timeout
        self._lock = Lock()  # of `_open`, and of whether it has a path
        self._open: _Update | None = None

    def swap(self, request: StageRequest, by: str) -> None:
        """Stage and commit, beside the lifecycle. Raises Conflict, and what `ModelOperations.swap` raises."""
        with self._lock:
            self._check_none_open()
        self._check_served(self.operations.swap(request, by, promotes=True))

    def start(self, by: str) -> None:
        """Open an update. Raises Conflict."""
        with self._lock:
            last = self._open
            self._check_none_open()
            self._open = _Update(by, self._timeout)
        if last is not None:
            self._discard(last)

    def stage(self, request: StageRequest, by: str) -> None:
        """Stage the weights of the update. Raises Conflict, and what `ModelOperations.stage` raises."""
        with self._step(by) as update:
            with self._lock:
                again, update.has_path = update.has_path, True
            if again:
                raise Conflict(
                    f"{self.operations.name}: the update has a path already, and was discarded; start again, and give "
                    "all shards as one directory"
                )
            self.operations.stage(request, by, change_id=update.id)

    def finish(self, request: CommitRequest, by: str) -> None:
        """Commit the weights of the update. Raises Conflict, and what `ModelOperations.commit` raises."""
        with self._step(by) as update:
            self._check_served(self.operations.commit(request, by, update.id, promotes=True))
            self._end(update)

    def end(self, by: str | None = None) -> None:
        """End the update that is open, and discard its weights. by: only if it is this one's; None: anybody's."""
        if (update := self._open) is not None and by in (None, update.by):
            self._end(update)

    @contextmanager
    def _step(self, by: str) -> Iterator[_Update]:
        update = self._open
        if update is None:
            raise Conflict(f"{self.operations.name}: no update is open; POST /start_weight_update first")
        if update.by != by:
            raise Conflict(f"{self.operations.name}: the update that is open was started by {update.by}; start yours")
        try:
            if update.lease.is_over:
                raise Conflict(f"{self.operations.name}: the update took longer than --staged-timeout; start again")
            yield update
        except StagingBusy:  # such as a finish while weights are still staged
            raise
        except BaseException:
            self._end(update)
            raise

    def _end(self, update: _Update) -> None:
        with self._lock:
            if self._open is update:
                self._open = None
        self._discard(update)

    def _discard(self, update: _Update) -> None:
        self.operations.discard(Change(), "", update.id)

    def _check_none_open(self) -> None:
        if (last := self._open) is not None and not last.lease.is_over:
            raise Conflict(
                f"{self.operations.name}: an update has been started by {last.by} already; finish it. If its trainer "
                "is gone, POST /init_weight_transfer_engine, with which trainers begin, discards it"
            )

    def _check_served(self, receipt: SwapReceipt | None) -> None:
        if receipt is None:
            raise NotServed(
                f"{self.operations.name}: the desired store that it follows now wants the weights, but this process "
                "does not serve them yet; look at /weight_info"
            )


def _check_fields(where: str, given: Mapping[str, Any], known: str) -> None:
    """Raise ValueError for fields that would change which weights are served."""
    for name in given:
        if name in PAYLOADS:
            raise ValueError(f"{where}: {name} {PAYLOADS[name]}. {_INSTEAD}")
        if name != known:
            raise ValueError(f"{where}: {brief(name)} is not known here; expected {known} alone")


def _info(operations: ModelOperations) -> WeightInfo:
    version = operations.version
    return WeightInfo(
        weight_version=_version_of(operations, version.weights_id) or version.labels.get(VERSION, version.weights_id),
        weights_id=version.weights_id,
        generation=version.generation,
        labels=version.labels,
    )


def _version_of(operations: ModelOperations, weights_id: str) -> str | None:
    """Return the name that a trainer gave to weights when they came last; a rollback to them keeps it."""
    for receipt in reversed(operations.model.history):
        if receipt.weights_id == weights_id:
            given, equals, version = operations.journal.why(receipt).partition("=")
            if equals and given == VERSION:
                return version
            if receipt.kind != "rollback":
                break
    return None


def _reason(version: str | None) -> str:
    return f"{VERSION}={version}" if version else ""


def _checked(operations: ModelOperations, question: CheckWeights) -> Checked:
    digests = {name: tensor_digest(blocks) for name, blocks in sorted(operations.version.identity.digests.items())}
    if question.action == "checksum" or question.baseline is None:
        return Checked(checksums=digests)
    names = sorted(digests.keys() | question.baseline)
    differ = [name for name in names if digests.get(name) != question.baseline.get(name)]
    return Checked(match=not differ, mismatches=differ)


async def _refuse(why: str, request: Request) -> Response:
    """Refuse without reading the body, which may be as large as the weights."""
    return _refused(BadRequest(f"{request.url.path}: {why}. {_INSTEAD}"))


def _refused(error: WeightswapError) -> Response:
    failure = admin_failure_of(error)
    return uncached(
        DiskRefused(error=failure.text, kind=failure.kind, reason=failure.reason, message=failure.text), 400
    )
