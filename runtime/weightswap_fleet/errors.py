"""Errors of a fleet's changes and answers.

WeightswapError
`-- FleetError
    |-- FleetRefused     a node cannot take the weights, so no node has changed
    |-- FleetUndecided   it is unknown if the change was written; all nodes follow the desired store
    |-- UnknownFleet     no fleet of that name is deployed
    `-- StaleReplica     a replica serves an older revision than its client has seen
"""

from __future__ import annotations

from collections.abc import Mapping

from weightswap_runtime.errors import MOST_OF_A_PROBLEM, WeightswapError, brief, plural, text_of


class FleetError(WeightswapError):
    """An error of a fleet. Each node serves the same weights as before, or those that the desired store wants."""


class FleetRefused(FleetError):
    """A change that not all nodes could take, so that no node has changed.

    reasons: the errors, by the nodes' names. problems: the same as sentences.
    """

    def __init__(self, where: str, reasons: Mapping[str, BaseException]) -> None:
        self.where = brief(where)
        self.reasons = {brief(node): error for node, error in reasons.items()}
        self.problems = tuple(
            brief(f"{node}: {type(error).__name__}: {_in_one_line(text_of(error))}", MOST_OF_A_PROBLEM)
            for node, error in self.reasons.items()
        )
        lines = [f"  - {problem}" for problem in self.problems]
        super().__init__(f"{where}: no node has changed, because {plural(len(lines), 'node')} cannot take it", *lines)


def _in_one_line(text: str) -> str:
    return "; ".join(line.removeprefix("  - ") for line in text.splitlines())


class FleetUndecided(FleetError):
    """A change of which the desired store did not say if it was written. The nodes read the desired store, and follow
    it."""


class UnknownFleet(FleetError):
    """A name of which no fleet is deployed here."""


class StaleReplica(FleetError):
    """A replica with older weights than its client has seen; the same request may be sent again."""
