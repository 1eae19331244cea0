"""Some models of other libraries, others every day: each ends with a word of ours, never with a traceback."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.apart import python_with
from tests.wild import page, recommenders
from tests.wild.survey import BROKEN, EQUAL, TRACED

PACKAGES = (
    *("diffusers", "importlib_metadata", "pillow", "pyparsing", "segmentation_models_pytorch", "timm"),
    *("torch_geometric", "torchvision==0.28.0", "xxhash", "zipp"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "packages"), [("libraries", PACKAGES), ("recommenders", recommenders.PACKAGES)])
def test_no_model_ends_in_a_traceback(tmp_path: Path, module: str, packages: tuple[str, ...]) -> None:
    program = python_with(tmp_path / "venv", "--no-deps", *packages)
    seed = date.today().toordinal()
    imports = f"from tests.wild.{module} import cases; from tests.wild.libraries import some"
    code = f"{imports}; some(cases(), seed={seed}, seconds=100)"
    done = subprocess.run([program, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split("\t")[:2] for line in done.stdout.splitlines())
    assert len(found) > 3
    assert {name: what for name, what in found.items() if what == BROKEN} == {}
    assert {EQUAL, TRACED} & set(found.values())


def test_the_page_is_as_the_survey_prints_it() -> None:
    outcomes = page.read(page.LIBRARIES)
    assert page.text(page.LIBRARIES, outcomes) == page.LIBRARIES.read_text()
    assert BROKEN not in {outcome.what for outcome in outcomes.values()}
