// What all sections are made of: ids, times, facts, numbers as people read them.

import { html, useState } from "./vendor/htm/preact.js";

const SHOWN = 12; // letters of an id

const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
/** A local time of today. */
export const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const dated = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** A count with separators, or with few digits where it is small. */
export function number(value) {
  return value.toLocaleString(undefined, value < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
}

/** A time span, given in seconds. */
export function duration(seconds) {
  const units = Object.entries({ s: 1, ms: 1e-3, µs: 0 });
  const [name, size] = units.find(([, least]) => seconds >= least);
  return `${(seconds / (size || 1e-6)).toLocaleString(undefined, { maximumSignificantDigits: 3 })} ${name}`;
}

/** Bytes, by 1000. */
export function bytes(value) {
  const step = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  const name = ["bytes", "kB", "MB", "GB", "TB"][step];
  return `${(value / 1000 ** step).toLocaleString(undefined, { maximumSignificantDigits: 3 })} ${name}`;
}

/** The first letters of an id, and a way to the others. */
export function Id({ id, what = "weights id" }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(id);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<span class="id">
    <code title=${id}>${id.slice(0, SHOWN)}</code>
    <button type="button" class="copy" aria-label=${`Copy the ${what} ${id.slice(0, SHOWN)}`} onClick=${copy}>
      ${copied ? "copied" : "copy"}
    </button>
  </span>`;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).catch(() => {});
  const area = document.createElement("textarea"); // a page that did not come by TLS has no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A local time, how long ago that is, and the exact one on hover. Seconds since the epoch. */
export function When({ at, now }) {
  const date = new Date(at * 1000);
  const today = date.toDateString() === new Date(now * 1000).toDateString();
  return html`<time datetime=${date.toISOString()} title=${exact.format(date)}>
    ${(today ? clock : dated).format(date)}, ${ago(now - at)}
  </time>`;
}

/** How long ago, roughly; seconds. */
export function ago(seconds) {
  const units = Object.entries({ d: 86400, h: 3600, min: 60 });
  const unit = units.find(([, size]) => seconds >= 2 * size);
  if (unit) return `${Math.floor(seconds / unit[1])} ${unit[0]} ago`;
  return seconds < 5 ? "just now" : `${Math.floor(seconds)} s ago`;
}

/** Names and values; what has none is left out. */
export function Facts({ rows }) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== false);
  return html`<dl class="facts">
    ${known.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** Labels, as chips. */
export function Labels({ labels }) {
  const known = Object.entries(labels);
  if (!known.length) return null;
  return html`<ul class="labels" aria-label="Labels">
    ${known.map(([name, value]) => html`<li key=${name}><span class="muted">${name}</span> ${value}</li>`)}
  </ul>`;
}

/** How weights were verified. */
export function verified(how) {
  return (
    { goldens: "goldens were reproduced", finite: "outputs are finite", none: "nothing to try them with" }[how] ?? how
  );
}

/** Whatever a document has, as text. */
export function plain(value) {
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A section with a heading, and buttons beside it. */
export function Section({ id, title, actions, children }) {
  return html`<section aria-labelledby=${id}>
    <div class="heading">
      <h2 id=${id}>${title}</h2>
      <div class="actions">${actions}</div>
    </div>
    ${children}
  </section>`;
}
