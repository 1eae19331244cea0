"""The demo, in a short form, and its check of the answers: a check that finds nothing proves nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support import warm

DIGITS, CLICKS = ROOT / "scripts" / "digits", ROOT / "scripts" / "clicks"
EPOCHS = 2
PNG = b"\x89PNG\r\n\x1a\n"

JUDGE = """
import sys
from pathlib import Path

import numpy as np
import torch
from answers import Answer
from checking import Checker
from dataset import split_digits
from network import DigitsNet

checker = Checker(split_digits()[1])
models = [DigitsNet().eval() for _ in range(2)]
for epoch, model in enumerate(models):
    path = Path(sys.argv[1]) / f"epoch-{epoch}.pt"
    torch.save(model.state_dict(), path)
    checker.learn(epoch, f"id-{epoch}", path)
    checker.expect(epoch)
mixture = DigitsNet().eval()
mixture.load_state_dict({**models[0].state_dict(), "head.5.bias": models[1].state_dict()["head.5.bias"]})
indices = np.array([3, 1, 4])
images = split_digits()[1].images[torch.from_numpy(indices)]


def judge(model, generation, weights_id):
    with torch.no_grad():
        logits = model(images).numpy()
    return checker.judge(Answer(0.0, 0.0, generation, weights_id, indices, logits)).value


print(judge(models[0], 0, "id-0"), judge(models[1], 1, "id-1"))
print(judge(models[0], 1, "id-1"), judge(models[0], 0, "id-1"), judge(models[0], 2, "id-0"))
print(judge(mixture, 0, "id-0"), judge(mixture, 1, "id-1"))
"""


def played(out: Path, *arguments: str) -> tuple[Any, str]:
    """Return the summary of a demo that writes its report to `out`, and what it said."""
    command = [sys.executable, str(DIGITS / "main.py"), f"--out={out}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "summary.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["double", "single"])
def test_the_demo_keeps_every_promise(tmp_path: Path, residency: str) -> None:
    out = tmp_path / "report"
    arguments = [f"--epochs={EPOCHS}", "--pace=0.4", f"--residency={residency}"]
    summary, said = played(out, *arguments)
    assert summary["ok"]
    assert summary["server_imports_clean"]
    assert summary["totals"]["wrong"] == summary["totals"]["mixed"] == 0
    assert summary["totals"]["requests"] > 100

    generations = summary["generations"]
    assert [row["generation"] for row in generations] == list(range(EPOCHS + 2))
    assert [row["epoch"] for row in generations] == [*range(EPOCHS + 1), EPOCHS - 1]
    assert all(row["requests"] for row in generations)
    assert generations[0]["accuracy"] < 0.3
    assert generations[EPOCHS]["accuracy"] > 0.7

    assert [refused["error"] for refused in summary["refused"]] == ["WeightFileError", "DigestMismatch"]
    assert all(refused["unchanged"] and refused["answers_after"] for refused in summary["refused"])
    assert {refused["weights_id"] for refused in summary["refused"]} == {generations[EPOCHS]["weights_id"]}
    assert summary["rollback"]["correct"]
    assert summary["rollback"]["weights_id"] == generations[EPOCHS - 1]["weights_id"]

    picture = (out / "timeline.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 20_000
    assert str(tmp_path) not in (out / "summary.json").read_text()
    for row in generations:
        assert row["weights_id"][:12] in said


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["double", "single"])
def test_two_ranks_answer_together(tmp_path: Path, residency: str) -> None:
    arguments = ["--ranks", f"--epochs={EPOCHS}", "--pace=0.6", f"--residency={residency}"]
    summary, _ = played(tmp_path, *arguments)
    assert summary["ok"]
    assert summary["server_imports_clean"]
    assert summary["totals"]["wrong"] == summary["totals"]["mixed"] == summary["totals"]["stale"] == 0
    assert summary["totals"]["requests"] > 50
    assert [row["epoch"] for row in summary["generations"]] == [*range(EPOCHS + 1), EPOCHS - 1]
    assert [refused["error"] for refused in summary["refused"]] == ["WeightFileError", "DigestMismatch"]
    assert all(refused["unchanged"] and refused["answers_after"] for refused in summary["refused"])


@pytest.mark.slow
def test_the_check_tells_wrong_answers_from_mixed_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        [warm.python(), "-c", JUDGE, str(tmp_path)], cwd=DIGITS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["right right", "wrong wrong wrong", "mixed mixed"]


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["double", "single"])
def test_a_trainer_sends_from_memory(tmp_path: Path, residency: str) -> None:
    """It is killed in the middle of a send, goes on, and diverges once; each answer is of the step that it names."""
    arguments = ["--live", f"--epochs={EPOCHS}", "--pace=1", f"--residency={residency}"]
    summary, _ = played(tmp_path, *arguments)
    assert summary["ok"]
    assert summary["server_imports_clean"]
    assert summary["totals"]["wrong"] == summary["totals"]["mixed"] == summary["totals"]["stale"] == 0
    steps = [row["step"] for row in summary["generations"]]
    last = max(steps)
    assert [row["generation"] for row in summary["generations"]] == list(range(len(steps)))
    assert steps == sorted(set(range(0, last + 1, 4)) - {last * 3 // 4}) or summary["sending"]["superseded"]
    assert len({row["weights_id"] for row in summary["generations"]}) == len(steps)
    assert summary["generations"][-1]["accuracy"] > 0.7

    (refused,) = summary["refused"]
    assert refused["error"] == "NonFiniteWeights"
    assert "head.5.bias: 10 NaN" in refused["message"]
    assert refused["unchanged"]
    assert refused["answers_after"]
    assert summary["sending"]["killed_at_step"] == last // 2
    assert summary["sending"]["answers_without_trainer"] > 100
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)


LIVE = """
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import main
import numpy as np
from answers import Answer
from checking import Verdict
from ledger import Generation, Ledger, Refusal, Send, Sends
from story import Outcome


def good():
    ledger = Ledger(unit="step")
    sends = Sends(12, halted_at=8, resumed_at=8, killed=5.0, resumed=7.0)
    sends.others.append({"step": 12, "error": "NonFiniteWeights", "message": "NaN"})
    for number, step in enumerate((0, 4, 8, 12)):
        at = [0.0, 3.0, 8.0, 10.0][number]
        ledger.generations.append(Generation(number, f"id-{step}", step, False, at, 0.0, 0.0))
        sends.served.append(Send(step, number, f"id-{step}", 0.001, 0.002))
    for started, number in ((1.0, 0), (4.0, 1), (6.0, 1), (9.0, 2), (9.5, 2), (11.0, 3)):
        answer(ledger, started, number)
    ledger.refusals.append(Refusal(9.2, "memory", "NonFiniteWeights", "NaN", 2, "id-8", True))
    ids = [generation.weights_id for generation in ledger.generations]
    return Outcome(ledger, "graph", 1, 1, ids, 6, [], None, sends)


def answer(ledger, started, number, verdict=Verdict.RIGHT):
    ledger.add(Answer(started, 0.1, number, "", np.zeros(1), np.zeros((1, 10))), verdict, 1)


def wrong(outcome):
    outcome.ledger.generations[1].wrong += 1


def mixed(outcome):
    outcome.ledger.generations[1].mixed += 1


def stale(outcome):
    answer(outcome.ledger, 8.5, 1)
    outcome.answers_given += 1


def backwards(outcome):
    outcome.ledger.generations[2].version = 0


def foreign(outcome):
    outcome.expected_weights_ids[1] = "id-5"


def lost(outcome):
    outcome.sends.served[1] = outcome.sends.served[1]._replace(weights_id="id-8")


def accepted(outcome):
    outcome.ledger.refusals.clear()


def unreported(outcome):
    outcome.sends.others.append({"step": 4, "error": "TransferFailed", "message": "gone"})


def restarted(outcome):
    outcome.sends.resumed_at = 0


def half(outcome):
    outcome.ledger.generations[2].at = 6.5


def silent(outcome):
    outcome.sends.killed = 6.5


def run(*spoilings):
    outcome = good()
    for spoil in spoilings:
        spoil(outcome)

    @contextmanager
    def played(*_):
        yield outcome

    main._played = played
    status = main.main()
    failures = json.loads(Path("out/summary.json").read_text())["failures"]
    print("RUN", *(spoil.__name__ for spoil in spoilings), status, len(failures))


sys.argv[1:] = ["--live", "--out=out"]
main.draw_timeline = lambda *_: None
for spoil in ((), *((each,) for each in (
    wrong, mixed, stale, backwards, foreign, lost, accepted, unreported, restarted, half, silent
))):
    run(*spoil)
"""


def test_the_demo_fails_for_anything_that_went_wrong_while_a_trainer_sent(tmp_path: Path) -> None:
    done = subprocess.run(
        [warm.python(), "-c", "import sys; sys.path.insert(0, sys.argv.pop(1))" + LIVE, str(DIGITS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    good, *bad = re.findall(r"^RUN ?(\w*) (\d) (\d)$", done.stdout, re.MULTILINE)
    assert good == ("", "0", "0"), done.stdout
    assert {status for _, status, _ in bad} == {"1"}
    kinds = ("wrong", "mixed", "stale", "foreign", "lost", "unreported", "restarted", "half", "silent")
    expected = {**dict.fromkeys(kinds, "1"), "backwards": "2", "accepted": "2"}
    assert {name: failures for name, _, failures in bad} == expected


@pytest.mark.slow
def test_row_deltas_rank_best(tmp_path: Path) -> None:
    """The order of the models is that of the ages of their weights; all answers are of weights that were published."""
    out = tmp_path / "rows.png"
    command = [sys.executable, str(CLICKS / "main.py"), "--seconds=40", "--full-every=24", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^(never updated|full files|row deltas) +(.*)$", done.stdout, re.MULTILINE))
    found = {name: [float(each) for each in re.findall(r"[\d.]+", row)] for name, row in rows.items()}
    (worst, oldest, *_), (_, older, *_), (best, age, *_) = found.values()
    assert best > worst + 0.01
    assert age < 5 < older < oldest
    assert re.search(r"^\d+ row deltas, .*; [1-9] full files after the first", done.stdout, re.MULTILINE)
    assert re.search(r"^\d{3,} answers, each of weights that were published", done.stdout, re.MULTILINE)
    assert out.read_bytes().startswith(PNG)


FORGED = """
import sys
from pathlib import Path

import main

published, answers = main.play(Path(sys.argv[1]), 2.0, 60.0)
main.play = lambda *_: (published, [*answers, answers[0]._replace(weights_id="0" * 64)])
sys.argv[1:] = []
sys.exit(main.main())
"""


@pytest.mark.slow
def test_the_demo_of_rows_fails_for_weights_that_nobody_published(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1))" + FORGED, str(CLICKS), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert f"answered from {'0' * 64}, which was never published" in done.stderr


@pytest.mark.parametrize(
    ("folder", "without", "extra", "ours"),
    [
        (DIGITS, {"fleet"}, "export", {"exporter", "runtime", "server"}),
        (DIGITS, set(), "ray", {"exporter", "runtime", "server", "fleet"}),
        (CLICKS, set(), "serve", {"exporter"}),
    ],
)
def test_it_imports_what_its_extra_installs(folder: Path, without: set[str], extra: str, ours: set[str]) -> None:
    """`scripts/demo` in a fresh clone has nothing else of what the tests have; `--serve` installs its own extra.

    So have `scripts/demo_fleet` and `scripts/demo_recsys`, with one extra more.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["demo"], *extras["export"], *extras[extra]]
    installed = {name for line in lines for name in re.findall(r"^[\w-]+", line)}
    files = [file for file in folder.glob("*.py") if file.stem not in without]
    imported = {
        name for file in files for name in re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
    }
    elsewhere = imported - sys.stdlib_module_names - {file.stem for file in files}
    packages = {f"weightswap_{name}" for name in ours}
    assert {"torch", "sklearn", *packages} <= elsewhere
    assert elsewhere - packages - {"sklearn"} <= installed
    assert "scikit-learn" in installed


@pytest.mark.slow
def test_it_stays_up_with_a_page(tmp_path: Path) -> None:
    command = [sys.executable, str(DIGITS / "main.py"), "--serve", "--epochs=1", "--pace=0.4", f"--out={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            said = next(line for line in demo.stdout if "Ctrl-C ends it" in line)
            found = re.search(r"page: (http://\S+)  token: (\S+)", said)
            assert found is not None
            with urllib.request.urlopen(found[1]) as page:
                assert b"start.js" in page.read()
            request = urllib.request.Request(f"{found[1]}admin/status", headers={"Authorization": f"Bearer {found[2]}"})
            with urllib.request.urlopen(request) as answer:
                (model,) = json.load(answer)["models"]
            assert (model["served"]["kind"], model["served"]["labels"]) == ("rollback", {"epoch": "0"})
            demo.send_signal(signal.SIGINT)
            assert demo.wait(120) == 0
        finally:
            demo.kill()
