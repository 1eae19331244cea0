"""What is drawn over time is what the metrics have counted."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from tests.support.administered import Operator
from tests.support.served import INFER, X, as_json, ask
from weightswap_server.admin.journal import LoadSeries, quantile

LIMITS = (0.001, 0.01, 0.1, 1.0)


@given(st.lists(st.floats(1e-5, 0.99), min_size=1, max_size=50), st.sampled_from([0.5, 0.99]))
def test_a_quantile_lies_where_it_should(values: list[float], share: float) -> None:
    """In the bucket of numpy's quantile."""
    histogram = Histogram("h", "h", buckets=LIMITS, registry=CollectorRegistry())
    for value in values:
        histogram.observe(value)
    samples = next(iter(histogram.collect())).samples
    buckets = [(float(each.labels["le"]), int(each.value)) for each in samples if each.name == "h_bucket"]
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    place = int(np.searchsorted(LIMITS, exact))
    found = quantile(buckets, share)
    assert found is not None
    assert (0.0, *LIMITS)[place] * (1 - 1e-9) <= found <= LIMITS[place] * (1 + 1e-9)


def test_quantiles_of_nothing_and_of_what_is_beyond() -> None:
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0), (float("inf"), 0)], 0.5) is None
    assert quantile([(1.0, 0), (float("inf"), 3)], 0.5) == 1.0
    assert quantile([(1.0, 10), (float("inf"), 10)], 0.5) == 0.5


def test_points_count_what_came_between_them(operator: Operator) -> None:
    series = LoadSeries(operator.server.service.load_metrics, {"tiny": ["tiny"], "other": ["other"]})
    ids = []
    for count in (3, 4):
        ids += [ask(operator.server, INFER, as_json(x=X)).json["parameters"]["weights_id"] for _ in range(count)]
        assert ask(operator.server, INFER, {"x": 1}).status == 400
        series.sample()
        operator.change("swap", 2)
    series.sample()
    first, second, last = [point for _, point in series.after("tiny", 0)]
    assert (first.answered, first.refused, first.failed) == (3, 1, 0)
    assert (second.answered, second.refused, second.failed) == (4, 1, 0)
    assert (first.weights, second.weights) == ({ids[0]: 3}, {ids[-1]: 4})
    assert first.p50 is not None
    assert first.p99 is not None
    assert 0 < first.p50 <= first.p99
    assert (last.answered, last.refused, last.p50, last.weights) == (0, 0, None, {})
    assert [each.answered for _, each in series.after("other", 0)] == [0, 0, 0]
    assert series.after("tiny", 3) == []


def test_points_come_on_when_the_clock_is_set_back(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    series = LoadSeries(operator.server.service.load_metrics, {"tiny": ["tiny"]})
    series.sample()
    ((number, before),) = series.after("tiny", 0)
    monkeypatch.setattr(time, "time", lambda: before.time - 3600)
    series.sample()
    assert [point.time for _, point in series.after("tiny", number)] == [before.time - 3600]
