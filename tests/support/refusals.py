"""What tests expect of an error besides its class."""

from __future__ import annotations

from collections.abc import Callable

from weightswap_runtime.errors import reason_of


def because(reason: str) -> Callable[[BaseException], bool]:
    """For `check=` of `pytest.raises`: the error has this reason."""
    return lambda error: reason_of(error) == reason
