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
from weightswap_exporter.capture.programs import mutated_buffers
from weightswap_exporter.engines.onnx_pools import uses_places
from weightswap_exporter.engines.onnx_rewrites import adapt
from weightswap_runtime import Artifact
from weightswap_runtime.engines.onnx_names import Names, element_of, onnx_names, output_dtypes
from weightswap_runtime.errors import CaptureError
from weightswap_runtime.format.manifest import Manifest, Method, NamedTensor
from weightswap_runtime.format.signature import Tensor, input_leaves, leaves

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
    _check_places(where, program)
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


def _check_places(where: str, program: ExportedProgram) -> None:
    """Raise CaptureError for places of maxima that ONNX lacks, where torch's translation has those of the sample."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if uses_places(node):
                raise CaptureError(
                    f"{where}: ONNX has no places of maxima in pools of dynamic sizes ({node.target}). Use the engine "
                    "'torch'"
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


def _adapt(program: ExportedProgram) -> None:
    """Rewrite a program so that its translation computes the same."""
    _drop_literals(program)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                adapt(module.graph, node)


def _drop_literals(program: ExportedProgram) -> None:
    """Replace literal outputs with None: the signature has their values."""
    (last,) = program.graph.find_nodes(op="output")
    last.args = (tuple(item if isinstance(item, torch.fx.Node) else None for item in last.args[0]),)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, ConstantArgument):
            spec.arg = ConstantArgument(spec.arg.name, None)
