"""The command line as a build script and an operator use it."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import typer

from tests.support.program import document, said

RECIPE = """
import torch
from torch import nn
from torch.export import Dim

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, parts, *, scale=1.0):
        return {"y": self.linear(x) * scale + parts[0], "n": 3}

def build():
    args = (torch.zeros(2, 4), [torch.zeros(3)])
    shapes = {"x": {0: Dim("batch", max=8)}, "parts": [None], "scale": None}
    return {"model": Net().eval(), "args": args, "kwargs": {"scale": 2.0}, "dynamic_shapes": shapes}

def pair():
    return nn.Linear(2, 2).eval(), (torch.zeros(2),)

def load(model, checkpoint):
    weight = torch.cat([checkpoint["q"], checkpoint["k"]])
    model.load_state_dict({"weight": weight, "bias": checkpoint["bias"]}, assign=True)

def fused():
    checkpoint = {"q": torch.zeros(1, 4), "k": torch.zeros(2, 4), "bias": torch.zeros(3)}
    return {"model": nn.Linear(4, 3).eval(), "args": (torch.zeros(4),), "load": load, "checkpoint": checkpoint}

def fails():
    return 1 / 0

def nothing():
    return None

def with_out():
    return {"model": Net(), "out": "x"}
"""


class Shell:
    """Runs `weightswap` in a folder that holds a recipe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "recipe.py").write_text(RECIPE)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        with chdir(self.folder):
            return said(*arguments, status=status)

    def document(self, *arguments: str, status: int = 0) -> Any:
        with chdir(self.folder):
            return document(*arguments, status=status)

    def state(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        return {
            "linear.weight": torch.rand(3, 4, generator=generator),
            "linear.bias": torch.rand(3, generator=generator),
        }


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell in a folder with an exported artifact, a packed weight file and inputs."""
    shell = Shell(tmp_path_factory.mktemp("cli"))
    shell("export", "recipe.py:build", "--out", "net.artifact", "--skeleton")
    torch.save(shell.state(), shell.folder / "checkpoint.pt")
    shell("pack", "checkpoint.pt", "net.artifact", "-o", "v1.safetensors", "--label", "step=7", "--label", "note=a=b")
    (shell.folder / "empty").mkdir()
    np.savez(shell.folder / "in.npz", **{"x": np.ones((3, 4), "f4"), "parts.0": np.ones(3, "f4")})
    safetensors.torch.save_file({"x": torch.ones(3, 4), "parts.0": torch.ones(3)}, shell.folder / "in.safetensors")
    return shell


def expected(shell: Shell) -> torch.Tensor:
    state = shell.state()
    return torch.nn.functional.linear(torch.ones(3, 4), state["linear.weight"], state["linear.bias"]) * 2 + torch.ones(
        3
    )


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz"])
@pytest.mark.sampled(1)
def test_run_writes_what_eager_gives(name: str, shell: Shell) -> None:
    output = shell.document("run", "net.artifact", "-w", "v1.safetensors", "-i", "in.npz", "-o", name)
    assert output["outputs"] == {"y": "F32[3, 3]", "n": 3}
    path = shell.folder / name
    found = safetensors.torch.load_file(path) if path.suffix != ".npz" else {"y": torch.from_numpy(np.load(path)["y"])}
    assert torch.equal(found["y"], expected(shell))


def test_inputs_may_be_safetensors_and_results_a_table(shell: Shell) -> None:
    output = shell("run", "net.artifact", "--weights", "v1.safetensors", "--input", "in.safetensors")
    assert "F32[3, 3]" in output
    assert "weights id" in output


def test_inspect_an_artifact(shell: Shell) -> None:
    output = shell("inspect", "net.artifact")
    assert (
        "forward(x: F32[batch, 4], parts: [F32[3]], *, scale: 2.0) -> {y: F32[batch, 3], n: 3}, batch in 0..8" in output
    )
    assert "linear.weight" in output
    told = shell.document("inspect", "net.artifact")
    assert told["total_bytes"] == 60
    assert told["manifest"]["graph_id"] in output


def test_inspect_a_weight_file(shell: Shell) -> None:
    output = shell("inspect", "v1.safetensors")
    assert "label      step = 7" in output
    assert "label      note = a=b" in output
    assert shell.document("inspect", "v1.safetensors")["stamp"]["weights_id"] in output
    safetensors.torch.save_file(shell.state(), shell.folder / "plain.safetensors")
    assert "not recorded" in shell("inspect", "plain.safetensors")
    assert shell.document("inspect", "plain.safetensors")["stamp"] is None


@pytest.mark.slow
def test_a_delta_between_two_files(shell: Shell) -> None:
    shell("export", "recipe.py:pair", "-o", "m.artifact")
    for name, value in (("one", 1.0), ("two", 2.0)):
        safetensors.torch.save_file(
            {"weight": torch.ones(2, 2), "bias": torch.full((2,), value)}, shell.folder / f"{name}.safetensors"
        )
        shell("pack", f"{name}.safetensors", "m.artifact", "-o", f"{name}.packed.safetensors")
    files = ("one.packed.safetensors", "two.packed.safetensors")
    output = shell("delta", *files, "-o", "d.safetensors", "--label", "step=2")
    assert "changes     8 B of 24 B (33.33 %)" in output
    made = shell.document("delta", *files, "-o", "d.safetensors")
    assert (made["changed"], made["nbytes"]) == (["bias"], 8)
    shown = shell("inspect", "d.safetensors")
    assert f"to         {made['weights_id']}" in shown
    assert "changes    bias, F32[2]: 1 range, 8 B" in shown
    assert shell.document("inspect", "d.safetensors")["kind"] == "delta file"
    receipts = shell.document("swap", "m.artifact", files[0], "d.safetensors")["receipts"]
    ids = [receipt["weights_id"] for receipt in receipts]
    assert ids == [made["base"], made["weights_id"]]
    assert "BaseMismatch" in shell("swap", "m.artifact", files[1], "d.safetensors", status=1)
    shell("delta", *reversed(files), "-o", "back.safetensors")
    chain = ("d.safetensors", "back.safetensors", "d.safetensors")
    assert "changes     8 B\n" in shell("delta", "--merge", *chain, "-o", "merged.safetensors")
    merged = shell.document("delta", "--merge", *chain, "-o", "merged.safetensors")
    assert merged == {**made, "path": "merged.safetensors", "total_bytes": None}
    assert "give two weight files, not 3" in shell("delta", *chain, "-o", "x.safetensors", status=2)
    assert "BaseMismatch" in shell("delta", "--merge", *chain[:2], *chain[1:], "-o", "x.safetensors", status=1)
    assert "not packed by weightswap" in shell("delta", "one.safetensors", files[1], "-o", "x.safetensors", status=1)


@pytest.mark.slow
def test_checkpoints_are_swapped_in_one_after_another(shell: Shell) -> None:
    shards = shell.folder / "shards"
    shards.mkdir()
    weight_map = {}
    for name, tensor in shell.state().items():
        weight_map[f"module.{name}"] = f"{name}.safetensors"
        safetensors.torch.save_file({f"module.{name}": tensor}, shards / f"{name}.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights_id = shell.document("inspect", "v1.safetensors")["stamp"]["weights_id"]
    output = shell("swap", "net.artifact", "shards", "v1.safetensors", "--residency", "single")
    assert output.count(f"weights id  {weights_id}") == 2
    assert "generation  1: v1.safetensors" in output
    receipts = shell.document("swap", "net.artifact", "shards/model.safetensors.index.json")["receipts"]
    assert [receipt["weights_id"] for receipt in receipts] == [weights_id]
    assert "shards     linear.bias.safetensors, linear.weight.safetensors" in shell("inspect", "shards")
    packed = shell.document("pack", "shards", "net.artifact", "-o", "v2.safetensors")
    assert packed["weights_id"] == weights_id


@pytest.mark.slow
def test_old_keys_are_left_out_of_a_swap(shell: Shell) -> None:
    old = shell.state() | {"emb.position_ids": torch.ones(3)}
    safetensors.torch.save_file(old, shell.folder / "old.safetensors")
    assert "emb.position_ids: unexpected" in shell("swap", "net.artifact", "old.safetensors", status=1)
    output = shell("swap", "net.artifact", "old.safetensors", "--ignore", "*.position_ids", "--ignore", "rotary.*")
    assert "left out    emb.position_ids" in output
    assert "warning: ignore='rotary.*': matches no name of old.safetensors" in output


@pytest.mark.slow
def test_an_adapter_that_computes(shell: Shell) -> None:
    output = shell("export", "recipe.py:fused", "--out", "fused.artifact", "--skeleton")
    assert "warning" not in output
    assert "computed from q, k" in shell("inspect", "fused.artifact")
    parts = {"q": torch.rand(1, 4), "k": torch.rand(2, 4), "bias": torch.rand(3)}
    safetensors.torch.save_file(parts, shell.folder / "parts.safetensors")
    swapped = shell.document("swap", "fused.artifact", "parts.safetensors")
    packed = shell.document("pack", "parts.safetensors", "fused.artifact", "-o", "fused.safetensors")
    assert swapped["receipts"][0]["weights_id"] == packed["weights_id"]


@pytest.mark.slow
def test_recipes_may_return_a_tuple_and_be_modules(shell: Shell) -> None:
    output = shell.document("export", "recipe:pair", "-o", "pair.artifact")
    assert output["weights"] == 2
    again = shell.document("export", "recipe.py:pair", "-o", "pair.artifact")
    assert again["graph_id"] == output["graph_id"]


REFUSED = {
    "unknown command": (("frobnicate",), 2, "No such command"),
    "no artifact": (("run", ".", "-w", "v1.safetensors"), 1, "no artifact here"),
    "neither an artifact nor a checkpoint": (("inspect", "empty"), 1, "no checkpoint in this folder (it is empty)"),
    "a checkpoint of another model": (("swap", "net.artifact", "in.safetensors"), 1, "linear.bias: missing, F32[3]"),
    "keys of an unknown kind": (("swap", "net.artifact", "v1.safetensors", "--keys", "names"), 2, "'names'"),
    "no file": (("inspect", "nowhere.safetensors"), 1, "cannot be opened"),
    "a recipe without a function": (("export", "recipe.py", "-o", "x"), 2, "is not a recipe"),
    "a recipe that is not there": (("export", "nowhere.py:build", "-o", "x"), 2, "no such file"),
    "a module that is not there": (("export", "nowhere:build", "-o", "x"), 2, "ModuleNotFoundError"),
    "a function that is not there": (("export", "recipe.py:nowhere", "-o", "x"), 2, "no function 'nowhere'"),
    "a recipe that raises": (
        ("export", "recipe.py:fails", "-o", "x"),
        2,
        "ZeroDivisionError: division by zero (recipe.py, ",
    ),
    "a recipe that returns nothing": (("export", "recipe.py:nothing", "-o", "x"), 2, "returned a NoneType"),
    "a recipe that returns out": (("export", "recipe.py:with_out", "-o", "x"), 2, "which the command line sets"),
    "no checkpoint": (("pack", "nowhere.pt", "net.artifact", "-o", "x.safetensors"), 1, "no such file"),
    "a label without a value": (
        ("pack", "checkpoint.pt", "net.artifact", "-o", "x", "--label", "step"),
        2,
        "expected name=text, got",
    ),
    "a checkpoint as weights": (("run", "net.artifact", "-w", "checkpoint.pt", "-i", "in.npz"), 1, "weightswap pack"),
    "inputs missing": (("run", "net.artifact", "-w", "v1.safetensors"), 1, "x: missing from the inputs (--input FILE)"),
    "other inputs": (
        ("run", "net.artifact", "-w", "v1.safetensors", "-i", "v1.safetensors"),
        1,
        "linear.bias: not an input (the inputs are parts.0, x)",
    ),
    "inputs of another kind": (("run", "net.artifact", "-w", "v1.safetensors", "-i", "in.txt"), 2, ".npz files"),
    "inputs that are not there": (("run", "net.artifact", "-w", "v1.safetensors", "-i", "no.npz"), 1, "cannot be read"),
    "another method": (("run", "net.artifact", "-w", "v1.safetensors", "--method", "encode"), 2, "is not a method"),
}


@pytest.mark.parametrize(("arguments", "status", "says"), REFUSED.values(), ids=REFUSED)
@pytest.mark.sampled(7)
def test_refusals_have_a_reason_and_a_status(arguments: tuple[str, ...], status: int, says: str, shell: Shell) -> None:
    output = " ".join(shell(*arguments, status=status).replace("│", "").split())
    assert says in output
    assert not (shell.folder / "x").exists()


def test_errors_are_documents_with_json(shell: Shell) -> None:
    told = shell.document("run", "net.artifact", "-w", "v1.safetensors", status=1)
    assert told["error"] == "InputMismatch"
    assert len(told["problems"]) == 2


def test_a_refused_file_does_not_hide_those_before_it(shell: Shell) -> None:
    told = shell.document("swap", "net.artifact", "v1.safetensors", "nowhere.safetensors", status=1)
    assert (told["error"], told["reason"]) == ("WeightFileError", "unreadable")
    assert [receipt["source"] for receipt in told["receipts"]] == ["v1.safetensors"]


def test_every_command_has_help(shell: Shell) -> None:
    for command in ((), ("export",), ("pack",), ("inspect",), ("run",), ("swap",)):
        assert "Usage: " in shell(*command, "--help")


@pytest.mark.parametrize(
    ("typed", "meant"), [(["sawp"], "'swap'"), (["swap", "a", "--rate-limt", "1"], "--rate-limit")]
)
def test_a_typing_error_is_answered_with_what_was_meant(typed: list[str], meant: str, shell: Shell) -> None:
    assert meant in shell(*typed, status=2)


def test_the_help_of_serve_has_groups_for_all_options(shell: Shell) -> None:
    from weightswap_tools.commands.serve import serve_command

    panels = {param.rich_help_panel for param in click_params(serve_command)}
    assert {"Models", "Weights", "Listening", "Observability"} < panels
    assert None not in panels
    output = shell("serve", "--help")
    assert output.index("Models ─") < output.index("--engine ") < output.index("Weights ─") < output.index("--watch  ")


def click_params(app: typer.Typer) -> list[Any]:
    command = typer.main.get_command(app)
    params = command.get_params(typer.Context(command))
    return [param for param in params if param.param_type_name == "option" and param.name != "help"]


def test_the_version(shell: Shell) -> None:
    from weightswap_runtime import __version__

    assert shell("--version").strip() == f"weightswap {__version__}"
