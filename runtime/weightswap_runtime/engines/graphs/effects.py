"""Effects of operators beside their results, as far as schemas tell it and where they do not."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# What is computed from weights and constants in models, and always gives the same for the same: no random numbers, no
# memory that nobody has written to, no shape that depends on values, only dense results.
_VIEWS = (
    "view reshape transpose t numpy_T permute unsqueeze squeeze expand expand_as broadcast_to flatten "
    "unflatten select slice narrow split chunk split_with_sizes unbind movedim swapaxes _to_copy to clone "
    "contiguous alias type_as "
)
_JOINS = (
    "cat stack concat repeat tile roll flip tril triu diagonal diag_embed index_select gather embedding "
    "masked_fill where "
)
_MADE = "arange zeros ones full scalar_tensor linspace eye zeros_like ones_like full_like new_zeros new_ones new_full "
_MATH = (
    "matmul mm bmm mv dot linear addmm baddbmm outer einsum kron sum mean amax amin prod norm "
    "linalg_vector_norm var std cumsum cumprod softmax log_softmax _weight_norm _weight_norm_interface "
    "linalg_inv inverse linalg_cholesky "
)
_REPEATABLE = frozenset((_VIEWS + _JOINS + _MADE + _MATH).split())
# their results may be views of an argument, which their schemas do not say
SECRET_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift"}
STATISTICS = {"training", "use_input_stats", "train"}  # flags of operators that then write to running statistics
# composed of other operators, and yet never one of their arguments or a part of it
_FRESH = {"linear", "matmul", "layer_norm", "batch_norm", "group_norm", "conv1d", "conv2d", "conv3d", "softmax"}


def is_repeatable(overload: OpOverload) -> bool:
    """Whether the same arguments always give the same dense tensors, and nothing else happens."""
    schema = overload._schema
    name = _short(overload)
    tensors = [str(each.type) in ("Tensor", "List[Tensor]") for each in schema.returns]
    if not tensors or not all(tensors) or is_mutable(overload) or not _own(overload):
        return False
    if name == "where":
        return len(schema.arguments) == 3
    return name in _REPEATABLE or (torch.Tag.pointwise in overload.tags and not _VARYING & set(overload.tags))


def is_mutable(overload: OpOverload) -> bool:
    """Whether a call may write to its arguments; also what its schema does not say."""
    schema = overload._schema
    return schema.is_mutable or any(argument.name in STATISTICS for argument in schema.arguments)


def is_fresh(overload: OpOverload) -> bool:
    """Whether no result shares memory with an argument.

    What is composed of other operators may return an argument without saying so.
    """
    if declares_views(overload) or not _own(overload) or _short(overload) in SECRET_VIEWS:
        return False
    return not is_composed(overload) or _short(overload) in _FRESH


def declares_views(overload: OpOverload) -> bool:
    """Whether results share memory with arguments by the schema."""
    return any(each.alias_info is not None for each in overload._schema.returns)


def is_composed(overload: OpOverload) -> bool:
    """Whether an operator is composed of others."""
    full_name = overload.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")


def _own(overload: OpOverload) -> bool:
    return overload._schema.name.startswith("aten::")


def _short(overload: OpOverload) -> str:
    return overload._schema.name.removeprefix("aten::")


_VARYING = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}
