"""`weightswap desired`: showing, changing and refusing."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.program import document, said
from tests.support.services import Service
from tests.support.tiny import TinyArtifact, WriteDelta, WriteWeights
from tests.tools.commands.test_swap_watch import lines_until, watch_command


@pytest.fixture
def service(tiny: TinyArtifact, tmp_path: Path) -> Service:
    return Service(tiny, tmp_path / "service")


def run(*arguments: object, status: int = 0) -> str:
    return said("desired", *arguments, status=status)


def test_the_desired_state_is_shown(service: Service) -> None:
    assert "desired     nothing yet" in run(service.folder)
    first, second = service.promote(1), service.promote(2)
    service.desired_store.rollback(revision=2, by="ana", why="slow\x1b[2J")
    text = run(service.folder)
    assert f"weights id  {first}" in text
    assert r"by ana: slow\x1b[2J" in text
    assert "on hold" in text
    assert second[:12] in text.partition("withdrawn")[2]


def test_a_change_names_the_revision_that_was_seen(service: Service) -> None:
    path = service.write(1)
    text = run(service.folder, "--set", path, status=2)
    assert "revision    0" in text
    assert "--revision 0" in text
    assert service.revision == 0
    assert "by ana: first" in run(service.folder, "--set", path, "--revision", 0, "--by", "ana", "--why", "first")
    refused = document("desired", service.folder, "--hold", "--revision", 0, status=1)
    assert refused["error"] == "RevisionConflict"
    assert service.desired_store.read().hold is None


def test_changes_by_every_option(service: Service) -> None:
    ids = [service.promote(seed) for seed in (1, 2, 3)]
    run(service.folder, "--rollback-to", ids[0][:8], "--revision", 3, "--no-hold")
    assert (service.desired, service.desired_store.read().hold) == (ids[0], None)
    run(service.folder, "--hold", "--revision", 4, "--by", "bo")
    now = document("desired", service.folder)
    assert (now["desired_store"], now["revision"], now["hold"]["by"]) == (str(service.folder), 5, "bo")
    run(service.folder, "--release", "--revision", 5)
    service.set(2)
    run(service.folder, "--rollback-to", "last", "--revision", 7)
    assert service.desired == ids[0]
    assert service.desired_store.read().hold is not None


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--hold", "--release", "--revision", "1"), 2, "give only one"),
        (("--rollback-to", "last", "--revision", "1"), 1, "NothingToRollBack"),
        (("--set", "none.safetensors", "--revision", "1"), 1, "WeightFileError"),
    ],
)
def test_refused_changes_say_why(arguments: tuple[str, ...], status: int, says: str, service: Service) -> None:
    service.set(1)
    assert says in run(service.folder, *arguments, status=status)
    assert service.revision == 1


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def spoiled(service: Service, seed: int, **values: torch.Tensor) -> str:
    """Desire weights with other values, as a trainer that checks nothing, and return their id."""
    path = service.tiny.write(service.folder / f"v{seed}.safetensors", service.tiny.values(seed) | values)
    state = service.desired_store.promote(path, by="trainer")
    assert state.weights is not None
    return state.weights.weights_id


def test_a_rollback_to_what_processes_would_refuse_writes_nothing(service: Service) -> None:
    """Withdrawn weights, NaN, and damaged files, also of what leads to a delta; infinities may be masks."""
    good = service.promote(1)
    bad = spoiled(service, 2, bias=torch.full((5,), torch.nan))
    masked = spoiled(service, 3, bias=torch.full((5,), -torch.inf))
    last = service.promote(4)
    before = service.desired_store.read()
    refused = run(service.folder, "--rollback-to", bad[:12], "--revision", 4, status=1)
    assert "NonFiniteWeights" in refused
    assert "bias: 5 NaN" in refused
    damage(service.folder / "v1.safetensors")
    assert "DigestMismatch" in run(service.folder, "--rollback-to", good[:12], "--revision", 4, status=1)
    assert "RevisionConflict" in run(service.folder, "--rollback-to", bad[:12], "--revision", 3, status=1)
    assert service.desired_store.read() == before

    run(service.folder, "--rollback-to", masked[:12], "--revision", 4)
    assert service.desired == masked
    withdrawn = run(service.folder, "--rollback-to", last[:12], "--revision", 5, status=1)
    assert "NotPromoted" in withdrawn
    assert "--set" in withdrawn
    assert (service.revision, service.desired) == (5, masked)
    run(service.folder, "--set", service.folder / "v4.safetensors", "--revision", 5)
    assert service.desired == last


def test_a_rollback_reads_what_leads_to_a_delta(service: Service, delta: WriteDelta, weight_file: WriteWeights) -> None:
    for revision, source in enumerate((weight_file(1), delta(1, 2), weight_file(3))):
        service.desired_store.set(source, revision=revision)
    before = service.desired_store.read()
    damage(weight_file(1))
    assert "DigestMismatch" in run(service.folder, "--rollback-to", "last", "--revision", 3, status=1)
    assert service.desired_store.read() == before
    weight_file(1)  # which writes it again
    run(service.folder, "--rollback-to", "last", "--revision", 3)
    assert service.desired == before.history[-1].weights_id


@pytest.mark.parametrize("options", [(), ("--full",)])
def test_a_chain_is_made_shorter(
    options: tuple[str, ...], service: Service, delta: WriteDelta, weight_file: WriteWeights
) -> None:
    for revision, source in enumerate((weight_file(1), delta(1, 2), delta(2, 3))):
        service.desired_store.set(source, revision=revision, by="ana")
    weights_id, out = service.desired, service.folder / "short.safetensors"
    assert "read first  2 files" in run(service.folder)
    assert "RevisionConflict" in run(service.folder, "--compact", out, *options, "--revision", 2, status=1)
    text = run(service.folder, "--compact", out, *options, "--revision", 3)
    assert ("read first  1 file" in text) != bool(options)
    assert "by ana" in text
    assert (service.revision, service.desired) == (4, weights_id)
    assert "nothing to make shorter" in run(service.folder, "--compact", out, *options, "--revision", 4, status=2)
    assert "give --compact FILE" in run(service.folder, "--full", status=2)


def test_what_is_set_is_read(service: Service) -> None:
    """Damaged files are refused; NaN and infinities may be intended, and are said."""
    service.set(1)
    values = service.tiny.values(2) | {"bias": torch.tensor([torch.nan, torch.inf, 1, 2, 3])}
    nan = service.tiny.write(service.folder / "nan.safetensors", values)
    assert "bias: 1 NaN and 1 infinite; processes" in run(service.folder, "--set", nan, "--revision", 1)
    assert service.revision == 2
    damage(service.write(3))
    assert "DigestMismatch" in run(
        service.folder, "--set", service.folder / "v3.safetensors", "--revision", 2, status=1
    )
    assert "warning" not in run(service.folder, "--set", service.write(4), "--revision", 2)


def test_a_missing_desired_store_is_an_error(tmp_path: Path) -> None:
    for arguments in ((), ("--hold", "--revision", 0)):
        assert "none: no such directory; create it" in run(tmp_path / "none", *arguments, status=1)


def test_swap_follows_until_it_is_interrupted(tiny: TinyArtifact, service: Service, weight_file: WriteWeights) -> None:
    service.set(1)
    with watch_command(tiny, "--follow", str(service.folder), "--interval", "0.01") as process:
        lines = lines_until(process, "committed")
        service.set(2)
        lines += lines_until(process, "committed")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert [line.split()[0] for line in lines] == ["staging", "staged", "committed"] * 2
    done = subprocess.run(
        [*process.args[:-4], "--watch", "x", "--follow", "y"],  # type: ignore[index]
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "give only one" in done.stderr) == (2, True)
