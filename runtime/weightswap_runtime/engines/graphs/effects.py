"""Side effects and aliasing of operators, from their schemas and, where those are silent, from tables."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# Operators that models apply to weights and constants, and that always return the same for the same arguments: no
# random numbers, no uninitialized memory, no shapes that depend on values, only dense results.
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
# their results may be views of an argument, though their schemas do not say so
SECRET_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift"}
STATISTICS = {"training", "use_input_stats", "train"}  # if set, the operator writes to running statistics
# composed of other operators, but their result never shares memory with an argument
_FRESH = {"linear", "matmul", "layer_norm", "batch_norm", "group_norm", "conv1d", "conv2d", "conv3d", "softmax"}


def is_repeatable(overload: OpOverload) -> bool:
    """Return whether equal arguments always give equal dense tensors, without side effects."""
    schema = overload._schema
    name = _short_name(overload)
    tensors = [str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns]
    if not tensors or not all(tensors) or is_mutable(overload) or not _is_aten(overload):
        return False
    if name == "where":
        return len(schema.arguments) == 3
    return name in _REPEATABLE or (torch.Tag.pointwise in overload.tags and not _UNREPEATABLE_TAGS & set(overload.tags))


def is_mutable(overload: OpOverload) -> bool:
    """Return whether a call may write to its arguments, even if its schema does not say so."""
    schema = overload._schema
    return schema.is_mutable or any(argument.name in STATISTICS for argument in schema.arguments)


def is_fresh(overload: OpOverload) -> bool:
    """Return whether no result shares memory with an argument.

    An operator that is composed of others may return an argument although its schema does not say so.
    """
    if declares_views(overload) or not _is_aten(overload) or _short_name(overload) in SECRET_VIEWS:
        return False
    return not is_composed(overload) or _short_name(overload) in _FRESH


def declares_views(overload: OpOverload) -> bool:
    """Return whether the schema says that results share memory with arguments."""
    return any(result.alias_info is not None for result in overload._schema.returns)


def is_composed(overload: OpOverload) -> bool:
    """Return whether an operator is composed of others."""
    full_name = overload.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")


def _is_aten(overload: OpOverload) -> bool:
    return overload._schema.name.startswith("aten::")


def _short_name(overload: OpOverload) -> str:
    return overload._schema.name.removeprefix("aten::")


_UNREPEATABLE_TAGS = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}
