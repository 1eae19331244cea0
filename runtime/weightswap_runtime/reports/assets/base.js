"use strict";

// What is shared by all that draws. Texts of the report reach the page through textContent alone.

const drawers = {}; // type of a block -> (figure, block) => undefined
const repainters = []; // called when the colours of the page change

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

let lastId = 0;

function freshId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

function bytesText(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = size;
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${size} B` : `${value.toFixed(1)} ${units[unit]}`;
}

function numberText(value) {
  if (typeof value !== "number") return String(value); // NaN, Infinity, large integers
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const short = Number(value.toPrecision(6));
  return value !== 0 && Math.abs(value) < 1e-3 ? short.toExponential() : String(short);
}

/** A number with few digits, for axes. */
function shortText(value, digits) {
  const size = Math.abs(value);
  const short = Number(value.toPrecision(digits));
  const far = size !== 0 && (size < 1e-3 || size >= 1e5);
  return far ? short.toExponential().replace("+", "") : String(short);
}

function amountText(value, what) {
  return what === "bytes" && typeof value === "number" ? bytesText(value) : numberText(value);
}

function shareText(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

function plural(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** A caption above a figure, if there is one. */
function caption(figure, text) {
  if (text) figure.append(element("figcaption", {}, text));
}

/** A box to search in, and the parts that it is shown by: its label, and itself. */
function searchBox(label, placeholder, oninput) {
  const id = freshId("search");
  const box = element("input", { type: "search", id, autocomplete: "off", spellcheck: "false", placeholder, oninput });
  return { box, parts: [element("label", { for: id, class: "unseen" }, label), box] };
}

/** Buttons that go through `count` things, `size` at a time; `show(from)` is called with the first one's place. */
function pager(count, size, label, show) {
  const bar = element("nav", { class: "pager", "aria-label": label });
  const words = element("span", { class: "muted", role: "status" });
  let from = 0;
  const go = (place) => () => {
    from = place();
    refresh();
    show(from);
  };
  const last = () => Math.floor(Math.max(0, total - 1) / size) * size;
  let total = count;
  const buttons = [
    ["First", () => 0],
    ["Previous", () => Math.max(0, from - size)],
    ["Next", () => Math.min(last(), from + size)],
    ["Last", last],
  ].map(([name, place]) => element("button", { type: "button", class: "button", onclick: go(place) }, name));
  const refresh = () => {
    const to = Math.min(total, from + size);
    words.textContent = total
      ? `${(from + 1).toLocaleString("en")}–${to.toLocaleString("en")} of ${total.toLocaleString("en")}`
      : "none";
    buttons.forEach((button, place) => (button.disabled = place < 2 ? from === 0 : from >= last()));
    bar.hidden = total <= size;
  };
  bar.append(buttons[0], buttons[1], words, buttons[2], buttons[3]);
  refresh();
  const restart = (newCount) => {
    total = newCount;
    from = 0;
    refresh();
  };
  return { bar, restart };
}
