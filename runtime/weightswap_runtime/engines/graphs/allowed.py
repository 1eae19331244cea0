"""torch's own operators that a graph may call: those that read and write nothing but the tensors that they are given.

Of sparse tensors only those by coordinates exist, as exports have no others; their indices are checked when they are
made, and cannot be changed. By other operators a graph that somebody has made by hand could build tensors whose indices
or sizes nobody checks, and so reach any address.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_PLAIN = "Tensor|int|float|bool|number|complex|str|Device|Generator"
_TYPE = re.compile(rf"(Optional\[)?(List\[)?(Optional\[)?({_PLAIN})\]{{0,3}}")
# of other kinds of tensors, of their memory, of gradients, and of single devices
_OTHER_KINDS = re.compile(
    r"sparse|cs[rc]|bs[rc]|coalesce|hspmm|sspaddmm|smm|(crow|ccol|col|row)_indices|nested|jagged|padded_tensor|mkldnn"
    r"|(?<!fake_)quantiz|qscheme|q_(per|scale|zero)|int_repr|^set_?$|set_data|from_file|resize_output|resize_as_sp"
    r"|backward|(retain|requires)_grad|record_stream|cudnn|miopen|mps|_xla|fbgemm"
)
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
# with their names beginning as those that are excluded
_COORDINATES = frozenset(
    {
        *("to_sparse", "_to_sparse", "to_dense", "_to_dense", "coalesce", "_coalesce", "is_coalesced"),
        *("sparse_coo_tensor", "sparse_dim", "sparse_mask", "indices", "_indices", "values", "_values"),
        *("_sparse_mm", "_sparse_addmm", "_sparse_sum", "_sparse_softmax", "_sparse_log_softmax"),
    }
)
_TRUSTING = frozenset({"ctc_loss", "_ctc_loss", "segment_reduce"})  # lengths and labels that they are given
_CHECKS = re.compile(r"_?(assert|sym_constrain|validate|linalg_check)_\w+")


def problem(operator: OpOverload) -> str:
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
    if any(argument.kwarg_only for argument in written):
        return "which writes to tensors that it is not about"
    if not schema.returns and not written and not _CHECKS.fullmatch(name):
        return "which changes the process, not a tensor"
    return ""


def is_sparse(operator: OpOverload) -> bool:
    """Return whether an operator is one of those for sparse tensors."""
    return operator._schema.name.partition("::")[2] in _COORDINATES


def _checked(
    indices: torch.Tensor, values: torch.Tensor, size: list[int] | None = None, **options: Any
) -> torch.Tensor:
    """Return a sparse tensor with indices of its own, all within its size. Raises RuntimeError for others."""
    options = {name: value for name, value in options.items() if name in ("dtype", "device", "is_coalesced")}
    return torch.sparse_coo_tensor(indices.clone(), values, size, check_invariants=True, **options)


_aten = torch.ops.aten
# what is called instead of operators that are safe only with a check, or a copy
SAFE: dict[OpOverload, Callable[..., Any]] = {
    _aten.sparse_coo_tensor.indices: _checked,
    _aten.sparse_coo_tensor.indices_size: _checked,
    _aten.indices.default: lambda tensor: _aten.indices.default(tensor).clone(),
    _aten._indices.default: lambda tensor: _aten._indices.default(tensor).clone(),
}
