// Dialogs of an operator's changes: each shows the effect, asks for a reason, and shows the server's error.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm/preact.js";
import { Facts, Id, Labels, verified } from "./parts.js";

const none = html`<span class="muted">nothing</span>`;
const shown = (weights) =>
  weights ? html`<${Id} id=${weights.weights_id} /><${Labels} labels=${weights.labels} />` : none;

/** By call: the title, the button, the rows that show the effect, and the request's fields, if any. */
const CHANGES = {
  commit: {
    title: "Commit the staged weights?",
    button: "Commit",
    rows: ({ served, staged }) => [
      ["Serves now", shown(served)],
      ["Will serve", shown(staged)],
      ["Verified", verified(staged.verified)],
      ["Non-finite", staged.nonfinite.join(", ")],
    ],
    body: (model) => ({ expect: model.staged.weights_id }),
  },
  discard: {
    title: "Discard what is staged?",
    button: "Discard",
    rows: ({ served, staged }) => [
      ["Gives up", staged?.weights_id ? shown(staged) : (staged?.source ?? none)],
      ["Serves on", shown(served)],
    ],
  },
  rollback: {
    title: "Roll back?",
    button: "Roll back",
    rows: ({ served, staged, following }, target) => [
      ["Serves now", shown(served)],
      ["Will serve", shown(target)],
      ["From", target.source],
      ["Verified", following && "before anything is written, unless they are still in memory"],
      ["Gives up", staged && `what is staged: ${staged.source}`],
    ],
    body: (_, target) => ({ to: target.weights_id }),
  },
  hold: {
    title: "Hold promotions?",
    button: "Hold",
    rows: ({ served }) => [
      ["Serves on", shown(served)],
      ["Then", "nothing new is promoted, in any process that follows the desired store, until the hold is released"],
    ],
  },
  release: {
    title: "Release the hold?",
    button: "Release",
    rows: ({ served, following }) => [
      ["Serves now", shown(served)],
      ["Held", [following.held_by && `by ${following.held_by}`, following.held_why].filter(Boolean).join(": ")],
      ["Then", "new weights are promoted again"],
    ],
  },
};

const seenState = ({ served, staged, following }) =>
  JSON.stringify([served?.weights_id, staged?.weights_id, staged?.source, following?.revision]);

function writtenTo(call, { following }) {
  if (call === "discard") return "";
  if (!following) return "This process alone: it follows no desired store.";
  return `${following.desired_store}, which has revision ${following.revision}`;
}

/** A dialog for one change of a model. change: the call, and for a rollback its target. send: posts the request. */
export function Confirm({ change, model, send, close }) {
  const { title, button, rows, body = () => ({}) } = CHANGES[change.call];
  const dialog = useRef();
  const [seen] = useState(() => seenState(model));
  const [before] = useState(model); // as it was when the dialog was opened
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const outdated = !busy && seen !== seenState(model); // an error says more: it may be what has changed
  const holds = change.call === "rollback" && before.following;
  useLayoutEffect(() => dialog.current.showModal(), []);

  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const hold = holds ? { hold: form.has("hold") } : {};
    const revision = before.following ? { revision: before.following.revision } : {};
    setBusy(true);
    setError(null);
    try {
      await send({ ...body(before, change.target), why: form.get("why"), ...hold, ...revision });
      dialog.current.close();
    } catch (error) {
      setError(error);
      setBusy(false);
    }
  };

  return html`<dialog ref=${dialog} aria-labelledby="confirm-title" onClose=${close}>
    <form onSubmit=${submit}>
      <h2 id="confirm-title">${title}</h2>
      <${Facts}
        rows=${[["Model", before.name], ...rows(before, change.target), ["Written to", writtenTo(change.call, before)]]}
      />
      <label class="field">
        <span>Why <span class="muted">(for the log, and whoever comes after you)</span></span>
        <textarea name="why" rows="2" maxlength="1000" autofocus></textarea>
      </label>
      ${
        holds &&
        html`<label>
        <input type="checkbox" name="hold" checked /> and hold: promote nothing until it is released
      </label>`
      }
      ${
        outdated &&
        !error &&
        html`<p class="note mark" role="alert">Something else has changed meanwhile. Cancel, and look again.</p>`
      }
      ${error && html`<p class="note bad" role="alert">${error.kind ? `${error.kind}: ` : ""}${error.message}</p>`}
      <div class="buttons">
        <button type="button" class="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button class="button strong" disabled=${busy || outdated}>
          ${busy ? "Waiting for the server…" : button}
        </button>
      </div>
    </form>
  </dialog>`;
}
