"""A graph as a Python function: one statement for each call of an operator.

The graph of `relu(x @ w.T)` becomes this source, which Python compiles once:

    def graph(v1, v2):
     v3 = c0(v1); del v1
     v4 = c1(v2, v3); del v2, v3
     v5 = c2(v4); del v4
     return (v5,)

No interpreter stands between two operators, so a call takes less time than that of the module the graph came from. Nor
does any text of an archive become source code: names are generated here, and strings, floats, dtypes and devices are
constants in the function's globals, as the operators are (`c0`).

Statements that depend on weights and constants alone (here `v3`) can be hoisted to a second function, the prologue. It
runs once for each set of weights, and the graph takes its results as parameters.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from weightswap_runtime.errors import ArtifactError
from weightswap_runtime.format.artifact import Artifact
from weightswap_runtime.tensors import DTYPES

from .graph_archive import (
    Argument,
    Graph,
    NamedArgument,
    Node,
    Symbol,
    UnknownPart,
    calls,
    check_records,
    read_argument,
    read_program,
)
from .operators import (
    AUTOCAST,
    DROPOUTS,
    DROPPED,
    OF_TORCH,
    RANKS,
    SET_GRADIENTS,
    ForeignFunction,
    MissingOperator,
    Operator,
    check_strings,
    find_operator,
)

_POSITIONAL, _KEYWORD = 1, 2  # the schema's kinds of arguments
_SPARSE = ("as_layout", 1)
_MOST_LITERALS = 1000  # of a list in the source: Python's compiler takes half a kilobyte for each
_MOST_BITS = 64  # of an integer: no operator takes a longer one
# the schema's numbers of torch's constants; the first two are not dtypes of weight files
_DTYPES = {9: "complex32", 11: "complex128"} | {row.code: row.torch or "" for row in DTYPES.values() if row.code}
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
# `operators` lets torch check the indices of sparse_coo; those of other layouts nobody checks
_LAYOUTS = {1: "sparse_coo", 7: "strided"}
_TABLES = {"as_scalar_type": _DTYPES, "as_memory_format": _MEMORY_FORMATS, "as_layout": _LAYOUTS}

Result = TypeVar("Result")


class DamagedGraph(Exception):
    """A graph that contradicts itself."""


DAMAGED = (
    DamagedGraph,
    msgspec.MsgspecError,
    zipfile.BadZipFile,
    # raised by Python for numbers and nesting that no export writes
    OverflowError,
    RecursionError,
    SyntaxError,
    ValueError,
)


class Compiled(NamedTuple):
    """A graph's functions."""

    call: Callable[..., Any]  # takes the results of the prologue and then the inputs; returns a tuple
    kinds: tuple[str, ...]  # of the inputs, as the schema calls them; a call ignores the values of literals
    outputs: int
    # whether the function computes the same if the dispatcher skips autograd, as it has only torch's own operators and
    # no part that runs with gradients
    past_autograd: bool
    prologue: Callable[..., Any] | None = None  # takes the fixed inputs; returns a tuple
    hoisted: int = 0  # number of the prologue's results


def open_graph(
    artifact: Artifact, name: str, device: torch.device, fixed: Sequence[bool] = (), group: str | None = None
) -> Compiled:
    """Compile the graph in the artifact's file `name`. Tensors that the function creates are made on `device`.

    fixed, group: as for `compile_graph`.
    Raises ArtifactError, also for operators that no package in this process has registered.
    """
    raw = artifact.read(name)
    where = str(artifact.path / name)
    graph = read_graph(raw, where)
    return checked(raw, where, lambda: compile_graph(graph, device, fixed, group))


def read_graph(raw: bytes, where: str) -> Graph:
    """Read the graph from an archive's bytes. Raises ArtifactError."""
    check_records(raw, where)
    return checked(raw, where, lambda: read_program(raw).graph_module.graph)


def compile_graph(graph: Graph, device: torch.device, fixed: Sequence[bool] = (), group: str | None = None) -> Compiled:
    """Compile a graph. Tensors that the function creates are made on `device`.

    fixed: for each input, whether it is the same in all calls. The prologue computes what depends on those alone.
    group: name under which torch knows the process group that calls the graph together; the graph itself calls it
    `RANKS`, so that each model of a process has its own. None: the graph may have no collectives.

    Raises UnknownPart, MissingOperator, ForeignFunction, DamagedGraph and msgspec.MsgspecError.
    """
    return _Writer(_Constants(device, group)).compile(graph, fixed)


def checked(raw: bytes, where: str, read: Callable[[], Result]) -> Result:
    """Return the result of `read`, which parses an archive's bytes; turn its errors into ArtifactError."""
    try:
        return read()
    except MissingOperator:
        raise ArtifactError(f"{where}: {_missing(calls(raw))}") from None
    except (UnknownPart, ForeignFunction) as reason:
        raise ArtifactError(
            f"{where}: has {reason}, which weightswap does not run. Export the artifact again, or install the "
            "weightswap that wrote it."
        ) from None
    except DAMAGED as error:
        raise ArtifactError(f"{where}: cannot be read ({error}). Export the artifact again.") from error


def _missing(targets: Iterable[str]) -> str:
    """Return the message about all operators that this process lacks, not only the first."""
    missing = sorted(filter(_is_missing, targets))
    libraries = sorted({target.split(".")[2] for target in missing} - OF_TORCH)
    if not libraries:
        return f"needs {', '.join(missing)}, which torch {torch.__version__} lacks. Install the torch that exported it."
    return (
        f"needs {', '.join(missing)}, which this process lacks. Name what registers the operators of "
        f"{', '.join(libraries)}: load(..., op_libraries=[...]); or import it first; or export without it."
    )


def _is_missing(target: str) -> bool:
    try:
        find_operator(target)
    except MissingOperator:
        return True
    except (ForeignFunction, UnknownPart):
        pass
    return False


class _Line(NamedTuple):
    """One call of an operator with the assignment of its results."""

    text: str
    uses: frozenset[str]  # local names
    defines: tuple[str, ...]  # local names
    operator: Operator


class _Constants:
    """What a graph's function and those of its subgraphs share: constants, and what is known of all of them."""

    def __init__(self, device: torch.device, group: str | None) -> None:
        self.device = device
        self.group = group
        self.past_autograd = True
        self.vmap = False
        self.values: dict[str, Any] = {}
        self._names: dict[tuple[type, Any], str] = {}

    def add(self, value: Any) -> str:
        # by its type, as True == 1; by its text, as 0.0 == -0.0 and a NaN equals nothing
        key = (type(value), repr(value) if isinstance(value, float | complex) else value)
        if key not in self._names:
            self._names[key] = name = f"c{len(self._names)}"
            self.values[name] = value
        return self._names[key]


class _Writer:
    """Writes the function of one graph. A subgraph has a writer, and so local names, of its own."""

    def __init__(self, constants: _Constants) -> None:
        self._constants = constants
        self._locals: dict[str, str] = {}  # local names by those in the graph
        self._used: set[str] = set()  # local names in the line that is being written
        self._count = 0

    def compile(self, graph: Graph, fixed: Sequence[bool] = ()) -> Compiled:
        parameters = [self._parameter(argument) for argument in graph.inputs]
        lines = [line for node in graph.nodes if (line := self._line(node)) is not None]
        self._used = set()
        values = [self._value(output) for output in graph.outputs]
        returned = frozenset(self._used)
        if graph.is_single_tensor_return and len(values) != 1:
            raise DamagedGraph(f"{len(values)} outputs where one is returned")
        result = values[0] if graph.is_single_tensor_return else _tuple(values)
        # not strict: whether the graph has the method's inputs is checked with the kinds of the compiled one
        kept = [parameter for parameter, is_fixed in zip(parameters, fixed, strict=False) if is_fixed]
        early, late, hoisted = _split(lines, frozenset(kept), returned) if kept else ([], lines, [])
        call = self._function([*hoisted, *parameters], late, returned, result)
        return Compiled(
            _leave_vmap(call) if self._constants.vmap else call,
            tuple(kind for argument in graph.inputs for kind in argument),
            len(values),
            self._constants.past_autograd,
            self._function(kept, early, frozenset(hoisted), _tuple(hoisted)) if hoisted else None,
            len(hoisted),
        )

    def _function(
        self, parameters: list[str], lines: list[_Line], returned: frozenset[str], result: str
    ) -> Callable[..., Any]:
        texts = [f"def graph({', '.join(parameters)}):", *_needed(lines, returned), f"return {result}"]
        scope = dict(self._constants.values)
        exec(compile("\n ".join(texts), "<graph>", "exec"), scope)  # every name in it was generated here
        function: Callable[..., Any] = scope["graph"]
        return function

    def _parameter(self, argument: Argument) -> str:
        kind, value = read_argument(argument)
        if kind == "as_tensor":
            return self._define(value.name)
        if kind == "as_sym_int" and value.as_name is not None:
            return self._define(value.as_name)
        if kind in ("as_int", "as_float", "as_bool", "as_none", "as_string"):
            return self._new_name()  # captured as a constant; nothing refers to it
        raise UnknownPart(f"an input of the kind {kind!r}")

    def _new_name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _define(self, name: str) -> str:
        return self._name(name, self._new_name())

    def _name(self, name: str, local: str) -> str:
        if name in self._locals:
            raise DamagedGraph(f"{name!r:.80} is defined twice")
        self._locals[name] = local
        return local

    def _use(self, name: str) -> str:
        if name not in self._locals:
            raise DamagedGraph(f"{name!r:.80} is used before it is defined")
        self._used.add(self._locals[name])
        return self._locals[name]

    def _line(self, node: Node) -> _Line | None:
        operator = find_operator(node.target)
        if operator.name in DROPPED or (operator.name in DROPOUTS and self._is_identity(node)):
            return None
        check_strings(operator, [item.arg for item in node.inputs])
        if operator.collective and self._constants.group is None:
            raise ForeignFunction(f"{operator.name!r}, a call of all ranks, in a model for one process")
        if any(read_argument(item.arg) == _SPARSE for item in node.inputs if "as_layout" in item.arg):
            operator = operator._replace(past_autograd=False, repeatable=False)
        self._constants.past_autograd &= operator.past_autograd
        self._constants.vmap |= operator.vmap
        self._used = set()
        call = self._call(node, operator)
        if operator.name == "aten::to":
            call = self._cast_if_needed(node, call)
        before = self._count
        target = self._target(node, operator)
        defines = tuple(f"v{number}" for number in range(before + 1, self._count + 1))
        return _Line(f"{target} = {call}" if target else call, frozenset(self._used), defines, operator)

    def _call(self, node: Node, operator: Operator) -> str:
        called, inputs = self._constants.add(operator.call), node.inputs
        if operator.name == SET_GRADIENTS and len(inputs) > 1:
            if read_argument(inputs[0].arg) == ("as_bool", False):  # everything runs without gradients
                called, inputs = self._value(inputs[1].arg), inputs[2:]
            else:
                self._constants.past_autograd = False
        arguments = []
        # replaces the device that the graph was captured on; autocast for another device stays as it is
        if operator.name == AUTOCAST and inputs and read_argument(inputs[0].arg) == ("as_string", "cpu"):
            arguments, inputs = [self._constants.add(self._constants.device.type)], inputs[1:]
        return f"{called}({', '.join([*arguments, *self._arguments(inputs, operator)])})"

    def _cast_if_needed(self, node: Node, call: str) -> str:
        """Return an expression that calls a cast only if it changes something; else the result is the argument.

        Many casts of a graph change nothing, and a comparison takes a small part of a call's time.
        """
        argument, *properties = (read_argument(item.arg) for item in node.inputs)
        if argument[0] != "as_tensor" or not properties or any(kind not in _COMPARED for kind, _ in properties):
            return call
        tensor = self._expression(*argument)
        same = (f"{tensor}.{_COMPARED[kind]} {self._expression(kind, value)}" for kind, value in properties)
        return f"{tensor} if {' and '.join(same)} else {call}"

    def _is_identity(self, node: Node) -> bool:
        """Return whether a dropout is not in training, and so returns its input; if so, give its result that name."""
        if len(node.inputs) != 3 or len(node.outputs) != 1:
            return False
        (kind, value), _, (_, training) = (read_argument(item.arg) for item in node.inputs)
        result, name = read_argument(node.outputs[0])
        if (kind, result, training) != ("as_tensor", "as_tensor", False):
            return False
        self._name(name.name, self._use(value.name))
        return True

    def _arguments(self, inputs: Iterable[NamedArgument], operator: Operator) -> Iterator[str]:
        had_keyword = False
        for item in inputs:
            is_group = operator.collective and read_argument(item.arg) == ("as_string", RANKS)
            text = self._constants.add(self._constants.group) if is_group else self._value(item.arg)
            if item.kind == _POSITIONAL or not item.name:
                if had_keyword:
                    raise DamagedGraph(f"{operator.name}: a positional argument after a named one")
                yield text
            elif item.kind == _KEYWORD and item.name in operator.keywords:
                had_keyword = True
                yield f"{item.name}={text}"  # a name from the operator's schema
            else:
                raise UnknownPart(f"the argument {item.name!r:.40} of {operator.name}")

    def _target(self, node: Node, operator: Operator) -> str:
        """Return the target of the result's assignment."""
        targets = [self._result(output) for output in node.outputs]
        if len(targets) != 1:
            return _tuple(targets) if targets else ""
        returns_tuple = operator.higher_order and node.is_hop_single_tensor_return is False
        return _tuple(targets) if returns_tuple and "as_tensor" in node.outputs[0] else targets[0]

    def _result(self, output: Argument) -> str:
        kind, value = read_argument(output)
        match kind:
            case "as_tensor":
                return self._define(value.name)
            case "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return self._new_name() if value.as_name is None else self._define(value.as_name)
            case "as_tensors":
                return _tuple([self._define(item.name) for item in value])
            case "as_none":
                return self._new_name()
        raise UnknownPart(f"a result of the kind {kind!r}")

    def _value(self, argument: Argument) -> str:
        """Return an argument as an expression."""
        return self._expression(*read_argument(argument))

    def _expression(self, kind: str, value: Any) -> str:
        if kind == "as_ints" and len(value) > _MOST_LITERALS:
            return f"[*{self._constants.add(tuple(map(_checked, value)))}]"
        if kind in _ITEMS:
            return f"[{', '.join(self._expression(_ITEMS[kind], item) for item in value)}]"
        if (write := _EXPRESSIONS.get(kind)) is None:
            raise UnknownPart(f"an argument of the kind {kind!r}")
        return write(self, value)

    def _constant(self, kind: str, value: int) -> str:
        """Return the name of torch's object for a number of the schema, if it has one."""
        torch_value = getattr(torch, _TABLES[kind].get(value, ""), None)
        if torch_value is None:
            raise UnknownPart(f"{kind} {value}")
        return self._constants.add(torch_value)

    def _device(self, device_type: str) -> str:
        """A graph runs where its weights are, wherever it was captured: every device in it becomes that one."""
        if device_type not in ("cpu", "cuda"):
            raise UnknownPart(f"a tensor on the device {device_type!r:.40}")
        return self._constants.add(self._constants.device)

    def _symbol(self, value: Symbol) -> str:
        if value.as_name is not None:
            return self._use(value.as_name)
        if value.as_float is not None:
            return self._constants.add(float(value.as_float))
        number = value.as_int if value.as_int is not None else value.as_bool
        if number is None:
            raise UnknownPart("a number without a value")
        return _integer(number)

    def _mapping(self, value: dict[str, Argument]) -> str:
        return f"{{{', '.join(f'{self._constants.add(name)}: {self._value(item)}' for name, item in value.items())}}}"


def _integer(value: int) -> str:
    """Return an integer or boolean as source, the only literals in it."""
    return f"({value!r})" if _checked(value) < 0 else repr(value)


def _checked(value: int) -> int:
    if value.bit_length() > _MOST_BITS:
        raise UnknownPart(f"an integer of {value.bit_length()} bits")
    return value


# how a value of each kind is written; see also `_ITEMS`
_EXPRESSIONS: dict[str, Callable[[_Writer, Any], str]] = {
    "as_none": lambda *_: "None",
    "as_tensor": lambda writer, value: writer._use(value.name),
    "as_optional_tensor": lambda writer, value: (
        "None" if value.as_tensor is None else writer._use(value.as_tensor.name)
    ),
    "as_int": lambda _, value: _integer(value),
    "as_bool": lambda _, value: _integer(value),
    "as_float": lambda writer, value: writer._constants.add(float(value)),
    "as_complex": lambda writer, value: writer._constants.add(complex(value.real, value.imag)),
    "as_string": lambda writer, value: writer._constants.add(value),
    "as_sym_int": _Writer._symbol,
    "as_sym_float": _Writer._symbol,
    "as_sym_bool": _Writer._symbol,
    "as_scalar_type": lambda writer, value: writer._constant("as_scalar_type", value),
    "as_memory_format": lambda writer, value: writer._constant("as_memory_format", value),
    "as_layout": lambda writer, value: writer._constant("as_layout", value),
    "as_device": lambda writer, value: writer._device(value.type),
    "as_graph": lambda writer, value: writer._constants.add(_Writer(writer._constants).compile(value.graph).call),
    "as_string_to_argument": _Writer._mapping,
}
_COMPARED = {"as_scalar_type": "dtype is", "as_layout": "layout is", "as_device": "device =="}
# kinds of lists, and the kind of their items
_ITEMS = {
    "as_tensors": "as_tensor",
    "as_ints": "as_int",
    "as_floats": "as_float",
    "as_bools": "as_bool",
    "as_strings": "as_string",
    "as_sym_ints": "as_sym_int",
    "as_sym_floats": "as_sym_float",
    "as_sym_bools": "as_sym_bool",
    "as_optional_tensors": "as_optional_tensor",
    "as_nested_tensors": "as_tensors",
    "as_int_lists": "as_ints",
    "as_float_lists": "as_floats",
}


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if items else ''})"


def _needed(lines: Sequence[_Line], returned: frozenset[str]) -> list[str]:
    """Return the text of the lines that are needed. Each name is deleted after its last use, to free its memory."""
    needed = set(returned)
    texts: list[str] = []
    for text, uses, defines, operator in reversed(lines):
        if operator.pure and needed.isdisjoint(defines):
            continue
        unneeded = sorted({*uses, *defines} - needed)
        texts.append(f"{text}; del {', '.join(unneeded)}" if unneeded else text)
        needed |= uses
    return texts[::-1]


def _split(
    lines: Sequence[_Line], fixed: frozenset[str], returned: frozenset[str]
) -> tuple[list[_Line], list[_Line], list[str]]:
    """Return the lines that depend on `fixed` names alone, the other lines, and the names that the former pass on.

    A line stays with the others if a later line may write to its results: the next call would see such a write. Then
    the lines that use its results stay, too, and may write in their turn, so this repeats until nothing changes.
    """
    written: set[str] = set()
    while True:
        early, late = _by_names(lines, fixed, written)
        names = {name for line in early for name in line.defines}
        overwritten = names & _written(late, lines)
        if not overwritten:
            break
        written |= overwritten
    used = returned.union(*(line.uses for line in late))
    return early, late, [name for line in early for name in line.defines if name in used]


def _by_names(lines: Sequence[_Line], fixed: frozenset[str], written: set[str]) -> tuple[list[_Line], list[_Line]]:
    known = set(fixed)
    early: list[_Line] = []
    late: list[_Line] = []
    for line in lines:
        if line.operator.repeatable and line.uses <= known and written.isdisjoint(line.defines):
            known.update(line.defines)
            early.append(line)
        else:
            late.append(line)
    return early, late


def _written(late: Sequence[_Line], lines: Sequence[_Line]) -> set[str]:
    """Return the names whose memory the lines of `late` may write to."""
    written = {name for line in late if line.operator.mutable for name in line.uses}
    for line in reversed(lines):  # a result comes after the arguments that it may share memory with
        if not line.operator.fresh and not written.isdisjoint(line.defines):
            written |= line.uses
    return written


def _leave_vmap(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it leaves every vmap level that it entered, even after an error.

    Levels belong to the thread: one that is left behind would change what the caller's own operators do.
    """
    depth_now = torch._C._functorch.get_dynamic_layer_stack_depth
    leave = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth

    def graph(*values: Any) -> Any:
        depth = depth_now()
        try:
            outputs = call(*values)
            if depth_now() != depth:
                raise DamagedGraph("a vmap begins but never ends")
            return outputs
        finally:
            leave(depth)

    return graph
