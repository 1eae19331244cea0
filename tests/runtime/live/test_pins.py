"""Pins, and the stagings and commits that wait for them or do not."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.tiny import TinyArtifact, WriteWeights, serves
from weightswap_runtime import StageCancelled, WaitTimeout, load
from weightswap_runtime.live import gate


def test_a_pin_is_waited_for_in_the_background(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with model.pin():
        model.swap(weight_file(1))
        staged = model.stage(weight_file(2), background=True, timeout=0.05)
        with pytest.raises(WaitTimeout):
            staged.wait(120)
    model.stage(weight_file(2), background=True).commit()
    assert serves(model, 2)


def test_a_cancel_reaches_a_staging_that_waits_for_a_pin(tiny: TinyArtifact, weight_file: WriteWeights) -> None:
    model = load(tiny.path, weight_file(0))
    with model.pin():
        model.swap(weight_file(1))
        for timeout in (30, None):
            staged = model.stage(weight_file(2), background=True, timeout=timeout)
            time.sleep(0.05)
            assert not staged.done
            staged.cancel()
            with pytest.raises(StageCancelled):
                staged.wait()
    model.swap(weight_file(2))
    assert serves(model, 2)


def test_a_pin_that_is_never_given_back_stops_no_calls(
    tiny: TinyArtifact, weight_file: WriteWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "PATIENCE", 0.02)
    model = load(tiny.path, weight_file(0), residency="single")
    pin = model.pin()
    holder = threading.Thread(target=pin.__enter__)
    holder.start()
    holder.join()
    time.sleep(0.05)
    with pytest.raises(WaitTimeout):
        model.swap(weight_file(1), timeout=0.1)
    swapping = threading.Thread(target=model.swap, args=(weight_file(1),), kwargs={"timeout": 60})
    swapping.start()
    for _ in range(20):
        assert serves(model, 0)
        time.sleep(0.01)
    assert swapping.is_alive()
    pin.__exit__()
    swapping.join()
    assert serves(model, 1)
