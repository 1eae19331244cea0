// The operators' page: asks for a token, listens to the server, and shows one model.

import { html, render, useEffect, useReducer, useState } from "./vendor/htm/preact.js";
import { Confirm } from "./changes.js";
import { call, listen } from "./connection.js";
import { Model } from "./model.js";
import { ago } from "./parts.js";

const KEY = "weightswap-token";
const MOST_POINTS = 600;
const HISTORY_EVENTS = new Set([ // after which the history is read again
  "committed",
  "rolled back",
  "refused",
  "skipped",
  "unreachable",
  "failed",
  "cancelled",
  "discarded",
]);

/** Reduce the page's state by a message of the event stream, or a response. */
function reduce(state, [kind, data]) {
  switch (kind) {
    case "status":
      return { ...state, server: data, connected: true };
    case "changed":
      return { ...state, server: withModel(state.server, data.model, data.status) };
    case "away":
      return { ...state, connected: false };
    case "staging":
      return { ...state, server: withModel(state.server, data.model, { staging: data }) };
    case "load":
      return { ...state, load: { ...state.load, [data.model]: withPoints(state.load[data.model], data.points) } };
    case "history":
      return { ...state, histories: { ...state.histories, [data.model]: data.history } };
    case "event":
      return HISTORY_EVENTS.has(data.kind) ? { ...state, changes: state.changes + 1 } : state;
  }
  return state;
}

function withModel(server, name, fields) {
  return { ...server, models: server.models.map((model) => (model.name === name ? { ...model, ...fields } : model)) };
}

function withPoints(before = [], points) {
  const known = new Set(before.map(({ time }) => time));
  const all = [...before, ...points.filter(({ time }) => !known.has(time))].slice(-MOST_POINTS);
  let next = Infinity; // the server's clock may have been set back: what lies after a later point goes
  return all.reduceRight((kept, point) => {
    if (point.time >= next) return kept;
    next = point.time;
    return [point, ...kept];
  }, []);
}

function SignIn({ why, enter }) {
  const [error, setError] = useState(why);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const token = form.get("token").trim();
    setBusy(true);
    try {
      if (!/^[!-~]+$/.test(token)) throw new Error("a token has letters, digits and signs, and no spaces");
      await call(token, "admin/status");
      enter(token, form.has("keep"));
    } catch (error) {
      setError(error.name === "TypeError" ? "the server does not answer" : error.message);
      setBusy(false);
    }
  };
  return html`<main class="sign-in">
    <h1>weightswap</h1>
    <section>
      <form onSubmit=${submit}>
        <label class="field">
          <span>Token</span>
          <input name="token" type="password" required autofocus autocomplete="off" spellcheck="false" />
        </label>
        <p class="hint">A line of the server's <code>--admin-token-file</code>, without the name before it.</p>
        <label><input type="checkbox" name="keep" /> keep it until this tab is closed</label>
        ${error && html`<p class="note bad" role="alert">${error}</p>`}
        <div class="buttons"><button class="button strong" disabled=${busy}>Enter</button></div>
      </form>
    </section>
  </main>`;
}

function selected(models) {
  const name = decodeURIComponent(location.hash.slice(1));
  return models.find((model) => model.name === name) ?? models[0];
}

function Top({ server, connected, model, leave }) {
  return html`<header class="top">
    <h1>${model.name}</h1>
    <div class="actions">
      <span class=${`badge ${connected ? "good" : "bad"}`} role="status">
        ${connected ? "live" : "no connection; trying again"}
      </span>
      <button type="button" class="button" onClick=${leave}>Forget the token</button>
    </div>
    <p class="subtitle">
      weightswap ${server.version}, started ${ago(server.time - server.started)}${server.stopping ? ", stopping" : ""}
    </p>
    ${
      server.models.length > 1 &&
      html`<nav aria-label="Models">
      ${server.models.map(
        ({ name }) =>
          html`<a
            key=${name}
            href=${`#${encodeURIComponent(name)}`}
            aria-current=${name === model.name ? "page" : undefined}
            >${name}</a
          >`,
      )}
    </nav>`
    }
  </header>`;
}

function doneText({ model, receipt }, name) {
  if (!receipt) return `${model}: ${name} is done.`;
  return `${model}: ${name} is done; generation ${receipt.generation} serves ${receipt.weights_id.slice(0, 12)}.`;
}

function Desk({ token, leave }) {
  const start = { server: null, load: {}, histories: {}, connected: false, changes: 0 };
  const [{ server, load, histories, connected, changes }, dispatch] = useReducer(reduce, start);
  const [, rerender] = useReducer((count) => count + 1, 0);
  const [change, setChange] = useState(null);
  const [done, setDone] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    listen(token, (kind, data) => dispatch([kind, data]), ended.signal).catch((error) => leave(error.message));
    addEventListener("hashchange", rerender);
    return () => {
      ended.abort();
      removeEventListener("hashchange", rerender);
    };
  }, []);
  const model = server && selected(server.models);
  const name = model?.name;
  useEffect(() => {
    if (!name || !connected) return;
    const path = `admin/models/${encodeURIComponent(name)}/history`;
    call(token, path).then(
      (history) => dispatch(["history", { model: name, history }]),
      () => {},
    );
  }, [name, connected, changes, model?.served?.generation, model?.following?.revision]);
  useEffect(() => {
    if (model) document.title = `${name}: generation ${model.served?.generation ?? "none"} · weightswap`;
  });
  const send = async (body) => {
    const changed = await call(token, `admin/models/${encodeURIComponent(change.model)}/${change.call}`, body);
    dispatch(["changed", changed]);
    setDone(doneText(changed, change.call));
  };
  const openDialog = (requested) => {
    setDone("");
    setChange({ ...requested, model: name, at: performance.now() });
  };
  if (!model) return html`<main><p class="hint">${connected ? "No models." : "Connecting…"}</p></main>`;
  // a dialog's close event may come after the next dialog was opened
  const close = () => setChange((current) => (current === change ? null : current));
  const changedModel = change && server.models.find(({ name }) => name === change.model);
  return html`<${Top} server=${server} connected=${connected} model=${model} leave=${() => leave("")} />
    <main class=${connected ? "" : "stale"}>
      <div role="status">${done && html`<p class="note good">${done}</p>`}</div>
      <${Model}
        key=${name}
        model=${model}
        server=${server}
        points=${load[name] ?? []}
        history=${histories[name] ?? null}
        now=${server.time}
        openDialog=${openDialog}
      />
    </main>
    ${changedModel && html`<${Confirm} key=${change.at} ...${{ change, send, close }} model=${changedModel} />`}`;
}

function Page() {
  const [token, setToken] = useState(sessionStorage.getItem(KEY));
  const [why, setWhy] = useState("");
  const enter = (token, keep) => {
    if (keep) sessionStorage.setItem(KEY, token);
    setToken(token);
  };
  const leave = (reason) => {
    sessionStorage.removeItem(KEY);
    setWhy(reason);
    setToken(null);
  };
  return token ? html`<${Desk} token=${token} leave=${leave} />` : html`<${SignIn} why=${why} enter=${enter} />`;
}

render(html`<${Page} />`, document.body);
