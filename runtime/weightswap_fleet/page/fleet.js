// The page of a fleet: the desired state, the weights of each node, and the progress of a commit.

import { Canary } from "./canary.js";
import { listen } from "./connection.js";
import { Facts, Id, Labels, Lines, Section, Table, When, duration } from "./parts.js";
import { html, render, useEffect, useReducer } from "./vendor/htm/preact.js";

/** Reduce the page's state by a message of the event stream. */
function reduce(state, [kind, data]) {
  if (kind === "away") return { ...state, connected: false };
  if (kind === "problem") return { ...state, connected: true, problem: data.error };
  return { fleet: data, connected: true, problem: "" };
}

function state({ agrees, nodes, trial }) {
  if (!agrees) return ["mark", "not all serve what is desired"];
  if (trial && !trial.outcome) return ["mark", "weights are on trial"];
  const prepares = nodes.some(({ preparing }) => preparing);
  return prepares ? ["mark", "a change is prepared"] : ["good", "all serve what is desired"];
}

function Top({ fleet, connected, problem }) {
  const [tone, text] = connected && !problem ? state(fleet) : ["bad", problem || "no connection; trying again"];
  return html`<header class="top">
    <h1>${fleet.fleet}</h1>
    <div class="actions"><span class=${`badge ${tone}`} role="status">${text}</span></div>
  </header>`;
}

function Desired({ desired, now }) {
  const { weights, hold, revision } = desired;
  return html`<${Section} id="desired" title="Desired">
    <${Facts}
      rows=${[
        ["weights", weights && html`<${Id} id=${weights.weights_id} />`],
        ["source", weights?.source],
        ["since", weights && html`<${When} at=${weights.since} now=${now} />`],
        ["by", weights?.by],
        ["why", weights?.why],
        ["revision", revision],
        ["on hold", hold && [hold.by && `by ${hold.by}`, hold.why].filter(Boolean).join(": ")],
      ]}
    />
    ${weights && html`<${Labels} labels=${weights.labels} />`}
  <//>`;
}

/** Return the seconds from the first commit of the newest revision to each node's; null if a node is behind. */
function afterTheFirst(nodes) {
  const newest = Math.max(...nodes.map(({ revision }) => revision));
  const times = nodes.map(({ revision, since }) => (revision === newest ? since : null));
  const first = Math.min(...times.filter((time) => time !== null));
  return times.map((time) => (time === null ? null : time - first));
}

const NODES = {
  Node: "text",
  State: "text",
  Weights: "text",
  Revision: "",
  Replicas: "text",
  Commit: "text",
  Since: "text",
};

function nodeRow(node, desired, after, longest, now) {
  const serves = node.weights_id === desired;
  const [tone, text] = node.error
    ? ["bad", node.error]
    : node.preparing
      ? ["mark", `prepares ${node.preparing.slice(0, 12)}`]
      : node.trying
        ? ["mark", `tries ${node.trying.slice(0, 12)}`]
      : serves
        ? ["good", "serves"]
        : ["mark", "behind"];
  return [
    node.node,
    html`<span class=${`badge ${tone}`}>${text}</span>`,
    node.weights_id && html`<${Id} id=${node.weights_id} />`,
    node.agent ? node.revision : "?",
    html`<ul class="replicas" aria-label=${`Replicas of ${node.node}`}>
      ${node.replicas.map((pid) => html`<li key=${pid} class=${serves ? "good" : "mark"}>${pid}</li>`)}
    </ul>`,
    after !== null &&
      html`<div class="after">
        ${after === 0 ? "first" : `${duration(after)} later`}
        <span style=${{ width: `${longest ? (100 * after) / longest : 0}%` }}></span>
      </div>`,
    node.since && html`<${When} at=${node.since} now=${now} />`,
  ];
}

function Nodes({ fleet }) {
  const { nodes, desired, time } = fleet;
  const after = afterTheFirst(nodes);
  const longest = Math.max(...after);
  const rows = nodes.map((node, at) => [
    node.node,
    nodeRow(node, desired.weights?.weights_id, after[at], longest, time),
  ]);
  return html`<${Section} id="nodes" title="Nodes">
    <${Table} label="Nodes" columns=${NODES} rows=${rows} />
    <p class="hint">All replicas of a node change with it. Times of commits are those of the nodes' own clocks.</p>
  <//>`;
}

/** The trial, with its share of all nodes' requests, or the outcome of the last trial. */
function Trial({ trial, now }) {
  if (!trial) return null;
  if (!trial.outcome) {
    const parts = Object.values(trial.shares);
    const share = parts.reduce((sum, part) => sum + part, 0) / (parts.length || 1);
    return html`<${Canary} canary=${{ ...trial.plan, ...trial, share }} now=${now} />`;
  }
  return html`<${Section} id="trial" title="Last trial">
    <${Facts}
      rows=${[
        ["weights", html`<${Id} id=${trial.weights_id} />`],
        ["outcome", trial.outcome],
        ["because", trial.reason],
      ]}
    />
  <//>`;
}

const BEFORE = { Weights: "text", State: "text", Source: "text", By: "text", Why: "text", Desired: "text" };

/** Weights that were desired before. Nodes may have refused them, so that they were never served. */
function History({ desired, nodes, now }) {
  const rows = (entries, what) =>
    [...entries].reverse().map((weights) => {
      const refusing = nodes.filter(({ refused }) => refused[weights.weights_id]);
      const reasons = refusing.map(
        ({ node, refused }) =>
          html`<div key=${node} class="info">
            <${Lines} text=${`refused by ${node}: ${refused[weights.weights_id]}`} />
          </div>`,
      );
      const when = html`<${When} at=${weights.since} now=${now} />`;
      const state = html`<div>${what}${reasons}</div>`;
      const id = html`<${Id} id=${weights.weights_id} />`;
      return [`${what} ${weights.weights_id}`, [id, state, weights.source, weights.by, weights.why, when]];
    });
  const all = [...rows(desired.history, "desired before"), ...rows(desired.withdrawn, "withdrawn")];
  if (!all.length) return null;
  return html`<${Section} id="history" title="Before">
    <${Table} label="Before" columns=${BEFORE} rows=${all} />
  <//>`;
}

function Page() {
  const [{ fleet, connected, problem }, dispatch] = useReducer(reduce, { fleet: null, connected: false, problem: "" });
  useEffect(() => {
    const ended = new AbortController();
    listen(null, (kind, data) => dispatch([kind, data]), ended.signal, "fleet/events");
    return () => ended.abort();
  }, []);
  useEffect(() => {
    if (fleet) document.title = `${fleet.fleet}: revision ${fleet.desired.revision} · weightswap`;
  });
  if (!fleet) return html`<main><p class="hint">${problem || "Connecting…"}</p></main>`;
  return html`<${Top} fleet=${fleet} connected=${connected} problem=${problem} />
    <main class=${connected && !problem ? "" : "stale"}>
      <${Desired} desired=${fleet.desired} now=${fleet.time} />
      <${Nodes} fleet=${fleet} />
      <${Trial} trial=${fleet.trial} now=${fleet.time} />
      <${History} desired=${fleet.desired} nodes=${fleet.nodes} now=${fleet.time} />
    </main>`;
}

render(html`<${Page} />`, document.body);
