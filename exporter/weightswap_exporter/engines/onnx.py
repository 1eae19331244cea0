"""ONNX graphs of methods, with weights as inputs.

torch translates a method. Some of its translations compute otherwise than eager code does, or crash in ONNX Runtime:
they are rewritten before, or refused. Then the graph gets the inputs, outputs and names that the runtime expects.
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    import onnx
    import onnx_ir as ir
    import onnxscript  # noqa: F401  torch needs it
except ImportError as error:
    raise MissingExtra("writing ONNX graphs", "onnx-export") from error

import logging
import math
import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from weightswap_exporter.capture.archive import method_program
from weightswap_exporter.capture.programs import arguments, mutated_buffers
from weightswap_exporter.engines.divisions import (
    exact_floor,
    exact_remainder,
    is_floor_of_fractions,
    is_remainder_of_fractions,
    replace,
)
from weightswap_exporter.engines.index_bounds import indices_of
from weightswap_exporter.engines.resizing import exact_nearest, is_nearest_to_size
from weightswap_runtime import Artifact
from weightswap_runtime.engines.onnx_names import Names, element_of, onnx_names, output_dtypes
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.manifest import Manifest, Method, NamedTensor
from weightswap_runtime.format.signature import Tensor, input_leaves, leaves

# places in the arguments of operators: attention's mask; a norm's running mean, and whether it is in training mode
_MASK = 3
_RUNNING, _TRAINING = 3, 5
_TOO_LARGE = (1 << 31) - 1  # index, of any integer type that operators take
_ROUNDED = {"aten::div", "aten::div_", "aten::fmod", "aten::fmod_"}
# operators that order int64, for which ONNX Runtime takes half of the bits of a difference
_BOUNDS = {"minimum", "maximum", "min.other", "max.other", "clamp", "clamp_min", "clamp_max", "clip"}
_EXTREMES = {"amin", "amax", "min.default", "max.default", "min.dim", "max.dim"}
_CLAMPS = {
    getattr(torch.ops.aten, f"{name}{end}").default for name in ("clamp", "clip", "hardtanh") for end in ("", "_")
}
_KIND = "pkg.torch.export.graph_signature.OutputSpec.kind"  # metadata key for the role of a value in the method
_RECURRENT = {"aten::lstm", "aten::gru"}
_PRODUCTS = {"aten::bmm", "aten::baddbmm", "aten::matmul", "aten::einsum", "aten::scaled_dot_product_attention"}
_TARGET = re.compile(r"target=(torch\.ops\.[\w.]+)")
_MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.:]+)', overload='(\w+)'\)>")


def onnx_graph(artifact: Artifact, name: str) -> bytes:
    """Return the ONNX model of a method. Weights, variants and state are inputs; the new state follows the outputs.

    torch translates it without optimisations, which would fold weights. Raises ArtifactError, CaptureError
    for a graph that has no ONNX equivalent, and Unsupported for a dtype that ONNX Runtime lacks.
    """
    where = f"method {name!r}"
    method = artifact.manifest.methods[name]
    program = method_program(artifact, name)
    _check_tables(artifact.manifest, method)
    _check_state(where, artifact)
    _check_empty(where, program)
    changed = mutated_buffers(program)
    _adapt(program)
    translated = _translate(where, program)
    names = onnx_names(artifact.manifest, method)
    targets = (spec.target for spec in program.graph_signature.input_specs)
    fqns = {target: item.name for target, item in zip(targets, method.inputs, strict=True) if target is not None}
    signature, dtypes = translated.exported_program.graph_signature, output_dtypes(artifact.manifest, method)
    _Interface(where, translated.model, signature, names, fqns, dtypes).apply(changed)
    model = ir.to_proto(translated.model)
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        raise CaptureError(
            *f"{where}: torch {torch.__version__} writes an invalid ONNX graph for it: {error}".splitlines()
        ) from error
    return bytes(model.SerializeToString(deterministic=True))


def _check_tables(manifest: Manifest, method: Method) -> None:
    """Raise Unsupported for a tensor with a dtype that ONNX Runtime lacks."""
    used = {item.name for item in method.inputs}
    rows = [row for row in (*manifest.weights, *manifest.state, *manifest.variable) if not used.isdisjoint(row.names)]
    for item in (*rows, *input_leaves(method.signature), *leaves(method.signature.output)):
        if isinstance(item, NamedTensor | Tensor):
            element_of(item.name, item.dtype)


def _check_state(where: str, artifact: Artifact) -> None:
    tied = [row.name for row in artifact.manifest.state if row.aliases]
    if tied:
        raise CaptureError(f"{where}: the state {tied[0]!r} has two names, which an ONNX graph cannot express")


def _check_empty(where: str, program: ExportedProgram) -> None:
    """Raise CaptureError for operators that end the process when a data-dependent size is 0."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if _ends_when_empty(node) and any(
                free_unbacked_symbols(each.meta.get("val")) for each in (node, *node.all_input_nodes)
            ):
                raise CaptureError(
                    f"{where}: {node.target} has a size that depends on values, such as x[mask]; where it is 0, ONNX "
                    "Runtime crashes. Use the engine 'torch'"
                )


def _ends_when_empty(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    return name in _RECURRENT or (name in _PRODUCTS and node.meta["val"].ndim > 2)  # batched matrix products


def _translate(where: str, program: ExportedProgram) -> Any:
    try:
        with _quiet(), _new_states_kept(), torch.no_grad():
            return torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
    except Exception as error:
        raise CaptureError(f"{where}: it has no ONNX equivalent: {_reason(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of torch about internals that the caller cannot choose."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _new_states_kept() -> Iterator[None]:
    """Make new values of buffers outputs during torch's last pass, which would drop them as unused."""
    from torch.onnx._internal._lazy_import import onnxscript_apis  # type: ignore[attr-defined]

    convert = onnxscript_apis.convert_version

    def converted(model: Any, version: int) -> Any:
        outputs = list(model.graph.outputs)
        others = [value for node in model.graph for value in node.outputs if value not in outputs]
        model.graph.outputs.extend(value for value in others if value.metadata_props.get(_KIND) == "BUFFER_MUTATION")
        model = convert(model, version)
        while len(model.graph.outputs) > len(outputs):
            model.graph.outputs.pop()
        return model

    with mock.patch.object(onnxscript_apis, "convert_version", converted):
        yield


def _reason(error: BaseException) -> str:
    """Return the operator that could not be translated, and why."""
    chain = [str(error)]
    cause = error.__cause__
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(chain)
    missing = sorted({f"{name}.{overload}" for name, overload in _MISSING.findall(text)})
    if missing:
        return f"ONNX has no {', '.join(missing)}"
    target = _TARGET.search(text)
    last = chain[-1].strip().splitlines()[0]
    return f"{target[1]}: {last}" if target else last


# What the runtime expects of the translated graph.


@dataclass
class _Interface:
    where: str
    model: Any
    signature: Any
    names: Names
    fqns: Mapping[str, str]  # the manifest's names by the program's names of tensors
    dtypes: Mapping[str, str]  # of the outputs by name

    def apply(self, changed: frozenset[str]) -> None:
        """Change the model. changed: the program's names of the buffers that a call changes."""
        inputs = self._paired("inputs", self.names.inputs, self.model.graph.inputs)
        weights = self._weights()
        finals = {**self._outputs(), **self._states(changed)}
        self.model.graph.inputs.clear()
        self.model.graph.outputs.clear()
        self.model.graph.inputs.extend([*weights.values(), *inputs.values()])
        for name, value in finals.items():
            self.model.graph.outputs.append(self._final(name, value))
        public = dict(zip(finals, self.model.graph.outputs, strict=True)) | inputs | weights
        self._rename(public)
        self._strip()

    def _outputs(self) -> dict[str, Any]:
        for spec in self.signature.output_specs:
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                raise CaptureError(f"{self.where}: it changes the input {spec.target!r}, which ONNX cannot express")
        return self._paired("outputs", self.names.outputs, self.model.graph.outputs)

    def _paired(self, what: str, names: Sequence[str | None], values: Sequence[Any]) -> dict[str, Any]:
        expected = [name for name in names if name is not None]
        if len(expected) != len(values):
            raise CaptureError(f"{self.where}: its ONNX graph has {len(values)} {what}, expected {len(expected)}")
        return dict(zip(expected, values, strict=True))

    def _weights(self) -> dict[str, Any]:
        """Return the initialisers that become inputs, by FQN. Constants stay, and unused initialisers are dropped."""
        weights = {}
        for name, value in list(self.model.graph.initializers.items()):
            del self.model.graph.initializers[name]
            fqn = self.fqns.get(name)
            if fqn in self.names.tensors:
                value.const_value = None
                weights[fqn] = value
            elif value.uses() or value in self.model.graph.outputs:
                self.model.graph.initializers[name] = value
        return weights

    def _states(self, changed: frozenset[str]) -> dict[str, Any]:
        """Return the new values of the buffers, by their output names."""
        values = {value.name: value for value in self._values()}
        final = {
            spec.target: values.get(spec.arg.name)
            for spec in self.signature.output_specs
            if spec.kind is OutputKind.BUFFER_MUTATION
        }
        lost = sorted(self.fqns[name] for name in changed | final.keys() if final.get(name) is None)
        if lost:
            raise CaptureError(f"{self.where}: its ONNX graph has lost the new value of the buffer {lost[0]!r}")
        new = {self.fqns[name]: value for name, value in final.items()}
        return {after: new[name] for name, after in self.names.after.items() if name in new}

    def _final(self, name: str, value: Any) -> Any:
        """Return the value as an output in the dtype of the manifest, from which some translations differ."""
        code = element_of(name, self.dtypes[name]).code
        node = ir.node("Cast", inputs=[value], attributes={"to": code})
        self.model.graph.append(node)
        (output,) = node.outputs
        output.type, output.shape = ir.TensorType(ir.DataType(code)), value.shape
        return output

    def _values(self) -> Iterator[Any]:
        yield from self.model.graph.inputs
        yield from self.model.graph.initializers.values()
        for node in self.model.graph.all_nodes():
            yield from node.outputs

    def _rename(self, public: Mapping[str, Any]) -> None:
        initializers, values = list(self.model.graph.initializers.values()), list(self._values())
        self.model.graph.initializers.clear()
        public_ids = {id(value) for value in public.values()}
        used = set(public)
        for number, value in enumerate(values):
            if id(value) not in public_ids:
                value.name = value.name if value.name and value.name not in used else f"{value.name or ''}#{number}"
                used.add(value.name)
        for name, value in public.items():
            value.name = name
        for value in initializers:
            self.model.graph.initializers[value.name] = value

    def _strip(self) -> None:
        """Remove metadata, which describes the build machine and the model's source code."""
        for item in (self.model, self.model.graph, *self.model.graph.all_nodes(), *self._values()):
            item.metadata_props.clear()
            item.doc_string = None
        for function in self.model.functions.values():
            function.metadata_props.clear()
            for node in function:
                node.metadata_props.clear()


# Rewrites of what torch translates to something that computes otherwise.


def _adapt(program: ExportedProgram) -> None:
    """Rewrite a program so that its translation computes the same."""
    _drop_literals(program)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                _adapt_node(module.graph, node)


def _drop_literals(program: ExportedProgram) -> None:
    """Replace literal outputs with None: the signature has their values."""
    (last,) = program.graph.find_nodes(op="output")
    last.args = (tuple(item if isinstance(item, torch.fx.Node) else None for item in last.args[0]),)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument):
            spec.arg = ConstantArgument(spec.arg.name, None)


def _adapt_node(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if node.target is torch.ops.aten.view.default:
        # decomposed attention may have other strides than views were captured for; ONNX has none
        node.target = torch.ops.aten.reshape.default
    elif node.target is torch.ops.aten.scaled_dot_product_attention.default:
        _plain_attention(graph, node)
    elif _is_training_norm(node):
        _decompose_norm(graph, node)
    elif node.target is operator.floordiv:
        _exact_division(graph, node)
    else:
        for applies, rewrite in (
            (_has_indices, _refuse_indices),
            (_rounds_integers, _exact_integers),
            (is_remainder_of_fractions, exact_remainder),
            (is_floor_of_fractions, exact_floor),
            (is_nearest_to_size, exact_nearest),
            (_orders_integers, _exact_order),
            (_is_angle, _exact_angle),
            (_has_mixed_bounds, _with_bounds_of_fractions),
        ):
            if applies(node):
                rewrite(graph, node)
                break


def _plain_attention(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose attention if it has a mask or not four dimensions.

    torch's translation takes four dimensions only, and gives NaN for a row that is wholly masked; eager gives zeros.
    """
    mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
    if node.meta["val"].ndim == 4 and mask is None:
        return
    if isinstance(mask, torch.fx.Node) and mask.meta["val"].dtype is torch.bool:
        node.replace_input_with(mask, _additive_mask(graph, node, mask))
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    node.target = torch.ops.aten._scaled_dot_product_attention_math.default
    node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _additive_mask(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node) -> torch.fx.Node:
    """Convert a boolean mask to numbers that are added to the scores."""
    aten = torch.ops.aten
    with graph.inserting_before(node):
        hidden = graph.call_function(aten.logical_not.default, (mask,))
        zeros = graph.call_function(aten.zeros_like.default, (mask,), {"dtype": node.meta["val"].dtype})
        return graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, -math.inf))


def _has_indices(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.one_hot.default or _position_of_indices(node) is not None


def _position_of_indices(node: torch.fx.Node) -> int | None:
    found = indices_of(node)
    if node.target is torch.ops.aten.take_along_dim.default and [value for _, value in arguments(node)][2] is None:
        return 1  # along a dimension, eager takes any indices
    return found[2] if found else None


def _refuse_indices(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Make negative indices, which ONNX counts from the end, too large, which is refused as in eager.

    So are all indices of bags whose offsets eager refuses.
    """
    position = _position_of_indices(node) or 0  # of one_hot
    aten, indices = torch.ops.aten, node.args[position]
    with graph.inserting_before(node):
        wrong = graph.call_function(aten.lt.Scalar, (indices, 0))
        if "embedding_bag" in str(node.target):
            wrong = graph.call_function(aten.logical_or.default, (wrong, _wrong_offsets(graph, node)))
        checked = graph.call_function(aten.masked_fill.Scalar, (indices, wrong, _TOO_LARGE))
        if node.target is aten.one_hot.default:  # ONNX's gives zeros for what is no class
            classes = graph.call_function(aten.arange.default, (node.args[1],))
            checked = graph.call_function(aten.index.Tensor, (classes, [checked]))
    node.update_arg(position, checked)


def _wrong_offsets(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Return whether an embedding bag's offsets begin with another number than 0, or lead beyond the indices."""
    aten, call, (indices, offsets) = torch.ops.aten, graph.call_function, node.args[1:3]
    first, last = (call(aten.slice.Tensor, (offsets, 0, *ends)) for ends in ((0, 1), (-1, _TOO_LARGE)))
    size = call(aten.sym_size.int, (indices, 0))
    return call(aten.logical_or.default, (call(aten.ne.Scalar, (first, 0)), call(aten.gt.Scalar, (last, size))))


def _is_training_norm(node: torch.fx.Node) -> bool:
    """Return whether the node is a norm in training mode, which torch mistranslates or strips of its statistics."""
    aten = torch.ops.aten
    if node.target is aten.instance_norm.default and node.args[_RUNNING] is None:
        return False
    return node.target in (aten.batch_norm.default, aten.instance_norm.default) and bool(node.args[_TRAINING])


def _decompose_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Decompose a norm by the statistics of the batch or of each instance, and update the running statistics."""
    aten = torch.ops.aten
    source, weight, bias, running_mean, running_var, _, momentum, eps, _ = node.args
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)  # the dtype in which eager sums
    reduced = [*([0] if node.target is aten.batch_norm.default else []), *range(2, value.ndim)]
    column = [-1, *[1] * (value.ndim - 2)]

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return graph.call_function(target, args, kwargs)

    with graph.inserting_before(node):
        x = call(aten.to.dtype, source, dtype)
        mean = call(aten.mean.dim, x, reduced, True)
        centred = call(aten.sub.Tensor, x, mean)
        var = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), reduced, True)
        result = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, var, eps)))
        for operation, affine in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
            if affine is not None:
                result = call(operation, result, call(aten.reshape.default, affine, column))
        result = call(aten.to.dtype, result, value.dtype)
        unbiased = call(aten.var.correction, x, reduced, correction=1, keepdim=True)
        for running, statistic in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                new = call(aten.reshape.default, call(aten.mean.dim, statistic, [0]), [-1])
                step = call(aten.mul.Tensor, call(aten.sub.Tensor, new, running), momentum)
                call(aten.copy_.default, running, call(aten.add.Tensor, running, step))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _exact_division(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Subtract the remainder before a floor division, as ONNX does not round negative quotients down."""
    dividend, divisor = node.args
    with graph.inserting_before(node):
        remainder = graph.call_function(operator.mod, (dividend, divisor))
        node.args = (graph.call_function(operator.sub, (dividend, remainder)), divisor)


def _rounds_integers(node: torch.fx.Node) -> bool:
    """Return whether the node rounds a quotient of integers or is their `fmod`, which torch translates with floats."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _ROUNDED:
        return False
    rounds = "fmod" in node.target._schema.name or node.kwargs.get("rounding_mode")
    dtype = node.meta["val"].dtype
    return bool(rounds) and dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex


def _exact_integers(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with floor division and remainder, whose translations compute with integers.

    The rewrite uses int64, as ONNX Runtime lacks some of these operators for narrower integers.
    """
    aten = torch.ops.aten
    with graph.inserting_before(node):
        dividend, divisor = (_int64(graph, value) for value in node.args[:2])
        result = _rounded(graph, dividend, divisor, node.kwargs.get("rounding_mode"))
        result = graph.call_function(aten.to.dtype, (result, node.meta["val"].dtype))
    replace(graph, node, result)


def _rounded(graph: torch.fx.Graph, dividend: torch.fx.Node, divisor: torch.fx.Node, mode: object) -> torch.fx.Node:
    aten = torch.ops.aten
    if mode == "floor":
        return graph.call_function(aten.floor_divide.default, (dividend, divisor))
    remainder = graph.call_function(aten.remainder.Tensor, (dividend, divisor))
    negative = tuple(graph.call_function(aten.lt.Scalar, (value, 0)) for value in (dividend, divisor))
    signs_differ = graph.call_function(aten.logical_xor.default, negative)
    inexact = graph.call_function(aten.ne.Scalar, (remainder, 0))
    away = graph.call_function(aten.logical_and.default, (signs_differ, inexact))  # rounding down is away from zero
    if mode == "trunc":
        floor = graph.call_function(aten.floor_divide.default, (dividend, divisor))
        return graph.call_function(aten.add.Tensor, (floor, _int64(graph, away)))
    fmod = graph.call_function(aten.sub.Tensor, (remainder, divisor))
    return graph.call_function(aten.where.self, (away, fmod, remainder))


def _orders_integers(node: torch.fx.Node) -> bool:
    """Return whether the node orders int64 by an operator that ONNX Runtime gets wrong if they are far apart."""
    if not isinstance(node.target, torch._ops.OpOverload) or _order(node) not in {"sign", *_BOUNDS, *_EXTREMES}:
        return False
    result = node.meta["val"][0] if isinstance(node.meta["val"], tuple) else node.meta["val"]
    (first, *_) = node.all_input_nodes
    return result.dtype is torch.int64 and bool(first.meta["val"].ndim or _order(node) not in _EXTREMES)


def _order(node: torch.fx.Node) -> str:
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
    return f"{name}.{node.target._overloadname}" if name in ("min", "max") else name


def _exact_order(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Rewrite the node with comparisons and with places of the least and the greatest, which are right."""
    aten, call, name = torch.ops.aten, graph.call_function, _order(node)
    given = {argument.name: value for argument, value in arguments(node)}
    if name in ("min.dim", "max.dim"):
        for user in [user for user in node.users if user.args[1] == 0]:  # the other one has the places
            with graph.inserting_before(user):
                result = _extreme(graph, given["self"], given["dim"], name, keep=bool(given["keepdim"]))
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        return
    with graph.inserting_before(node):
        result = given["self"]
        if name in _EXTREMES:
            dims = range(result.meta["val"].ndim)
            for dim in sorted({dim % len(dims) for dim in given.get("dim") or dims}, reverse=True):
                result = _extreme(graph, result, dim, name, keep=bool(given.get("keepdim")))
        elif name == "sign":
            above, below = (call(compare, (result, 0)) for compare in (aten.gt.Scalar, aten.lt.Scalar))
            result = call(aten.sub.Tensor, (_int64(graph, above), _int64(graph, below)))
        else:
            is_least = name in ("maximum", "max.other")  # that the result may be
            least = given.get("min") if "other" not in given else given["other"] if is_least else None
            most = given.get("max") if "other" not in given else None if is_least else given["other"]
            result = _int64(graph, result)
            for bound, compare in ((least, aten.lt.Tensor), (most, aten.gt.Tensor)):
                if bound is not None:
                    limit = _int64(graph, bound)
                    result = call(aten.where.self, (call(compare, (result, limit)), limit, result))
    replace(graph, node, result)


def _extreme(graph: torch.fx.Graph, values: torch.fx.Node, dim: int, name: str, *, keep: bool) -> torch.fx.Node:
    """Return the least or the greatest values along a dimension."""
    aten = torch.ops.aten
    place = aten.argmin.default if "min" in name else aten.argmax.default
    found = graph.call_function(aten.gather.default, (values, dim, graph.call_function(place, (values, dim, True))))
    return found if keep else graph.call_function(aten.squeeze.dim, (found, dim))


def _is_angle(node: torch.fx.Node) -> bool:
    """Return whether the node is `atan2`, whose translation loses NaN, and has other quadrants at 0 and infinity."""
    return node.target in (torch.ops.aten.atan2.default, torch.ops.aten.atan2_.default)


def _exact_angle(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    wide = torch.promote_types(dtype, torch.float32)  # in which eager computes it

    def call(target: Any, *args: Any) -> torch.fx.Node:
        return graph.call_function(target, args)

    def is_negative(value: torch.fx.Node) -> torch.fx.Node:  # also -0.0, whose reciprocal is negative infinity
        below = call(aten.lt.Scalar, call(aten.reciprocal.default, value), 0)
        return call(aten.logical_or.default, call(aten.lt.Scalar, value, 0), below)

    with graph.inserting_before(node):
        y, x = (call(aten.to.dtype, value, wide) for value in node.args)
        height, width = (call(aten.abs.default, value) for value in (y, x))
        steep = call(aten.atan.default, call(aten.div.Tensor, height, width))
        eighth = call(aten.atan.default, call(aten.ones_like.default, steep))  # of a turn, in all digits of the dtype
        both_infinite = call(aten.eq.Scalar, call(aten.minimum.default, height, width), math.inf)
        both_zero = call(aten.eq.Scalar, call(aten.maximum.default, height, width), 0)
        acute = call(aten.where.self, both_infinite, eighth, call(aten.where.self, both_zero, height, steep))
        obtuse = call(aten.sub.Tensor, call(aten.mul.Scalar, eighth, 4), acute)
        angle = call(aten.where.self, is_negative(x), obtuse, acute)
        result = call(aten.where.self, is_negative(y), call(aten.neg.default, angle), angle)
        result = call(aten.to.dtype, result, dtype)
    replace(graph, node, result)


def _has_mixed_bounds(node: torch.fx.Node) -> bool:
    """Return whether the node is `clamp` with an integer and a fraction, which torch.onnx refuses."""
    return node.target in _CLAMPS and {type(bound) for bound in node.args[1:]} == {int, float}


def _with_bounds_of_fractions(_: torch.fx.Graph, node: torch.fx.Node) -> None:
    values, *bounds = node.args
    node.args = (values, *map(float, bounds))  # type: ignore[arg-type]


def _int64(graph: torch.fx.Graph, value: Any) -> torch.fx.Node:
    """Return a tensor or number of a graph as an int64 tensor."""
    if isinstance(value, torch.fx.Node) and not isinstance(value.meta.get("val"), int | torch.SymInt):
        return graph.call_function(torch.ops.aten.to.dtype, (value, torch.int64))
    return graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"dtype": torch.int64})
