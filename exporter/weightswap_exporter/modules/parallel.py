"""`Parallel`: a model as one of several ranks has it, with its part of the weights, and what the ranks do together.

A plan names layers and how each is split, in the words of transformers. Within `as_rank`, each of these layers has the
part of its weights that a rank has, and calls the ranks' collectives: a capture then gives the graph of all ranks. Only
the plan decides a cut, never a shape: a contiguous part of two matrices in one tensor would have the right shape, too.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from weightswap_runtime.engines.operators import RANKS
from weightswap_runtime.errors import ExportError, listed
from weightswap_runtime.format.manifest import Cut

from .libraries import is_pretrained
from .stand_ins import restored
from .tensors import ModelView, is_composed, tie_key

# other names of what is the same without gradients
_SAME = {"colwise_rep": "colwise_gather_output", "replicated_with_grad_allreduce": "replicate"}
_STYLES = ("colwise", "rowwise", "packed_colwise", "colwise_gather_output", "replicate")
_PACKED = re.compile(r"packed_colwise:([2-9]|[1-9]\d+)")
_KEYS, _QUERIES = ("k_proj", "v_proj"), "q_proj"
_HEADS = re.compile(r"(num|n|nr|local|total)_(\w*_)?heads?|n?heads|nhead")


@dataclass(frozen=True)
class Parallel:
    """A model split over several ranks, for `export(parallel=)`.

    size: number of ranks. plan: style by layer, a name as `named_modules()` gives it, with `*` for any one part, as in
    {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}; "auto" takes that of a transformers model (`model.tp_plan`).
    A style is one of

    - "colwise": each rank computes a part of the outputs, and passes it on: a "rowwise" layer takes them up
    - "rowwise": each rank has a part of the inputs; the ranks' outputs are added, and the bias once to their sum
    - "packed_colwise": as "colwise", for several layers in one tensor, each cut by itself: two, as gate and up; with
      "packed_colwise:3" three of the same size, as queries, keys and values. That of GPT-2's `c_attn` is three
    - "colwise_gather_output" (in older plans "colwise_rep"): as "colwise", and every rank gets all outputs
    - "replicate" (where there are gradients, "replicated_with_grad_allreduce"): every rank has the whole, as of all
      layers that the plan does not name

    Layers are nn.Linear, and transformers' Conv1D. Keys and values of fewer heads than ranks are on several ranks each.
    A layer whose weight is tied to another's stays whole, if its style is "colwise_gather_output"; so does an embedding
    that a model's own plan splits by vocabulary ("embedding_rowwise"). An attention must take its number of heads from
    the tensors' shapes (`view(..., -1, head_dim)`), as those of transformers do, or is refused; GPT-2's is handled.

    Shapes do not show whether a plan is right, as a softmax over a part of the features is no softmax. So the export
    runs all ranks, as threads, on random weights and inputs, and refuses a plan with which they compute something else
    than the whole model. Models of more than 1 GB are not tried, with a warning: goldens prove them
    (`export(goldens=)`).
    """

    size: int
    plan: Mapping[str, str] | Literal["auto"] = "auto"


class Rank(NamedTuple):
    """A model within `as_rank`."""

    view: ModelView
    cuts: dict[str, Cut]  # by the names of weights


def check_plan(view: ModelView, parallel: Parallel) -> None:
    """Raise ExportError with everything in a plan that cannot be done."""
    _layers(view, parallel)


@contextmanager
def as_rank(view: ModelView, parallel: Parallel) -> Iterator[Rank]:
    """Give the view's model the parts and the calls of one rank in the block; its end restores the model.

    All ranks have the same shapes; the values are those of rank 0. Raises ExportError as `check_plan` does.
    """
    layers = _layers(view, parallel)
    with restored(view.model):
        for layer in layers:
            layer.install(parallel.size)
        for module in view.model.modules():
            _set_sizes(module, layers, parallel.size)
        yield Rank(ModelView(view.model), {name: cut for layer in layers for name, cut in layer.cuts.items()})


# The plan.


def _plan_of(model: nn.Module, plan: Mapping[str, str] | str) -> dict[str, str]:
    if isinstance(plan, Mapping):
        return dict(plan)
    if plan != "auto":
        raise ExportError(f'parallel: plan={plan!r}: expected "auto", or a dict from names of layers to styles')
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        if is_pretrained(module) and not any(name.startswith(f"{owner}.") or not owner for owner in owners):
            owners[name] = module
    found = {
        f"{name}.{key}" if name else key: style
        for name, owner in owners.items()
        for key, style in (owner.tp_plan or {}).items()
    }
    if not found:
        kind = type(model).__qualname__
        raise ExportError(f"parallel: {kind} has no plan of its own; give one: plan={{'layers.*.fc1': 'colwise', ...}}")
    # every rank has the whole embedding: one that is split by vocabulary needs the rank's number in the graph
    return {key: "replicate" if style == "embedding_rowwise" else style for key, style in found.items()}


class _Layer(NamedTuple):
    """A layer that is cut."""

    name: str
    module: nn.Module
    parent: nn.Module
    style: str
    cuts: dict[str, Cut]

    @property
    def repeat(self) -> int:
        """The number of ranks that have the same part."""
        return self.cuts[f"{self.name}.weight"].repeat

    def install(self, size: int) -> None:
        """Give the module the parts of its weights, and the calls of the ranks.

        Its attributes stay those of the whole: what reads a number of outputs beside the tensors then has one that does
        not fit them, and fails, instead of computing something else.
        """
        module = self.module
        for name, cut in self.cuts.items():
            leaf = name.rpartition(".")[2]
            module._parameters[leaf] = _part(module._parameters[leaf], cut, size)
        if self.style == "rowwise":
            module.forward = lambda x: _plus(_summed(_product(module, x, None)), module.bias)
        elif self.style == "colwise_gather_output":
            module.forward = lambda x: _gathered(_product(module, x, module.bias), size)
        else:
            module.forward = lambda x: _product(module, x, module.bias)


class _Refused(Exception):
    """Why a layer cannot be split as the plan says."""


def _layers(view: ModelView, parallel: Parallel) -> list[_Layer]:
    """Return the layers that are cut. Raises ExportError with everything that cannot be done."""
    size = parallel.size
    if type(size) is not int or size < 2:
        raise ExportError(f"parallel: size={size!r}: expected the number of ranks, 2 or more")
    plan = _plan_of(view.model, parallel.plan)
    problems: list[str] = []
    refused: dict[tuple[str, str], list[str]] = {}  # names by the key of the plan, and why
    layers: list[_Layer] = []
    for name, styles in _planned(view, plan, problems).items():
        (key, style), *others = styles.items()
        if others:
            problems.append(f"{name}: is {style!r} by {key!r}, and {others[0][1]!r} by {others[0][0]!r}")
        elif style != "replicate":
            try:
                layers.append(_layer(view, name, style, size))
            except _Refused as reason:
                refused.setdefault((key, str(reason)), []).append(name)
    layers = [layer for layer in layers if layer.cuts]
    problems += [f"{listed(names, 2)}: {reason}" for (_, reason), names in refused.items()]
    problems += _attention_problems(layers)
    if parallel.plan != "auto":
        problems += _head_problems(layers)
    if problems:
        raise ExportError("the plan of parallel= cannot be carried out:", *(f"  - {text}" for text in problems))
    return layers


def _planned(view: ModelView, plan: Mapping[str, str], problems: list[str]) -> dict[str, dict[str, str]]:
    """Return, for each layer that a plan names, the key of each style that it has."""
    planned: dict[str, dict[str, str]] = {}
    for key, given in plan.items():
        style = _SAME.get(given, given)
        pattern = re.compile(re.escape(key).replace(r"\*", r"[^.]+"))
        found = [name for name, _ in view.model.named_modules() if pattern.fullmatch(name)]
        if style not in _STYLES and not _PACKED.fullmatch(str(style)):
            problems.append(f"{key}: the style {given!r}, expected {', '.join(_STYLES)}")
        elif not found:
            problems.append(f"{key}: {_nothing(view, pattern)}")
        else:
            for name in found:
                styles = planned.setdefault(name, {})
                if style not in styles.values():
                    styles[key] = style
    return planned


def _nothing(view: ModelView, pattern: re.Pattern[str]) -> str:
    tensors = [name for name in view.tensors if pattern.fullmatch(name)]
    if tensors:
        return f"names {tensors[0]}, which is no layer but a tensor, and is not cut by itself"
    names = [name for name, module in view.model.named_modules() if isinstance(module, nn.Linear) or _is_conv(module)]
    return f"matches no layer of the model, whose layers have names such as {listed(names, 3)}"


def _layer(view: ModelView, name: str, style: str, size: int) -> _Layer:
    """Return a layer with its cuts; without any if it stays whole."""
    module = view.model.get_submodule(name)
    parent = view.model.get_submodule(name.rpartition(".")[0])
    weights = _weights(name, module)
    if ties := _ties(view, weights):
        if style != "colwise_gather_output":  # which gives all outputs either way
            raise _Refused(f"is tied to {ties[0]}, which would stay whole; leave it out of the plan, or untie them")
        return _Layer(name, module, parent, style, {})
    outputs, inputs = (1, 0) if _is_conv(module) else (0, 1)
    shape = weights[f"{name}.weight"].shape
    if style == "rowwise":
        if shape[inputs] % size:
            raise _Refused(f"has {shape[inputs]} inputs, which {size} ranks do not divide")
        return _Layer(name, module, parent, style, {f"{name}.weight": Cut(dim=inputs)})
    leaf = name.rpartition(".")[2]
    groups = _groups(style, parent, leaf)
    gathers = style == "colwise_gather_output"
    repeat = 1 if gathers else _repeat(parent, leaf, shape[outputs] // groups, size)
    if shape[outputs] % (groups * (size // repeat)):
        parts = f"{groups} parts of " if groups > 1 else ""
        raise _Refused(f"has {parts}{shape[outputs] // groups} outputs, which {size} ranks do not divide")
    dims = {"weight": outputs, "bias": 0}
    cuts = {key: Cut(dim=dims[key.rpartition(".")[2]], groups=groups, repeat=repeat) for key in weights}
    return _Layer(name, module, parent, style, cuts)


def _weights(name: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's weight and bias, by FQN."""
    kind = type(module).__qualname__
    if not (_is_conv(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)):
        raise _Refused(f"{kind} is not cut, only nn.Linear and transformers' Conv1D are")
    if "weight" not in module._parameters or set(module._parameters) - {"weight", "bias"} or module._modules:
        raise _Refused(f"{kind} has a weight that is computed from other tensors")
    weights = {f"{name}.{key}": value for key, value in module._parameters.items() if value is not None}
    if odd := [key for key, value in weights.items() if is_composed(value) or not value.is_contiguous()]:
        raise _Refused(f"{odd[0]} is no plain row-major tensor")
    return dict(weights)


def _is_conv(module: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D, whose weight is transposed."""
    return _is_from(module, "transformers.pytorch_utils", "Conv1D")


def _is_from(module: nn.Module, origin: str, name: str) -> bool:
    kind = getattr(sys.modules.get(origin), name, None)
    return kind is not None and type(module) is kind


def _ties(view: ModelView, weights: Mapping[str, torch.Tensor]) -> list[str]:
    keys = {tie_key(value) for value in weights.values()}
    return [name for name, tensor in view.tensors.items() if name not in weights and tie_key(tensor) in keys]


def _groups(style: str, parent: Any, leaf: str) -> int:
    """Return how many layers are in one tensor."""
    named = _PACKED.fullmatch(style)
    if not (_is_gpt2(parent) and leaf in ("c_attn", "q_attn")):
        return int(named[1]) if named else 2 if style == "packed_colwise" else 1
    if parent.is_cross_attention:
        raise _Refused("belongs to an attention to another model's outputs, which is not cut")
    if style != "packed_colwise" and not (named and named[1] == "3"):
        raise _Refused(f"has queries, keys and values in one tensor, which {style!r} would mix; use 'packed_colwise'")
    return 3


def _is_gpt2(module: nn.Module) -> bool:
    return _is_from(module, "transformers.models.gpt2.modeling_gpt2", "GPT2Attention")


# Heads.


def _repeat(parent: Any, leaf: str, length: int, size: int) -> int:
    """Return how many ranks have the same part of a layer: more than one if it has fewer heads of keys than ranks."""
    head = getattr(parent, "head_dim", None)
    if not (_is_gpt2(parent) or leaf in (_QUERIES, *_KEYS)) or type(head) is not int or head < 1 or length % head:
        return 1
    heads = length // head
    if heads % size and not (leaf in _KEYS and size % heads == 0 and hasattr(parent, "num_key_value_groups")):
        raise _Refused(f"has {heads} heads, which {size} ranks do not divide")
    return max(1, size // heads)


def _attention_problems(layers: list[_Layer]) -> Iterator[str]:
    """Yield attentions whose queries are cut and whose keys are not, or the other way round: heads would not meet."""
    cut = {id(layer.module) for layer in layers if layer.style != "colwise_gather_output"}
    for layer in layers:
        leaf = layer.name.rpartition(".")[2]
        if leaf in (_QUERIES, *_KEYS) and id(layer.module) in cut:
            beside = {name: layer.parent._modules.get(name) for name in (_QUERIES, *_KEYS)}
            if whole := [name for name, other in beside.items() if other is not None and id(other) not in cut]:
                yield f"{layer.name}: is cut, but {whole[0]} beside it is not"


def _head_problems(layers: list[_Layer]) -> Iterator[str]:
    """Yield modules around layers that pass parts on, and whose code reads a number of heads, which is the whole's.

    `view(..., num_heads, -1)` of a part would give as many, smaller heads, and other numbers.
    """
    parents = {type(layer.parent): layer for layer in layers if layer.style not in ("rowwise", "colwise_gather_output")}
    for kind, layer in parents.items():
        if not _is_gpt2(layer.parent) and (name := _head_name(kind)):
            yield (
                f"{layer.name}: {kind.__qualname__} reads {name}, which is that of the whole model; take the number of "
                "heads from the shapes, as view(..., -1, head_dim) does"
            )


def _head_name(kind: type) -> str:
    """Return the name of a number of heads that the methods of a class read, except its constructor; empty for none."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = [inspect.unwrap(member) for each in own for name, member in vars(each).items() if name != "__init__"]
    codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    codes += [const for code in codes for const in code.co_consts if isinstance(const, CodeType)]
    return next((name for code in codes for name in code.co_names if _HEADS.fullmatch(name)), "")


def _set_sizes(module: Any, layers: list[_Layer], size: int) -> None:
    """Set the sizes that an attention has beside its layers as they are on a rank."""
    cut = {id(layer.module): layer for layer in layers}
    if _is_gpt2(module) and id(module.c_attn) in cut:
        module.split_size //= size
    keys = cut.get(id(module._modules.get(_KEYS[0])))
    if keys is not None and keys.repeat > 1:
        # all heads of queries that a rank has use its one head of keys
        module.num_key_value_groups //= keys.repeat


# What a rank has, and does.


def _part(whole: nn.Parameter | None, cut: Cut, size: int) -> nn.Parameter:
    """Return what rank 0 has of a parameter; all ranks have as much."""
    assert whole is not None
    groups = whole.detach().chunk(cut.groups, cut.dim)
    values = torch.cat([group.chunk(size // cut.repeat, cut.dim)[0] for group in groups], cut.dim).contiguous()
    part = nn.Parameter(values, whole.requires_grad)
    vars(part).update(vars(whole))
    return part


def _product(module: nn.Module, x: torch.Tensor, bias: Any) -> torch.Tensor:
    """Return what a layer gives."""
    weight: Any = module.weight
    return _plus(torch.matmul(x, weight), bias) if _is_conv(module) else nn.functional.linear(x, weight, bias)


def _plus(product: torch.Tensor, bias: Any) -> torch.Tensor:
    return product if bias is None else product + bias


def _summed(part: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_exporting():
        return part  # what is called besides, to look for caches for example, has no other ranks
    functional = torch.ops._c10d_functional
    whole: torch.Tensor = functional.wait_tensor(functional.all_reduce(part, "sum", RANKS))
    return whole


def _gathered(part: torch.Tensor, size: int) -> torch.Tensor:
    """Join the parts of all ranks along the last dimension.

    They are gathered along a new first one: a gathering along another would fix the size of the batch in the graph.
    """
    if torch.compiler.is_exporting():
        functional = torch.ops._c10d_functional
        parts = functional.wait_tensor(functional.all_gather_into_tensor(part.unsqueeze(0), size, RANKS))
    else:
        parts = torch.stack([part] * size)
    whole: torch.Tensor = parts.movedim(0, -2).flatten(-2)
    return whole
