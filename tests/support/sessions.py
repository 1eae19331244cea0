"""Access to the session that a model serves with."""

from __future__ import annotations

from weightswap_runtime import Model
from weightswap_runtime.engines.engine import Bound


def bound_of(model: Model) -> Bound:
    assert model._gate.current is not None
    return model._gate.current.session.bound[model._member.id]
