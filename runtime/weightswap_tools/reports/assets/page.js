"use strict";

// What is shared by all scripts. Texts of the report reach the page through textContent alone.

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made[name] = value;
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function numberText(value) {
  if (typeof value !== "number") return String(value); // NaN, Infinity, large integers
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const short = Number(value.toPrecision(6));
  return Math.abs(value) < 1e-3 ? short.toExponential() : String(short);
}

function amountText(value, kind) {
  if (kind !== "bytes" || typeof value !== "number") return numberText(value);
  const unit = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return unit ? `${(value / 1000 ** unit).toFixed(1)} ${" kMGT"[unit]}B` : `${value} B`;
}

function plural(count, one) {
  return `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
}

/** A row of texts, each with its class, and a bar for a part of the most that there is. */
function barRow(tag, attributes, part, most, texts) {
  const bar = element("span", { class: "bar", style: `--part: ${(100 * part) / Math.max(1, most)}%` });
  return element(tag, { class: "part", ...attributes }, ...spans(texts), bar);
}

/** The texts that there are, by class. */
function spans(texts) {
  const there = Object.entries(texts).filter(([, text]) => text);
  return there.map(([look, text]) => element("span", { class: look }, text));
}
