// The page of a fleet: the desired state, the weights of each node, and the progress of a commit.

import { Canary } from "./canary.js";
import { listen } from "./connection.js";
import { Facts, Id, Labels, Section, When, duration } from "./parts.js";
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

function Node({ node, desired, after, longest, now }) {
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
  return html`<tr>
    <th scope="row">${node.node}</th>
    <td><span class=${`badge ${tone}`}>${text}</span></td>
    <td>${node.weights_id && html`<${Id} id=${node.weights_id} />`}</td>
    <td>${node.keeper ? node.revision : "?"}</td>
    <td>
      <ul class="replicas" aria-label=${`Replicas of ${node.node}`}>
        ${node.replicas.map((pid) => html`<li key=${pid} class=${serves ? "good" : "mark"}>${pid}</li>`)}
      </ul>
    </td>
    <td class="after">
      ${after === null ? "" : after === 0 ? "first" : `${duration(after)} later`}
      ${after !== null && html`<span style=${{ width: `${longest ? (100 * after) / longest : 0}%` }}></span>`}
    </td>
    <td>${node.since && html`<${When} at=${node.since} now=${now} />`}</td>
  </tr>`;
}

function Nodes({ fleet }) {
  const { nodes, desired, time } = fleet;
  const after = afterTheFirst(nodes);
  const longest = Math.max(...after);
  return html`<${Section} id="nodes" title="Nodes">
    <div class="wide" tabindex="0" role="group" aria-label="Nodes">
      <table>
        <thead>
          <tr>
            ${["Node", "State", "Weights", "Revision", "Replicas", "Commit", "Since"].map(
              (title) => html`<th key=${title} scope="col">${title}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${nodes.map(
            (node, index) =>
              html`<${Node}
                key=${node.node}
                node=${node}
                desired=${desired.weights?.weights_id}
                after=${after[index]}
                longest=${longest}
                now=${time}
              />`,
          )}
        </tbody>
      </table>
    </div>
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

/** Weights that were desired before. Nodes may have refused them, so that they were never served. */
function History({ desired, nodes, now }) {
  const refusedBy = ({ weights_id }) => nodes.filter(({ refused }) => refused[weights_id]);
  const described = (entries, what) =>
    [...entries].reverse().map((weights) => ({ ...weights, what, refusing: refusedBy(weights) }));
  const entries = [...described(desired.history, "desired before"), ...described(desired.withdrawn, "withdrawn")];
  if (!entries.length) return null;
  return html`<${Section} id="history" title="Before">
    <div class="wide" tabindex="0" role="group" aria-label="Before">
      <table>
        <thead>
          <tr>
            ${["Weights", "", "Source", "By", "Why", "Desired"].map(
              (title) => html`<th key=${title} scope="col">${title}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${entries.map(
            (weights) =>
              html`<tr key=${`${weights.what} ${weights.weights_id}`}>
                <th scope="row"><${Id} id=${weights.weights_id} /></th>
                <td>
                  ${weights.what}
                  ${weights.refusing.map(
                    ({ node, refused }) =>
                      html`<p key=${node} class="info reason">refused by ${node}: ${refused[weights.weights_id]}</p>`,
                  )}
                </td>
                <td>${weights.source}</td>
                <td>${weights.by}</td>
                <td>${weights.why}</td>
                <td><${When} at=${weights.since} now=${now} /></td>
              </tr>`,
          )}
        </tbody>
      </table>
    </div>
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
