"""What a pickle would make, told from its operations, before anything makes it.

A few hundred bytes can ask for more work than a machine ever does: tuples that hold each other twice take 2 ** 60 steps
to hash, a list is copied at each of a thousand mentions, `bytearray` takes a size. So Python's own unpickler, which is
written in Python and can be changed operation by operation, makes values that do nothing first. What the bytes of a
pickle make costs no more than they explain; what may cost more is counted, in units of about 16 bytes or as many
nanoseconds: what is mentioned again, as if it were written out there, calls, and copies by these.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from struct import error as StructError  # noqa: N812
from typing import Any, ClassVar, NamedTuple

import torch
from torch.serialization import StorageType

UNITS = 300_000  # for a pickle of any length
UNITS_PER_BYTE = 4  # torch.save takes less than 1, torch.distributed.checkpoint 1 in its lists of chunks
MOST_REPEATED, MOST_BYTES = 4, 64 << 20  # tensors may have so many times the bytes of their storages, and so many more
MOST_UNSOUND = 4096  # keys whose hashes anybody can make equal, so that each is compared with all
_MOST_DEPTH = 100  # of tuples in tuples
_OBJECT, _SET = 10, 14  # an instance; an empty set, which has one byte in a pickle and 216 in memory
_UNIT = 16  # bytes of a text whose copy costs one unit
_LARGE = (1 << 61) - 1  # integers from here on can have any hash


class Refused(ValueError):
    """A pickle asks for what no checkpoint needs."""


class Repeated(Refused):
    """Tensors repeat what is stored so often that reading them takes long."""


class Scan(NamedTuple):
    """Result of a scan."""

    storages: dict[str, int]  # bytes that each storage must have, by key, in the order of their first mention
    names: set[str]  # of classes and functions
    value: Any  # what the pickle makes; a list for a dict or set, too
    end: int


def scan(data: bytes, begin: int = 0) -> Scan:
    """Follow the operations of the pickle that begins at an offset.

    Raises Refused for a pickle that costs too much, EOFError if the data ends before it does, and ValueError for
    damaged ones.
    """
    file = io.BytesIO(data)
    file.seek(begin)
    scanner = _Scanner(file, len(data) - begin)
    try:
        value = scanner.load()
        scanner.check_whole()
        return Scan(scanner.storages, scanner.names, value, file.tell())
    except Refused:
        raise
    except EOFError as error:  # Python's own has no text
        raise EOFError("the end is missing") from error
    except (ValueError, LookupError, AttributeError, TypeError, pickle.UnpicklingError, StructError) as error:
        if file.tell() == len(data):
            raise EOFError("the end is missing") from error
        raise ValueError(f"no operation of a checkpoint before byte {file.tell()}") from error


def as_text(key: str | bytes) -> str:
    """Return a key of a storage, which Python 2 has written as bytes."""
    return key if isinstance(key, str) else key.decode("latin1")


class _Storage:
    def __init__(self, key: str, size: int) -> None:
        self.key, self.size = key, size  # of an element in bytes


class _Global:
    """Class or function, with the columns of `_CALLS`."""

    def __init__(self, module: str, name: str) -> None:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.name = f"{module}.{name}"
        rows = (row for row in _CALLS if self.name.startswith(row[0]) and self.name.endswith(row[1]))
        *_, self.hidden, self.made = next(rows)


_SOMETHING = object()


class _Scanner(pickle._Unpickler):
    """`stack` has real numbers, texts, bytes, tuples and lists; dicts and sets are lists; objects are `_SOMETHING`."""

    # of the base class
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, file: io.BytesIO, length: int) -> None:
        super().__init__(file, encoding="bytes")
        self.length, self.units = length, UNITS + UNITS_PER_BYTE * length
        self.unsound = 0
        self.uncalled: Counter[str] = Counter()
        self.names: set[str] = set()
        self.storages: dict[str, int] = {}
        self.tensors: dict[str, int] = {}

    def spend(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise Refused("it takes more work or memory than its length explains")

    def pay(self, value: Any) -> None:
        """Spend what a copy of a value costs, with the lists in its tuples as they are now."""
        level = [value]
        for _ in range(_MOST_DEPTH):
            deeper: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is tuple:
                    self.spend(1 + len(each))
                    deeper += each
                elif kind is list:
                    self.spend(len(each))
                elif kind is not int:
                    self.spend(len(each) // _UNIT if kind is str or kind is bytes else 1)
            if not deeper:
                return
            level = deeper
        raise Refused("it is nested too deeply")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Count keys that anybody can choose by their hash; that of a text is random."""
        for key in keys:
            self.unsound += (type(key) is tuple and _has_number(key)) or (type(key) is int and abs(key) >= _LARGE)
        if self.unsound > MOST_UNSOUND:
            raise Refused(f"it has more than {MOST_UNSOUND} keys that are tuples of numbers or large numbers")

    def check_whole(self) -> None:
        """Check what only the end of a pickle tells."""
        if found := [name for name, count in self.uncalled.items() if count]:
            raise Refused(f"it has {found[0]} as a value")
        stored, wanted = sum(self.storages.values()), sum(self.tensors.values())
        if wanted > MOST_BYTES + MOST_REPEATED * stored:
            most = max(self.tensors.values())
            raise Repeated(f"a tensor that can only be read whole takes {most} bytes, and all that is stored {stored}")

    def find_class(self, module: str, name: str) -> Any:
        found = _Global(module, name)
        self.names.add(found.name)
        self.uncalled[found.name] += found.hidden
        return found

    def persistent_load(self, identity: Any) -> Any:
        """Note a storage: `("storage", class, key, location, number of elements)`, in old files with a view of it."""
        kind, key, _, numel = identity[1:5]
        if type(numel) is not int or numel < 0:
            raise ValueError("a storage has no size")
        name = kind.name.rpartition(".")[2]
        size = 1 if name == "UntypedStorage" else StorageType(name).dtype.itemsize  # type: ignore[no-untyped-call]
        key = as_text(key)
        self.storages[key] = max(self.storages.get(key, 0), numel * size)
        return _Storage(key, size)

    def get(self, index: int) -> None:
        value = self.memo[index]
        if type(value) is tuple:
            self.pay(value)
        elif type(value) is _Global:
            self.uncalled[value.name] += value.hidden
        self.append(value)

    def get_1(self) -> None:
        self.get(self.read(1)[0])

    def get_4(self) -> None:
        self.get(int.from_bytes(self.read(4), "little"))

    def put_4(self) -> None:
        index = int.from_bytes(self.read(4), "little")
        if index > self.length:  # pickle makes room for all below it
            raise Refused("it numbers its values as no pickle of its length does")
        self.memo[index] = self.stack[-1]

    def empty_set(self) -> None:
        self.spend(_SET)
        self.append([])

    def add(self, added: list[Any], keys: Sequence[Any]) -> None:
        self.check_keys(keys)
        if type(target := self.stack[-1]) is list:
            target += added

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.add([key, value], (key,))

    def set_items(self) -> None:
        added = self.pop_mark()
        self.add(added, added[::2])

    def add_items(self) -> None:
        added = self.pop_mark()
        self.add(added, added)

    def frozen_set(self) -> None:
        added = self.pop_mark()
        self.check_keys(added)
        self.append(tuple(added))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.spend(_OBJECT)
        if arguments:
            self.pay(arguments)
        if type(function) is not _Global:  # the unpickler decides
            self.append(_SOMETHING)
            return
        self.uncalled[function.name] -= function.hidden
        if isinstance(function.made, str):
            raise Refused(f"it {function.made.format(function.name)}")
        self.append(function.made(self, _items(arguments)) if function.made else _SOMETHING)

    def new_with_names(self) -> None:
        self.pay(self.stack.pop())
        self.reduce()

    def build(self) -> None:
        self.spend(_OBJECT)
        self.pay(self.stack.pop())

    def tensor(self, given: Sequence[Any]) -> object:
        """Note the bytes of a tensor, which a few steps of zero can make any number."""
        storage, offset, shape, steps = given[:4]
        if not all(type(each) is int for each in (offset, *shape, *steps)):  # lists would be printed to any depth
            raise TypeError("sizes are not numbers")
        dtypes = (getattr(torch, each.name.rpartition(".")[2], None) for each in given[6:] if type(each) is _Global)
        size = max([storage.size, *(dtype.itemsize for dtype in dtypes if isinstance(dtype, torch.dtype))])
        self.tensors[f"{storage.key} {offset} {shape} {steps}"] = prod(min(each, _LARGE) for each in shape) * size
        return _SOMETHING

    def container(self, given: Sequence[Any]) -> list[Any]:
        content = [inner for item in given for inner in _items(item)]
        for inner in content:
            if type(inner) is tuple or type(inner) is list:
                self.pay(inner)
        self.check_keys(content)  # of a set
        self.check_keys(key for inner in content for key in _items(inner)[:1])  # of pairs
        return content

    def frozen(self, given: Sequence[Any]) -> Any:
        return tuple(self.container(given))

    def size(self, given: Sequence[Any]) -> Any:
        return given[0] if given and type(given[0]) is tuple else self.frozen(given)

    def bytearray(self, given: Sequence[Any]) -> object:
        if any(type(item) is int for item in given):
            raise Refused("it makes a bytearray of a size")
        return _SOMETHING

    def encoded(self, given: Sequence[Any]) -> object:
        if len(given) != 2 or given[1] not in ("latin1", "latin-1"):
            raise Refused("it encodes a text, and not as latin1")
        return _SOMETHING

    # of pickle's operations those that checkpoints have; not those of protocol 0, and no copy of what is on the stack
    dispatch: ClassVar[dict[int, Any]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in b"\x80.(0N\x88\x89KMJ\x8a\x8bGX\x8c\x8dUTCB\x8e"},
        **{code: pickle._Unpickler.dispatch[code] for code in b")\x85\x86\x87t]aecq\x93Q\x94"},
        ord("\x95"): lambda self: self.read(8),  # of a frame, which only makes reading faster
        ord("\x96"): pickle._Unpickler.dispatch[ord("\x8e")],  # as bytes: a bytearray is made before it is read
        ord("}"): pickle._Unpickler.dispatch[ord("]")],
        ord("\x8f"): empty_set,
        ord("s"): set_item,
        ord("u"): set_items,
        ord("\x90"): add_items,
        ord("\x91"): frozen_set,
        ord("R"): reduce,
        ord("\x81"): reduce,
        ord("\x92"): new_with_names,
        ord("b"): build,
        ord("r"): put_4,
        ord("h"): get_1,
        ord("j"): get_4,
    }


def _has_number(level: Any) -> bool:
    """Return whether a number is in a tuple of tuples. Python would follow a deep one until its stack ends."""
    found = False
    for _ in range(_MOST_DEPTH):
        found = found or any(type(each) in (int, float) for each in level)
        level = [inner for each in level if type(each) is tuple for inner in each]
        if not level:
            return found
    raise Refused("it is nested too deeply")


def _items(value: Any) -> Sequence[Any]:
    return value if type(value) in (tuple, list) else ()


# beginning and end of a name; whether it is hidden: may only be called, as other functions could call it at any cost;
# and what a call does, why it is refused, or None if it makes an object. The first row that fits is taken.
_CALLS: tuple[tuple[str, tuple[str, ...], bool, Callable[[_Scanner, Sequence[Any]], Any] | str | None], ...] = (
    (
        "torch._utils._rebuild_device_tensor_from",
        ("",),
        True,
        # a tensor of one number may be of any size until then
        "holds a tensor that torch copies to load it (move the model to the CPU before it is saved)",
    ),
    ("torch._utils._rebuild_tensor", ("",), False, _Scanner.tensor),
    ("torch._utils._rebuild_qtensor", ("",), False, _Scanner.tensor),
    ("torch.", ("Storage", "Tensor"), False, "makes a {} without values"),
    ("torch.Size", ("Size",), False, _Scanner.size),
    ("builtins.frozenset", ("frozenset",), True, _Scanner.frozen),
    ("builtins.bytearray", ("bytearray",), True, _Scanner.bytearray),
    ("builtins.", ("",), True, _Scanner.container),
    ("collections.", ("",), True, _Scanner.container),
    ("_codecs.encode", ("encode",), True, _Scanner.encoded),
    ("", ("",), False, None),
)
