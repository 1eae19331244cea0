"""The code of docs/memory.md runs as it stands."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.support.administered import TOKEN
from tests.support.pages import page, python, served, shell


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def test_the_page_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, sending, by_http, *_ = re.findall(r"```python\n(.*?)```", page("memory"), re.DOTALL)
    command, operated, serve, update, *_ = re.findall(r"```sh\n(.*?)```", page("memory"), re.DOTALL)
    found = [line.split(maxsplit=3) for line in python(tmp_path, here).splitlines()]
    assert [line[:3] for line in found] == [[str(step), "{'step':", f"'{step}'}}"] for step in (1, 2, 3)]
    assert len({line[3] for line in found}) == 3
    with served(tmp_path, command.strip() + " --port 0"):
        assert python(tmp_path, here + sending).splitlines()[-1] == "0 {'step': '4'}"

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    port, imports = free_port(), sending.partition("\n\n")[0]
    with served(tmp_path, operated.strip().replace("8003", port) + " --port 0"):
        said = python(tmp_path, here + imports + "\n" + by_http.replace("8003", port))
    assert said.splitlines()[-1] == "memory:token"
    save = 'from safetensors.torch import save_file as save; save(trained.state_dict(), "checkpoints/{}.safetensors")'
    python(tmp_path, here, save.format(0), save.format(5))
    port = free_port()
    with served(tmp_path, serve.strip().replace("8000", "0").replace("8003", port)):
        updated, info = map(
            json.loads, shell(tmp_path, update.replace("8003", port)).replace("}{", "}\n{").splitlines()
        )
    assert updated["success"] is True
    assert (info["weight_version"], info["generation"]) == ("5", 1)
