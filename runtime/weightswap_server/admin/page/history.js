// Commits with their receipts, and refusals, the latest first.

import { html, useState } from "./vendor/htm/preact.js";
import { Facts, Id, Labels, Lines, Section, When, bytes, duration, empty, plain } from "./parts.js";

const FIRST = 20; // entries that are shown at first

const FORMATS = {
  bytes_read: bytes,
  bytes_copied: bytes,
  seconds_staged: duration,
  seconds_verified: duration,
  seconds_paused: duration,
  committed_at: (at) => new Date(at * 1000).toISOString(),
};
const TONES = { serving: "good", commit: "plain", "desired before": "plain", withdrawn: "mark", refused: "bad" };
const IN_ENTRY = new Set(["generation", "labels", "why", "by", "reloadable"]); // fields that the entry itself shows

function Receipt({ receipt }) {
  const fields = Object.entries(receipt).filter(([name, value]) => !IN_ENTRY.has(name) && !empty(value));
  const rows = fields.map(([name, value]) => [name.replaceAll("_", " "), (FORMATS[name] ?? plain)(value)]);
  return html`<details>
    <summary>Receipt</summary>
    <${Facts} rows=${rows} />
  </details>`;
}

function RollBack({ to, act }) {
  return html`<button type="button" class="button push" aria-label=${`Roll back to ${to}`} onClick=${act}>
    Roll back to this
  </button>`;
}

function Badges({ states }) {
  return states.map((state) => html`<span key=${state} class=${`badge ${TONES[state]}`}>${state}</span>`);
}

function Commit({ receipt, now, states, rollBack }) {
  const { generation, kind, weights_id, labels, by, why, source, seconds_paused, committed_at } = receipt;
  return html`<li class="entry">
    <div class="line">
      <${Badges} states=${states} />
      <strong>generation ${generation}</strong>
      <${Id} id=${weights_id} />
      <${Labels} labels=${labels} />
      <span class="muted push"><${When} at=${committed_at} now=${now} /></span>
    </div>
    <div class="info line">
      <span>
        ${kind === "full" ? "" : `${kind}, `}${by && `by ${by}, `}paused${" "}
        ${duration(seconds_paused)}${why && html`: <q>${why}</q>`}
      </span>
      ${rollBack && html`<${RollBack} to=${`generation ${generation}, ${weights_id.slice(0, 12)}`} act=${rollBack} />`}
    </div>
    <${Receipt} receipt=${receipt} />
  </li>`;
}

/** Weights that the desired store has named, and this process has not served. started: when it was. */
function Desired({ weights, started, now, states, rollBack }) {
  return html`<li class="entry">
    <div class="line">
      <${Badges} states=${states} />
      <${Id} id=${weights.weights_id} />
      <${Labels} labels=${weights.labels} />
      <span class="muted push"><${When} at=${weights.since} now=${now} /></span>
    </div>
    <div class="info line">
      <span>
        desired${weights.by && ` by ${weights.by}`},${" "}
        ${weights.since < started ? "before this process was started" : "not served by this process"}
        ${weights.why && html`: <q>${weights.why}</q>`}
      </span>
      ${rollBack && html`<${RollBack} to=${weights.weights_id.slice(0, 12)} act=${rollBack} />`}
    </div>
    ${weights.refused && html`<div class="info"><${Lines} text=${weights.refused} /></div>`}
  </li>`;
}

function Refusal({ refusal, now }) {
  const { event, kind, error, source, by, phase, time } = refusal;
  const quiet = event === "cancelled" || event === "discarded";
  return html`<li class="entry">
    <div class="line">
      <span class=${`badge ${quiet ? "plain" : "bad"}`}>${event}</span>
      ${kind && html`<strong>${kind}</strong>`}
      <span class="muted push"><${When} at=${time} now=${now} /></span>
    </div>
    ${error && html`<div class="info"><${Lines} text=${error} /></div>`}
    <p class="info muted">${source}${by && `, by ${by}`}${phase && `, while ${phase}`}</p>
  </li>`;
}

/** Weights that a model can be rolled back to, by weights id. */
function targets(history, model) {
  const served = model.served?.weights_id;
  const full = history.receipts.filter(({ kind, reloadable }) => kind === "full" && reloadable);
  const known = model.following ? [...history.withdrawn, ...history.desired] : full;
  const earlier = known.filter(({ weights_id }) => weights_id !== served);
  return new Map(earlier.map((weights) => [weights.weights_id, weights]));
}

function entries(history, model, started, now, openDialog) {
  const back = targets(history, model);
  const isRefused = (id) => Boolean(back.get(id)?.refused);
  const rollBack = (id) =>
    back.has(id) && !isRefused(id) && (() => openDialog({ call: "rollback", target: back.get(id) }));
  const seen = new Set(history.receipts.map(({ weights_id }) => weights_id));
  const withdrawn = new Set(history.withdrawn.map(({ weights_id }) => weights_id));
  const statesOf = (id, serving, otherwise) => {
    const states = [serving && "serving", withdrawn.has(id) && "withdrawn", isRefused(id) && "refused"].filter(Boolean);
    return states.length ? states : [otherwise];
  };
  const commits = history.receipts.map((receipt) => {
    const serving = receipt.generation === model.served?.generation;
    const id = receipt.weights_id;
    const props = { receipt, now, states: statesOf(id, serving, "commit"), rollBack: rollBack(id) };
    return [receipt.committed_at, html`<${Commit} key=${`commit ${receipt.generation}`} ...${props} />`];
  });
  const desired = [...back.values()]
    .filter(({ weights_id }) => !seen.has(weights_id))
    .map((weights) => {
      const id = weights.weights_id;
      const props = { weights, started, now, states: statesOf(id, false, "desired before"), rollBack: rollBack(id) };
      return [weights.since, html`<${Desired} key=${`desired ${id}`} ...${props} />`];
    });
  const refusals = history.refusals.map((refusal, index) => [
    refusal.time,
    html`<${Refusal} key=${`refusal ${refusal.time} ${index}`} refusal=${refusal} now=${now} />`,
  ]);
  return [...commits, ...desired, ...refusals].sort(([one], [other]) => other - one).map(([, entry]) => entry);
}

/** The section of the history. history: null while it is loading. */
export function History({ history, model, started, now, openDialog }) {
  const [all, setAll] = useState(false);
  const known = history ? entries(history, model, started, now, openDialog) : [];
  const hidden = all ? 0 : Math.max(0, known.length - FIRST);
  return html`<${Section} id="history" title="History">
    ${!known.length && html`<p class="hint">${history ? "Nothing was committed or refused yet." : "Loading…"}</p>`}
    <ol class="entries">
      ${all ? known : known.slice(0, FIRST)}
    </ol>
    ${
      hidden > 0 &&
      html`<button type="button" class="button" onClick=${() => setAll(true)}>Show ${hidden} older ones</button>`
    }
  <//>`;
}
