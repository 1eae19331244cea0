// The keeper and the workers of a server: served weights, start time, and number of answers of each.

import { html } from "./vendor/htm/preact.js";
import { Id, Section, When, number } from "./parts.js";

const SILENT = 3; // seconds; processes report each second

function state({ ready, since, heard }, now) {
  if (heard > since && now - heard > SILENT) return ["bad", `silent for ${Math.round(now - heard)} s`];
  return ready ? ["good", "ready"] : ["mark", "begins"];
}

function Row({ process, name, now }) {
  const serving = process.models[name];
  const [tone, text] = state(process, now);
  return html`<tr>
    <th scope="row">${process.name}</th>
    <td><span class=${`badge ${tone}`}>${text}</span></td>
    <td>${serving?.generation ?? ""}</td>
    <td>${serving?.weights_id && html`<${Id} id=${serving.weights_id} />`}</td>
    <td>${process.role === "keeper" ? "" : number(process.answered)}</td>
    <td><${When} at=${process.since} now=${now} /></td>
    <td>${process.pid}</td>
  </tr>`;
}

/** The section of processes, if there are several. name: of the model. */
export function Processes({ processes, name, now }) {
  if (processes.length < 2) return null;
  return html`<${Section} id="processes" title="Processes">
    <div class="wide" tabindex="0" role="group" aria-label="Processes">
      <table>
        <thead>
          <tr>
            ${["Process", "State", "Generation", "Weights", "Answered", "Since", "Pid"].map(
              (title) => html`<th key=${title} scope="col">${title}</th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${processes.map((process) => html`<${Row} key=${process.name} process=${process} name=${name} now=${now} />`)}
        </tbody>
      </table>
    </div>
  <//>`;
}
