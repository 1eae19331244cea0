"""What a pickle would make, told from its operations, before anything makes it.

A few hundred bytes can ask for more work than a machine ever does: tuples that hold each other twice take 2 ** 60 steps
to hash, a list is copied at each of a thousand mentions, `bytearray` takes a size. Here values have only their cost, in
units of about 16 bytes or as many nanoseconds, and a pickle may cost as much as its length explains.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.serialization import StorageType

UNITS = 300_000  # for a pickle of any length
# torch.save takes 1 to 3, torch.distributed.checkpoint up to 7 in its lists of chunks, which are mostly references
UNITS_PER_BYTE = 12
MOST_REPEATED, MOST_BYTES = 4, 64 << 20  # tensors may have so many times the bytes of their storages, and so many more
MOST_UNSOUND = 4096  # keys whose hashes anybody can make equal, so that each is compared with all
_OPERATION, _OBJECT, _SET = 5, 10, 20
_UNIT = 16
_LARGE = (1 << 61) - 1  # integers from here on can have any hash
_CONVERTED = "torch._utils._rebuild_device_tensor_from"  # a tensor of one number may be of any size until it is copied
_CONTAINERS = ("collections.", "builtins.")
_REBUILT = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_qtensor")
_ENCODE = "_codecs.encode"
_LATIN = ("latin1", "latin-1")


class Refused(ValueError):
    """A pickle asks for what no checkpoint needs."""


class Repeated(Refused):
    """Tensors repeat what is stored so often that reading them takes long."""


class Scan(NamedTuple):
    """Result of a scan. storages: bytes that each storage must have, by key. value: what is on top in the end."""

    storages: dict[str, int]
    value: Any
    end: int


class _Tuple:
    """Tuple. sound: nobody can choose it by its hash, as those of texts are random."""

    __slots__ = ("cost", "items", "sound")

    def __init__(self, items: Sequence[Any], cost: int, sound: bool) -> None:
        self.items, self.cost, self.sound = items, cost, sound


class _Growing:
    """List, dict or set; of a list, its items."""

    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[Any] | None = None


class _Storage(NamedTuple):
    """Storage. size: that of an element in bytes."""

    key: str
    size: int


class _Named(str):
    """Name of a class or function."""


_EMPTY = _Tuple((), 1, sound=True)
_MARK, _CONSTANT, _NUMBER, _SOMETHING = (object() for _ in range(4))


def scan(data: bytes, begin: int = 0) -> Scan:
    """Follow the operations of the pickle that begins at an offset.

    Raises Refused for a pickle that costs too much, EOFError if the data ends before it does, and ValueError for
    damaged ones.
    """
    machine = _Machine(data, begin)
    try:
        value = machine.run()
        machine.check_tensors()
        return Scan(machine.storages, value, machine.at)
    except RecursionError as error:
        raise Refused("it is nested too deeply") from error
    except (LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"no operation of a checkpoint at byte {machine.at}") from error


class _Machine:
    def __init__(self, data: bytes, begin: int) -> None:
        self.data, self.begin, self.at = data, begin, begin
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, int] = {}
        self.tensors: dict[str, int] = {}
        self.spent = self.unsound = 0

    def run(self) -> Any:
        while (code := self.next()) != _STOP:
            self.spend(_OPERATION)
            _OPERATIONS[code](self)
        return self.stack.pop()

    def next(self) -> int:
        if self.at >= len(self.data):
            raise EOFError("the end is missing")
        self.at += 1
        return self.data[self.at - 1]

    def spend(self, units: int) -> None:
        self.spent += units
        if self.spent > UNITS + UNITS_PER_BYTE * (self.at - self.begin):
            raise Refused("it takes more work or memory than its length explains")

    def number(self, size: int) -> int:
        return int.from_bytes(self.bytes(size), "little")

    def bytes(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise EOFError("the end is missing")
        self.at += size
        self.spend(size // _UNIT)
        return self.data[self.at - size : self.at]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        return self.bytes((len(self.data) if end < 0 else end) + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("values are missing")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def pop_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            if not place:
                raise ValueError("a mark is missing")
            place -= 1
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def push_tuple(self, items: Sequence[Any]) -> None:
        cost, sound = 1, True
        for item in items:
            kind = type(item)
            if kind is _Tuple:
                cost, sound = cost + item.cost, sound and item.sound
            elif kind is int or item is _NUMBER:
                cost, sound = cost + 1, False
            else:
                cost += _cost(item)
                if kind is _Named:
                    _check_value(item)
        self.spend(_OPERATION + cost)
        self.stack.append(_Tuple(items, cost, sound))

    def add(self, items: list[Any], keys: list[Any]) -> None:
        """Add items to what is on top of the stack, and hash those that are keys."""
        for key in keys:
            self.hash(key)
        for item in items:
            if type(item) is _Named:
                _check_value(item)
        if isinstance(target := self.stack[-1], _Growing):
            target.count += len(items) + sum(map(_cost, keys))
            if not keys:
                target.items = target.items or []
                target.items += items

    def hash(self, key: Any) -> None:
        self.spend(_cost(key))
        self.unsound += (isinstance(key, _Tuple) and not key.sound) or (type(key) is int and abs(key) >= _LARGE)
        if self.unsound > MOST_UNSOUND:
            raise Refused(f"it has more than {MOST_UNSOUND} keys that are tuples of numbers or large numbers")

    def pays(self, value: Any) -> None:
        """Spend what a copy of a value costs, with the lists in it as they are now."""
        self.spend(_cost(value))
        for item in items(value) if isinstance(value, _Tuple) else ():
            self.pays(item)

    def call(self, count: int) -> None:
        """Call a function or class with what is on top of the stack: a tuple, and for count 3 a dict."""
        *arguments, function = [self.stack.pop() for _ in range(count)]
        given = items(arguments[-1])
        self.spend(_OBJECT)
        for argument in arguments:
            self.pays(argument)
        if not isinstance(function, _Named):
            self.push(_SOMETHING)  # which an unpickler may refuse
            return
        _check_call(function, given)
        if function.startswith(_CONTAINERS):
            for inner in (inner for item in given for inner in items(item)):
                for key in (inner, *items(inner)[:1]):  # of a set, or of a pair
                    self.hash(key)
        if function.startswith(_REBUILT):
            self.tensor(given)
        self.push(_made(function, given))

    def storage(self) -> None:
        """Note a storage: `("storage", class, key, location, number of elements)`, in old files with a view of it."""
        identity = self.stack.pop()
        kind, key, _, numel = identity.items[1:5]
        if type(numel) is not int or numel < 0:
            raise ValueError("a storage has no size")
        name = kind.rpartition(".")[2]
        size = 1 if name == "UntypedStorage" else StorageType(name).dtype.itemsize  # type: ignore[no-untyped-call]
        key = as_text(key)
        self.storages[key] = max(self.storages.get(key, 0), numel * size)
        self.push(_Storage(key, size))

    def tensor(self, given: Sequence[Any]) -> None:
        """Note the bytes of a tensor, which a few steps of zero can make any number."""
        storage, offset, shape, steps = given[:4]
        size = max([storage.size, *(_itemsize(each) for each in given[6:] if type(each) is _Named)])
        place = f"{storage.key} {offset} {items(shape)} {items(steps)}"
        self.tensors[place] = prod(min(each, _LARGE) for each in items(shape)) * size

    def check_tensors(self) -> None:
        stored, wanted = sum(self.storages.values()), sum(self.tensors.values())
        if wanted > MOST_BYTES + MOST_REPEATED * stored:
            most = max(self.tensors.values())
            raise Repeated(f"a tensor that can only be read whole takes {most} bytes, and all that is stored {stored}")

    def put(self, index: int) -> None:
        if index > self.at:  # pickle makes room for all below it
            raise Refused("it numbers its values as no pickle of its length does")
        self.memo[index] = self.stack[-1]


def _cost(value: Any) -> int:
    if isinstance(value, _Tuple):
        return value.cost
    if isinstance(value, _Growing):
        return 1 + value.count
    return 1 + len(value) // _UNIT if isinstance(value, str | bytes) else 1


def as_text(key: str | bytes) -> str:
    """Return a key of a storage, which Python 2 has written as bytes."""
    return key if isinstance(key, str) else key.decode("latin1")


def _itemsize(name: str) -> int:
    dtype = getattr(torch, name.rpartition(".")[2], None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 0


def items(value: Any) -> Sequence[Any]:
    """Return the items of a tuple or list."""
    return (value.items or ()) if isinstance(value, _Tuple | _Growing) else ()


def _check_value(function: str) -> None:
    """Raise Refused for a function that something else could call, unseen here."""
    if function.startswith((*_CONTAINERS, _CONVERTED)) or function == _ENCODE:
        raise Refused(f"it has {function} as a value")


def _check_call(function: str, items: Any) -> None:
    """Raise Refused for a call that costs other than its arguments."""
    if function.startswith(_CONVERTED):
        raise Refused("it holds a tensor that torch copies to load it (move the model to the CPU before it is saved)")
    if function == _ENCODE and (len(items) != 2 or items[1] not in _LATIN):
        raise Refused("it encodes a text, and not as latin1")
    if function == "builtins.bytearray" and any(type(item) is int for item in items):
        raise Refused("it makes a bytearray of a size")
    module, _, name = function.rpartition(".")
    if module.partition(".")[0] == "torch" and name.endswith(("Storage", "Tensor")):
        raise Refused(f"it makes a {function} without values")


def _made(function: str, items: Any) -> Any:
    """Return the result of a call: a tuple that it is given stays one."""
    if function == "torch.Size" and items and isinstance(items[0], _Tuple):
        return items[0]
    if function in ("torch.Size", "builtins.frozenset"):
        return _Tuple((), 1 + sum(map(_cost, items)), sound=False)
    if function.startswith(_CONTAINERS):
        made = _Growing()
        made.count = sum(map(_cost, items))
        return made
    return _SOMETHING


Operation = Callable[[_Machine], object]


def _pushes(size: int, value: object) -> Operation:
    def push(machine: _Machine) -> None:
        machine.at += size
        machine.push(value)

    return push


def _integer(size: int, *, signed: bool = False) -> Operation:
    return lambda machine: machine.push(int.from_bytes(machine.bytes(size), "little", signed=signed))


def _text(size: int) -> Operation:
    return lambda machine: machine.push(machine.bytes(machine.number(size)).decode("utf-8", "surrogatepass"))


def _raw(size: int) -> Operation:
    return lambda machine: machine.push(machine.bytes(machine.number(size)))


def _long(size: int) -> Operation:
    return lambda machine: machine.push(int.from_bytes(machine.bytes(machine.number(size)), "little", signed=True))


def _last(count: int) -> Operation:
    return lambda machine: machine.push_tuple(machine.pop(count))


def _mark(machine: _Machine) -> None:
    machine.spend(_OPERATION)
    machine.push(_MARK)


def _grow(units: int) -> Operation:
    def make(machine: _Machine) -> None:
        machine.spend(units)
        machine.push(_Growing())

    return make


def _marked(*, keys: int) -> Operation:
    """Return the operation that adds all items since the mark, each first of `keys` a key."""

    def add(machine: _Machine) -> None:
        items = machine.pop_mark()
        machine.add(items, items[::keys] if keys else [])

    return add


def _single(count: int) -> Operation:
    """Return the operation that adds one item, or a key with its value."""

    def add(machine: _Machine) -> None:
        items = machine.pop(count)
        machine.add(items[1:] or items, items[: count - 1])

    return add


def _frozen(machine: _Machine) -> None:
    items = machine.pop_mark()
    for item in items:
        machine.hash(item)
    machine.push_tuple(items)


def _global(machine: _Machine) -> None:
    module, name = machine.line(), machine.line()
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    machine.push(_Named(f"{module}.{name}"))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push(_Named(f"{module}.{name}"))


def _build(machine: _Machine) -> None:
    machine.spend(_OBJECT)
    machine.pays(machine.stack.pop())


def _skip(size: int) -> Operation:
    return lambda machine: machine.bytes(size)


_STOP = ord(".")
_OPERATIONS: dict[int, Operation] = {
    ord(code): operation
    for code, operation in {
        "N": _pushes(0, _CONSTANT),
        "\x88": _pushes(0, _CONSTANT),
        "\x89": _pushes(0, _CONSTANT),
        "G": _pushes(8, _NUMBER),
        "K": _integer(1),
        "M": _integer(2),
        "J": _integer(4, signed=True),
        "\x8a": _long(1),
        "\x8b": _long(4),
        "X": _text(4),
        "\x8c": _text(1),
        "\x8d": _text(8),
        "U": _raw(1),
        "T": _raw(4),
        "C": _raw(1),
        "B": _raw(4),
        "\x8e": _raw(8),
        "\x96": _raw(8),
        "(": _mark,
        "0": lambda machine: machine.stack.pop(),
        ")": _pushes(0, _EMPTY),
        "t": lambda machine: machine.push_tuple(machine.pop_mark()),
        "\x85": _last(1),
        "\x86": _last(2),
        "\x87": _last(3),
        "]": _grow(_OPERATION),
        "}": _grow(_OPERATION),
        "\x8f": _grow(_SET),
        "a": _single(1),
        "e": _marked(keys=0),
        "s": _single(2),
        "u": _marked(keys=2),
        "\x90": _marked(keys=1),
        "\x91": _frozen,
        "c": _global,
        "\x93": _stack_global,
        "R": lambda machine: machine.call(2),
        "\x81": lambda machine: machine.call(2),
        "\x92": lambda machine: machine.call(3),
        "b": _build,
        "Q": lambda machine: machine.storage(),
        "q": lambda machine: machine.put(machine.number(1)),
        "r": lambda machine: machine.put(machine.number(4)),
        "\x94": lambda machine: machine.put(len(machine.memo)),
        "h": lambda machine: machine.push(machine.memo[machine.number(1)]),
        "j": lambda machine: machine.push(machine.memo[machine.number(4)]),
        "\x80": _skip(1),
        "\x95": _skip(8),
    }.items()
}
