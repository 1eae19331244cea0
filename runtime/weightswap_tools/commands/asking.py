"""Which servers serve the desired weights: asked at their admin planes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from weightswap_tools.admin_client import AdminClient, AdminUnreachable
from weightswap_tools.terminal import status_line

_POLL_SECONDS = 0.3
_PATIENCE = 10.0  # seconds for an answer


class Asked(NamedTuple):
    """A model of a server that was asked."""

    server: str
    model: str  # empty if it is not known
    weights_id: str | None  # that it serves
    agrees: bool  # these are the desired ones
    state: str


def ask_servers(
    clients: Sequence[AdminClient], model: str | None, place: str, desired: str | None, timeout: float
) -> list[Asked]:
    """Ask until each server serves the desired weights, or the timeout has passed; return what they said last.

    model: its name on all servers; None: the models that follow the place. Raises AdminRefused.
    """
    deadline = time.monotonic() + timeout
    with status_line("asking the servers") as update:
        while True:
            asked = [each for client in clients for each in _ask(client, model, place, desired)]
            if all(each.agrees for each in asked) or time.monotonic() >= deadline:
                return asked
            update(f"{sum(each.agrees for each in asked)} of {len(asked)} serve the desired weights")
            time.sleep(_POLL_SECONDS)


def _ask(client: AdminClient, model: str | None, place: str, desired: str | None) -> Iterator[Asked]:
    """Yield a row for each model that is meant, or one row that says why there is none."""
    try:
        models = client.get("/admin/status", _PATIENCE)["models"]
    except AdminUnreachable as error:
        yield Asked(client.where, model or "", None, False, str(error).removeprefix(f"{client.where}: "))
        return
    if model is None:
        meant = [each for each in models if each["following"] and each["following"]["place"] == place]
        what = f"no model follows {place}; give --model if it is mounted elsewhere there"
    else:
        meant, what = [each for each in models if each["name"] == model], "has no such model"
    if not meant:
        yield Asked(client.where, model or "", None, False, what)
    for each in meant:
        served = each["served"]["weights_id"] if each["served"] else None
        agrees = desired is not None and served == desired
        yield Asked(client.where, each["name"], served, agrees, "serves" if agrees else _why_not(each, desired))


def _why_not(model: dict[str, Any], desired: str | None) -> str:
    following = model["following"]
    if desired is None:
        return "nothing is desired"
    if following is None:
        return "follows no place"
    return " ".join(following["error"].split()) or f"not yet; has read revision {following['revision']}"
