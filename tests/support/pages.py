"""Pages of the documentation, whose code and commands are run unchanged."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support import warm

DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language, in the order of the page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell(folder: Path, commands: str) -> str:
    program = f"{warm.python()} -c 'from weightswap_tools.program import main; main()'"
    script = f"set -e\n{commands.replace('weightswap ', program + ' ')}"
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(folder: Path, *parts: str) -> str:
    command = [warm.python(), "-c", "\n".join(parts)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def prepare_recipe(folder: Path) -> str:
    """Write the recipe of the command-line page, its checkpoints and inputs; return the page."""
    text = page("commands")
    (recipe,) = blocks(text, "python")
    (folder / "recipe.py").write_text(recipe)
    prepare = (
        "import numpy, recipe, torch; torch.save(recipe.Tagger().state_dict(), 'checkpoint.pt');"
        "torch.save(recipe.Tagger().state_dict(), 'other.pt');"
        "numpy.savez('inputs.npz', tokens=numpy.ones((3, 9), 'i8'), mask=numpy.ones((3, 9), 'f4'))"
    )
    python(folder, prepare)
    return text


@contextmanager
def served(folder: Path, command: str) -> Iterator[None]:
    """Run the page's command during the block, and check that it ends well."""
    program = [warm.python(), "-c", "from weightswap_tools.commands.serve import serve_command; serve_command()"]
    arguments = shlex.split(command.replace("\\\n", ""))[2:]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*program, *arguments], cwd=folder, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            yield
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()
