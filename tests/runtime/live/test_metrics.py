"""Metrics, read back by Prometheus' own parser, under threads, forks and dropped models."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.support.forks import in_a_child
from tests.support.sessions import live
from tests.support.tiny import TinyArtifact, WriteWeights, X, serves
from tests.support.watched import eventually
from weightswap_runtime import (
    Event,
    InputMismatch,
    MissingExtra,
    Model,
    ModelFailed,
    NothingToRollBack,
    StageCancelled,
    SwapError,
    Unsupported,
    WeightFileError,
    load,
)
from weightswap_runtime.format.identity import Identity
from weightswap_runtime.metrics import (
    CALL_BUCKETS,
    LONGEST_LABEL,
    MOST_LABELS,
    PAUSE_BUCKETS,
    Distribution,
    ModelCollector,
    Tallies,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """A registry, with the parsed samples of a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def samples(self) -> Samples:
        text = generate_latest(self.registry).decode()
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        found = [sample for family in families for sample in family.samples]
        result = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
        assert len(result) == len(found)
        return result

    def value(self, name: str, model: str = "digits", **labels: str) -> float | None:
        return self.samples().get((f"weightswap_{name}", frozenset({"model": model, **labels}.items())))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the samples of one name, by the values of these labels."""
        return {
            tuple(dict(pairs)[label] for label in labels): value
            for (found, pairs), value in self.samples().items()
            if found == f"weightswap_{name}"
        }


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


def test_what_is_served(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model = load(tiny.path)
    ModelCollector(model, "digits", scrape.registry)
    assert scrape.value("generation") is None
    assert scrape.value("committed_timestamp_seconds") is None
    assert scrape.by("model_info", "graph_id") == {(model.graph_id,): 1}
    for seed in (1, 2):
        receipt = model.swap(weight_file(seed))
    assert scrape.value("generation") == 1
    assert scrape.value("committed_timestamp_seconds") == pytest.approx(receipt.committed_at)
    assert scrape.by("model_info", "graph_id", "weights_id") == {(model.graph_id, receipt.weights_id): 1}
    assert scrape.value("failed") == 0
    model._gate.fail("a test")
    assert scrape.value("failed") == 1


def test_labels_of_the_weights_are_bounded(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model = load(tiny.path, weight_file(1))
    ModelCollector(model, "digits", scrape.registry)
    labels = {f"k {number:03}": 'a "quoted"\ntext' for number in range(99)} | {"": "x" * 999, "a.b": "1", "a-b": "2"}
    current = live(model)
    model._gate.exchange(type(current)(current.session, 1, Identity("0" * 64, {}, labels)))
    ((_, pairs),) = [key for key in scrape.samples() if key[0] == "weightswap_model_info"]
    shown = {name: text for name, text in pairs if name.startswith("label_")}
    assert len(shown) == MOST_LABELS
    assert shown["label_"] == "x" * LONGEST_LABEL
    assert {shown["label_a_b"], shown["label_a_b_"]} == {"1", "2"}
    assert shown["label_k_003"] == 'a "quoted"\ntext'


def test_calls_by_method_and_outcome(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model = load(tiny.path, weight_file(1))
    ModelCollector(model, "digits", scrape.registry)
    for _ in range(3):
        assert serves(model, 1)
    with pytest.raises(InputMismatch):
        model("no tensor")
    with model.pin() as pinned:
        pinned(X)
        assert scrape.value("leases") == 1
    model._gate.fail("a test")
    with pytest.raises(ModelFailed):
        model(X)
    assert scrape.by("calls_total", "method", "outcome") == {
        ("forward", "ok"): 4,
        ("forward", "refused"): 1,
        ("forward", "failed"): 1,
    }
    assert scrape.value("call_seconds_count", method="forward") == 4
    assert (scrape.value("call_seconds_sum", method="forward") or 0) > 0
    buckets = [
        value for _, value in sorted((float(le), v) for (le,), v in scrape.by("call_seconds_bucket", "le").items())
    ]
    assert len(buckets) == len(CALL_BUCKETS) + 1
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4
    assert scrape.value("leases") == 0


def test_swaps_by_kind_and_outcome(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model = load(tiny.path, weight_file(1))
    ModelCollector(model, "digits", scrape.registry)
    receipts = [model.swap(weight_file(2)), model.swap(weight_file(3), only="bias"), model.rollback()]
    model.stage(weight_file(2)).discard()
    with pytest.raises(NothingToRollBack):
        model.rollback()
    with pytest.raises(WeightFileError):
        model.swap("nowhere")
    assert scrape.by("swaps_total", "kind", "outcome") == {
        ("full", "committed"): 1,
        ("partial", "committed"): 1,
        ("rollback", "committed"): 1,
        ("full", "discarded"): 1,
        ("rollback", "refused"): 1,
        ("unknown", "refused"): 1,
    }
    assert scrape.by("failures_total", "reason") == {("NothingToRollBack",): 1, ("WeightFileError",): 1}
    assert scrape.value("staged_bytes_total") == 2 * 92 + 20
    assert scrape.value("phase_seconds_count", phase="staging") == 3
    assert (scrape.value("phase_seconds_sum", phase="verifying") or 0) > 0
    assert scrape.value("pause_seconds_count") == len(receipts)
    assert scrape.value("pause_seconds_sum") == pytest.approx(sum(each.seconds_paused for each in receipts))


def test_a_commit_that_is_refused_counts_its_staging_once(
    tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape
) -> None:
    model = load(tiny.path, weight_file(1), residency="single")
    ModelCollector(model, "digits", scrape.registry)
    with model.pin(), pytest.raises(SwapError):
        model.swap(weight_file(2), timeout=0)
    assert scrape.by("swaps_total", "kind", "outcome") == {("full", "discarded"): 1}
    assert scrape.by("failures_total", "reason") == {("WaitTimeout",): 1}


def test_a_staging_under_way(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model = load(tiny.path, weight_file(1))
    ModelCollector(model, "digits", scrape.registry)
    assert (scrape.value("staging"), scrape.value("staging_expected_bytes")) == (0, 0)
    with model.stage(weight_file(2), background=True, rate_limit=100) as staged:
        assert eventually(lambda: bool(scrape.value("staging_done_bytes")))
        samples = scrape.samples()
        staged.cancel()
    labels = frozenset({("model", "digits")})
    assert samples["weightswap_staging", labels] == 1
    assert 0 < samples["weightswap_staging_done_bytes", labels] <= samples["weightswap_staging_expected_bytes", labels]
    assert scrape.value("staging") == 0
    assert scrape.by("swaps_total", "outcome") == {("cancelled",): 1}


def test_several_models_share_a_registry(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    one, other = load(tiny.path, weight_file(1)), load(tiny.path, weight_file(2))
    sharing = load(tiny.path, share=one)
    for name, model in {"one": one, "other": other, "sharing": sharing}.items():
        ModelCollector(model, name, scrape.registry)
    sharing.swap(weight_file(3))
    sharing(X)
    assert scrape.by("generation", "model") == {("one",): 1, ("other",): 0, ("sharing",): 1}
    assert scrape.by("swaps_total", "model") == {("one",): 1, ("sharing",): 1}
    assert scrape.by("calls_total", "model") == {("sharing",): 1}


def test_a_name_is_taken_once(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    model, other = load(tiny.path), load(tiny.path, weight_file(1))
    collector = ModelCollector(model, "digits", scrape.registry)
    with pytest.raises(Unsupported, match="name='digits': another model in this registry"):
        ModelCollector(other, "digits", scrape.registry)
    assert not other._methods.observers.all
    collector.close()
    collector.close()
    with ModelCollector(other, "digits", scrape.registry):
        assert scrape.value("generation") == 0
    assert scrape.samples() == {}
    assert not model._methods.observers.all
    assert not other._methods.observers.all


def test_a_dropped_model_goes_and_its_name_is_free(
    tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape
) -> None:
    model, other = load(tiny.path, weight_file(1)), load(tiny.path)
    ModelCollector(model, "digits", scrape.registry)
    ModelCollector(other, "other", scrape.registry)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    ModelCollector(load(tiny.path), "brief", scrape.registry)
    again = load(tiny.path, weight_file(2))
    ModelCollector(again, "digits", scrape.registry)
    gc.collect()
    assert set(scrape.by("failed", "model")) == {("digits",), ("other",)}


def test_the_default_registry_and_openmetrics(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(1))
    with ModelCollector(model):
        model(X)
        text = openmetrics.generate_latest(REGISTRY).decode()
    families = {family.name: family for family in openmetrics_parser.text_string_to_metric_families(text)}
    assert families["weightswap_calls"].samples[0].value == 1
    assert families["weightswap_model"].type == "info"
    assert families["weightswap_phase_seconds"].type == "summary"
    assert "weightswap" not in generate_latest(REGISTRY).decode()


@pytest.mark.parametrize("bounds", [CALL_BUCKETS, PAUSE_BUCKETS])
def test_a_distribution_counts_as_its_definition(bounds: tuple[float, ...]) -> None:
    choose = random.Random(5)
    values = [*bounds, 0.0, 1e9, *(10 ** choose.uniform(-8, 3) for _ in range(1000))]
    distribution = Distribution(bounds)
    for value in values:
        distribution.observe(value)
    assert list(bounds) == sorted(set(bounds))
    expected = [sum(value <= bound for value in values) for bound in bounds] + [len(values)]
    assert [count for _, count in distribution.cumulative()] == expected
    assert [float(end) for end, _ in distribution.cumulative()] == pytest.approx([*bounds, float("inf")])
    assert distribution.sum == pytest.approx(sum(values))


class Traffic:
    """Threads call and swap, and count independently what they did."""

    def __init__(self, model: Model, files: list[Path]) -> None:
        self.model = model
        self.files = files
        self.calls: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter()
        self._lock = threading.Lock()

    def call(self, seed: int) -> None:
        for number in range(400):
            try:
                self.model(X if (number + seed) % 5 else "no tensor")
                outcome = "ok"
            except InputMismatch:
                outcome = "refused"
            with self._lock:
                self.calls[outcome] += 1

    def swap(self, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(60):
            outcome = choose.choice([self.commit, self.refuse, self.cancel, self.discard])(choose.choice(self.files))
            with self._lock:
                self.swaps[outcome] += 1

    def commit(self, path: Path) -> str:
        self.model.swap(path, busy="wait")
        return "committed"

    def refuse(self, path: Path) -> str:
        with pytest.raises(SwapError):
            self.model.swap(path.with_name("nowhere"), busy="wait")
        return "refused"

    def cancel(self, path: Path) -> str:
        staged = self.model.stage(path, background=True, busy="wait")
        staged.cancel()
        try:
            staged.wait()
        except StageCancelled:
            return "cancelled"
        return "discarded"

    def discard(self, path: Path) -> str:
        self.model.stage(path, busy="wait").discard()
        return "discarded"


@pytest.mark.slow
def test_counts_add_up_in_a_storm(tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape) -> None:
    files = [weight_file(seed) for seed in range(3)]
    model = load(tiny.path, files[0])
    events: list[Event] = []
    model.listen(events.append)
    ModelCollector(model, "digits", scrape.registry)
    traffic = Traffic(model, files)
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(run, seed) for seed in range(3) for run in (traffic.call, traffic.swap)]
        while not all(each.done() for each in running):
            scrape.samples()
    for each in running:
        each.result()
    assert scrape.by("calls_total", "outcome") == {(key,): value for key, value in traffic.calls.items()}
    swaps: Counter[str] = Counter()
    for (_, outcome), value in scrape.by("swaps_total", "kind", "outcome").items():
        swaps[outcome] += int(value)
    assert swaps == traffic.swaps
    kinds = Counter(event.kind for event in events)
    assert kinds["staged"] == kinds["committed"] + kinds["discarded"]
    assert scrape.value("generation") == kinds["committed"]
    assert scrape.value("staged_bytes_total") == sum(event.nbytes for event in events)
    assert scrape.value("leases") == 0


def test_a_forked_child_can_call_while_another_thread_is_counting(
    tiny: TinyArtifact, weight_file: WriteWeights, scrape: Scrape
) -> None:
    model = load(tiny.path, weight_file(1))
    collector = ModelCollector(model, "digits", scrape.registry)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with collector._tallies.lock:
            held.set()
            go_on.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(120)
    assert in_a_child(lambda: serves(model, 1) and scrape.by("calls_total", "outcome") == {("ok",): 1})
    go_on.set()
    thread.join()


def test_an_unknown_error_counts_as_failed() -> None:
    tallies = Tallies()
    for error in (None, ValueError(), KeyboardInterrupt(), InputMismatch("forward", ["x"])):
        tallies.on_call("forward", 0.001, error)
    assert tallies.calls == {("forward", "ok"): 1, ("forward", "failed"): 2, ("forward", "refused"): 1}


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "weightswap_runtime.metrics")
    with pytest.raises(MissingExtra, match=r"pip install 'weightswap\[metrics\]'"):
        importlib.import_module("weightswap_runtime.metrics")
