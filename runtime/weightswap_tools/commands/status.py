"""`weightswap status`: show what a running server serves."""

from __future__ import annotations

from typing import Any

import typer

from weightswap_tools.admin_client import AdminClient, read_token
from weightswap_tools.terminal import JsonOption, errors_as_exit, human_bytes, print_json, say

from .desired import labels_text, time_text
from .push import TokenOption, UrlArgument

_SILENT = 3.0  # seconds without a heartbeat, which processes send each second

status_command = typer.Typer(add_completion=False)


@status_command.command()
def status(url: UrlArgument, token_file: TokenOption = None, as_json: JsonOption = False) -> None:
    """Show what a server serves and since when, what is staged, and what it follows or watches."""
    with errors_as_exit(as_json):
        document = AdminClient(url, read_token(token_file)).get("/admin/status")
        if as_json:
            print_json(document)
            return
        for model in document["models"]:
            _print(model)
            if len(document["processes"]) > 1:
                _print_processes(document, model["name"])


def _print(model: dict[str, Any]) -> None:
    state = "ready" if model["ready"] else "unloaded" if not model["loaded"] else "not ready"
    say(f"model       {model['name']} ({state}, {model['engine']} on {model['device']})")
    if served := model["served"]:
        by = f" by {served['by']}" if served["by"] else ""
        say(f"serves      {served['weights_id']}{labels_text(served['labels'])}")
        say(f"since       {time_text(served['since'])}{by}, generation {served['generation']}")
    else:
        say("serves      nothing yet")
    if staging := model["staging"]:
        done, total = human_bytes(staging["bytes_done"]), human_bytes(staging["bytes_total"])
        say(f"staging     {staging['phase']} {done} of {total}")
    if (staged := model["staged"]) and staged["ready"]:
        say(f"staged      {staged['weights_id']}{labels_text(staged['labels'])} by {staged['by']}")
    if following := model["following"]:
        say(f"follows     {following['place']}, revision {following['revision']}{_agreement(following)}")
    if watching := model["watching"]:
        error = f": {_one_line(watching['error'])}" if watching["error"] else ""
        say(f"watches     {watching['directory']}{error}")


def _print_processes(server: dict[str, Any], model: str) -> None:
    for process in server["processes"]:
        serving = process["models"].get(model)
        serves = serving is not None and serving["weights_id"] is not None
        what = f"generation {serving['generation']}, {serving['weights_id'][:12]}" if serves else "nothing yet"
        answered = f", {process['answered']} answered" if process["role"] == "worker" else ""
        since = f"process {process['pid']} since {time_text(process['since'])}"
        silent = server["time"] - process["heard"] if process["heard"] > process["since"] else 0  # else it is starting
        state = f", SILENT for {silent:.0f} s" if silent > _SILENT else "" if process["ready"] else ", not ready"
        say(f"{process['name']:<12}{what}, {since}{answered}{state}")


def _agreement(following: dict[str, Any]) -> str:
    by = f" by {following['held_by']}" if following["held_by"] else ""
    why = f": {following['held_why']}" if following["held_why"] else ""
    hold, error = f", on hold{by}{why}" if following["on_hold"] else "", _one_line(following["error"])
    if not following["reachable"]:
        return f"{hold}, and CANNOT BE READ now: {error}"
    return hold + ("" if following["agrees"] else f", NOT served: {error or 'not yet'}")


def _one_line(error: str) -> str:
    return " ".join(error.split())
