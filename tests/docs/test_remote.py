"""The commands and the code of docs/remote.md run as they stand, against servers on loopback."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.pages import blocks, page
from tests.support.servers import S3Server, WebServer
from tests.support.tiny import TinyArtifact

PAGE = page("remote")


@pytest.mark.slow
def test_the_page_on_urls(tmp_path: Path) -> None:
    (code,) = blocks(PAGE, "python")
    commands = blocks(PAGE, "sh")[1]
    tiny = TinyArtifact(tmp_path / "digits.artifact")
    first, second = (tiny.write(tmp_path / f"v{seed}.safetensors", tiny.values(seed)) for seed in (1, 2))
    with WebServer() as web, S3Server() as s3:
        s3.new_bucket().put("v1.safetensors", first.read_bytes())
        web.put("v2.safetensors", second.read_bytes())
        environment = os.environ | {"FSSPEC_S3": json.dumps(s3.options)}

        def run(command: list[str]) -> str:
            return subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
            ).stdout

        def here(text: str) -> str:
            program = f"{warm.python()} -c 'from weightswap_tools.program import main; main()'"
            return text.replace("https://models.example.com", web.url).replace("weightswap ", f"{program} ")

        assert run([warm.python(), "-c", here(code)]) == "s3://weights/v1.safetensors\n"
        said = run(["sh", "-e", "-c", here(commands)])
    assert f"file       {web.url}/v2.safetensors" in said
    assert "generation  0: s3://weights/v1.safetensors" in said
    assert f"generation  1: {web.url}/v2.safetensors" in said
