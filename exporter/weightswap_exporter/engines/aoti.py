"""Files of the engine `aoti`: methods compiled by AOTInductor, so that weights stay out of them.

By default AOTInductor compiles in what it can: small weights, this machine's threads and vector extensions. Its
generated code ends the process where eager raises. Settings, rewrites of the graph and lowerings of some operators
prevent both; what cannot be prevented is refused.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import shutil
import sysconfig
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import sympy
import torch
import torch._inductor
from torch._guards import detect_fake_mode
from torch._inductor import config, cpu_vec_isa
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.utils import fresh_inductor_cache
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from weightswap_exporter.capture.archive import method_program
from weightswap_exporter.capture.programs import functionalised, is_plain
from weightswap_exporter.engines.divisions import (
    exact_floor,
    exact_remainder,
    is_floor_of_fractions,
    is_remainder_of_fractions,
)
from weightswap_exporter.engines.index_bounds import indices_of
from weightswap_runtime import Artifact
from weightswap_runtime.engines.aoti import Library, target_of
from weightswap_runtime.engines.aoti_package import (
    BESIDE_GPUS,
    LIBRARY_SUFFIX,
    NOTE_NAME,
    TARGETS,
    Note,
    NotedTensor,
    Target,
    is_gpu_target,
    machine_name,
    machine_targets,
)
from weightswap_runtime.errors import CaptureError, ExportError, Unsupported
from weightswap_runtime.format.manifest import GraphInput, Method
from weightswap_runtime.format.signature import Integer, Leaf, Signature, Tensor, input_leaves, leaves
from weightswap_runtime.torch_tensors import DTYPE_NAMES
from weightswap_tools.inputs import common_sizes, edge_sizes

from .aoti_rewrites import rewritten

_MISSING_COMPILER = "InvalidCxxCompiler"
_ERROR_LINE = re.compile(r"^.*\berror: (.*)$", re.MULTILINE)
_CUDA_HEADER = re.compile(r"((?:cuda|crt/|nv/)[^:]*): No such file")
_Values = Mapping[sympy.Symbol, sympy.Integer]
_CHECK, _PARALLEL = "AOTI_TORCH_CHECK(", "#pragma omp parallel"
# Weights of every size stay out: by default, weights with one element and vectors of up to eight are compiled in.
_SETTINGS: Mapping[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.use_runtime_constant_folding": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
    "freezing": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    # else fused code computes in float32 without the casts to 16 bits between: x - x.half().float() would be 0
    "emulate_precision_casts": True,
    # of the environment, as are the next two: else it would leave out the checks of sizes that depend on values
    "scalar_asserts": True,
    # nor may the C++ compiler rearrange sums: (x + 1e8) - 1e8 would be x
    "cpp.enable_unsafe_math_opt_flag": False,
    "cpp.enable_floating_point_contract_flag": "off",
    # else a number that is written into a constant of float64 is rounded to float32
    "optimize_scatter_upon_const_tensor": False,
    # precompiled headers would go into the user's cache
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.model_name_for_generated_files": "graph",
}
# Code for any number of threads, which is the same wherever it is compiled. The number says how many loops are shared
# out: where a batch of two was the sample, more than it keeps one row's work from being one thread's. In a process with
# one, AOTInductor would leave out what keeps every thread of a region from running a part for one: on a server with
# more, `counter += 1` would count once in each thread.
_THREADED: Mapping[str, Any] = {"cpp.dynamic_threads": True, "cpp.threads": 16}
_SERIAL: Mapping[str, Any] = {"cpp.dynamic_threads": False, "cpp.threads": 1}
# Where tools are, and how many of them run at once, is the user's; what else is set is for torch.compile.
_USERS = ("cpp.cxx", "compile_threads", "worker_", "cuda.", "rocm.", "xpu.", "cutlass.")
_ON_GPU: Mapping[str, Any] = {"aot_inductor.embed_kernel_binary": True}  # else kernels are files beside the library
_aten = torch.ops.aten
_BYTES = frozenset({torch.int8, torch.uint8})
_INTEGERS = frozenset({*_BYTES, torch.int16, torch.int32, torch.int64})
_DIVISIONS = frozenset({"div", "divide", "floor_divide", "remainder", "fmod"})
_FOLDER = "data/aotinductor/model"
_FORMAT = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"3\n"}


def build_target(device: torch.device) -> str:
    """Return the target to compile for: the best that this machine can run. Raises Unsupported."""
    if device.type != "cpu":
        return target_of(device)
    targets = machine_targets()
    if not targets:
        raise Unsupported(f"the engine 'aoti' compiles for x86_64 with AVX2 on Linux; this machine is {machine_name()}")
    return targets[0]


def package(artifact: Artifact, name: str, target: str, device: torch.device) -> bytes:
    """Compile a method for the target of `device`. Returns a package that torch's package loader can also read.

    Raises ArtifactError, Unsupported, CaptureError for a graph that AOTInductor cannot express, and ExportError without
    a C++ compiler.
    """
    # whatever the caller's modes: the graph has its own casts and devices
    both = torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False)
    with torch.device("cpu"), torch.inference_mode(False), both[0], both[1]:
        return _package(artifact, name, target, device)


def _package(artifact: Artifact, name: str, target: str, device: torch.device) -> bytes:
    where = f"method {name!r}"
    method = artifact.manifest.methods[name]
    program = method_program(artifact, name, device)
    rows = _rows(program, method.inputs)
    graph = _flat_graph(where, program, method, device)
    raw = _compile_library(where, graph, target)
    bound = [constant.fqn for constant in Library(raw, where, device).constants]
    if unknown := sorted(set(bound) - rows.keys()):
        raise CaptureError(f"{where}: AOTInductor made a constant of its own, {unknown[0]!r}")
    swapped = {fqn for fqn, row in rows.items() if row.kind != "constant" and 0 not in row.shape}  # no values, no loss
    if lost := sorted(graph.read & swapped - set(bound)):
        name = rows[lost[0]].name
        raise CaptureError(f"{where}: AOTInductor compiled in the value of {name!r}, which no swap would change")
    note = Note(
        graph_id=artifact.graph_id,
        method=name,
        target=target,
        torch=str(torch.__version__),
        tensors=tuple(rows[fqn] for fqn in sorted(bound)),
        written=graph.written,
    )
    return _archive(name, note, raw, device)


def _rows(program: ExportedProgram, inputs: tuple[GraphInput, ...]) -> dict[str, NotedTensor]:
    """Return the program's tensors by FQN, with their names in the manifest."""
    tables = (program.state_dict, program.constants)
    rows = {}
    for item, spec in zip(inputs, program.graph_signature.input_specs, strict=True):
        tensor = next((table[spec.target] for table in tables if spec.target in table), None)
        if item.kind != "input" and spec.target is not None and isinstance(tensor, torch.Tensor):
            dtype = DTYPE_NAMES[tensor.dtype]
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            rows[spec.target] = NotedTensor(spec.target, item.kind, item.name, dtype, shape, stride)
    return rows


def _archive(name: str, note: Note, library: bytes, device: torch.device) -> bytes:
    metadata = {"AOTI_DEVICE_KEY": device.type}
    records = {
        **_FORMAT,
        NOTE_NAME: msgspec.json.encode(note),
        f"{_FOLDER}/{name}{LIBRARY_SUFFIX}": library,
        f"{_FOLDER}/{name}.wrapper_metadata.json": msgspec.json.encode(metadata),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in records.items():
            # a plain ZipInfo has a fixed date and no platform
            info = zipfile.ZipInfo(f"{name}/{path}")
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return buffer.getvalue()


# The graph: flat inputs and outputs, and no operator whose code would end the process.


class _FlatGraph(NamedTuple):
    """A graph module with flat inputs and outputs.

    An integer input is passed as the size of a tensor, an integer output as a tensor without dimensions.
    """

    module: GraphModule
    samples: tuple[torch.Tensor, ...]  # of its inputs
    sizes: tuple[_Values, ...]  # of its symbols, some that calls may have
    read: frozenset[str]  # FQNs of the tensors that the graph depends on
    written: tuple[int, ...]  # indices, among the method's flat inputs, of those that a call changes


def _flat_graph(where: str, program: ExportedProgram, method: Method, device: torch.device) -> _FlatGraph:
    """Flatten the graph of a program on `device`. Raises CaptureError for inputs that AOTInductor cannot take."""
    written = _written_inputs(program)
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    _name_constants(module)
    _adapt(module, on_cpu=device.type == "cpu")
    outputs = _flatten_outputs(module, leaves(method.signature.output))
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    sizes = tuple(_sizes(placeholders, method.signature))
    samples = []
    for placeholder, leaf in zip(placeholders, input_leaves(method.signature), strict=True):
        if isinstance(leaf, Tensor):
            samples.append(_sample(where, leaf, placeholder.meta["val"]).to(device))
        elif isinstance(leaf, Integer):
            samples.append(_as_size(where, module, placeholder, leaf))
        else:
            module.graph.erase_node(placeholder)
    module.graph._codegen = CodeGen()
    module._in_spec = pytree.tree_structure((tuple(samples), {}))
    module._out_spec = pytree.tree_structure(outputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.users}
    return _FlatGraph(module, tuple(samples), sizes, frozenset(read), written)


def _sizes(placeholders: Iterable[Node], signature: Signature) -> Iterator[_Values]:
    """Yield values of the symbols in the shapes of inputs. None is 0 or 1, which torch never tells from others."""
    names: dict[sympy.Symbol, str] = {}
    for placeholder, leaf in zip(placeholders, input_leaves(signature), strict=True):
        value = placeholder.meta["val"]
        shapes = (value.shape, leaf.shape) if isinstance(leaf, Tensor) else ((value,), (getattr(leaf, "value", None),))
        for size, text in zip(*shapes, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(text, str):  # such as 2*rows+1
                names |= dict.fromkeys(size.node.expr.free_symbols, re.findall(r"[^\W\d]\w*", text)[0])
    for sizes in (*common_sizes(signature), *edge_sizes(signature)):
        if min(sizes.values(), default=2) > 1:
            yield {symbol: sympy.Integer(sizes[name]) for symbol, name in names.items()}


def _written_inputs(program: ExportedProgram) -> tuple[int, ...]:
    if is_plain(program):
        return ()
    specs = functionalised(program).graph_signature.output_specs
    names = {spec.target for spec in specs if spec.kind is OutputKind.USER_INPUT_MUTATION}
    inputs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return tuple(index for index, spec in enumerate(inputs) if getattr(spec.arg, "name", None) in names)


def _name_constants(module: GraphModule) -> None:
    """Register all tensors as buffers: AOTInductor would rename those that are not registered."""
    registered = {
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    for node in module.graph.find_nodes(op="get_attr"):
        owner, _, name = str(node.target).rpartition(".")
        submodule = module.get_submodule(owner)
        value = getattr(submodule, name)
        if isinstance(value, torch.Tensor) and node.target not in registered:
            delattr(submodule, name)
            submodule.register_buffer(name, value)
            registered.add(node.target)


def _adapt(module: GraphModule, *, on_cpu: bool) -> None:
    """Let operators round as eager does and, on the CPU, refuse the same indices and divisors without ending the
    process."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in list(part.graph.nodes):
                if on_cpu and (found := indices_of(node)):
                    _check_indices(part.graph, node, *found)
                elif on_cpu and _divides_by_integers(node):
                    _check_divisor(part.graph, node)
                elif is_remainder_of_fractions(node):
                    exact_remainder(part.graph, node)
                elif is_floor_of_fractions(node):
                    exact_floor(part.graph, node)


def _check_indices(graph: torch.fx.Graph, node: Node, table: Node, dimension: int, position: int) -> None:
    """Make indices one beyond the last where AOTInductor would count them from the end, or write elsewhere."""
    aten, indices = torch.ops.aten, node.args[position]
    with graph.inserting_before(node):
        below = graph.call_function(aten.lt.Scalar, (indices, 0))
        is_scalar = getattr(table.meta.get("val"), "ndim", 1) == 0  # which has one element along any dimension
        beyond: Any = 1 if is_scalar else graph.call_function(aten.sym_size.int, (table, dimension))
        checked = graph.call_function(aten.masked_fill.Scalar, (indices, below, beyond))
        if "scatter" in str(node.target):  # with a reduction it checks nothing, and an index operator does
            checked = graph.call_function(
                aten.index.Tensor, (graph.call_function(aten.arange.default, (beyond,)), [checked])
            )
    if node.target is aten.embedding.default:  # its check ends the process
        node.target, node.args, node.kwargs = aten.index.Tensor, (table, [checked]), {}
    else:
        node.update_arg(position, checked)


def _divides_by_integers(node: Node) -> bool:
    name = str(getattr(node.target, "_opname", "")).removesuffix("_")
    dtype = getattr(node.meta.get("val"), "dtype", torch.bool)
    return name in _DIVISIONS and dtype in _INTEGERS and isinstance(node.args[1], Node)


def _check_divisor(graph: torch.fx.Graph, node: Node) -> None:
    """Let an index operator raise where a divisor is 0, before generated code divides.

    That traps if it rounds to zero; else it notes a 0 in a variable that all calls in the process share, so that one of
    two at a time ends the process, or raises for the other.
    """
    aten, call, divisor = torch.ops.aten, graph.call_function, node.args[1]
    is_size = not isinstance(getattr(divisor, "meta", {}).get("val"), torch.Tensor)
    position = 0 if is_size else 1  # of the operand that carries the check
    operand = node.args[position]
    assert isinstance(operand, Node)
    with graph.inserting_before(node):
        divisors = call(aten.scalar_tensor.default, (divisor,)) if is_size else divisor
        is_zero = call(aten.to.dtype, (call(aten.eq.Scalar, (divisors, 0)), torch.int64))
        zero = call(aten.arange.default, (1,), {"dtype": operand.meta["val"].dtype})  # one element, at index 0
        checked = call(aten.add.Tensor, (operand, call(aten.index.Tensor, (zero, [is_zero]))))
    node.update_arg(position, checked)


def _flatten_outputs(module: GraphModule, expected: list[Leaf]) -> tuple[Any, ...]:
    """Drop literals from the outputs of the graph, as they are in the manifest. Returns the other outputs."""
    output = module.graph.output_node()
    (values,) = output.args
    assert isinstance(values, list | tuple)
    with module.graph.inserting_before(output):
        outputs = [_output(module, value, leaf) for value, leaf in zip(values, expected, strict=True)]
    kept = tuple(value for value in outputs if value is not None)
    output.args = (kept,)
    return kept


def _output(module: GraphModule, value: Any, leaf: Leaf) -> Any:
    if isinstance(leaf, Tensor):
        return value
    if not isinstance(leaf, Integer):
        return None
    target = torch.ops.aten.scalar_tensor.default
    return module.graph.call_function(target, (value,), {"dtype": torch.int64, "device": torch.device("cpu")})


def _sample(where: str, leaf: Tensor, value: FakeTensor) -> torch.Tensor:
    """Return a tensor of the sizes that the graph was captured with. Raises CaptureError if it is not contiguous."""
    shape, stride = [_hint(size) for size in value.shape], [_hint(step) for step in value.stride()]
    contiguous = torch.empty(shape, dtype=value.dtype, device="meta").stride()
    steps = zip(stride, contiguous, shape, strict=True)
    if any(actual != expected for actual, expected, size in steps if size > 1) and 0 not in shape:
        raise CaptureError(
            f"{where}: was captured with {leaf.name!r} of shape {shape} with strides {stride}, and AOTInductor would "
            f"accept no others. Export with a contiguous sample, which has {list(contiguous)}"
        )
    return torch.zeros(shape, dtype=value.dtype)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _as_size(where: str, module: GraphModule, placeholder: Node, leaf: Integer) -> torch.Tensor:
    """Replace an integer input with the size of a tensor, as AOTInductor takes only tensors. Returns a sample."""
    value = placeholder.meta["val"]
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    if mode is None or not isinstance(value, torch.SymInt):
        raise CaptureError(f"{where}: takes the integer {leaf.name!r}, which AOTInductor cannot take")
    with module.graph.inserting_after(placeholder):
        size = module.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, 0))
    size.meta["val"] = value
    placeholder.replace_all_uses_with(size, delete_user_cb=lambda user: user is not size)
    with mode:
        placeholder.meta["val"] = torch.empty((value,), dtype=torch.uint8)
    return torch.zeros(_hint(value), dtype=torch.uint8)


# Compilation.


def _compile_library(where: str, graph: _FlatGraph, target: str) -> bytes:
    """Compile a graph with flat inputs and outputs. Returns the bytes of the shared library.

    Raises CaptureError for a graph that AOTInductor cannot express, ExportError without a C++ compiler, and Unsupported
    if this torch cannot compile for the target.
    """
    _check_tools()
    with suppress(_ParallelChecks):
        return _compile(where, graph, target, _THREADED)
    return _compile(where, graph, target, _SERIAL)  # beyond the block: an error here has causes of its own


class _ParallelChecks(CaptureError):
    """Generated code has checks in parallel regions, where an exception ends the process."""


def _unfit(where: str, reason: str) -> str:
    return f"{where}: AOTInductor cannot compile it for a server: {reason}. Use the engine 'torch'"


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(shlex.split(compiler)[0] if compiler.strip() else ""):
        raise ExportError(
            f"the engine 'aoti' compiles C++ and cannot find {compiler!r}. Install g++, or set CXX to a compiler"
        )
    if not hasattr(config.cpp, "march"):
        raise Unsupported(
            f"torch {torch.__version__} compiles only for the machine that it runs on, and what it compiles neither "
            "says why a call failed nor releases the tensors that it was bound to: it lacks AOTInductorGetLastError "
            "and AOTInductorModelContainerExtractConstantsMapEntries. Install torch>=2.13 to compile for the engine "
            "'aoti', on the CPU and on GPUs"
        )


def _compile(where: str, graph: _FlatGraph, target: str, threads: Mapping[str, Any]) -> bytes:
    on_gpu = is_gpu_target(target)
    processor = TARGETS[BESIDE_GPUS if on_gpu else target]
    # each compilation has a folder of its own: the cache would take files of the same names for the same files
    sources = mock.patch.object(AotCodeCompiler, "compile", _compile_checked(where, graph.sizes))
    with (
        tempfile.TemporaryDirectory(prefix="weightswap-") as folder,
        _compiling(where, processor, on_gpu, folder),
        sources,
    ):
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        hidden = {cache: ".", str(Path(torch.__file__).parent): "torch", sysconfig.get_paths()["include"]: "python"}
        maps = [shlex.quote(f"-ffile-prefix-map={path}={name}") for path, name in hidden.items()]
        settings = {**_SETTINGS, **threads, "cpp.march": " ".join([processor.march, *maps])}
        settings |= _ON_GPU if on_gpu else {}
        with config.patch(_reset_settings()):
            files = torch._inductor.aot_compile(graph.module, graph.samples, options=settings)
        assert isinstance(files, list)
        return _library(where, [Path(file) for file in files if isinstance(file, str)])


def _reset_settings() -> dict[str, Any]:
    """Return the defaults of what the process has set for torch.compile: passes of its own, other backends and checks.

    Code would depend on them, and could compute something else than the graph does.
    """
    settings: Any = config  # which torch makes an object with more than a module has
    changed = (name for name in settings._config if not settings._is_default(name))
    return {name: settings._config[name].default for name in changed if not name.startswith(_USERS)}


def _library(where: str, files: list[Path]) -> bytes:
    """Return the bytes of the compiled library. Raises CaptureError if it calls operators without a C function."""
    proxies = [path for path in files if path.suffix == ".json" and not path.stem.endswith("_metadata")]
    nodes = [node for path in proxies for node in json.loads(path.read_bytes()).get("nodes", ())]
    # such as operators of Python packages, which torch's own loader would look up
    if foreign := sorted({str(node["node"]["target"]) for node in nodes}):
        raise CaptureError(_unfit(where, f"it calls {', '.join(foreign)}"))
    (library,) = (path for path in files if path.suffix == ".so")
    return library.read_bytes()


@contextmanager
def _compiling(where: str, processor: Target, on_gpu: bool, folder: str) -> Iterator[None]:
    """Run AOTInductor in isolation: in a fresh cache, without logs and warnings, and for `processor` alone."""
    loggers = [logging.getLogger(name) for name in ("torch._inductor", "torch._inductor.utils")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        vectors = mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", return_value=[_vectors(processor)])
        cache = fresh_inductor_cache(dir=folder)
        with warnings.catch_warnings(action="ignore"), cache, vectors, rewritten(on_gpu):
            yield
    except Exception as error:
        if ours := next((cause for cause in _chain(error) if isinstance(cause, CaptureError)), None):
            raise ours from None
        raise _explained(where, error) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _compile_checked(where: str, sizes: Iterable[_Values]) -> Callable[..., Any]:
    """Return a replacement of `AotCodeCompiler.compile` that checks sources before the slow C++ compiler runs."""
    original: Callable[..., Any] = AotCodeCompiler.compile

    def checked(graph: Any, *sources: Any, **options: Any) -> Any:
        # what AOTInductor has found equal for the sample and taken for granted; nobody checks it in calls. Many of its
        # inequalities only choose how a loop is written, such as `rows < 16`, and the code is right beyond them
        for equal in (guard.expr for guard in graph.sizevars.shape_env.guards if isinstance(guard.expr, sympy.Eq)):
            if any(equal.xreplace(values) is sympy.false for values in sizes):
                raise CaptureError(_unfit(where, f"its code is for the sizes of the sample alone, with {equal}"))
        if any(_CHECK in source and _PARALLEL in source for source in sources if isinstance(source, str)):
            raise _ParallelChecks(_unfit(where, "its checks would crash the process"))
        return original(graph, *sources, **options)

    return checked


def _vectors(target: Target) -> cpu_vec_isa.VecISA:
    """Return the vector extensions of a target alone: torch would add those of this machine."""
    base: type[cpu_vec_isa.VecISA] = cpu_vec_isa.VecAVX512 if target.bits == 512 else cpu_vec_isa.VecAVX2

    class Vectors(base):  # type: ignore[misc, valid-type]
        __hash__ = cpu_vec_isa.VecISA.__hash__

        def __bool__(self) -> bool:  # not tried out, as this machine may lack them
            return True

    vectors: cpu_vec_isa.VecISA = Vectors()
    return vectors


def _explained(where: str, error: Exception) -> Exception:
    chain = _chain(error)
    if any(type(item).__name__ == _MISSING_COMPILER for item in chain):
        return ExportError(f"the engine 'aoti' needs a C++ compiler. Install g++, or set CXX ({error})")
    text = "\n".join(str(item) for item in chain)
    compiler_error = _ERROR_LINE.search(text)
    if compiler_error and (header := _CUDA_HEADER.match(compiler_error[1])):
        return ExportError(
            f"the engine 'aoti' compiles for GPUs with the CUDA toolkit, and cannot find {header[1]}. Install the "
            f"toolkit of CUDA {torch.version.cuda}, and set CUDA_HOME to its folder"
        )
    first_line = next(iter(str(error).strip().splitlines()), "")
    reason = f"the C++ compiler says: {compiler_error[1]}" if compiler_error else first_line
    return CaptureError(f"{where}: AOTInductor of torch {torch.__version__} cannot compile it: {reason:.500}")


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain
