"""The command `weightswap diff`: its output, its reports and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from tests.support import warm
from tests.support.program import document, run, said
from tests.support.tiny import TinyArtifact
from weightswap_tools.diff.show import grid
from weightswap_tools.program import app

INF = float("inf")
HOSTILE = "<script>alert(1)</script>[red]\x1b[2J\u202e\n"


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

    def doubled(self) -> tuple[str, str]:
        """Write two files of forty tensors, all of which change."""
        before = {f"w{index}": torch.ones(2) for index in range(40)}
        return self.write("c", before), self.write("d", {name: value * 2 for name, value in before.items()})

    def __call__(self, *arguments: object, status: int = 0) -> str:
        return said("diff", *(self.folder / f"{name}.safetensors" for name in "ab"), *arguments, status=status)


@pytest.fixture
def diff(tmp_path: Path) -> Diff:
    return Diff(tmp_path)


def test_a_summary_and_the_most_alarming(diff: Diff) -> None:
    text = diff()
    assert "tensors     1 alarm, 1 changed, 2 the same" in text
    assert "2 of 4 tensors, the most alarming first" in text
    assert text.index("layers.0.w") < text.index("layers.1.w")
    assert "1 new NaN" in text
    assert "same " not in text.partition("┏")[2]
    assert "same" in diff("--all").partition("┏")[2]


def test_only_the_most_alarming_are_shown(diff: Diff) -> None:
    paths = diff.doubled()
    text = said("diff", *paths)
    assert "10 more differ; --all shows them" in text
    assert "w39" not in text
    assert "w39" in said("diff", *paths, "--all")
    assert "w19 and 20 more\n" in said("diff", *paths, "--fail-if", "changed", status=1)


def test_json_is_one_document_with_everything(diff: Diff) -> None:
    told = json.loads(diff("--json", "--fail-if", "new_nan", "--fail-if", "removed", status=1))
    assert (told["kind"], told["level"], told["counts"]) == ("weights", "alarm", {"changed": 2, "same": 2})
    met = [(each["condition"], each["tensors"]) for each in told["fail_if"]]
    assert met == [("new_nan", ["layers.0.w"]), ("removed", [])]
    assert [tensor["name"] for tensor in told["tensors"]][:2] == ["layers.0.w", "layers.1.w"]
    assert (told["tensors"][1]["change"]["rel_change"], told["overall"]["tensors"]) == (0.5, 2)


@pytest.mark.parametrize("target", ["a", "b"])
def test_a_report_replaces_only_reports(target: str, diff: Diff) -> None:
    path = diff.folder / f"{target}.safetensors"
    before = path.read_bytes()
    assert "exists and is not a report, so it is not overwritten" in diff("--html", path, status=2)
    assert path.read_bytes() == before
    page = diff.folder / "d.html"
    page.touch()
    for _ in range(2):
        diff("--html", page)


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
    assert says in diff("--fail-if", condition, status=status)


def test_a_condition_on_values_reads_what_did_not_change(tiny: TinyArtifact, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "v.safetensors", tiny.values(1) | {"bias": torch.full((5,), float("nan"))})
    said("diff", path, path, "--fail-if", "new_nan")
    assert "no value changed" in said("diff", path, path)
    assert "failed      nan: bias" in said("diff", path, path, "--fail-if", "nan", status=1)


@pytest.mark.parametrize("condition", ["nan or inf", "nan", "norm > 0", "mean < 2", "std >= 0", "dead_rows"])
def test_a_condition_on_values_reads_what_was_renamed(condition: str, diff: Diff) -> None:
    tensor = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    paths = diff.write("c", {"old": tensor}), diff.write("d", {"new": tensor})
    assert f"failed      {condition}: new" in said("diff", *paths, "--fail-if", condition, status=1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", ["rel_change", "max_change", "max_rel_change", "share_changed", "sign_flips", "cosine"]
)
@pytest.mark.parametrize("value", [0.0, float("nan"), 3.0])
def test_a_condition_means_the_same_beside_other_options(
    name: str, value: float, tiny: TinyArtifact, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "v.safetensors", tiny.values(1) | {"bias": torch.full((5,), value)})
    met = []
    for more in ((), ("--values",), ("--fail-if", "nan")):
        for condition in (f"{name} > 0.99", f"not {name} > 0.99"):
            told = CliRunner().invoke(app, ["diff", str(path), str(path), "--json", "--fail-if", condition, *more])
            met.append(set(json.loads(told.stdout)["fail_if"][0]["tensors"]))
    assert met[:2] == met[2:4] == met[4:]


def test_infinity_that_became_nan_is_an_alarm(diff: Diff) -> None:
    paths = (diff.write(name, {"w": torch.tensor([value, 1.0])}) for name, value in (("c", INF), ("d", INF - INF)))
    assert "1 new NaN" in said("diff", *paths, "--fail-if", "alarm and new_nan == 1", status=1)


def test_a_report_of_weights(diff: Diff, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    assert f"report      {page}" in diff("--html", page, "--fail-if", "new_nan", status=1)
    told = ("What changed in the weights", "layers.0.w", "1 alarm, 1 changed, 2 the same")
    for text in (*told, '"name":"elements changed","kind":"percent"'):
        assert text in page.read_text()


@pytest.mark.parametrize("page", ["absent/p.html", "/proc/p.html", "a.safetensors/p.html", ".", "x" * 300])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    page: str, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(diff.folder)
    before = sorted(diff.folder.rglob("*"))
    for command in ("diff", "inspect", "bench", "swap", "verify"):
        paths = ["nowhere", "nothing"][command == "inspect" :]
        assert "cannot be written" in run(command, *paths, "--html", page, status=2).stderr
    assert sorted(diff.folder.rglob("*")) == before


def test_a_report_that_can_be_written_leaves_nothing_if_the_work_fails(diff: Diff) -> None:
    before = sorted(diff.folder.rglob("*"))
    said("diff", "nowhere", "nothing", "--html", diff.folder / "d.html", status=1)
    assert sorted(diff.folder.rglob("*")) == before


@pytest.mark.sampled(2)
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
    paths = [
        diff.write(name, dict.fromkeys(names, torch.full((2,), value))) for name, value in (("c", 1.0), ("d", 0.0))
    ]
    text = said("diff", *paths, "--all", "--html", tmp_path / "d.html", "--fail-if", "changed", status=1)
    assert not {"\x1b", "\u202e"} & set(text)
    assert "[red]" in text
    assert "<script>alert" not in (tmp_path / "d.html").read_text()
    assert [tensor["name"] for tensor in document("diff", *paths)["tensors"]] == names


def test_names_of_a_checkpoint_through_an_artifact(
    diff: Diff, tiny: TinyArtifact, weight_file: Callable[[int], Path]
) -> None:
    values = tiny.values(2)
    checkpoint = diff.write("checkpoint", {"w": values.pop("weight"), **values})
    assert "tensors     4 the same" in said("diff", weight_file(2), checkpoint, "--artifact", tiny.path)
    assert "a.safetensors: refused" in diff("--artifact", tiny.path, status=1)


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
    assert says in " ".join(said("diff", *paths, status=status).replace("│", "").split())


def test_errors_are_documents_with_json(diff: Diff) -> None:
    files = [diff.folder / f"{name}.safetensors" for name in "ab"]
    assert document("diff", *files, "--fail-if", "x", status=2)["error"] == "Unsupported"
    assert "--fail-if" in said("diff", "--help")


def test_weights_as_a_grid_of_layers() -> None:
    names = ["h.10.attn.w", "h.2.attn.w", "h.2.mlp.b", "emb.weight", "bias", "h.2.experts.1.w"]
    rows, columns, cells = grid(names)
    assert rows == ("(model)", "emb", "h.2", "h.10")
    assert columns == ("bias", "weight", "attn.w", "experts.1.w", "mlp.b")
    assert cells[2] == (None, None, "h.2.attn.w", "h.2.experts.1.w", "h.2.mlp.b")
    assert cells[3] == (None, None, "h.10.attn.w", None, None)
    assert grid([]) == ((), (), ())
