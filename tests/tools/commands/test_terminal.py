"""Output of commands with hostile names and labels, a broken pipe, or closed standard streams."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.support import program, warm
from weightswap_exporter import export, pack
from weightswap_runtime.errors import visible
from weightswap_tools.terminal import human_bytes, printable_json

EVIL = "evil\nverdict     equal\r\x1b[31m\x9b2J\u202e[red]"
MAIN = "from weightswap_tools.program import main; main()"
WITHOUT_STDOUT = f"import os, sys; sys.kept = sys.stdout; os.close(1); sys.stdout = None; {MAIN}"
RECIPE = """
import torch
from torch import nn

def build():
    return {"model": nn.Linear(2, 2).eval(), "args": (torch.zeros(2),)}
"""
COMMANDS = {
    "inspect a file": ["inspect", "v1.safetensors"],
    "inspect in JSON": ["inspect", "v1.safetensors", "--json"],
    "inspect an artifact": ["inspect", EVIL],
    "inspect a tree": ["inspect", "odd.safetensors", "--tree"],
    "diff": ["diff", "v1.safetensors", "odd.safetensors", "--fail-if", "changed"],
    "diff artifacts": ["diff", EVIL, EVIL],
    "delta": ["delta", "v1.safetensors", "v2.safetensors", "-o", f"{EVIL}.delta", "--label", f"{EVIL}={EVIL}"],
    "run": ["run", EVIL, "-w", "v1.safetensors", "-i", "in.safetensors"],
    "swap": ["swap", EVIL, "v1.safetensors", f"{EVIL}.safetensors"],
    "swap what does not fit": ["swap", EVIL, "odd.safetensors"],
    "swap what is not there": ["swap", EVIL, f"no {EVIL}"],
    "pack": ["pack", f"{EVIL}.pt", EVIL, "-o", f"{EVIL}.packed", "--level", EVIL, "--label", f"{EVIL}={EVIL}"],
    "pack what does not fit": ["pack", "odd.safetensors", EVIL, "-o", "x.safetensors"],
    "export": ["export", "recipe.py:build", "-o", f"{EVIL}.artifact"],
    "verify": ["verify", EVIL, "v1.safetensors", "--recipe", "recipe.py:build"],
    "export-onnx": ["export-onnx", EVIL, "v1.safetensors", "-o", f"{EVIL}.onnx"],
    "help": ["inspect", "--help"],
    "version": ["--version"],
}
ANSWERS_NO = {"diff", "swap what does not fit", "swap what is not there", "pack what does not fit"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with an evil path, and weight files with evil paths, labels and names."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "recipe.py").write_text(RECIPE)
    torch.manual_seed(0)
    model = nn.Linear(2, 2).eval()
    artifact = export(model, (torch.zeros(2),), out=folder / EVIL)
    pack(model, artifact, out=folder / "v1.safetensors", labels={EVIL: EVIL})
    model.bias.data += 1
    for name in ("v2.safetensors", f"{EVIL}.safetensors"):
        pack(model, artifact, out=folder / name, labels={EVIL: EVIL})
    torch.save({EVIL: model.state_dict()}, folder / f"{EVIL}.pt")
    safetensors.torch.save_file({EVIL: torch.ones(2), f"a.{EVIL}": torch.ones(2)}, folder / "odd.safetensors")
    safetensors.torch.save_file({"input": torch.zeros(2)}, folder / "in.safetensors")
    return folder


def run(folder: Path, script: str, arguments: list[str], **streams: int) -> subprocess.CompletedProcess[str]:
    command = [warm.python(), "-c", script, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    done = subprocess.run(command, cwd=folder, text=True, errors="surrogateescape", check=False, **pipes)  # type: ignore[call-overload]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_all_output_is_printable(name: str, folder: Path) -> None:
    done = run(folder, MAIN, COMMANDS[name])
    assert done.returncode == (name in ANSWERS_NO), done.stderr
    for line in (done.stdout + done.stderr).split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("verdict     equal") or name == "diff artifacts"
    if name not in ("help", "version", "run"):
        assert visible(EVIL)[:8] in done.stdout + done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_broken_pipe_ends_a_command_quietly(name: str, folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(folder, MAIN, COMMANDS[name], stdout=writer)
    finally:
        os.close(writer)
    # a command that prints only on standard error does not meet the broken pipe
    quiet = 1 if name == "help" else 141  # rich prints the help
    assert done.returncode == (name in ANSWERS_NO if done.stderr else quiet), done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_work_with_closed_standard_output(name: str, folder: Path) -> None:
    done = run(folder, WITHOUT_STDOUT, COMMANDS[name])
    assert done.returncode == (name in ANSWERS_NO), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.sampled(1)
def test_streams_that_a_shell_has_closed(closed: str, folder: Path) -> None:
    """Files opened with closed streams could get their descriptors; a report must still be whole."""
    script = f'exec "$0" "$@" {closed}'
    command = ["sh", "-c", script, warm.sys.executable, "-c", MAIN]
    done = subprocess.run(
        [*command, "inspect", "odd.safetensors", "--html", "odd.html"], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert (folder / "odd.html").read_bytes().rstrip().endswith(b"</html>")
    (folder / "odd.html").unlink()


def test_json_has_no_raw_control_characters() -> None:
    text = "a\x9b2J\x7f\x85é"
    raw = printable_json({text: [text]})
    assert raw == rb'{"a\u009b2J\u007f\u0085' + "é".encode() + rb'":["a\u009b2J\u007f\u0085' + "é".encode() + b'"]}'
    assert json.loads(raw) == {text: [text]}
    assert not any("\x7f" <= letter <= "\x9f" for letter in printable_json({"\udcff": text}).decode())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (10**13, "10000.0 GB")],
)
def test_sizes(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_paragraphs_of_help_are_wrapped_to_the_terminal() -> None:
    """typer keeps the line breaks of docstrings after the first paragraph."""
    lines = [line.strip() for line in program.said("push", "--help", width=70).splitlines()]
    start = next(index for index, line in enumerate(lines) if line.startswith("The file is uploaded"))
    paragraph = lines[start : lines.index("", start)]
    assert len(paragraph) > 1
    assert all(len(line) > 45 for line in paragraph[:-1])
