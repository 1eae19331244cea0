"""The code of docs/memory.md runs as it stands."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.administered import TOKEN
from tests.support.pages import blocks, page, python, served, shell
from tests.support.ports import free_port


@pytest.mark.slow
def test_the_page_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, sending, by_http, by_group, *_ = blocks(page("memory"), "python")
    command, operated, serve, update, *_ = blocks(page("memory"), "sh")
    found = [line.split(maxsplit=3) for line in python(tmp_path, here).splitlines()]
    assert [line[:3] for line in found] == [[str(step), "{'step':", f"'{step}'}}"] for step in (1, 2, 3)]
    assert len({line[3] for line in found}) == 3
    with served(tmp_path, command.strip() + " --port 0"):
        assert python(tmp_path, here + sending).splitlines()[-1] == "0 {'step': '4'}"

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("WEIGHTSWAP_ADMIN_TOKEN", TOKEN)
    port, imports = str(free_port()), sending.partition("\n\n")[0]
    with served(tmp_path, operated.strip().replace("8003", port) + " --port 0"):
        said = python(tmp_path, here + imports + "\n" + by_http.replace("8003", port))
    assert said.splitlines()[-1] == "memory:token"

    send, receive = re.findall(
        r"^(?:sender|receiver) = .*", by_group.replace("trainer:29600", f"127.0.0.1:{free_port()}"), re.MULTILINE
    )
    served_by = (
        "from weightswap_runtime import *\nmodel = load('policy.artifact')\n{}\nwhile receiver.alive:\n    pass\n"
    )
    programs = [
        f"from weightswap_runtime import *\n{here}{send}\nsender.send(trained)\nsender.close()\nmodel = served",
        *(served_by.format(receive.replace(", 1, 3", f", {rank}, 3")) for rank in (1, 2)),
    ]
    with ThreadPoolExecutor(3) as pool:
        ids = list(pool.map(lambda program: python(tmp_path, program, "print(model.weights_id)"), programs))
    assert len({each.splitlines()[-1] for each in ids}) == 1

    save = 'from safetensors.torch import save_file as save; save(trained.state_dict(), "checkpoints/{}.safetensors")'
    python(tmp_path, here, save.format(0), save.format(5))
    port = str(free_port())
    with served(tmp_path, serve.strip().replace("8000", "0").replace("8003", port)):
        updated, info = map(
            json.loads, shell(tmp_path, update.replace("8003", port)).replace("}{", "}\n{").splitlines()
        )
    assert updated["success"] is True
    assert (info["weight_version"], info["generation"]) == ("5", 1)
