"""The command `weightswap diff`: its output, its reports and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from tests.support import warm
from tests.support.tiny import TinyArtifact
from weightswap_exporter.commands.verify import verify_command
from weightswap_tools.bench.command import bench_command
from weightswap_tools.commands.swap import swap_command
from weightswap_tools.diff.command import diff_command
from weightswap_tools.diff.show import grid
from weightswap_tools.inspect.command import inspect_command

INF = float("inf")
HOSTILE = "<script>alert(1)</script>[red]\x1b[2J\u202e\n"


class Said(NamedTuple):
    status: int
    out: str
    err: str


class Diff:
    """Runs the command on the files `a` and `b` of a folder, which it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ones = torch.ones(4, 3)
        self.before = {"layers.0.w": ones, "layers.1.w": ones * 2, "head.weight": ones * 3, "same": ones * 4}
        self.write("a", self.before)
        after = {name: value.clone() for name, value in self.before.items()}
        after["layers.0.w"][0, 0] = float("nan")
        after["layers.1.w"] *= 1.5
        self.write("b", after)

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> str:
        path = self.folder / f"{name}.safetensors"
        safetensors.torch.save_file({key: value.clone() for key, value in tensors.items()}, path)
        return str(path)

    def __call__(self, *arguments: str) -> Said:
        files = [str(self.folder / f"{name}.safetensors") for name in "ab"]
        return self.call(*files, *arguments)

    def call(self, *arguments: str) -> Said:
        done = CliRunner().invoke(diff_command, list(arguments))
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return Said(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def diff(tmp_path: Path) -> Diff:
    return Diff(tmp_path)


def test_a_summary_and_the_most_alarming(diff: Diff) -> None:
    said = diff()
    assert said.status == 0
    assert "tensors     1 alarm, 1 changed, 2 the same" in said.out
    assert "2 of 4 tensors, the most alarming first" in said.out
    assert said.out.index("layers.0.w") < said.out.index("layers.1.w")
    assert "1 new NaN" in said.out
    assert "same " not in said.out.partition("┏")[2]
    assert "same" in diff("--all").out.partition("┏")[2]


def test_only_the_most_alarming_are_shown(diff: Diff) -> None:
    before = {f"w{index}": torch.ones(2) for index in range(40)}
    paths = diff.write("c", before), diff.write("d", {name: value * 1.25 for name, value in before.items()})
    said = diff.call(*paths)
    assert "10 more differ; --all shows them" in said.out
    assert "w39" not in said.out
    assert "w39" in diff.call(*paths, "--all").out


def test_json_is_one_document_with_everything(diff: Diff) -> None:
    said = diff("--json", "--fail-if", "new_nan", "--fail-if", "removed")
    document = json.loads(said.out)
    assert (said.status, said.err) == (1, "")
    assert (document["kind"], document["level"], document["counts"]) == ("weights", "alarm", {"changed": 2, "same": 2})
    assert document["fail_if"] == [
        {"condition": "new_nan", "tensors": ["layers.0.w"]},
        {"condition": "removed", "tensors": []},
    ]
    assert [tensor["name"] for tensor in document["tensors"]][:2] == ["layers.0.w", "layers.1.w"]
    assert document["tensors"][1]["change"]["rel_change"] == 0.5
    assert document["overall"]["tensors"] == 2


@pytest.mark.parametrize("target", ["a", "b"])
def test_a_report_replaces_only_reports(target: str, diff: Diff) -> None:
    path = diff.folder / f"{target}.safetensors"
    before = path.read_bytes()
    said = diff("--html", str(path))
    assert said.status == 2
    assert "exists and is not a report, so it is not overwritten" in said.err
    assert path.read_bytes() == before
    page = diff.folder / "d.html"
    page.touch()
    assert [diff("--html", str(page)).status for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("form", [(), ("--json",), ("--tree",)])
def test_a_broken_pipe_is_no_mismatch(form: tuple[str, ...], diff: Diff) -> None:
    program = [warm.python(), "-c", "from weightswap_tools.program import main; main()", "inspect"]
    reading, writing = os.pipe()
    os.close(reading)
    path = diff.folder / "a.safetensors"
    done = subprocess.run([*program, path, *form], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("condition", "status", "says"),
    [
        ("rel_change > 0.6", 0, "passed      rel_change > 0.6"),
        ("rel_change > 0.4", 1, "failed      rel_change > 0.4: layers.1.w"),
        ('nan and name ~ "layers.*"', 1, "layers.0.w"),
        ("rel_change >", 2, "column 13: invalid syntax"),
    ],
)
def test_conditions_decide_the_status(condition: str, status: int, says: str, diff: Diff) -> None:
    said = diff("--fail-if", condition)
    assert said.status == status
    assert says in said.out + said.err


def test_tensors_that_meet_a_condition_are_listed_to_a_limit(diff: Diff) -> None:
    before = {f"w{index}": torch.ones(2) for index in range(40)}
    paths = diff.write("c", before), diff.write("d", {name: value * 2 for name, value in before.items()})
    assert "w19 and 20 more\n" in diff.call(*paths, "--fail-if", "changed").out


def test_a_condition_on_values_reads_what_did_not_change(tiny: TinyArtifact, tmp_path: Path, diff: Diff) -> None:
    values = tiny.values(1) | {"bias": torch.full((5,), float("nan"))}
    path = str(tiny.write(tmp_path / "v.safetensors", values))
    assert diff.call(path, path, "--fail-if", "new_nan").status == 0
    assert "no value changed" in diff.call(path, path).out
    said = diff.call(path, path, "--fail-if", "nan")
    assert said.status == 1
    assert "failed      nan: bias" in said.out


@pytest.mark.parametrize("condition", ["nan or inf", "nan", "norm > 0", "mean < 2", "std >= 0", "dead_rows"])
def test_a_condition_on_values_reads_what_was_renamed(condition: str, diff: Diff) -> None:
    tensor = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    paths = diff.write("c", {"old": tensor}), diff.write("d", {"new": tensor})
    said = diff.call(*paths, "--fail-if", condition)
    assert said.status == 1
    assert f"failed      {condition}: new" in said.out


@pytest.mark.parametrize(
    "name", ["rel_change", "max_change", "max_rel_change", "share_changed", "sign_flips", "cosine"]
)
@pytest.mark.parametrize("value", [0.0, float("nan"), 3.0])
def test_a_condition_means_the_same_beside_other_options(
    name: str, value: float, tiny: TinyArtifact, tmp_path: Path, diff: Diff
) -> None:
    path = str(tiny.write(tmp_path / "v.safetensors", tiny.values(1) | {"bias": torch.full((5,), value)}))
    met = []
    for more in ((), ("--values",), ("--fail-if", "nan")):
        for condition in (f"{name} > 0.99", f"not {name} > 0.99"):
            document = json.loads(diff.call(path, path, "--json", "--fail-if", condition, *more).out)
            met.append(set(document["fail_if"][0]["tensors"]))
    assert met[:2] == met[2:4] == met[4:]


def test_infinity_that_became_nan_is_an_alarm(diff: Diff) -> None:
    paths = (diff.write(name, {"w": torch.tensor([value, 1.0])}) for name, value in (("c", INF), ("d", INF - INF)))
    said = diff.call(*paths, "--fail-if", "alarm and new_nan == 1")
    assert said.status == 1
    assert "1 new NaN" in said.out


def test_a_report_of_weights(diff: Diff, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    said = diff("--html", str(page), "--fail-if", "new_nan")
    assert said.status == 1
    assert f"report      {page}" in said.out
    text = page.read_text()
    assert "What changed in the weights" in text
    assert "layers.0.w" in text
    assert "1 alarm, 1 changed, 2 the same" in text
    assert '"name":"elements changed","kind":"percent"' in text


@pytest.mark.parametrize("page", ["absent/p.html", "/proc/p.html", "a.safetensors/p.html", ".", "x" * 300])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    page: str, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(diff.folder)
    before = sorted(diff.folder.rglob("*"))
    for command in (diff_command, inspect_command, bench_command, swap_command, verify_command):
        done = CliRunner().invoke(command, ["nowhere", "nothing", "--html", page][command is inspect_command :])
        assert done.exit_code == 2
        assert "cannot be written" in done.stderr
    assert sorted(diff.folder.rglob("*")) == before


def test_a_report_that_can_be_written_leaves_nothing_if_the_work_fails(diff: Diff) -> None:
    before = sorted(diff.folder.rglob("*"))
    assert diff.call("nowhere", "nothing", "--html", str(diff.folder / "d.html")).status == 1
    assert sorted(diff.folder.rglob("*")) == before


@pytest.mark.parametrize("form", [("--json",), (), ("--html",)])
@pytest.mark.parametrize("command", ["diff", "inspect"])
def test_paths_that_are_not_utf_8(command: str, form: tuple[str, ...], diff: Diff) -> None:
    path = os.fsencode(diff.folder) + b"/\xff.safetensors"
    Path(os.fsdecode(path)).write_bytes((diff.folder / "a.safetensors").read_bytes())
    page = os.fsencode(diff.folder) + b"/\xfe.html"
    program = [warm.python(), "-c", "from weightswap_tools.program import main; main()", command, path]
    arguments = [path] * (command == "diff") + [*form] + [page] * ("--html" in form)
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (r"\udcfe.html" if "--html" in form else r"\udcff.safetensors") in done.stdout
    if "--json" in form:
        assert json.loads(done.stdout)


def test_hostile_names(diff: Diff, tmp_path: Path) -> None:
    names = [HOSTILE, f"layers.0.{HOSTILE}"]
    before = diff.write("c", dict.fromkeys(names, torch.ones(2)))
    after = diff.write("d", dict.fromkeys(names, torch.zeros(2)))
    said = diff.call(before, after, "--all", "--html", str(tmp_path / "d.html"), "--fail-if", "changed")
    assert "\x1b" not in said.out
    assert "\u202e" not in said.out
    assert "[red]" in said.out
    page = (tmp_path / "d.html").read_text()
    assert "<script>alert" not in page
    assert [tensor["name"] for tensor in json.loads(diff.call(before, after, "--json").out)["tensors"]] == names


def test_names_of_a_checkpoint_through_an_artifact(
    diff: Diff, tiny: TinyArtifact, weight_file: Callable[[int], Path]
) -> None:
    values = tiny.values(2)
    checkpoint = diff.write(
        "checkpoint", {"w": values["weight"], **{key: values[key] for key in ("bias", "tied", "steps")}}
    )
    said = diff.call(str(weight_file(2)), checkpoint, "--artifact", str(tiny.path))
    assert (said.status, "tensors     4 the same" in said.out) == (0, True)
    foreign = diff(*("--artifact", str(tiny.path)))
    assert foreign.status == 1
    assert "a.safetensors: refused" in foreign.err


REFUSED = {
    "no file": (("nowhere.safetensors", "a"), 1, "nowhere.safetensors: cannot be opened"),
    "an artifact and a file": (("tiny.artifact", "a"), 2, "is an artifact and"),
    "a file and an artifact": (("a", "tiny.artifact"), 2, "is an artifact and"),
    "a condition on artifacts": (("tiny.artifact", "tiny.artifact", "--fail-if", "nan"), 2, "are for weights"),
    "a level of artifacts": (("tiny.artifact", "tiny.artifact", "--level", "x"), 2, "are for weights"),
    "a level of weight files": (("a", "a", "--level", "x"), 2, "leave --level out"),
    "an unknown option": (("a", "b", "--frobnicate"), 2, "No such option"),
}


@pytest.mark.parametrize(("arguments", "status", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals(
    arguments: tuple[str, ...], status: int, says: str, diff: Diff, tiny: TinyArtifact, tmp_path: Path
) -> None:
    names = {"a": "a.safetensors", "b": "b.safetensors"}
    paths = [
        argument if argument[0] == "-" or argument in ("nan", "x") else str(tmp_path / names.get(argument, argument))
        for argument in arguments
    ]
    said = diff.call(*paths)
    assert said.status == status
    assert says in " ".join((said.out + said.err).replace("│", "").split())


def test_errors_are_documents_with_json(diff: Diff, tmp_path: Path) -> None:
    said = diff("--json", "--fail-if", "x")
    assert (said.status, json.loads(said.out)["error"]) == (2, "Unsupported")


def test_help(diff: Diff) -> None:
    said = diff.call("--help")
    assert (said.status, "--fail-if" in said.out) == (0, True)


def test_weights_as_a_grid_of_layers() -> None:
    names = ["h.10.attn.w", "h.2.attn.w", "h.2.mlp.b", "emb.weight", "bias", "h.2.experts.1.w"]
    rows, columns, cells = grid(names)
    assert rows == ("(model)", "emb", "h.2", "h.10")
    assert columns == ("bias", "weight", "attn.w", "experts.1.w", "mlp.b")
    assert cells[2] == (None, None, "h.2.attn.w", "h.2.experts.1.w", "h.2.mlp.b")
    assert cells[3] == (None, None, "h.10.attn.w", None, None)
    assert grid([]) == ((), (), ())
