// The page: asks for a token, listens to the server, and shows one model.

import { html, render, useEffect, useReducer, useState } from "./vendor/htm/preact.js";
import { Confirm } from "./changes.js";
import { call, listen } from "./connection.js";
import { Model } from "./model.js";
import { ago } from "./parts.js";

const KEY = "weightswap-token";
const MOST_POINTS = 600;
const TOLD = new Set([
  "committed",
  "rolled back",
  "refused",
  "skipped",
  "unreachable",
  "failed",
  "cancelled",
  "discarded",
]);

/** What the page knows, after one more thing: of the stream, or an answer. */
function known(state, [kind, data]) {
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
      return TOLD.has(data.kind) ? { ...state, changes: state.changes + 1 } : state;
  }
  return state;
}

function withModel(server, name, fields) {
  return { ...server, models: server.models.map((model) => (model.name === name ? { ...model, ...fields } : model)) };
}

function withPoints(before = [], points) {
  const last = before.at(-1)?.time ?? 0;
  return [...before, ...points.filter(({ time }) => time > last)].slice(-MOST_POINTS);
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
    } catch (refused) {
      setError(refused.name === "TypeError" ? "the server does not answer" : refused.message);
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

function said({ model, receipt }, name) {
  if (!receipt) return `${model}: ${name} is done.`;
  return `${model}: ${name} is done; generation ${receipt.generation} serves ${receipt.weights_id.slice(0, 12)}.`;
}

function Desk({ token, leave }) {
  const start = { server: null, load: {}, histories: {}, connected: false, changes: 0 };
  const [{ server, load, histories, connected, changes }, know] = useReducer(known, start);
  const [, turn] = useReducer((count) => count + 1, 0);
  const [asked, ask] = useState(null);
  const [done, setDone] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    listen(token, (kind, data) => know([kind, data]), ended.signal).catch((error) => leave(error.message));
    addEventListener("hashchange", turn);
    return () => {
      ended.abort();
      removeEventListener("hashchange", turn);
    };
  }, []);
  const model = server && selected(server.models);
  const name = model?.name;
  useEffect(() => {
    if (!name || !connected) return;
    const path = `admin/models/${encodeURIComponent(name)}/history`;
    call(token, path).then(
      (history) => know(["history", { model: name, history }]),
      () => {},
    );
  }, [name, connected, changes, model?.served?.generation, model?.following?.revision]);
  useEffect(() => {
    if (model) document.title = `${name}: generation ${model.served?.generation ?? "none"} · weightswap`;
  });
  const send = async (change, body) => {
    const changed = await call(token, `admin/models/${encodeURIComponent(asked.model)}/${change}`, body);
    know(["changed", changed]);
    setDone(said(changed, change));
  };
  const open = (change) => {
    setDone("");
    ask({ ...change, model: name, at: performance.now() });
  };
  if (!model) return html`<main><p class="hint">${connected ? "No models." : "Connecting…"}</p></main>`;
  const close = () => ask((now) => (now === asked ? null : now)); // a dialog says so late
  const about = asked && server.models.find((each) => each.name === asked.model);
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
        ask=${open}
      />
    </main>
    ${about && html`<${Confirm} key=${asked.at} asked=${asked} model=${about} send=${send} close=${close} />`}`;
}

function Page() {
  const [token, setToken] = useState(sessionStorage.getItem(KEY));
  const [why, setWhy] = useState("");
  const enter = (given, keep) => {
    if (keep) sessionStorage.setItem(KEY, given);
    setToken(given);
  };
  const leave = (reason) => {
    sessionStorage.removeItem(KEY);
    setWhy(reason);
    setToken(null);
  };
  return token ? html`<${Desk} token=${token} leave=${leave} />` : html`<${SignIn} why=${why} enter=${enter} />`;
}

render(html`<${Page} />`, document.body);
