// The owner and the workers of a server: served weights, start time, and number of answers of each.

import { html } from "./vendor/htm/preact.js";
import { Id, Section, Table, When, number } from "./parts.js";

const SILENT = 3; // seconds; processes report each second

function state({ ready, since, heard }, now) {
  if (heard > since && now - heard > SILENT) return ["bad", `silent for ${Math.round(now - heard)} s`];
  return ready ? ["good", "ready"] : ["mark", "begins"];
}

const COLUMNS = {
  Process: "text",
  State: "text",
  Generation: "",
  Weights: "text",
  Answered: "",
  Since: "text",
  Pid: "",
};

function row(process, name, now) {
  const serving = process.models[name];
  const [tone, text] = state(process, now);
  return [
    process.name,
    html`<span class=${`badge ${tone}`}>${text}</span>`,
    serving?.generation,
    serving?.weights_id && html`<${Id} id=${serving.weights_id} />`,
    process.role !== "owner" && number(process.answered),
    html`<${When} at=${process.since} now=${now} />`,
    process.pid,
  ];
}

/** The section of processes, if there are several. name: of the model. */
export function Processes({ processes, name, now }) {
  if (processes.length < 2) return null;
  const rows = processes.map((process) => [process.name, row(process, name, now)]);
  return html`<${Section} id="processes" title="Processes">
    <${Table} label="Processes" columns=${COLUMNS} rows=${rows} />
  <//>`;
}
