"""Variants: tensors of a model that each call chooses, instead of the set that all calls share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import nn

from weightswap_exporter.models.peft_layers import check_active, check_whole, unscaled
from weightswap_exporter.models.tensors import is_fake, named_parameters, named_tensors
from weightswap_runtime.errors import CaptureError, ExportError
from weightswap_runtime.format.manifest import METHOD_NAME, GraphInput, NamedTensor
from weightswap_runtime.messages import listed

Groups = Mapping[str, Sequence[str]]  # FQNs by group
NO_GROUPS: Groups = MappingProxyType({})
Declared = Mapping[str, str | Sequence[str]]
CALL_ARGUMENT = "variants"  # with it, a call chooses variants


def find_groups(model: nn.Module, declared: Declared | None) -> Groups:
    """Return the FQNs that match each group's patterns. Raises ExportError."""
    if not declared:
        return NO_GROUPS
    names = sorted(named_parameters(model), key=list(named_tensors(model)).index)
    groups: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, declaration in declared.items():
        if not METHOD_NAME.fullmatch(group):
            raise ExportError(f"variants: the group {group!r} is not an identifier")
        for pattern in [declaration] if isinstance(declaration, str) else declaration:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise ExportError(f"variants: {pattern!r} matches no parameter; the parameters are {listed(names, 3)}")
            if shared := [name for name in matched if owner.setdefault(name, group) != group]:
                raise ExportError(f"variants: {shared[0]} is in the groups {owner[shared[0]]!r} and {group!r}")
            groups[group] = list(dict.fromkeys([*groups.get(group, []), *matched]))
    check_active(model)
    check_whole(model, owner)
    return groups


@contextmanager
def base_alone(model: nn.Module, groups: Groups) -> Iterator[None]:
    """Let the model compute, in the block, what its graph computes for calls without a variant.

    Variable tensors are zeros. The scaling factors of PEFT's layers, which would become constants of the graph, are 1:
    a runtime multiplies them into the tensors that it loads.
    """
    tensors = named_tensors(model)
    variable = [tensors[name] for names in groups.values() for name in names if not is_fake(tensors[name])]
    if not groups:
        yield
        return
    values = [tensor.detach().clone() for tensor in variable]
    try:
        with unscaled(model):
            _write(variable, [torch.zeros_like(value) for value in values])
            yield
    finally:
        _write(variable, values)


@torch.no_grad()
def _write(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def check_variable(fqns: Sequence[str], kind: str, groups: Groups) -> None:
    """Raise CaptureError unless the names of one tensor all belong to one group, and it is a weight."""
    if kind != "weight" or not any(set(fqns) <= set(names) for names in groups.values()):
        raise CaptureError(f"{listed(fqns)}: a variant needs all names of a tensor, and no tensor that calls change")


def with_siblings(variable: frozenset[str], names: Collection[str], composed: Collection[str]) -> frozenset[str]:
    """Add to variable tensors the other parts of the tensors that they are parts of. composed: FQNs of such tensors."""
    parts = ([name for name in names if name.startswith(f"{fqn}.")] for fqn in composed)
    return variable.union(*(each for each in parts if variable.intersection(each)))


def grouped(
    rows: Sequence[NamedTensor],
    groups: Groups,
    inputs: Mapping[str, Sequence[GraphInput]],
    composed: Collection[str] = (),
) -> dict[str, tuple[NamedTensor, ...]]:
    """Return the rows by group. composed: FQNs of the parameters that are made of other tensors.

    Raises CaptureError for rows that no method reads, for only some of the parts of a tensor that methods read, and for
    inputs named `variants`.
    """
    read = {item.name for items in inputs.values() for item in items if item.kind == "variant"}
    if unread := [row.name for row in rows if not read.intersection(row.names)]:
        raise CaptureError(f"variants: no method reads {listed(unread)}; declare only what calls choose, or delete it")
    if rows and (
        named := [
            name for name, items in inputs.items() if ("input", CALL_ARGUMENT) in {(i.kind, i.name) for i in items}
        ]
    ):
        raise CaptureError(f"method {named[0]!r}: rename the input {CALL_ARGUMENT!r}: calls choose variants by it")
    reads = {item.name for items in inputs.values() for item in items if item.kind in ("weight", "variant")}
    for fqn in composed if rows else ():
        owners: dict[str, list[str]] = {}
        for part in sorted(name for name in reads if name.startswith(f"{fqn}.")):
            owners.setdefault(next((group for group, names in groups.items() if part in names), ""), []).append(part)
        if len(owners) > 1:
            parts = "; ".join(f"{listed(names)} in {group or 'no group'}" for group, names in owners.items())
            raise CaptureError(f"variants: {fqn} is one tensor ({parts}); declare all its parts in one group")
    return {group: tuple(row for row in rows if row.name in names) for group, names in groups.items()}
