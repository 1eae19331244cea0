"""Rules that promote or abort a canary: a condition on its measures, and how long it must hold."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weightswap_runtime.errors import Unsupported
from weightswap_runtime.format.conditions import condition_dims, evaluate, parse_condition

_FOR = re.compile(r"(.*\S)\s+for\s+(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h)\s*", re.DOTALL)
_SECONDS = {"s": 1, "min": 60, "h": 3600}
Values = Mapping[str, float | None]


class Rule:
    """A rule such as `errors < 0.001 and p99_ratio < 1.1 for 5 min`: it holds once the condition was true at each check
    for that long. A condition on a value that is not measured yet is false."""

    def __init__(self, text: str, known: frozenset[str]) -> None:
        """known: the names that it may use. Raises Unsupported."""
        self.text = text
        match = _FOR.fullmatch(text)
        condition, self.seconds = (match[1], float(match[2]) * _SECONDS[match[3]]) if match else (text, 0.0)
        try:
            self._condition = parse_condition(condition, fractions=True)
        except ValueError as error:
            raise Unsupported(f"the rule {text!r}: {error}; expected e.g. `errors < 0.001 for 5 min`") from error
        self._names = condition_dims(self._condition)
        if unknown := sorted(self._names - known):
            raise Unsupported(f"the rule {text!r}: {unknown[0]} is not measured; there are: {', '.join(sorted(known))}")
        self._since: float | None = None

    def held_for(self, now: float) -> float:
        """Return the seconds for which the condition has been true at each check."""
        return 0.0 if self._since is None else now - self._since

    def holds(self, values: Values, now: float) -> bool:
        """Check the condition once. now: seconds of a monotonic clock."""
        measured = {name: value for name, value in values.items() if value is not None and name in self._names}
        if measured.keys() != self._names or not evaluate(self._condition, measured):
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.seconds
