"""The page of a fleet: what it shows of nodes, of a commit that passes over them, and of what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from tests.support.browser import FAINT, NAMELESS, browser
from weightswap_fleet import UnknownFleet
from weightswap_fleet.documents import NodeStatus, TrialReport
from weightswap_fleet.fleet_page import page_app
from weightswap_runtime import DesiredState
from weightswap_server.http.listening import listening

from .nodes import Fleet, FleetTrial, serving_zero

__all__ = ["browser"]
HOSTS = ["127.0.0.1"]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Three nodes that serve number 0, at revision 1."""
    with serving_zero(tmp_path, 3, monkeypatch, by="ana", why="the first") as made:
        yield made


class Watched:
    """A fleet as the page reads it, with an optional problem."""

    name = "tagger"
    problem: Exception | None = None
    trial: TrialReport | None = None

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    @property
    def desired(self) -> DesiredState:
        return self._fleet.desired_store.read()

    @property
    def nodes(self) -> dict[str, NodeStatus]:
        if self.problem is not None:
            raise self.problem
        return {name: agent.status()._replace(replicas=(100, 101)) for name, agent in self._fleet.agents.items()}


@contextmanager
def served(watched: Watched) -> Iterator[str]:
    """Serve the page while the block runs. Yields its address."""
    app = page_app(watched, HOSTS)
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


def test_it_shows_what_each_replica_serves_and_a_commit_that_passes_over_them(fleet: Fleet, browser: Any) -> None:
    complaints: list[str] = []
    watched = Watched(fleet)
    with served(watched) as address:
        context = browser.new_context(reduced_motion="reduce", viewport={"width": 1200, "height": 900})
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        page.get_by_text("all serve what is desired", exact=True).wait_for()
        assert page.locator(".replicas li.good").all_inner_texts() == ["100", "101"] * 3
        assert page.get_by_text("first", exact=True).count() >= 1
        assert page.locator("*").evaluate_all(FAINT)[1] == []
        assert page.locator("button, [role=group], ul").evaluate_all(NAMELESS) == []

        fleet.lose("commit", "reconcile_soon", node="n1")
        receipt = fleet.swap(1, "bo", "better")
        page.get_by_text("not all serve what is desired").wait_for()
        page.wait_for_function("() => document.querySelectorAll('.replicas li.mark').length === 2")
        ids = page.locator("section[aria-labelledby=nodes] tbody code").all_inner_texts()
        assert [shown == receipt.weights_id[:12] for shown in ids] == [True, False, True]
        fleet.agents["n1"].reconcile()
        page.get_by_text("all serve what is desired", exact=True).wait_for()
        assert page.get_by_text("later").count() == 2
        assert page.title() == "tagger: revision 2 · weightswap"
        page.locator("section[aria-labelledby=history]").get_by_text("desired before").wait_for()
        fleet.desired_store.set(fleet.damaged(4), revision=2)
        fleet.reconcile()
        fleet.desired_store.rollback(revision=3, hold=False)
        fleet.reconcile()
        withdrawn = page.locator("section[aria-labelledby=history] tr").filter(has_text=fleet.weights_id(4)[:12])
        withdrawn.get_by_text("withdrawn").wait_for()
        withdrawn.get_by_text("refused by n1: ").wait_for()
        page.get_by_text("all serve what is desired", exact=True).wait_for()

        trial = FleetTrial(fleet.trial(2, share=0.25), fleet)
        trial.begin(5.0)
        watched.trial = trial.report()
        page.get_by_text("weights are on trial", exact=True).wait_for()
        assert page.locator("section[aria-labelledby=nodes]").get_by_text("tries ").count() == 3
        tried = page.locator("section[aria-labelledby=canary]")
        tried.get_by_text("answers 25 %").wait_for()
        assert tried.locator("code").first.inner_text() == trial.request.weights.weights_id[:12]
        trial.end()
        watched.trial = trial.report("aborted", "errors > 0.01")
        page.locator("section[aria-labelledby=trial]").get_by_text("errors > 0.01").wait_for()
        page.get_by_text("all serve what is desired", exact=True).wait_for()
        assert page.locator("*").evaluate_all(FAINT)[1] == []

        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        watched.problem = UnknownFleet("tagger: no fleet of that name has a node here; deploy it first")
        page.get_by_text("no fleet of that name has a node here").wait_for()
        watched.problem = None
        page.get_by_text("all serve what is desired", exact=True).wait_for()
        context.close()
    assert complaints == []


def test_it_answers_to_no_other_name_and_changes_nothing(fleet: Fleet) -> None:
    app = page_app(Watched(fleet), HOSTS)
    assert TestClient(app, base_url="http://evil.example").get("/").status_code == 400
    client = TestClient(app, base_url="http://127.0.0.1")
    page = client.get("/")
    assert (page.status_code, "page/fleet.js" in page.text) == (200, True)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert client.post("/fleet/events").status_code == 405
    assert client.get("/page/../agent.py").status_code == 404
