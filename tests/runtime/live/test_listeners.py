"""Listeners and the history: the events that they receive, and what listeners may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import Event, StageCancelled, Staged, StagingBusy, WaitTimeout, WeightFileError, load


def test_events_say_what_happened(tiny: TinyArtifact, weight_file: WriteWeights, tmp_path: Path) -> None:
    events: list[Event] = []
    model = load(tiny.path, weight_file(0), on_event=events.append)
    model.stage(weight_file(1), background=True, rate_limit=20.0, by="me").cancel()
    model.stage(weight_file(1)).discard()
    with pytest.raises(WeightFileError):
        model.swap(tmp_path / "none", by="me")
    model.swap(weight_file(1))
    model.rollback(by="you")
    kinds = ["staging", "staged", "committed", "staging", "cancelled", "staging", "staged", "discarded"]
    kinds += ["staging", "refused", "staging", "staged", "committed", "rolled back"]
    assert [event.kind for event in events] == kinds
    asked = [event.by for event in events if event.kind in {"cancelled", "refused", "rolled back"}]
    assert asked == ["me", "me", "you"]
    refused = events[kinds.index("refused")]
    assert isinstance(refused.error, WeightFileError)
    assert str(refused).startswith(f"refused for me while opening: {tmp_path / 'none'}: WeightFileError: ")
    assert events[-1].receipt is model.history[-1]


def test_a_listener_that_raises_harms_nobody(
    tiny: TinyArtifact, weight_file: WriteWeights, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(event: Event) -> None:
        raise KeyError(event.kind)

    model = load(tiny.path, weight_file(0), on_event=raising)
    model.swap(weight_file(1))
    assert serves(model, 1)
    assert "KeyError: 'committed'" in caplog.text


def test_history_is_bounded(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    model.swap(weight_file(1), by="first")
    for _ in range(120):
        model.rollback()
    assert len(model.history) == 100
    assert [receipt.generation for receipt in model.history] == list(range(22, 122))
    assert {receipt.kind for receipt in model.history} == {"rollback"}
    times = [receipt.committed_at for receipt in model.history]
    assert times == sorted(times)


def test_listeners_may_cancel_or_discard_a_staging(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0), residency="single")
    box: list[Staged] = []
    kinds: list[str] = []

    def listener(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind in {"staged", "refused", "committed"} and box:
            (box[-1].cancel if event.kind == "staged" else box[-1].discard)()

    model.listen(listener)
    box.append(model.stage(weight_file(1), background=True, rate_limit=400))
    with pytest.raises(StageCancelled):
        box[0].wait(30)
    assert kinds == ["staging", "staged", "discarded"]
    box.clear()
    staged = model.stage(weight_file(1))
    box.append(staged)
    with model.pin(), pytest.raises(WaitTimeout):
        staged.commit()
    assert kinds[3:] == ["staging", "staged", "refused", "discarded"]
    box.clear()
    staged = model.stage(weight_file(2))
    box.append(staged)
    staged.commit()
    assert kinds[7:] == ["staging", "staged", "committed"]
    assert serves(model, 2)


def test_a_listener_that_swaps_is_refused_at_once(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    refused: list[BaseException] = []

    def listener(event: Event) -> None:
        if event.kind == "committed":
            for step in (lambda: model.swap(weight_file(2)), model.rollback):
                with pytest.raises(StagingBusy) as caught:
                    step()
                refused.append(caught.value)

    stop = model.listen(listener)
    model.swap(weight_file(1))
    stop()
    assert [str(error)[:29] for error in refused] == ["a listener runs before its sw", "another staging of this model"]
    assert serves(model, 1)
    model.swap(weight_file(2))
    assert serves(model, 2)
