"""Loading of an artifact for serving: its engine, the memory for its weights, and the first weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from weightswap_runtime._version import __version__
from weightswap_runtime.engines.choosing import EngineName, as_taken, choose_engine, open_engine
from weightswap_runtime.engines.engine import AUTO, CudaGraphs, Engine, EngineOptions
from weightswap_runtime.errors import Unsupported, warn
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.format.goldens import Mode
from weightswap_runtime.format.names import Keys
from weightswap_runtime.live.ranks import Ranks
from weightswap_runtime.live.receipt import Listener
from weightswap_runtime.live.residency import ResidencyName
from weightswap_runtime.live.store import WeightStore
from weightswap_runtime.live.variants import MOST
from weightswap_runtime.memory.device_memory import HOST, StagingMode, device_name, open_memory
from weightswap_runtime.staging.request import Admit

from .model import Model

if TYPE_CHECKING:
    from weightswap_runtime.staging.given import Given

PathLike = str | os.PathLike[str]


def load(
    artifact: PathLike | Artifact,
    weights: Given | None = None,
    *,
    ignore: str | Sequence[str] = (),
    keys: Keys | None = None,
    expect: str | None = None,
    verify: Mode = "goldens",
    allow_nonfinite: bool | str | Sequence[str] | None = None,
    device: str = "cpu",
    engine: EngineName = "torch",
    threads: int | None = None,
    prologue: bool = True,
    residency: ResidencyName = "double",
    staging: StagingMode = "auto",
    cuda_graphs: CudaGraphs | None = None,
    keep_previous: Literal["host"] | None = None,
    share: Model | None = None,
    ranks: Ranks | None = None,
    on_event: Listener | None = None,
    op_libraries: Sequence[str] = (),
    max_variants: int = MOST,
    max_hash_trees: int | None = None,
    admit: Admit | None = None,
) -> Model:
    """Open an artifact and, if there are `weights` (a file, a checkpoint, tensors), serve them as generation 0.

    artifact: a folder, the URL of one (docs/remote.md), or an opened `Artifact`.
    residency: "double" holds two sets of weights: commits and rollbacks take constant time, and a staging overwrites
    the previous weights. "single" holds one: a commit copies in place while calls are held, staging allocates a second
    set temporarily, and nothing is kept for a rollback. keep_previous="host" keeps one set more: a rollback is then
    possible in single residency, and in double residency also after a staging that was refused.
    `weights`, `ignore`, `keys`, `expect`, `verify` and `allow_nonfinite` are those of `Model.stage`.

    device: "cpu", or a torch accelerator such as "cuda" or "cuda:1", as a text or a `torch.device`. On an accelerator,
    inputs and outputs are torch tensors on that device. staging: where single residency stages on an accelerator:
    "device", "host", or "auto", which is the device if there is room. cuda_graphs: sizes of calls that are captured
    once and replayed across swaps, such as [{"batch": 1}], or "auto" for any size. docs/cuda.md describes all three.

    share: a model whose weights this one serves from, too. The artifact must have the same table of weights (names,
    types, shapes, ties, order in memory), as when one module is exported twice with different inputs. The engines may
    differ as long as the tables agree. A swap through either model changes both in one commit. `residency`,
    `keep_previous`, `max_hash_trees` and the device are those of the other model, and `weights` are swapped into both.
    ranks: `Ranks(group)`, for an artifact that was exported with parallel=: the processes that have the model together.
    All of them call this at the same place, with the same arguments; docs/ranks.md.
    on_event: a listener of events, called in the thread that causes them; see `Event`.

    engine: "torch"; "aoti", for an artifact that was compiled for it on a machine like this one (its machine code runs
    in this process); "onnx", for an artifact that was compiled for it (on the CPU it takes and returns numpy arrays and
    needs no torch); or "auto", the fastest that this machine and the artifact offer. `Model.engine` then names it, and
    a RuntimeWarning says why machine code that the artifact has for this machine is not used. Methods for which the
    artifact has no file of the engine run on `torch`, on the same weights and contexts; see `Model.engines`.
    threads: the threads that one call of the engine `onnx` uses on the CPU; by default one for each core.
    prologue: let the engine `torch` compute results that depend on weights and constants alone once per staging,
    instead of in every call. max_variants: how many variants of one group may be resident; see `Model.add_variant`.
    max_hash_trees: bytes that may be kept for the digests of tables of which a few rows change (docs/recommenders.md);
    by default as many as they need, a sixteenth of these tables at most. With 0, each block of 1 MiB with a changed row
    is hashed as a whole.
    admit: a callback that is called with the path or URL of each file before it is staged, whoever requests it, and the
    weights id that the file claims; it raises a SwapError to refuse the file. The served weights have exactly that id.
    For a variant, whose file claims no id, it is called after reading, with the actual id. It is not called for the
    files that lead to a delta's base. Watchers and followers call it again for a refused file once
    the file, its goldens or its signature change, or once `admit.fingerprint()`, if it has that, returns another value.
    op_libraries: packages to import, or shared libraries to load, that register operators which the graphs call.

    Raises ArtifactError, Unsupported, MissingExtra, OutOfMemory, and whatever `Model.swap` raises; with `ranks`
    RanksRefused for what any of them would raise, and RanksLost.
    """

    def open_model() -> Model:
        if share is not None:
            _check_share(share, admit)
        opened = _open_artifact(artifact, op_libraries)
        _check_ranks(opened, ranks, share)
        model_device = _device_of(device, share)
        chosen = choose_engine(engine, opened, model_device)
        opened = as_taken(chosen, opened)
        if share is None:
            memory, split = open_memory(model_device, staging), opened.manifest.ranks
            rows = opened.manifest.weights
            store = WeightStore(rows, residency, keep_previous, memory, None, max_hash_trees, ranks, split)
        else:
            store = share._store
        store.admit = admit or store.admit
        group = ranks.group_name if ranks else None
        options = EngineOptions(threads, prologue, store.stages_on_host, cuda_graphs, group)
        opened_engine = _open_chosen(engine, chosen, opened, model_device, options)
        return Model(opened, store, device=model_device, engine=opened_engine, max_variants=max_variants)

    model = open_model() if ranks is None else _open_together(ranks, open_model)
    if on_event is not None:
        model.listen(on_event)
    if weights is not None:
        try:
            model.swap(weights, ignore=ignore, keys=keys, expect=expect, verify=verify, allow_nonfinite=allow_nonfinite)
        except BaseException:
            model.close()  # the error refers to it, and it would keep its memory and its ranks
            raise
    return model


def _open_together(ranks: Ranks, open_model: Callable[[], Model]) -> Model:
    """Open a model on all ranks, or on none. Raises RanksRefused and RanksLost."""
    opened: list[Model] = []

    def prepare() -> dict[str, str]:
        model = open_model()
        opened.append(model)
        return {
            "version": __version__,
            "graph": model.graph_id,
            "residency": model.residency,
            "device": model.device.partition(":")[0],
        }

    with ranks.turn("load"):
        ranks.agree_after("load", prepare)
    ranks.serve(opened[0]._store)
    return opened[0]


def _open_artifact(artifact: PathLike | Artifact, op_libraries: Sequence[str]) -> Artifact:
    if op_libraries:
        from weightswap_runtime.engines.operators import import_libraries  # needs torch

        import_libraries(op_libraries)
    return artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)


def _device_of(device: str, share: Model | None) -> str:
    """Return the name of a model's device, which is that of the model that it shares with. Raises Unsupported."""
    if share is None:
        return device_name(device)
    if device != HOST and device_name(device) != share.device:
        raise Unsupported(
            f"device={device!r}: the model to share with is on {share.device!r}. Leave device= out, or load this one "
            "without share="
        )
    return share.device


def _check_ranks(artifact: Artifact, ranks: Ranks | None, share: Model | None) -> None:
    split, where = artifact.manifest.ranks, artifact.path
    if split is None and ranks is not None:
        raise Unsupported(
            f"{where}: is for one process; export it with parallel=Parallel({ranks.size}), or leave out ranks="
        )
    if split is not None and ranks is None:
        raise Unsupported(
            f"{where}: is for {split.size} ranks, which have it together. Start as many processes, and in each "
            "load(..., ranks=Ranks(group)); docs/ranks.md"
        )
    if split is not None and ranks is not None and split.size != ranks.size:
        raise Unsupported(
            f"{where}: is for {split.size} ranks, the group has {ranks.size}; export it with "
            f"parallel=Parallel({ranks.size})"
        )
    if ranks is not None:
        ranks.check_unused()
    if split is not None and share is not None:
        raise Unsupported(f"{where}: share: not for models on several ranks")


def _check_share(share: object, admit: Admit | None) -> None:
    if not isinstance(share, Model):
        raise Unsupported(f"share={share!r}: expected a model that load() returned")
    share._check_open()
    if admit is not None:
        raise Unsupported("admit, share: models that share weights use the admit= of the first load(); pass it there")


def _open_chosen(requested: str, chosen: str, artifact: Artifact, device: str, options: EngineOptions) -> Engine:
    """Open the engine; if "auto" chose one that cannot be opened here, open `torch` instead, with a warning."""
    try:
        return open_engine(chosen, artifact, device, options)
    except Unsupported as error:
        if requested != AUTO or chosen == "torch":
            raise
        warn(f"engine=\"auto\": using the engine 'torch' instead: {error}", RuntimeWarning)
        return open_engine("torch", artifact, device, options)
