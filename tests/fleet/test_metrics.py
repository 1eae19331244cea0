"""Metrics of a fleet: for each node the sum of its replicas, even of ended ones; all nodes in one text."""

from __future__ import annotations

import os

from prometheus_client.parser import text_string_to_metric_families

from weightswap_fleet.documents import NodeMethods
from weightswap_fleet.node.agent import NodeMetrics, joined
from weightswap_server.service.metrics import ServerMetrics

from .nodes import Fleet, NodeAgent

Labels = tuple[tuple[str, str], ...]


def replica(weights_id: str, requests: int) -> str:
    """Return the metrics of a replica that has refused so many requests."""
    counted = ServerMetrics()
    for _ in range(requests):
        counted.refused("tiny", weights_id, 503)
    return counted.text().decode()


def read(text: str, name: str) -> dict[Labels, float]:
    """Return the samples of a name, by all their labels."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_replicas_are_added_up_and_those_that_have_ended_stay(fleet: Fleet) -> None:
    metrics = NodeMetrics("tiny", fleet.agents["n0"].model)
    for pid, requests in ((1, 3), (2, 4), (1, 5)):
        metrics.update(pid, replica("w", requests))
    assert sum(read(metrics.text(), "weightswap_server_requests_total").values()) == 9
    metrics.end_others([2])
    metrics.update(3, replica("w", 1))
    assert sum(read(metrics.text(), "weightswap_server_requests_total").values()) == 10
    metrics.end_others([2])
    metrics.end_others([])
    assert sum(read(metrics.text(), "weightswap_server_requests_total").values()) == 10
    metrics.close()


def test_all_nodes_are_in_one_text(fleet: Fleet) -> None:
    for node, agent in fleet.agents.items():
        fleet.attach(node)
        agent.report(os.getpid(), replica("w", 2 if node == "n0" else 7), fleet.spec)
    fleet.swap(1)
    answers = fleet.call(fleet.names(), 1.0, NodeMethods.metrics)
    text = joined({node: answer for node, answer in answers.items() if isinstance(answer, str)})
    requests = read(text, "weightswap_server_requests_total")
    refused = {labels: value for labels, value in requests.items() if ("status", "503") in labels}
    assert {dict(labels)["node"]: value for labels, value in refused.items()} == {"n0": 2, "n1": 7}
    generations = read(text, "weightswap_generation")
    assert {dict(labels)["node"]: value for labels, value in generations.items()} == {"n0": 1, "n1": 1}
    assert text.count("# TYPE weightswap_server_requests_total counter") == 1
    assert joined({}) == ""


def test_who_has_no_seat_is_not_counted(fleet: Fleet, agent: NodeAgent) -> None:
    agent.report(1, replica("w", 2), fleet.spec)
    assert read(agent.metrics(), "weightswap_server_requests_total") == {}
