"""`weightswap desired`: showing, changing and refusing."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.services import Service
from tests.support.tiny import TinyArtifact, WriteWeights
from tests.tools.commands.test_swap_watch import lines_until, watch_command
from weightswap_tools.commands.desired import desired_command


@pytest.fixture
def service(tiny: TinyArtifact, tmp_path: Path) -> Service:
    return Service(tiny, tmp_path / "service")


def run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(desired_command, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done.output


def test_the_desired_state_is_shown(service: Service) -> None:
    assert "desired     nothing yet" in run(service.folder)
    first, second = service.promote(1), service.promote(2)
    service.place.rollback(revision=2, by="ana", why="slow\x1b[2J")
    said = run(service.folder)
    assert f"weights id  {first}" in said
    assert r"by ana: slow\x1b[2J" in said
    assert "on hold" in said
    assert second[:12] in said.partition("withdrawn")[2]


def test_a_change_names_the_revision_that_was_seen(service: Service) -> None:
    path = service.write(1)
    said = run(service.folder, "--set", path, status=2)
    assert "revision    0" in said
    assert "--revision 0" in said
    assert service.revision == 0
    said = run(service.folder, "--set", path, "--revision", 0, "--by", "ana", "--why", "first")
    assert "by ana: first" in said
    refused = json.loads(run(service.folder, "--hold", "--revision", 0, "--json", status=1).partition("\n")[2])
    assert refused["error"] == "RevisionConflict"
    assert service.place.read().hold is None


def test_changes_by_every_option(service: Service) -> None:
    ids = [service.promote(seed) for seed in (1, 2, 3)]
    run(service.folder, "--rollback-to", ids[0][:8], "--revision", 3, "--no-hold")
    assert (service.desired, service.place.read().hold) == (ids[0], None)
    run(service.folder, "--hold", "--revision", 4, "--by", "bo")
    document = json.loads(run(service.folder, "--json"))
    assert (document["place"], document["revision"], document["hold"]["by"]) == (str(service.folder), 5, "bo")
    run(service.folder, "--release", "--revision", 5)
    service.set(2)
    run(service.folder, "--rollback-to", "last", "--revision", 7)
    assert service.desired == ids[0]
    assert service.place.read().hold is not None


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


def test_a_missing_place_is_an_error(tmp_path: Path) -> None:
    assert "DesiredError" in run(tmp_path / "none", status=1)


def test_swap_follows_until_it_is_interrupted(tiny: TinyArtifact, service: Service, weight_file: WriteWeights) -> None:
    service.set(1)
    with watch_command(tiny, "--follow", str(service.folder), "--interval", "0.01") as process:
        lines = lines_until(process, "committed")
        service.set(2)
        lines += lines_until(process, "committed")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert [line.split()[0] for line in lines] == ["staging", "staged", "committed"] * 2
    done = subprocess.run(
        [*process.args[:-4], "--watch", "x", "--follow", "y"],  # type: ignore[index]
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "give only one" in done.stderr) == (2, True)
