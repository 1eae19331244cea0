// One model: its served and staged weights, the source that it follows, its load and its history.

import { html } from "./vendor/htm/preact.js";
import { Canary } from "./canary.js";
import { Answering, Load } from "./charts.js";
import { History } from "./history.js";
import { Facts, Id, Labels, Lines, Section, When, bytes, empty, plain, verified } from "./parts.js";
import { Processes } from "./processes.js";

const SHOWN_FIELDS = new Set([
  "name",
  "methods",
  "ready",
  "loaded",
  "failed",
  "graph_id",
  "engine",
  "device",
  "residency",
  "served",
  "staged",
  "staging",
  "canary",
  "following",
  "watching",
]);
const here = () => location.href.replace(/[?#].*$/, "").replace(/\/$/, "");

function Command({ children }) {
  return html`<code class="command" tabindex="0">${children}</code>`;
}

function state({ failed, loaded, ready, served }) {
  if (failed) return ["bad", "failed: calls are refused; swap a full set"];
  if (!served) return ["mark", "waits for its first weights"];
  if (!loaded) return ["mark", "unloaded by an operator"];
  return ready ? ["good", "ready"] : ["mark", "warming up"];
}

function Served({ model, server, now }) {
  const { served } = model;
  const [tone, text] = state(model);
  return html`<${Section} id="served" title="Served" actions=${html`<span class=${`badge ${tone}`}>${text}</span>`}>
    ${
      served
        ? html`<p class="weights">
            <${Id} id=${served.weights_id} />
            <span class="generation">generation ${served.generation}</span>
            <${Labels} labels=${served.labels} />
          </p>
          <${Facts}
            rows=${[
              ["Since", html`<${When} at=${served.since} now=${now} />`],
              ["By", served.by],
              ["Why", served.why],
              ["From", served.source],
              ["Verified", verified(served.verified)],
            ]}
          />`
        : html`<p class="hint">Nothing is served yet. Give it weights:</p>
          <${Command}>weightswap push ${here()} v1.safetensors --token-file token<//>`
    }
    <${Facts}
      rows=${[
        ["In process", server.processes.length < 2 && String(server.pid)],
        ["Engine", `${model.engine} on ${model.device}, residency ${model.residency}`],
        ["Methods", model.methods.length > 1 && model.methods.join(", ")],
        ["Graph", html`<${Id} id=${model.graph_id} what="graph id" />`],
      ]}
    />
  <//>`;
}

function Progress({ staging }) {
  const { phase, bytes_done, bytes_total } = staging;
  return html`<label class="progress">
    <progress value=${bytes_total ? bytes_done : undefined} max=${bytes_total || 1}></progress>
    <span>${phase}, ${bytes(bytes_done)} of ${bytes(bytes_total)}</span>
  </label>`;
}

function Staged({ model, now, openDialog }) {
  const { staged, staging, canary } = model;
  const button = (call, name, enabled, strong) =>
    html`<button
      type="button"
      class=${`button ${strong ? "strong" : ""}`}
      disabled=${!enabled}
      onClick=${() => openDialog({ call })}
    >
      ${name}
    </button>`;
  const actions =
    staged &&
    html`${button("discard", staged.ready && !canary ? "Discard" : "Abort", true)}
    ${button("commit", canary ? "Promote" : "Commit", staged.ready, true)}`;
  return html`<${Section} id="staged" title="Staged" actions=${actions}>
    ${staging && html`<${Progress} staging=${staging} />`}
    ${
      !staged &&
      !staging &&
      html`<p class="hint">Nothing is staged. Stage weights, look at them here, and commit them:</p>
      <${Command}>weightswap push ${here()} v2.safetensors --stage --token-file token<//>`
    }
    ${
      staged?.weights_id &&
      html`<p class="weights"><${Id} id=${staged.weights_id} /><${Labels} labels=${staged.labels} /></p>`
    }
    ${
      staged &&
      html`<${Facts}
      rows=${[
        ["From", staged.source],
        ["By", staged.by],
        ["Why", staged.why],
        ["Since", html`<${When} at=${staged.since} now=${now} />`],
        ["Kind", staged.kind !== "full" && staged.kind],
        ["Verified", staged.ready && verified(staged.verified)],
        ["Non-finite", staged.ready && (staged.nonfinite.join(", ") || "none that were not there before")],
      ]}
    />`
    }
  <//>`;
}

function Following({ model, now, openDialog }) {
  const { following } = model;
  if (!following) return null;
  const { on_hold, agrees, reachable, error } = following;
  const call = on_hold ? "release" : "hold";
  const actions = html`<button type="button" class="button" onClick=${() => openDialog({ call })}>
    ${on_hold ? "Release" : "Hold"}
  </button>`;
  const [tone, text] = !reachable
    ? ["bad", "the desired store cannot be read; what is served is served on"]
    : agrees
      ? ["good", "serves what is desired"]
      : ["mark", "does not serve what is desired yet"];
  return html`<${Section} id="following" title="Desired state" actions=${actions}>
    <p class="line">
      <span class=${`badge ${tone}`}>${text}</span>
      ${on_hold && html`<span class="badge mark">on hold</span>`}
    </p>
    ${error && html`<div class="note bad"><${Lines} text=${error} /></div>`}
    <${Facts}
      rows=${[
        ["Desired store", following.desired_store],
        ["Revision", following.revision === null ? "" : String(following.revision)],
        ["Desired", following.desired && html`<${Id} id=${following.desired} />`],
        ["Held by", on_hold && following.held_by],
        ["Held because", on_hold && following.held_why],
        ["Held since", on_hold && following.held_since && html`<${When} at=${following.held_since} now=${now} />`],
      ]}
    />
  <//>`;
}

function Watching({ model }) {
  const { watching } = model;
  if (!watching) return null;
  const list = (files) =>
    Object.keys(files).length > 0 &&
    html`<ul>
      ${Object.entries(files).map(
        ([name, why]) => html`<li key=${name}><code>${name}</code>: <${Lines} text=${why} /></li>`,
      )}
    </ul>`;
  return html`<${Section} id="watching" title="Watched directory">
    ${watching.error && html`<div class="note bad"><${Lines} text=${watching.error} /></div>`}
    <${Facts}
      rows=${[
        ["Directory", watching.directory],
        ["Skipped", list(watching.skipped)],
        ["Waiting", list(watching.waiting)],
      ]}
    />
  <//>`;
}

/** Fields of a newer server that this page does not know, as they are. */
function Others({ model }) {
  const known = Object.entries(model).filter(([name, value]) => !SHOWN_FIELDS.has(name) && !empty(value));
  return known.map(([name, value]) => {
    const title = name.replaceAll("_", " ");
    const fields = value && typeof value === "object" ? Object.entries(value) : [[name, value]];
    const rows = fields.map(([field, item]) => [field.replaceAll("_", " "), item === null ? "" : plain(item)]);
    return html`<${Section} key=${name} id=${`other-${name}`} title=${title[0].toUpperCase() + title.slice(1)}>
      <${Facts} rows=${rows} />
    <//>`;
  });
}

/** All sections of a model. openDialog: opens a dialog for a change. */
export function Model({ model, server, points, history, now, openDialog }) {
  const commits = history?.receipts ?? [];
  return html`<div class="columns">
      <${Served} model=${model} server=${server} now=${now} />
      <${Staged} model=${model} now=${now} openDialog=${openDialog} />
    </div>
    <${Canary} canary=${model.canary} now=${now} />
    <${Following} model=${model} now=${now} openDialog=${openDialog} />
    <${Watching} model=${model} />
    <${Processes} processes=${server.processes} name=${model.name} now=${now} />
    <${Others} model=${model} />
    <${Section} id="load" title="Load">
      <${Load} points=${points} commits=${commits} />
      <${Answering} points=${points} now=${now} model=${model} />
    <//>
    <${History} history=${history} model=${model} started=${server.started} now=${now} openDialog=${openDialog} />`;
}
