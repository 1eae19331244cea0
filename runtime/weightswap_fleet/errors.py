"""Why a fleet was not changed, or did not answer.

WeightswapError
`-- FleetError
    |-- FleetRefused     a node could not take the weights, so that none has
    |-- FleetUndecided   whether the change was written is not known; all nodes do what the place says
    |-- UnknownFleet     no fleet of that name is deployed
    `-- StaleReplica     a replica has not caught up with what its client has seen
"""

from __future__ import annotations

from collections.abc import Mapping

from weightswap_runtime.errors import MOST_OF_A_PROBLEM, WeightswapError, text_of
from weightswap_runtime.messages import brief, plural


class FleetError(WeightswapError):
    """Raised by a fleet; each node serves what it served, or what the place of the desired state says."""


class FleetRefused(FleetError):
    """Not all nodes could take the weights, so that none did.

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
        super().__init__(f"{where}: no node has changed, as {plural(len(lines), 'node')} cannot take it", *lines)


def _in_one_line(text: str) -> str:
    return "; ".join(line.removeprefix("  - ") for line in text.splitlines())


class FleetUndecided(FleetError):
    """The place did not say whether it has taken a change. The nodes read it, and do what it says."""


class UnknownFleet(FleetError):
    """No fleet of that name is deployed here."""


class StaleReplica(FleetError):
    """A replica has older weights than its client has seen; the same request may be sent again."""
