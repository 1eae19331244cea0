"use strict";

// The last script: sets up the choice of colours, and draws every block.

function setUpColours() {
  const button = document.getElementById("theme");
  const { style } = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (style.colorScheme ? style.colorScheme === "dark" : preferred.matches);
  const name = () => (button.textContent = `${dark() ? "Light" : "Dark"} colours`);
  button.onclick = () => {
    style.colorScheme = dark() ? "light" : "dark";
    name();
  };
  preferred.onchange = name;
  button.hidden = false;
  name();
}

setUpColours();
const blocks = JSON.parse(document.getElementById("data").textContent);
const draw = { table: drawTable, modules: drawModules, chart: drawChart };
for (const figure of document.querySelectorAll("figure[data-block]")) {
  const block = blocks[figure.dataset.block];
  draw[block.type](figure, block);
}
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = ""))); // drawn
