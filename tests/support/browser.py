"""Browser for tests of pages, where one is installed, and checks that every page must pass."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
# the visible ones of some elements that have no accessible name
NAMELESS = """all => all.filter(one => one.checkVisibility() && !(
    one.getAttribute("aria-label") || one.labels?.[0]?.textContent.trim() || one.textContent.trim()
)).map(one => one.outerHTML)"""
# the number of elements with text, and those with too little contrast
FAINT = """all => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const parsed = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const behind = (one) => {
        const [red, green, blue, alpha] = parsed(getComputedStyle(one).backgroundColor);
        if (alpha === 255 || !one.parentElement) return [red, green, blue];
        const below = behind(one.parentElement);
        return [red, green, blue].map((value, place) => (alpha * value + (255 - alpha) * below[place]) / 255);
    };
    const text = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const contrast = (one) => {
        const lights = [parsed(getComputedStyle(one).color).slice(0, 3), behind(one)].map((colour) => {
            const parts = colour.map((value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4));
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05;
        });
        return Math.max(...lights) / Math.min(...lights);
    };
    const read = all.filter((one) => text(one) && !one.closest("svg, [aria-hidden], script, style, noscript"));
    return [read.length, read.filter((one) => contrast(one) < 4.5).map((one) => one.outerHTML)];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser for one module. While it runs, this thread has an asyncio loop, so other tests cannot run one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"there is no browser ({', '.join(PROGRAMS)})")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()
