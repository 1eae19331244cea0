"""The operators that a graph may call, and what a call of each does to its arguments.

A graph comes from a file, and whoever wrote the file chooses what it calls, with which arguments. So this page is a
boundary of security: `find_operator` returns only what computes on the tensors, numbers and texts that it is given. Of
what torch registers it refuses all that opens files, follows addresses, changes the process or trusts its arguments.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra("op_libraries", "torch") from error

import functools
import importlib
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from keyword import iskeyword
from typing import Any, NamedTuple

import msgspec
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator, OpOverload

from weightswap_runtime.errors import Unsupported

from .graph_archive import UnknownPart

RANKS = "ranks"  # in a graph, the name of the group of all ranks; engines put that of the model's in its place
OF_TORCH = {"aten", "prims"}  # namespaces whose operators are judged one by one, by `_problem`
# a check of dtypes and devices of intermediate results, which the signature's inputs have determined already
DROPPED = {"aten::_assert_tensor_metadata"}
DROPOUTS = {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"}
SET_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"  # arguments: a boolean, a graph, the graph's inputs
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"  # the first argument names a type of device
# their results may be views of an argument, though their schemas do not say so
SECRET_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift"}
STATISTICS = {"training", "use_input_stats", "train"}  # if set, the operator writes to running statistics


class Operator(NamedTuple):
    """An operator or function that a graph calls."""

    call: Callable[..., Any]
    name: str
    pure: bool  # a call whose result is unused can be removed
    keywords: frozenset[str] = frozenset()  # names of arguments that may be passed by keyword
    higher_order: bool = False
    past_autograd: bool = True  # as in `Compiled`
    repeatable: bool = False  # equal arguments always give equal tensors, without side effects
    mutable: bool = False  # it may write to its arguments
    fresh: bool = False  # no result shares memory with an argument
    vmap: bool = False  # it is a part of `torch.vmap`
    collective: bool = False  # all ranks call it together: it is never left out, nor moved to the prologue


class MissingOperator(Exception):
    """An operator that no package in this process has registered."""


class ForeignFunction(Exception):
    """A function that no graph has a reason to call."""


@functools.cache  # of at most as many as are registered: what raises is not cached
def find_operator(target: str) -> Operator:
    """Return the operator that a graph calls `target`. Raises MissingOperator, ForeignFunction, and UnknownPart."""
    if target in _NUMBERS:
        return Operator(_NUMBERS[target], target, pure=True)
    if target in _VMAP:
        return Operator(_VMAP[target], target, pure=False, past_autograd=False, mutable=True, vmap=True)
    if target.startswith(f"{predispatch.__name__}."):
        raise UnknownPart(f"the function {target!r:.80}")
    parts = target.split(".")
    # words alone, so that no part reaches an attribute of an attribute
    if parts[:2] != ["torch", "ops"] or not all(_WORD.fullmatch(part) for part in parts):
        raise ForeignFunction(f"{target!r:.80}")
    if parts[2:3] == ["higher_order"]:
        return _higher_order(parts[3:], target)
    return _overload(parts[2:], target)


def check_strings(operator: Operator, arguments: Collection[Mapping[str, Any]]) -> None:
    """Raise ForeignFunction if a call has strings that could be more than modes.

    arguments: those of the call, each by its kind. Only the texts of collectives are read.
    """
    kinds = {kind for argument in arguments for kind in argument}
    namespace = operator.name.partition("::")[0]
    takes_modes = namespace in _TAKES_STRINGS or operator.higher_order or operator.vmap
    if operator.collective:
        texts = [_text(argument["as_string"]) for argument in arguments if "as_string" in argument]
        problem = texts not in _texts_of(operator) or _STRINGS.intersection(kinds) - {"as_string"}
        if problem:
            raise ForeignFunction(f"{operator.name!r:.80} with the texts {texts!r:.80}, expected the group {RANKS!r}")
    elif not takes_modes and _STRINGS.intersection(kinds):
        raise ForeignFunction(f"{operator.name!r:.80} with a string, which could be the name of a file")


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else msgspec.json.decode(value)


def _texts_of(operator: Operator) -> list[list[str]]:
    """Return the texts that a call of a collective may have, in order."""
    name = operator.name.partition("::")[2]
    if name == "wait_tensor":
        return [[]]
    return [[reduction, RANKS] for reduction in _REDUCTIONS] if "reduce" in name else [[RANKS]]


def import_libraries(names: Iterable[str]) -> None:
    """Import each package, or load each shared library (a path that ends in .so), so that its operators exist.

    Raises Unsupported if one cannot be loaded.
    """
    libraries = [] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in libraries):
        raise Unsupported(f"op_libraries={names!r}: expected names of packages, or paths of shared libraries")
    for name in libraries:
        try:
            if name.endswith(".so"):
                torch.ops.load_library(name)  # type: ignore[no-untyped-call]
            else:
                importlib.import_module(name)
        except Exception as error:
            raise Unsupported(f"op_libraries: {name!r} cannot be loaded ({type(error).__name__}: {error})") from error


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCALAR = "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ not_ lshift rshift"
_SYMBOLIC = "sym_not sym_int sym_float sym_ite sym_max sym_min sym_sum sym_sqrt _sym_sqrt"
# arithmetic on sizes
_NUMBERS: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _SCALAR.split()},
    **{f"math.{name}": getattr(math, name) for name in ("trunc", "ceil", "floor", "sqrt")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)},
}
_LEVELS = "lazy_load_decompositions _vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim"
# `torch.vmap` leaves these calls in a graph, where a level of it begins and ends
_VMAP: dict[str, Callable[..., Any]] = {
    f"{predispatch.__name__}.{name}": getattr(predispatch, name)
    for name in _LEVELS.split()
    if hasattr(predispatch, name)
}
_HIGHER_ORDER = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "map_impl", "scan"}
_SIZES = {"aten::sym_size", "aten::sym_numel", "aten::sym_stride"}
# their operators' strings are modes; elsewhere a string may be the path of a file (`image::write_file`)
_TAKES_STRINGS = {*OF_TORCH, "quantized_decomposed", "torchao"}
_STRINGS = {"as_string", "as_strings", "as_string_to_argument"}


def _higher_order(parts: list[str], target: str) -> Operator:
    torch_operator = getattr(torch.ops.higher_order, parts[0], None) if len(parts) == 1 else None
    if not isinstance(torch_operator, HigherOrderOperator):
        raise ForeignFunction(f"{target!r:.80}")
    if parts[0] not in _HIGHER_ORDER:
        raise UnknownPart(f"the operator {target!r:.80}")
    return Operator(torch_operator, target, pure=False, higher_order=True, mutable=True)


def _overload(parts: list[str], target: str) -> Operator:
    if len(parts) != 3:
        raise ForeignFunction(f"{target!r:.80}")
    namespace, operator, overload = parts
    collective = namespace == _FUNCTIONAL and operator in _COLLECTIVES and overload == "default"
    if namespace in _INTERNAL and not collective:
        raise ForeignFunction(f"{target!r:.80}, which is internal to torch")
    if collective:
        _import_collectives()
    full = f"{namespace}::{operator}" + (f".{overload}" if overload != "default" else "")
    if not _is_dispatched(full):  # before `torch.ops`, which has operators of TorchScript, too
        raise MissingOperator(target)
    torch_operator = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    schema = torch_operator._schema
    name = schema.name
    if any(_HANDLES.search(str(argument.type)) for argument in schema.arguments):
        raise ForeignFunction(f"{target!r}, which bypasses tensors")
    if namespace in OF_TORCH and (why := _problem(torch_operator)):
        raise ForeignFunction(f"{target!r}, {why}")
    return Operator(
        _exchanged
        if name == f"{_FUNCTIONAL}::all_to_all_single"
        else _SAFE.get(torch_operator) or _FASTER.get(torch_operator, torch_operator._op),
        name,
        pure=name in _SIZES,
        # a keyword of Python cannot be written in a call
        keywords=frozenset(argument.name for argument in schema.arguments if not iskeyword(argument.name)),
        past_autograd=name.startswith("aten::") and name.removeprefix("aten::") not in _COORDINATES,
        repeatable=_is_repeatable(torch_operator),
        mutable=is_mutable(torch_operator),
        fresh=is_fresh(torch_operator),
        collective=collective,
    )


def _import_collectives() -> None:
    """Import what registers the collectives' kernels. Raises Unsupported for a torch without them."""
    try:
        importlib.import_module("torch.distributed._functional_collectives")
    except ImportError as error:
        raise Unsupported(f"torch {torch.__version__} was built without torch.distributed ({error})") from error


def _exchanged(
    input: torch.Tensor,  # noqa: A002 (as in the schema)
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    group_name: str,
) -> torch.Tensor:
    """Exchange parts of a tensor between ranks. Raises IndexError for parts of less than none.

    gloo checks the sum of the lengths alone, so that another part would reach beyond the end of the tensor.
    """
    if any(length < 0 for length in (*output_split_sizes, *input_split_sizes)):
        raise IndexError(f"all_to_all_single: parts of {output_split_sizes} and {input_split_sizes} elements")
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    result: torch.Tensor = exchange(input, output_split_sizes, input_split_sizes, group_name)
    return result


def _is_dispatched(name: str) -> bool:
    """Return whether torch's dispatcher has an operator. TorchScript has more, some of which write files."""
    try:
        return torch._C._dispatch_has_kernel(name)
    except RuntimeError as error:  # not the name of an operator
        raise ForeignFunction(f"{name!r:.80}") from error


_FUNCTIONAL = "_c10d_functional"
# What an export has of them: each returns a new tensor, which is there once `wait_tensor` has returned. None is pure,
# repeatable or fresh: a rank that leaves one out or calls it at another place would take part in another's.
_COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"),
        "wait_tensor",
    }
)
_REDUCTIONS = ("sum", "avg", "min", "max", "product")
# internal to torch, for compilers, processes and packed objects: no export calls them, and some read more than tensors
_INTERNAL = frozenset(
    {
        *(_FUNCTIONAL, "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "c10d"),
        *("debug_mode_ops", "debugprims", "export", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked"),
        *("onednn", "onnx", "prim", "profiler", "quantization", "quantized", "rngprims", "sparse", "static_runtime"),
        *("streams", "symm_mem"),
    }
)
_HANDLES = re.compile(r"\b(Storage|Stream)\b")
# as schemas print types: a dtype, a layout and a memory format are an `int`. What else there is are Python objects
_PLAIN = "Tensor|int|float|bool|number|complex|str|Device|Generator"
_TYPE = re.compile(rf"(Optional\[)?(List\[)?(Optional\[)?({_PLAIN})\]{{0,3}}")
# of other kinds of tensors, whose kernels trust indices and packed bytes; of their memory, of gradients, and of single
# devices. `search` finds these words anywhere in a name, so that variants which a new torch adds are refused, too
_OTHER_KINDS = re.compile(
    r"sparse|cs[rc]|bs[rc]|coalesce|hspmm|sspaddmm|smm|(crow|ccol|col|row)_indices|nested|jagged|padded_tensor|mkldnn"
    r"|(?<!fake_)quantiz|qscheme|q_(per|scale|zero)|int_repr|^set_?$|set_data|from_file|resize_output|resize_as_sp"
    r"|backward|(retain|requires)_grad|record_stream|cudnn|miopen|mps|_xla|fbgemm"
)
# the internal operators that exports contain. The others may leave the checks of their arguments to their callers in
# torch, so the list names what is allowed, and a new torch's internal operators are refused until they are added
_PRIVATE = re.compile(
    "_("
    r"adaptive_avg_pool\dd|assert_\w+|functional_assert_\w+|functional_sym_\w+|batch_norm_\w+|native_batch_norm_\w+"
    r"|native_multi_head_attention|transform_bias_rescale_qkv|transformer_encoder_layer_fwd|cast_\w+|to_copy|to_cpu"
    r"|cdist_forward|pdist_forward|euclidean_dist|conj|conj_copy|conj_physical|neg_view|neg_view_copy|convolution"
    r"|convolution_mode|slow_conv2d_forward|dim_arange|shape_as_tensor|embedding_bag|embedding_bag_forward_only"
    r"|fft_[cr]2[cr]|fused_rms_norm|fused_dropout|grouped_mm|int_mm|mixed_dtypes_linear|scaled_mm|scaled_mm_v2"
    r"|scaled_grouped_mm|scaled_grouped_mm_v2|weight_int\dpack_mm\w*|convert_weight_to_int4pack\w*|dyn_quant_\w+"
    r"|fake_quantize_\w+|fused_moving_avg_obs_fq_helper\w*|linalg_(det|eigh|eigvals|slogdet|solve_ex|svd|check_errors)"
    r"|cholesky_solve_helper|lu_with_info|local_scalar_dense|log_softmax|softmax|masked_softmax|safe_softmax|logcumsumexp"
    r"|cummax_helper|cummin_helper|aminmax|unique|unique2|is_(all|any)_true|is_zerotensor|stack|chunk_cat|pad_circular"
    r"|pad_enum|prelu_kernel|addmm_activation|add_relu_?|reshape_copy|unsafe_view|trilinear|weight_norm|weight_norm_interface"
    r"|scaled_dot_product_\w+|flash_attention_forward|efficient_attention_forward|thnn_fused_(gru|lstm)_cell"
    r"|histogramdd_\w+|sample_dirichlet|standard_gamma|upsample_\w+|foreach_\w+"
    ")"
)
# of sparse tensors by coordinates, which models do build; their names begin as those that are excluded
_COORDINATES = frozenset(
    {
        *("to_sparse", "_to_sparse", "to_dense", "_to_dense", "coalesce", "_coalesce", "is_coalesced"),
        *("sparse_coo_tensor", "sparse_dim", "sparse_mask", "indices", "_indices", "values", "_values"),
        *("_sparse_mm", "_sparse_addmm", "_sparse_sum", "_sparse_softmax", "_sparse_log_softmax"),
    }
)
# they read as many labels and rows as the lengths that they are given say, beyond the end of the tensors
_TRUSTING = frozenset({"ctc_loss", "_ctc_loss", "segment_reduce"})
_CHECKS = re.compile(r"_?(assert|sym_constrain|validate|linalg_check)_\w+")


def _problem(operator: OpOverload) -> str:
    """Return why a graph may not call an operator of torch's own; empty if it may."""
    schema = operator._schema
    name = schema.name.partition("::")[2]
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    if not all(_TYPE.fullmatch(str(argument.type)) for argument in schema.arguments):
        return "which takes more than tensors and numbers"
    if name in _TRUSTING:
        return "which does not check the lengths that it is given"
    if name.startswith("_") and not name.startswith("__") and name not in _COORDINATES and not _PRIVATE.fullmatch(name):
        return "which is internal to torch"
    if name not in _COORDINATES and _OTHER_KINDS.search(name):
        return "which does more than compute with dense tensors"
    if any(argument.kwarg_only for argument in written):  # `out=`
        return "which writes to tensors that it is not about"
    if not schema.returns and not written and not _CHECKS.fullmatch(name):
        return "which changes the process, not a tensor"
    return ""


def is_mutable(overload: OpOverload) -> bool:
    """Return whether a call may write to its arguments, even if its schema does not say so."""
    schema = overload._schema
    return schema.is_mutable or any(argument.name in STATISTICS for argument in schema.arguments)


def is_fresh(overload: OpOverload) -> bool:
    """Return whether no result shares memory with an argument.

    An operator that is composed of others may return an argument although its schema does not say so.
    """
    name = _aten_name(overload)
    if not name or name in SECRET_VIEWS or declares_views(overload):
        return False
    return name in _FRESH or not is_composed(overload)


def declares_views(overload: OpOverload) -> bool:
    """Return whether the schema says that results share memory with arguments."""
    return any(result.alias_info is not None for result in overload._schema.returns)


def is_composed(overload: OpOverload) -> bool:
    """Return whether an operator is composed of others."""
    full_name = overload.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")


# composed of other operators, but their result never shares memory with an argument
_FRESH = {"linear", "matmul", "layer_norm", "batch_norm", "group_norm", "conv1d", "conv2d", "conv3d", "softmax"}
# Operators that models apply to weights and constants, and that always return the same for the same arguments: no
# random numbers, no uninitialized memory, no shapes that depend on values, only dense results. An operator that is not
# here stays in the call, which is slower but never wrong.
_VIEWS = (
    "view reshape transpose t numpy_T permute unsqueeze squeeze expand expand_as broadcast_to flatten "
    "unflatten select slice narrow split chunk split_with_sizes unbind movedim swapaxes _to_copy to clone "
    "contiguous alias type_as "
)
_JOINS = (
    "cat stack concat repeat tile roll flip tril triu diagonal diag_embed index_select gather embedding "
    "masked_fill where "
)
_FILLS = "arange zeros ones full scalar_tensor linspace eye zeros_like ones_like full_like new_zeros new_ones new_full "
_MATH = (
    "matmul mm bmm mv dot linear addmm baddbmm outer einsum kron sum mean amax amin prod norm "
    "linalg_vector_norm var std cumsum cumprod softmax log_softmax _weight_norm _weight_norm_interface "
    "linalg_inv inverse linalg_cholesky "
)
_REPEATABLE = frozenset((_VIEWS + _JOINS + _FILLS + _MATH).split())
_UNREPEATABLE_TAGS = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}


def _is_repeatable(overload: OpOverload) -> bool:
    """Return whether equal arguments always give equal dense tensors, without side effects."""
    schema, name = overload._schema, _aten_name(overload)
    tensors = [str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns]
    if not name or not tensors or not all(tensors) or is_mutable(overload):
        return False
    if name == "where":
        return len(schema.arguments) == 3  # with one, its shape depends on values
    return name in _REPEATABLE or (torch.Tag.pointwise in overload.tags and not _UNREPEATABLE_TAGS & set(overload.tags))


def _aten_name(overload: OpOverload) -> str:
    """Return the name of one of ATen's operators; empty for others."""
    namespace, _, name = overload._schema.name.partition("::")
    return name if namespace == "aten" else ""


def _sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, size: list[int] | None = None, **options: Any
) -> torch.Tensor:
    """Return a sparse tensor with indices of its own, all within its size. Raises RuntimeError for others."""
    options = {name: value for name, value in options.items() if name in ("dtype", "device", "is_coalesced")}
    return torch.sparse_coo_tensor(indices.clone(), values, size, check_invariants=True, **options)


def _rising(offsets: torch.Tensor, most: int) -> bool:
    """Return whether offsets on the CPU rise from 0 or more to `most` at most, in a small part of an operator's time.

    Offsets elsewhere are not looked at: a call would wait for the device, which a CUDA graph cannot.
    """
    if not offsets.is_cpu:
        return True
    ends = offsets.numpy()
    if ends.ndim != 1 or (ends[1:] < ends[:-1]).any():
        return False
    return not ends.size or (ends[0] >= 0 and ends[-1] <= most)


def _bags(operator: OpOverload) -> Callable[..., Any]:
    """Return an operator on bags of rows that refuses offsets that do not rise, as its kernels take them as they are.

    Of the first and the last one torch itself says whether they are in range, but not if there is no bag for ids.
    """
    call = operator._op

    def checked(
        weight: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        *rest: Any,
        **options: Any,
    ) -> Any:
        count = indices.numel()
        if not _rising(offsets, count) or (count and len(offsets) <= include_last_offset):
            raise IndexError(f"embedding_bag: offsets out of range: they must rise from 0 to at most {count}")
        given = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset)
        return call(weight, indices, offsets, *given, *rest, **options)

    return checked


def _grouped(
    self: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **options: Any
) -> torch.Tensor:
    """Multiply groups of rows or columns whose ends rise. What no group has is zero; torch would leave it as it was."""
    result: torch.Tensor
    if offs is None or not offs.is_cpu:
        result = _aten._grouped_mm.default(self, mat2, offs, *rest, **options)
        return result
    dim = {(2, 3): 0, (3, 2): 1}.get((self.dim(), mat2.dim()))  # of the result; None: the groups are those of sums
    size = mat2.shape[1] if dim == 1 else self.shape[0 if dim == 0 else 1]
    if not _rising(offs, size):
        raise IndexError(f"grouped_mm: offs out of range: they must rise from 0 to at most {size}")
    result = _aten._grouped_mm.default(self, mat2, offs, *rest, **options)
    if dim is not None and (end := int(offs[-1]) if len(offs) else 0) < size:
        result.narrow(dim, end, size - end).zero_()
    return result


_aten = torch.ops.aten
_tensor, _nn = torch.Tensor, torch._C._nn
# What is called instead of operators that are safe only with a check, or a copy: kernels trust a sparse tensor's
# indices, so a graph must neither choose them unchecked nor write to them afterwards; those of bags trust offsets.
_SAFE: dict[OpOverload, Callable[..., Any]] = {
    _aten.sparse_coo_tensor.indices: _sparse_tensor,
    _aten.sparse_coo_tensor.indices_size: _sparse_tensor,
    _aten.indices.default: lambda tensor: _aten.indices.default(tensor).clone(),
    _aten._indices.default: lambda tensor: _aten._indices.default(tensor).clone(),
    _aten.embedding_bag.default: _bags(_aten.embedding_bag.default),
    _aten.embedding_bag.padding_idx: _bags(_aten.embedding_bag.padding_idx),
    _aten._embedding_bag.default: _bags(_aten._embedding_bag.default),
    _aten._embedding_bag_forward_only.default: _bags(_aten._embedding_bag_forward_only.default),
    _aten._grouped_mm.default: _grouped,
}
# torch functions that do the same as an overload, with the same arguments, in less time per call
_FASTER: dict[OpOverload, Callable[..., Any]] = {
    _aten.sym_size.int: _tensor.size,
    _aten.sym_stride.int: _tensor.stride,
    _aten.sym_numel.default: _tensor.numel,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.index_copy_.default: _tensor.index_copy_,
    _aten.clone.default: torch.clone,
    _aten.matmul.default: torch.matmul,
    _aten.bmm.default: torch.bmm,
    _aten.linear.default: _nn.linear,
    _aten.transpose.int: torch.transpose,
    _aten.view.default: _tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.select.int: torch.select,
    _aten.softmax.int: torch.softmax,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.gelu.default: _nn.gelu,
    _aten.relu.default: torch.relu,
    _aten.silu.default: _nn.silu,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.neg.default: torch.neg,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.contiguous.default: _tensor.contiguous,
    _aten.expand.default: _tensor.expand,
    _aten.flatten.using_ints: torch.flatten,
    _aten.unflatten.int: torch.unflatten,
    _aten.squeeze.dim: torch.squeeze,
    _aten.cat.default: torch.cat,
    _aten.chunk.default: torch.chunk,
    _aten.embedding.default: torch.embedding,
    _aten.mean.dim: torch.mean,
    _aten.conv2d.default: torch.conv2d,
    _aten.batch_norm.default: torch.batch_norm,
    _aten.max_pool2d.default: torch.max_pool2d,
    _aten.dropout.default: torch.dropout,
    _aten.scaled_dot_product_attention.default: _nn.scaled_dot_product_attention,
}
