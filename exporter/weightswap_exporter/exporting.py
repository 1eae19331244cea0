"""`export()`: from a model to an artifact: its graphs, and the tables of what they read, without the weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import nn

from weightswap_exporter.capture.archive import graph_archive
from weightswap_exporter.capture.capture import (
    Captured,
    MethodSpec,
    capture,
    scales_in_code,
    scales_in_state,
    training_operators,
)
from weightswap_exporter.capture.classify import Tables, classify, overlapping
from weightswap_exporter.capture.conversion import record_conversion
from weightswap_exporter.capture.decoders import decoder, dropped_settings
from weightswap_exporter.capture.describe import describe_method
from weightswap_exporter.capture.tracing import CheckpointTensors, Load
from weightswap_exporter.checkpoints.loading import example_checkpoint, kinds_file
from weightswap_exporter.engines.compiling import (
    OnStep,
    check_engines,
    engine_files,
    ignore_step,
    try_engines,
    with_files,
    write_files,
)
from weightswap_exporter.engines.engine_check import try_ranks
from weightswap_exporter.modules.libraries import Declared, Groups, base_alone, find_groups, peft_base, without_cache
from weightswap_exporter.modules.parallel import Parallel, as_rank, check_plan
from weightswap_exporter.modules.tensors import ModelView, computed_anew, plain_buffers, unwrapped
from weightswap_runtime import Artifact, __version__
from weightswap_runtime.engines.choosing import ENGINES
from weightswap_runtime.engines.operators import RANKS
from weightswap_runtime.errors import (
    ArtifactError,
    CaptureError,
    ExportError,
    Unsupported,
    WeightswapError,
    listed,
    warn,
)
from weightswap_runtime.format.artifact import zeros
from weightswap_runtime.format.canonical import encode_tensors
from weightswap_runtime.format.cuts import part_of_rank
from weightswap_runtime.format.goldens import GOLDENS_NAME, INPUTS_NAME
from weightswap_runtime.format.manifest import (
    CONSTANTS_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    METHOD_NAME,
    RANKS_VERSION,
    VARIANTS_VERSION,
    Manifest,
    Method,
    Producer,
    Split,
    TextGeneration,
    decode_manifest,
    encode_manifest,
    with_graph_id,
)
from weightswap_runtime.format.model_config import config_of
from weightswap_runtime.format.safetensors import parse_file
from weightswap_runtime.format.signature import Signature, leaves
from weightswap_runtime.sources.location import check_writable
from weightswap_runtime.sources.writing import new_folder
from weightswap_runtime.tensors import Tolerance, describe
from weightswap_runtime.threads import without_garbage_collection
from weightswap_runtime.torch_tensors import tensor_content

from .goldens import GoldensRequest, Requested, record, record_inputs, wanted_goldens, weights_identity


def export(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    methods: Mapping[str, MethodSpec] | None = None,
    engines: Sequence[str] = ("torch",),
    load: Load | None = None,
    checkpoint: CheckpointTensors | str | os.PathLike[str] | None = None,
    goldens: Requested | None = None,
    tolerance: Tolerance | None = None,
    variants: Declared | None = None,
    parallel: Parallel | None = None,
    on_step: OnStep = ignore_step,
) -> Artifact:
    """Capture a model's graphs, without its weights, into the folder `out`.

    model: real, or built under `skeleton()`; on the CPU, in the mode (`.eval()`) in which it is to be served.
    args, kwargs, dynamic_shapes: sample inputs and dynamic dimensions of `forward`, as `torch.export.export` takes
    them. methods: a MethodSpec for each method to capture, instead of these three. All methods share one set of
    weights. Two artifacts can share one in a server (`load(share=...)`) if each weight has the same name, dtype, shape,
    ties and strides in both: export the same module for both, including parts that one of them does not call.
    load: a function `load(model, checkpoint)` that loads a checkpoint into the model; default
    `model.load_state_dict`. checkpoint: an example of a checkpoint, as tensors by key or as a path; default
    `model.state_dict()`. Its values are not used.
    goldens: calls to record with the eager model, whose outputs a server must reproduce: a list of `(args, kwargs)` or
    of tuples of args for `forward` or the only method, or a dict of such lists by method (a tuple of a tuple and a dict
    is `(args, kwargs)`). The model is called in its mode, under `torch.no_grad()`, with row-major copies of the inputs
    and from the initial state, and is left as it was. A skeleton cannot be called, so its inputs alone are recorded: a
    server checks that every set of weights gives finite outputs for them.
    tolerance: `(rtol, atol)` for comparing with the goldens; default: exact on the same kind of machine. With
    `parallel`, where ranks add in another order than the model, it is that of the coarsest dtype of the weights:
    `(1e-4, 1e-5)` for float32, `(1e-2, 1e-2)` for float16, `(5e-2, 5e-2)` for bfloat16.
    variants: parameters that each call chooses among sets that a server keeps side by side, as name patterns by group,
    such as {"lora": "*lora_*"}; see docs/variants.md. Goldens are those of the base: these parameters are zeros.
    parallel: the ranks that the model is split over, and how: the artifact is then for that many processes, each with a
    part of the weights. Its table of weights has the whole ones, and weight files are those of the model in one
    process, whatever the number of ranks. Goldens are recorded with the whole model. Tensors that calls change,
    variants and other engines than `torch` are refused.
    engines: engines that the graphs are also compiled for, as `compile_engines` can do later; a MethodSpec may name its
    own instead. A method that an engine has no file for runs on `torch`. on_step: callback for progress messages.

    Wrappers by torch.compile, DataParallel and DistributedDataParallel are removed. A model of the library transformers
    is captured without its key-value cache, and has its own defaults for `load` and `checkpoint`. A module around such
    models keeps their caches, as it may compute with them, but returns None for each. A parameter that is composed of
    other tensors, as torchao's quantised ones are, becomes one weight for each of them.

    The folder appears whole or not at all; an existing artifact is replaced. The same model gives the same bytes.
    Raises CaptureError, ExportError, Unsupported for tensors that cannot be taken apart (sharded ones, for example),
    and ParityError for goldens that cannot be recorded.
    """
    specs = _specs(args, kwargs, dynamic_shapes, methods)
    plain = unwrapped(model)
    if isinstance(plain, torch.jit.ScriptModule):
        raise CaptureError(
            f"a TorchScript module ({plain.original_name}), expected an eager one. Export the module that "
            "torch.jit.trace or torch.jit.script was given; pack(scripted.state_dict(), ...) packs the weights of this"
        )
    return _export(
        peft_base(plain) if variants else plain,
        specs,
        out,
        engines,
        load=load,
        checkpoint=checkpoint,
        goldens=wanted_goldens(goldens, tolerance, list(specs)),
        variants=variants,
        parallel=parallel,
        on_step=on_step,
    )


def export_decoder(
    model: nn.Module,
    *,
    out: str | os.PathLike[str],
    length: int,
    batch: int = 1,
    checkpoint: CheckpointTensors | str | os.PathLike[str] | None = None,
    engines: Sequence[str] = ("torch",),
    variants: Declared | None = None,
    on_step: OnStep = ignore_step,
) -> Artifact:
    """Capture a language model of transformers so that a server generates with it: `model.generate(...)`.

    model: one with key-value caches, real or built under `skeleton()`. length: capacity of a context in tokens, prompt
    and answer together. batch: number of sequences that are generated side by side. Both are fixed. out, checkpoint,
    engines, variants, on_step: as in `export`. What generates is not split over ranks. Raises the errors of `export`,
    and Unsupported for a model whose memory is not a key-value cache. Warns of settings of its generation_config with
    which transformers chooses other tokens; only the end tokens are kept.
    """
    base = peft_base(model) if variants else model
    prepared, methods, generation = decoder(base, length, batch)
    if text := dropped_settings(base):
        warn(text)
    return _export(
        prepared,
        methods,
        out,
        engines,
        checkpoint=checkpoint,
        generation=generation,
        variants=variants,
        on_step=on_step,
    )


def _export(
    model: nn.Module,
    specs: Mapping[str, MethodSpec],
    out: str | os.PathLike[str],
    engines: Sequence[str],
    *,
    load: Load | None = None,
    checkpoint: CheckpointTensors | str | os.PathLike[str] | None = None,
    goldens: GoldensRequest | None = None,
    generation: TextGeneration | None = None,
    variants: Declared | None = None,
    parallel: Parallel | None = None,
    on_step: OnStep,
) -> Artifact:
    method_engines = _engines_of(specs, engines)
    if parallel is not None:
        _check_parallel(model, parallel, method_engines, variants)
    check_writable(out)
    path = _check_out(Path(out))
    view = ModelView(model)
    view.check_separable()
    example = None if checkpoint is None else example_checkpoint(checkpoint)
    groups = find_groups(view, variants)
    with without_garbage_collection(), computed_anew(), plain_buffers(model), base_alone(view, groups):
        on_step(f"capturing {', '.join(specs)}")
        manifest, files, texts = _artifact(view, specs, load, example, groups)
        whole = manifest, files
        if parallel is not None:
            on_step(f"capturing {', '.join(specs)} as one of {parallel.size} ranks")
            manifest, files = _for_ranks(view, specs, parallel, *whole)
        for text in texts:  # before anything is written: a warning may be an error
            warn(text)
        manifest = msgspec.structs.replace(manifest, generation=generation)
        if goldens:
            recorded = _recorded_calls(view, goldens, specs, manifest, files[CONSTANTS_NAME])
            files |= recorded
            manifest = with_files(manifest, recorded)
        try:
            decode_manifest(encode_manifest(manifest), str(path))
        except ArtifactError as error:
            raise CaptureError(f"the model cannot be described: {error}") from error
        if parallel is not None:
            on_step("trying the ranks")
            _try_ranks(whole, (manifest, files))
        previous = _compiled_for(path)
        _write(path, manifest, files, method_engines, on_step)
    if lost := sorted(previous - _compiled_for(path)):
        text = f"{path}: the replaced artifact was compiled for {', '.join(lost)}, and the new one is not"
        warn(f"{text}; run weightswap compile")
    return Artifact.open(path)


def _specs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    methods: Mapping[str, MethodSpec] | None,
) -> Mapping[str, MethodSpec]:
    if methods is None:
        return {"forward": MethodSpec("forward", args, kwargs or {}, dynamic_shapes)}
    if args != () or kwargs or dynamic_shapes is not None:
        raise ExportError("give either `methods`, or `args`, `kwargs` and `dynamic_shapes` for forward, not both")
    if not isinstance(methods, Mapping) or not all(isinstance(spec, MethodSpec) for spec in methods.values()):
        raise ExportError("methods must be a dict from names to MethodSpec")
    if not methods or not all(map(METHOD_NAME.fullmatch, methods)):
        raise CaptureError(f"method names must be identifiers, and at least one is needed; got {list(methods)}")
    return methods


def _engines_of(specs: Mapping[str, MethodSpec], engines: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the engines of each method. Raises Unsupported for unknown ones."""
    check_engines(engines)
    method_engines = {name: engines if spec.engines is None else spec.engines for name, spec in specs.items()}
    for name, own_engines in method_engines.items():
        check_engines(own_engines, f"method {name!r}: ")
    return method_engines


def _check_out(path: Path) -> Path:
    try:
        foreign = path.exists() and not (path / MANIFEST_NAME).is_file()
    except (OSError, ValueError) as error:
        raise ExportError(f"{path!s:.200}: cannot be written ({error})") from error
    if foreign:
        raise ExportError(f"{path}: exists and is not an artifact; give an unused name, or remove it")
    return path


def _artifact(
    view: ModelView,
    specs: Mapping[str, MethodSpec],
    load: Load | None,
    checkpoint: CheckpointTensors | None,
    groups: Groups,
) -> tuple[Manifest, dict[str, bytes], list[str]]:
    """Return the manifest, the content of the other files by name, and warnings."""
    captured = _captured(view, specs)
    texts = list(_doubts(captured))
    tables = classify(view, captured, groups)
    if pairs := overlapping(view.tensors, tables.weights):
        texts.append(
            "these weights share memory but are not one tensor; after a swap they do not share it: " + "; ".join(pairs)
        )
    recorded = record_conversion(view, tables, load=load, checkpoint=checkpoint)
    described, files = _graphs(captured, tables)
    files[CONSTANTS_NAME] = _constants(tables)
    files |= recorded.files | kinds_file(view)
    manifest = Manifest(
        format_version=VARIANTS_VERSION if groups else FORMAT_VERSION,
        graph_id="",
        producer=Producer(weightswap=__version__, torch=str(torch.__version__)),
        device="cpu",
        methods=described,
        weights=tables.weights,
        state=tables.state,
        constants=tables.constants,
        conversion=recorded.conversion,
        files={name: blake3(content).hexdigest() for name, content in sorted(files.items())},
        variants=tables.variants,
        config=config_of(view.model, scaled=not groups),  # variants bring their own factors
    )
    return with_graph_id(manifest), files, [*texts, *recorded.warnings]


def _captured(view: ModelView, specs: Mapping[str, MethodSpec]) -> dict[str, Captured]:
    with without_cache(view.model):
        return {name: capture(view, name, spec) for name, spec in specs.items()}


def _graphs(
    captured: Mapping[str, Captured], tables: Tables, group: str | None = None
) -> tuple[dict[str, Method], dict[str, bytes]]:
    """Return the methods of the manifest, and the files of their graphs by name. group: as for `graph_archive`."""
    described = {
        name: Method(graph=f"graphs/{name}.pt2", inputs=tables.inputs[name], signature=describe_method(method))
        for name, method in captured.items()
    }
    archives = {
        described[name].graph: graph_archive(method.program, described[name].signature, group)
        for name, method in captured.items()
    }
    return described, archives


def _check_parallel(
    model: nn.Module, parallel: Parallel, engines: Mapping[str, Sequence[str]], variants: Declared | None
) -> None:
    if not isinstance(parallel, Parallel):
        raise ExportError(f"parallel={parallel!r:.80}: expected weightswap_exporter.Parallel(size, plan)")
    if variants:
        raise Unsupported("variants= with parallel=: calls of several ranks choose no variants; export one of the two")
    if compiled := sorted({name for names in engines.values() for name in names if ENGINES[name].compiled}):
        raise Unsupported(f"engines={compiled} with parallel=: several ranks need the engine 'torch'; leave them out")
    check_plan(ModelView(model), parallel)  # before anything is captured


def _for_ranks(
    view: ModelView, specs: Mapping[str, MethodSpec], parallel: Parallel, whole: Manifest, files: dict[str, bytes]
) -> tuple[Manifest, dict[str, bytes]]:
    """Return the manifest and the files of a model for its ranks. whole, files: those for one process.

    A rank differs in its graphs alone. Raises CaptureError where it would differ in anything else.
    """
    if whole.state:
        names = listed([row.name for row in whole.state])
        raise Unsupported(f"parallel=: calls change {names}, and ranks keep no state; pass it in and out of the call")
    with as_rank(view, parallel) as rank:
        try:
            captured = _captured(rank.view, specs)
        except CaptureError as error:
            raise CaptureError(
                f"as one of {parallel.size} ranks: {error}",
                "Where it reads a part of the features, a forward has to take sizes from tensors, such as the number "
                "of heads in view(*x.shape[:-1], -1, head_dim), or the plan leaves the layer before it whole.",
            ) from error
        tables = classify(rank.view, captured)
        methods, archives = _graphs(captured, tables, RANKS)
    cuts = {row.name: rank.cuts[row.name] for row in whole.weights if row.name in rank.cuts}
    split = Split(size=parallel.size, whole=whole.graph_id, cuts=cuts)
    _check_tables(whole, split, tables, files[CONSTANTS_NAME])
    for name, method in methods.items():
        _check_signature(name, whole.methods[name].signature, method.signature)
    files = files | archives
    manifest = msgspec.structs.replace(
        whole,
        format_version=RANKS_VERSION,
        methods=methods,
        files={name: blake3(content).hexdigest() for name, content in sorted(files.items())},
        ranks=split,
    )
    return with_graph_id(manifest), files


def _try_ranks(*artifacts: tuple[Manifest, dict[str, bytes]]) -> None:
    """Compare what the whole model and its ranks compute. Raises CaptureError."""
    with tempfile.TemporaryDirectory(prefix="weightswap-") as name:
        folders = [Path(name) / number for number in ("whole", "ranks")]
        for folder, (manifest, files) in zip(folders, artifacts, strict=True):
            write_files(folder, manifest, files)
        try_ranks(*map(Artifact.open, folders))


def _check_signature(name: str, whole: Signature, rank: Signature) -> None:
    if (whole.args, whole.kwargs, whole.output) == (rank.args, rank.kwargs, rank.output):
        return
    pairs = zip_longest(leaves(rank.output), leaves(whole.output))
    ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("other inputs", "its own"))
    raise CaptureError(
        f"method {name!r}: a rank has {ours}, and the whole model {theirs}. The plan leaves outputs in parts: gather "
        "them with 'colwise_gather_output', or add them up with 'rowwise'"
    )


def _check_tables(whole: Manifest, split: Split, tables: Tables, constants: bytes) -> None:
    """Raise CaptureError unless a rank has the same weights, cut as planned, and the same constants."""
    found = {row.name: row for row in tables.weights}
    cuts = split.cuts
    expected = {
        row.name: part_of_rank(row, cuts[row.name], split.size) if row.name in cuts else row for row in whole.weights
    }
    differ = [name for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]
    if differ:
        have, want = (rows.get(differ[0]) for rows in (found, expected))
        raise CaptureError(
            f"{differ[0]}: a rank has {describe(have) if have else 'no such weight'}, and by the plan "
            f"{describe(want) if want else 'none'}. Split a layer that the model's calls read by its parts alone"
        )
    if tables.constants != whole.constants or _constants(tables) != constants:
        names = sorted({row.name for row in (*tables.constants, *whole.constants)})
        raise CaptureError(
            f"constants of a rank are not those of the whole model ({listed(names)}): a list, closure or cache holds "
            "them, or they follow from the sizes of a layer. Compute them in the call from its tensors"
        )


def _doubts(captured: Mapping[str, Captured]) -> Iterator[str]:
    """Yield warnings of what was captured, but may not be what the user wants to serve."""
    methods = captured.values()
    if training := sorted({op for method in methods for op in training_operators(method)}):
        yield (
            f"the exported graph behaves as in training ({', '.join(training)}): call model.eval() before the export "
            "if it is to serve"
        )
    if scales := dict.fromkeys(name for method in methods for name in scales_in_state(method)):
        yield (
            f"calls observe values and may change {listed(list(scales))}: these are state, and keep what they are now, "
            "whatever a checkpoint has. To serve a checkpoint's scales, give torch.fake_quantize_per_tensor_affine (or "
            "per_channel) buffers that no call changes"
        )
    if any(map(scales_in_code, methods)):
        yield (
            "tensors are quantised with scales that are numbers of the model's code, as convert_pt2e() writes: "
            "they stay what they are now, and weights of another calibration would be served with them. Export the "
            "model again after each calibration, or quantise with torchao's quantize_, whose scales are weights"
        )
    if tensors := dict.fromkeys(path for method in methods for path in method.side_effects.tensors):
        names = listed(list(tensors))
        yield f"a call leaves tensors in {names}. No later call reads them, and a server does not keep them"
    if numbers := dict.fromkeys(path for method in methods for path in method.side_effects.numbers):
        yield (
            f"a call changes {listed(list(numbers))}. The next call computes the same, and a server does not change "
            "them: make sure that no later call reads them"
        )
    yield from dict.fromkeys(text for method in methods for text in method.doubts)


def _constants(tables: Tables) -> bytes:
    """Return the content of `constants.safetensors`."""
    names = [row.name for row in (*tables.constants, *tables.state) if not row.zero]
    return b"".join(encode_tensors({name: tensor_content(tables.values[name]) for name in names}))


def _recorded_calls(
    view: ModelView, goldens: GoldensRequest, specs: Mapping[str, MethodSpec], manifest: Manifest, constants: bytes
) -> dict[str, bytes]:
    """Return the file of recorded calls: goldens, or for a skeleton the inputs alone."""
    if view.hollow:
        return {INPUTS_NAME: record_inputs(goldens, manifest).encode(None)}
    functions = {name: spec.fn_name for name, spec in specs.items()}
    values = parse_file(constants, CONSTANTS_NAME)[0] | zeros(manifest.state)
    recording = record(view, goldens, manifest, values, functions)
    return {GOLDENS_NAME: recording.encode(weights_identity(view, manifest))}


def _write(
    path: Path, manifest: Manifest, files: dict[str, bytes], engines: Mapping[str, Sequence[str]], on_step: OnStep
) -> None:
    try:
        with new_folder(path) as folder:
            write_files(folder, manifest, files)
            artifact = Artifact.open(folder)
            if more := engine_files(artifact, engines, on_step=on_step):
                write_files(folder, manifest, more)
                on_step("trying what was compiled")
                try_engines(Artifact.open(folder), [engine for names in engines.values() for engine in names])
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error})") from error


def _compiled_for(path: Path) -> set[str]:
    """Return the engines, with their machine targets, that an artifact is compiled for; none if it does not exist."""
    try:
        files = Artifact.open(path).manifest.files
    except (WeightswapError, OSError):
        return set()
    parts = (name.split("/")[1:-1] for name in files if name.startswith("engines/"))
    return {" for ".join(part) for part in parts}
