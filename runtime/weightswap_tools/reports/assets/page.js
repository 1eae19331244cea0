"use strict";

// Functions that all scripts share. Texts of a report enter the page only through textContent.

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node[name] = value;
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function numberText(value) {
  if (typeof value !== "number") return String(value); // NaN, Infinity, large integers
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const short = Number(value.toPrecision(6));
  return Math.abs(value) < 1e-3 ? short.toExponential() : String(short);
}

function amountText(value, kind) {
  if (kind === "percent" && typeof value === "number") return `${Number((100 * value).toPrecision(3))} %`;
  if (kind !== "bytes" || typeof value !== "number") return numberText(value);
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return unit ? `${(value / 1000 ** unit).toFixed(1)} ${" kMGT"[unit]}B` : `${value} B`;
}

function plural(count, one) {
  return `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
}

/** A row of texts by class, and a bar that shows a part of the maximum. */
function barRow(tag, attributes, part, most, texts) {
  const bar = element("span", { class: "bar", style: `--part: ${(100 * part) / Math.max(1, most)}%` });
  return element(tag, { class: "part", ...attributes }, ...spans(texts), bar);
}

/** Elements for the texts that are not empty, by class. */
function spans(texts) {
  const shown = Object.entries(texts).filter(([, text]) => text);
  return shown.map(([look, text]) => element("span", { class: look }, text));
}
