"use strict";

// The last script: the choice of colours, and the drawing of every block.

const THEMES = { light: "dark", dark: "light" };

let chosenTheme = null;

function currentTheme() {
  return chosenTheme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function setUpThemes() {
  const button = document.getElementById("theme");
  const name = () => (button.textContent = `${THEMES[currentTheme()] === "dark" ? "Dark" : "Light"} colours`);
  const repaint = () => {
    name();
    repainters.forEach((paint) => paint());
  };
  button.addEventListener("click", () => {
    chosenTheme = THEMES[currentTheme()];
    document.getElementById("dark").media = chosenTheme === "dark" ? "screen" : "not all";
    repaint();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", repaint);
  button.hidden = false;
  name();
}

setUpThemes();
const blocks = JSON.parse(document.getElementById("data").textContent);
for (const figure of document.querySelectorAll("figure[data-block]")) {
  const block = blocks[Number(figure.dataset.block)];
  drawers[block.type](figure, block);
}
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = ""))); // drawn
