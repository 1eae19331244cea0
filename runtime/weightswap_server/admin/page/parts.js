// Parts of all sections: ids, times, facts, formatted numbers.

import { html, useState } from "./vendor/htm/preact.js";

const SHOWN = 12; // characters of an id

const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
/** Format of a local time of today. */
export const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const dated = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** Format a number with separators, or with three digits if it is small. */
export function number(value) {
  return value.toLocaleString(undefined, value < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
}

/** Format a time span in seconds. */
export function duration(seconds) {
  const units = Object.entries({ s: 1, ms: 1e-3, µs: 0 });
  const [name, size] = units.find(([, least]) => seconds >= least);
  return `${(seconds / (size || 1e-6)).toLocaleString(undefined, { maximumSignificantDigits: 3 })} ${name}`;
}

/** Format bytes in units of 1000. */
export function bytes(value) {
  const step = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  const name = ["bytes", "kB", "MB", "GB", "TB"][step];
  return `${(value / 1000 ** step).toLocaleString(undefined, { maximumSignificantDigits: 3 })} ${name}`;
}

/** The beginning of an id, with a button that copies all of it. */
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
  const area = document.createElement("textarea"); // without TLS there is no navigator.clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A local time and its age, with the exact time on hover. at, now: seconds since the epoch. */
export function When({ at, now }) {
  const date = new Date(at * 1000);
  const today = date.toDateString() === new Date(now * 1000).toDateString();
  return html`<time datetime=${date.toISOString()} title=${exact.format(date)}>
    ${(today ? clock : dated).format(date)}, ${ago(now - at)}
  </time>`;
}

/** Format an age in seconds, roughly. */
export function ago(seconds) {
  const units = Object.entries({ d: 86400, h: 3600, min: 60 });
  const unit = units.find(([, size]) => seconds >= 2 * size);
  if (unit) return `${Math.floor(seconds / unit[1])} ${unit[0]} ago`;
  return seconds < 5 ? "just now" : `${Math.floor(seconds)} s ago`;
}

/** Names and values. Rows without a value are left out. */
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

/** Describe how weights were verified. */
export function verified(how) {
  return (
    { goldens: "goldens were reproduced", finite: "outputs are finite", none: "nothing to try them with" }[how] ?? how
  );
}

/** Tell whether a value says nothing. */
export const empty = (value) =>
  value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);

const SHOWN_LINES = 3; // of a long text, beside its last line, which says what to do

/** A text of several lines; if it is long, all but its first lines and its last one are folded. */
export function Lines({ text }) {
  const lines = text.split("\n");
  const [folded, last] = [lines.slice(SHOWN_LINES, -1), lines.at(-1)];
  if (folded.length < 3) return html`<div class="lines">${text}</div>`;
  return html`<div class="lines">${lines.slice(0, SHOWN_LINES).join("\n")}</div>
    <details>
      <summary>${folded.length} more lines</summary>
      <div class="lines">${folded.join("\n")}</div>
    </details>
    <div class="lines">${last}</div>`;
}

/** A wide table; on phones each row is a list.
 *
 * columns: "text" or "" by title. rows: [key, cells], of which the first names the row.
 */
export function Table({ label, columns, rows }) {
  const titles = Object.keys(columns);
  return html`<div class="wide" tabindex="0" role="group" aria-label=${label}>
    <table>
      <thead>
        <tr>
          ${titles.map((title) => html`<th key=${title} class=${columns[title]} scope="col">${title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          ([key, [name, ...cells]]) =>
            html`<tr key=${key}>
              <th scope="row">${name}</th>
              ${cells.map((cell, at) => {
                const title = titles[at + 1];
                return html`<td key=${title} class=${columns[title]} data-title=${title}>${cell}</td>`;
              })}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** Format any value of a document. */
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
