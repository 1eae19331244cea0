// A canary beside the served weights: measures of both, differences between their answers, and its rules.

import { html } from "./vendor/htm/preact.js";
import { Facts, Id, Section, When, duration, number } from "./parts.js";

const share = (value) => `${number(100 * value)} %`;
const MEASURED = [
  ["Requests", "requests", number],
  ["Errors", "errors", share],
  ["Non-finite answers", "nonfinite", share],
  ["p50", "p50", duration],
  ["p99", "p99", duration],
];

const formatted = (value, format) => (value === null || value === undefined ? "–" : format(value));

function Sides({ values }) {
  return html`<table>
    <thead>
      <tr>
        <td></td>
        <th scope="col">canary</th>
        <th scope="col">served</th>
      </tr>
    </thead>
    <tbody>
      ${MEASURED.map(
        ([name, field, format]) =>
          html`<tr key=${field}>
            <th scope="row">${name}</th>
            <td>${formatted(values[field], format)}</td>
            <td>${formatted(values[`served_${field}`], format)}</td>
          </tr>`,
      )}
    </tbody>
  </table>`;
}

function differences({ compared, differing, max_abs, max_rel }, tolerance) {
  if (!compared) return "";
  const most = `at most ${formatted(max_abs, number)}, or ${formatted(max_rel, share)}`;
  const many = formatted(differing, share);
  return `${number(compared)} compared, ${many} differ by more than ${share(tolerance)}; ${most}`;
}

/** The section of a canary, if there is one. Its buttons are in the section of staged weights. */
export function Canary({ canary, now }) {
  if (!canary) return null;
  const { values } = canary;
  const held = canary.promote_held > 0 ? `, true for ${duration(canary.promote_held)}` : "";
  const badge = html`<span class="badge mark">answers ${share(canary.share)}${canary.shadow ? ", shadow" : ""}</span>`;
  return html`<${Section} id="canary" title="Canary" actions=${badge}>
    <div class="columns">
      <${Sides} values=${values} />
      <${Facts}
        rows=${[
          ["Weights", html`<${Id} id=${canary.weights_id} />`],
          ["Since", html`<${When} at=${canary.since} now=${now} />`],
          ["Promoted if", canary.promote_if ? `${canary.promote_if}${held}` : "an operator does it"],
          ["Aborted if", canary.abort_if],
          ["Answers", differences(values, canary.tolerance)],
          ["Left out", canary.skipped > 0 && `${number(canary.skipped)} that came too fast`],
        ]}
      />
    </div>
  <//>`;
}
