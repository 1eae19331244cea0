"""Pictures for the documentation: a report of a small encoder before and after a few steps of training; a live demo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from safetensors.torch import save_file
from torch import nn

from weightswap_tools.diff import Policy, compare_weights
from weightswap_tools.diff.show.weights_page import weights_report
from weightswap_tools.reports import Report, write_report

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
    """Tokens to classes."""

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
    """Train on what the first token is; the rate grows from layer to layer."""
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
    """A training that went wrong in two places."""
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


def picture(page: Path, image: Path) -> None:
    """Photograph a report."""
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]")
        tab.screenshot(path=image)
        browser.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_report("diff.html", diff_report(Path()))
        picture(Path(folder) / "diff.html", IMAGES / "diff.png")
        subprocess.run([sys.executable, SCRIPTS / "digits" / "main.py", "--out", folder], check=True)
        shutil.copy("timeline.png", IMAGES / "swaps.png")


if __name__ == "__main__":
    main()
