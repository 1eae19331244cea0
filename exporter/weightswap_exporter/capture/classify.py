"""What each tensor of a model is: a weight, state that calls change, a constant of the graphs, or variable.

A parameter is a weight, and so is a persistent buffer that no call changes; what a call changes is state. Of the rest,
and of literals in the code, what a graph reads is a constant: the artifact has its values. No two of them may share
memory, since a server keeps each apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from weightswap_exporter.modules.libraries import NO_GROUPS, Groups, check_variable, grouped, with_siblings
from weightswap_exporter.modules.stand_ins import replaced_by
from weightswap_exporter.modules.tensors import ModelView, TieKey, dtype_name, extents, is_fake, tie_key
from weightswap_runtime.errors import CaptureError, listed
from weightswap_runtime.format.manifest import GraphInput, NamedTensor, is_dense
from weightswap_runtime.torch_tensors import tensor_bytes

from .capture import Captured
from .document_check import is_path
from .programs import graph_inputs


class Tables(NamedTuple):
    """Tables of the manifest."""

    weights: tuple[NamedTensor, ...]
    state: tuple[NamedTensor, ...]
    constants: tuple[NamedTensor, ...]
    inputs: dict[str, tuple[GraphInput, ...]]  # flat inputs of each method's graph
    values: dict[str, torch.Tensor]  # of constants and state, to store in the artifact
    variants: dict[str, tuple[NamedTensor, ...]]  # by group

    @property
    def loaded(self) -> set[str]:
        """FQNs of all tensors that loading code may write to."""
        variable = (row for rows in self.variants.values() for row in rows)
        return {name for row in (*self.weights, *self.state, *variable) for name in row.names}


def classify(view: ModelView, captured: Mapping[str, Captured], variants: Groups = NO_GROUPS) -> Tables:
    """Sort every parameter and buffer, in the order of registration; tied ones are one row under the first FQN.

    variants: FQNs of the tensors that calls choose, by group. Inputs that no graph reads are removed from the programs.
    Raises CaptureError for tensors that cannot be captured.
    """
    mutated = frozenset(fqn for method in captured.values() for fqn in method.mutated)
    variable = frozenset(fqn for fqns in variants.values() for fqn in fqns)
    tensors = view.tensors
    groups: dict[TieKey, list[str]] = {}
    for fqn, tensor in tensors.items():
        groups.setdefault(tie_key(tensor), []).append(fqn)
    unsaved = {fqn for fqns in groups.values() if not view.saved_names.intersection(fqns) for fqn in fqns}
    removable = mutated | unsaved | with_siblings(variable, tensors, view.composed)
    read = {target for method in captured.values() for target in _drop_unused(method.program, removable)}
    kinds: dict[str, str] = {}
    rows: dict[str, list[NamedTensor]] = {"weight": [], "state": [], "constant": [], "variant": []}
    for fqns in groups.values():
        kind = "weight" if view.saved_names.intersection(fqns) else "constant"
        if mutated.intersection(fqns):
            kind = "state"
            if shared := sorted(view.parameter_names.intersection(fqns)):
                raise CaptureError(f"a call changes {', '.join(fqns)}, but {', '.join(shared)} is a parameter")
        if variable.intersection(fqns):
            check_variable(fqns, kind, variants)
            kind = "variant"
        if kind == "constant" and not read.intersection(fqns):
            continue  # such as a record of the training: it may differ in the model that gives the next weights
        rows[kind].append(_row(fqns, tensors[fqns[0]]))
        kinds |= dict.fromkeys(fqns, kind)
    values = {row.name: tensors[row.name].detach() for kind in ("state", "constant") for row in rows[kind]}
    inputs = {}
    replaced = replaced_by(view)
    known = {key: fqn for key, fqn in replaced if key[2:] == tie_key(tensors[fqn])[2:]}  # not those converted since
    known |= {tie: fqns[0] for tie, fqns in groups.items()}
    for name, method in captured.items():
        lifted = _lifted_constants(name, method)
        # a plain attribute may hold a tensor of the model: the graph then reads that one
        aliases = {key: known[tie] for key, tensor in lifted.items() if (tie := tie_key(tensor)) in known}
        own = {key: tensor for key, tensor in lifted.items() if key not in aliases}
        rows["constant"] += [_row([key], tensor) for key, tensor in own.items()]
        values |= own
        inputs[name] = tuple(_graph_inputs(name, method, kinds, aliases))
    _check_values(values)
    _check_state(values, rows["state"], rows["constant"])
    _check_overlaps(values, {row.name: tensors[row.name] for row in rows["weight"]}, replaced)
    state = tuple(msgspec.structs.replace(row, zero=not _has_bits(values[row.name])) for row in rows["state"])
    variant_rows = grouped(rows["variant"], variants, inputs, view.composed)
    return Tables(tuple(rows["weight"]), state, tuple(rows["constant"]), inputs, values, variant_rows)


def _drop_unused(program: ExportedProgram, names: Collection[str]) -> set[str]:
    """Remove placeholders of these tensors that a graph does not use, so that its calls need none; return the rest."""
    for node, spec in graph_inputs(program):
        if spec.target in names and not node.users:
            program.graph.erase_node(node)
            program.graph_signature.input_specs.remove(spec)
    program.graph_module.recompile()
    return {spec.target for _, spec in graph_inputs(program) if spec.target is not None}


def _has_bits(tensor: torch.Tensor) -> bool:
    """Return whether any byte is not zero: -0.0 has bits."""
    return bool(np.frombuffer(tensor_bytes(tensor), np.uint8).any())


def _row(names: list[str], tensor: torch.Tensor) -> NamedTensor:
    name = names[0]
    if bad := [n for n in names if n == "__metadata__" or any(ord(c) < 32 for c in n)]:
        raise CaptureError(f"{bad[0]!r}: a tensor cannot have this name in a safetensors file")
    if bad := [n for n in names if not is_path(n)]:
        raise CaptureError(
            f"{bad[0]!r}: a tensor cannot have this name in a graph: parts of a name must not be empty, contain "
            "quotes, or begin and end with two underscores like Python's own names; rename it in the model"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CaptureError(f"{name}: {tensor.layout} tensors cannot be captured, only dense ones")
    if tensor.device.type != "cpu" and not is_fake(tensor):
        raise CaptureError(f"{name}: is on {tensor.device}; export the model from the CPU")
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    contiguous = tensor.is_contiguous()
    if not contiguous and not is_dense(shape, stride):
        raise CaptureError(
            f"{name}: its elements overlap or leave gaps (stride {list(stride)}). If it is a view of a weight, take "
            "the view in the call; otherwise make it .contiguous()"
        )
    return NamedTensor(
        name=name,
        dtype=dtype_name(tensor.dtype, name),
        shape=shape,
        aliases=tuple(names[1:]),
        stride=None if contiguous else stride,
        requires_grad=tensor.requires_grad,
    )


def _lifted_constants(name: str, method: Captured) -> dict[str, torch.Tensor]:
    """Return literals and plain tensor attributes as METHOD/NAME: names are only unique within a method."""
    constants: Mapping[str, Any] = method.program.constants
    specs = method.program.graph_signature.input_specs
    lifted = [str(spec.target) for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR]
    return {f"{name}/{target}": constants[target].detach() for target in lifted}


def _graph_inputs(
    name: str, method: Captured, kinds: Mapping[str, str], aliases: Mapping[str, str]
) -> Iterable[GraphInput]:
    """Yield the flat inputs in order. `aliases` are the FQNs of lifted constants that the tables have already."""
    for spec in method.program.graph_signature.input_specs:
        target = str(spec.target)
        if spec.kind is InputKind.USER_INPUT:
            yield GraphInput(kind="input", name=spec.arg.name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            key = f"{name}/{target}"
            kind = kinds[aliases[key]] if key in aliases else "constant"
            yield GraphInput(kind=kind, name=aliases.get(key, key))  # type: ignore[arg-type]
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and target in kinds:
            yield GraphInput(kind=kinds[target], name=target)  # type: ignore[arg-type]
        else:
            raise CaptureError(
                f"method {name!r} reads {target or spec.arg.name} ({spec.kind.name}), which cannot be captured"
            )


def _check_values(values: Mapping[str, torch.Tensor]) -> None:
    if empty := [name for name, value in values.items() if is_fake(value)]:
        raise CaptureError(
            f"{', '.join(empty)}: constants and state go into the artifact, but these have no values. What follows "
            "from a skeleton's parameters changes with them: compute it in the call, or register it as a persistent "
            "buffer."
        )


def overlapping(tensors: Mapping[str, torch.Tensor], rows: Iterable[NamedTensor]) -> list[str]:
    """Return, as texts, the pairs of distinct tensors that share some of their memory."""
    spans = sorted((*span, name) for name, span in extents({row.name: tensors[row.name] for row in rows}).items())
    return sorted(
        f"{name} and {other}"
        for (storage, _, end, name), (next_storage, begin, _, other) in pairwise(spans)
        if storage == next_storage and begin < end
    )


def _check_state(values: Mapping[str, torch.Tensor], state: list[NamedTensor], constants: list[NamedTensor]) -> None:
    """Refuse state that shares memory with other tensors: a server keeps each apart, and updates one alone."""
    storages = {values[row.name].untyped_storage()._cdata for row in state}
    constants = [row for row in constants if values[row.name].untyped_storage()._cdata in storages]
    if pairs := overlapping(values, state + constants):
        raise CaptureError(
            f"{listed(pairs, between='; ')} share memory that calls change, but are not one tensor: register one of "
            "them, and take views of it in the call"
        )


def _check_overlaps(
    values: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], replaced: Iterable[tuple[TieKey, str]]
) -> None:
    """Refuse constants in a weight's memory: they would keep their exported values after a swap."""
    storages = {weight.untyped_storage()._cdata: name for name, weight in weights.items() if weight.numel()}
    before = {key[0]: fqn for key, fqn in replaced}
    for name, value in values.items():
        storage = value.untyped_storage()._cdata if value.numel() else None
        if weight := storages.get(storage):
            raise CaptureError(
                f"{name}: is a view of the weight {weight}, and would keep its current values. Take the view in the "
                "call."
            )
        if weight := before.get(storage):
            raise CaptureError(
                f"{name}: is a view of what became the weight {weight}, or is from before the model was converted, and "
                "would keep its current values. Take views in the call, and register parameters before lists, "
                "closures and the like hold them."
            )
