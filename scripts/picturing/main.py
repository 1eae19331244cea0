"""Pictures for the documentation: a report of an encoder before and after fine-tuning, a live demo, and its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright
from safetensors.torch import save_file
from torch import nn

from weightswap_tools.diff import Policy, compare_weights
from weightswap_tools.diff.show import weights_report
from weightswap_tools.reports.blocks import Report
from weightswap_tools.reports.page import write_report

SCRIPTS = Path(__file__).parents[1]
IMAGES = SCRIPTS.parent / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WIDTH, HEIGHT = 1200, 1180


class Encoder(nn.Module):
    """Classifier of token sequences."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return logits


def fine_tune(model: Encoder, rate: float, growth: float, steps: int) -> None:
    """Train to predict the first token; the learning rate grows from layer to layer."""
    layers = enumerate(model.encoder.layers)
    groups = [{"params": layer.parameters(), "lr": rate * growth**depth} for depth, layer in layers]
    optimizer = torch.optim.AdamW([*groups, {"params": model.head.parameters(), "lr": 1e-3}])
    for _ in range(steps):
        tokens = torch.randint(0, 500, (32, 16))
        loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0] % 8)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def diff_report(folder: Path) -> Report:
    """Write the report of a training that went wrong in two places."""
    torch.manual_seed(0)
    model = Encoder()
    fine_tune(model, 1e-3, 1.0, 60)
    save_file(model.state_dict(), folder / "base.safetensors")
    fine_tune(model, 1e-6, 2.5, 20)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["encoder.layers.4.linear1.weight"][17] = 0
    state["encoder.layers.2.norm1.weight"][3] = torch.nan
    save_file(state, folder / "tuned.safetensors")
    diff = compare_weights(folder / "base.safetensors", folder / "tuned.safetensors")
    policy = Policy("new_nan or rel_change > 0.5")
    return weights_report(diff, {policy.text: policy.failures(diff)})


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """Open a page in a browser during the block."""
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
        tab.goto(url)
        yield tab
        browser.close()


def picture(page: Path, image: Path) -> None:
    with opened(page.as_uri()) as tab:
        tab.wait_for_selector("html[data-ready]")
        tab.screenshot(path=image)


def call(address: str, token: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}admin/{path}", data, {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def picture_operator(address: str, token: str, image: Path) -> None:
    """Take a screenshot of an operator's page, with the rolled-back weights staged again."""
    receipts = call(address, token, "models/digits/history")["receipts"]
    call(address, token, "models/digits/stage", {"source": receipts[-2]["source"], "why": "was it the weights?"})
    with opened(address) as tab:
        tab.get_by_label("Token").fill(token)
        tab.get_by_role("button", name="Enter").click()
        tab.get_by_text("Roll back to this").first.wait_for()
        tab.wait_for_timeout(2000)  # points of some seconds
        tab.screenshot(path=image)


def picture_demo(folder: str) -> None:
    """Take a screenshot of the operator's page after a demo, which draws its own plot."""
    command = [sys.executable, SCRIPTS / "digits" / "main.py", "--serve", "--out", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        printed = next(line for line in demo.stdout if "Ctrl-C ends it" in line)
        match = re.search(r"(http://\S+)  token: (\S+)", printed)
        assert match is not None
        picture_operator(match[1], match[2], IMAGES / "operator.png")
        demo.send_signal(signal.SIGINT)
    shutil.copy("timeline.png", IMAGES / "swaps.png")


def picture_rows() -> None:
    """Draw the demo of row updates."""
    subprocess.run([sys.executable, SCRIPTS / "clicks" / "main.py", "--out", IMAGES / "rows.png"], check=True)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_report("diff.html", diff_report(Path()))
        picture(Path(folder) / "diff.html", IMAGES / "diff.png")
        picture_demo(folder)
        picture_rows()


if __name__ == "__main__":
    main()
