"""Conditions on what became of a tensor: `new_nan or rel_change > 0.5 and name ~ "encoder.*"`.

Grammar, from loose to tight: `or`, `and`, `not`, then one of `QUANTITY`, `QUANTITY < NUMBER` (also <=, >, >=, ==, !=),
`name ~ "PATTERN"` and a condition in parentheses. A quantity alone holds where it is not zero.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from weightswap_runtime.errors import Unsupported

from .levels import new_values
from .report import TensorDiff, WeightsDiff

MOST_CHARACTERS = 2000
MOST_NESTED = 50
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<text>\"[^\"]*\"|'[^']*')|(?P<sign><=|>=|==|!=|[<>~()-]))"
)
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
Quantity = Callable[[TensorDiff], float | None]
Test = Callable[[TensorDiff], bool]


def _after(field: str) -> Quantity:
    """Of what B holds."""
    return lambda diff: getattr(diff.values_after, field) if diff.values_after else None


def _change(field: str) -> Quantity:
    return lambda diff: getattr(diff.change, field) if diff.change else None


def _status(status: str) -> Quantity:
    return lambda diff: float(diff.status == status)


def _level(level: str) -> Quantity:
    return lambda diff: float(diff.level == level)


QUANTITIES: Mapping[str, Quantity] = {
    "nan": _after("nan"),
    "inf": _after("inf"),
    "mean": _after("mean"),
    "std": _after("std"),
    "norm": _after("norm"),
    "dead_rows": _after("dead_rows"),
    "new_nan": lambda diff: new_values(diff)[0],
    "new_inf": lambda diff: new_values(diff)[1],
    "new_dead_rows": lambda diff: new_values(diff)[2],
    "rel_change": _change("rel_change"),
    "max_change": lambda diff: (diff.change.largest.change if diff.change.largest else 0.0) if diff.change else None,
    "max_rel_change": _change("max_rel_change"),
    "share_changed": _change("share_changed"),
    "sign_flips": _change("sign_flips"),
    "cosine": _change("cosine"),
    "removed": _status("removed"),
    "added": _status("added"),
    "reshaped": _status("reshaped"),
    "retyped": _status("retyped"),
    "renamed": _status("renamed"),
    "changed": lambda diff: float(diff.level != "same" and diff.status != "renamed"),
    "alarm": _level("alarm"),
    "notice": _level("notice"),
}
OF_VALUES = frozenset({"nan", "inf", "mean", "std", "norm", "dead_rows"})  # also a tensor that is the same has them
UNCHANGED: Mapping[str, float] = {
    "rel_change": 0.0,
    "max_change": 0.0,
    "max_rel_change": 0.0,
    "share_changed": 0.0,
    "sign_flips": 0.0,
    "cosine": 1.0,
}
"""What the quantities of a tensor are of which both files record the same digest."""


class Policy:
    """A parsed condition. `text` is what it was parsed from, `quantities` are the names that it uses."""

    def __init__(self, text: str) -> None:
        """Raises Unsupported, which says in which column, for what is no condition."""
        self.text = text
        parser = _Parser(text)
        self._test = parser.whole()
        self.quantities = frozenset(parser.used)

    @property
    def needs_values(self) -> bool:
        """Whether it asks for what can only be told by reading tensors that did not change."""
        return not OF_VALUES.isdisjoint(self.quantities)

    def meets(self, tensor: TensorDiff) -> bool:
        """Whether the condition holds for a tensor. A comparison with what is not known of it does not hold."""
        return self._test(tensor)

    def failures(self, diff: WeightsDiff) -> tuple[str, ...]:
        """The names of all tensors for which it holds, the most alarming first."""
        return tuple(tensor.name for tensor in diff.tensors if self.meets(tensor))


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


class _Parser:
    """Recursive descent; `used` collects the quantities."""

    def __init__(self, text: str) -> None:
        self.used: set[str] = set()
        self._text = text
        if len(text) > MOST_CHARACTERS:
            raise Unsupported(f"a condition of {len(text)} characters; the most are {MOST_CHARACTERS}")
        self._tokens = self._split()
        self._depth = 0

    def whole(self) -> Test:
        found = self._either()
        if self._next.kind != "end":
            raise self._error("expected `and`, `or` or the end")
        return found

    def _split(self) -> list[_Token]:
        tokens, place = [], 0
        end = len(self._text.rstrip())
        while place < end:
            match = _TOKEN.match(self._text, place)
            if match is None:
                column = place + len(self._text[place:]) - len(self._text[place:].lstrip())
                raise _refused(self._text, column, "expected a quantity, a number, a sign or a text in quotes")
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*tokens, _Token("end", "", end)]

    @property
    def _next(self) -> _Token:
        return self._tokens[0]

    def _take(self, *texts: str) -> bool:
        """Step over the next word or sign if it is one of these."""
        found = self._next.kind in ("word", "sign") and self._next.text in texts
        if found:
            self._tokens.pop(0)
        return found

    def _error(self, what: str) -> Unsupported:
        return _refused(self._text, self._next.column, what)

    def _either(self) -> Test:
        tests = [self._both()]
        while self._take("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else lambda diff: any(test(diff) for test in tests)

    def _both(self) -> Test:
        tests = [self._negated()]
        while self._take("and"):
            tests.append(self._negated())
        return tests[0] if len(tests) == 1 else lambda diff: all(test(diff) for test in tests)

    def _negated(self) -> Test:
        negations = 0
        while self._take("not"):
            negations += 1
        test = self._simple()
        return test if negations % 2 == 0 else lambda diff: not test(diff)

    def _simple(self) -> Test:
        if self._take("("):
            return self._nested()
        if self._take("name"):
            return self._name()
        return self._comparison()

    def _nested(self) -> Test:
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise self._error(f"more than {MOST_NESTED} parentheses in one another")
        found = self._either()
        if not self._take(")"):
            raise self._error("expected `)`")
        self._depth -= 1
        return found

    def _name(self) -> Test:
        if not self._take("~"):
            raise self._error('expected `~` and a pattern, as in name ~ "encoder.*"')
        token = self._next
        if token.kind != "text":
            raise self._error('expected a pattern in quotes, such as "encoder.*"')
        self._tokens.pop(0)
        pattern = token.text[1:-1]
        return lambda diff: fnmatchcase(diff.name, pattern)

    def _comparison(self) -> Test:
        quantity = self._quantity()
        sign = self._next.text
        if self._next.kind != "sign" or sign not in _COMPARISONS:
            return lambda diff: bool(quantity(diff))
        self._tokens.pop(0)
        number, holds = self._number(), _COMPARISONS[sign]

        def compares(diff: TensorDiff) -> bool:
            value = quantity(diff)
            return value is not None and holds(value, number)

        return compares

    def _quantity(self) -> Quantity:
        token = self._next
        if token.kind != "word" or token.text not in QUANTITIES:
            raise self._error(f"expected one of name, {', '.join(QUANTITIES)}")
        self._tokens.pop(0)
        self.used.add(token.text)
        return _known(token.text)

    def _number(self) -> float:
        minus = self._take("-")
        token = self._next
        if token.kind != "number":
            raise self._error("expected a number")
        self._tokens.pop(0)
        return -float(token.text) if minus else float(token.text)


def _known(name: str) -> Quantity:
    """The quantity, also of tensors that were not read as they did not change."""
    unread = UNCHANGED.get(name)

    def quantity(diff: TensorDiff) -> float | None:
        found = QUANTITIES[name](diff)
        return unread if found is None and diff.status in ("same", "renamed") and diff.change is None else found

    return quantity


def _refused(text: str, column: int, what: str) -> Unsupported:
    found = repr(text[column : column + 20]) if column < len(text) else "the end"
    return Unsupported(f"the condition {text!r}, column {column + 1}: {what}, found {found}")
