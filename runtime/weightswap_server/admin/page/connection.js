// Calls of the admin plane, and its event stream. A token goes into headers, never into a URL.

const SILENCE = 10_000; // ms: the stream sends something each second
const LONGEST_WAIT = 8_000;

/** A request that the server has refused, with its message. */
export class Refused extends Error {
  constructor(status, document) {
    super(document.error);
    this.status = status;
    this.kind = document.kind;
  }
}

async function send(token, path, options) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { cache: "no-store", headers, ...options });
  if (!response.ok) {
    const document = await response
      .json()
      .catch(() => ({ error: `the server answers with status ${response.status}`, kind: "" }));
    throw new Refused(response.status, document);
  }
  return response;
}

/** Return the document of a GET, or with a body, of a POST. Throws Refused, and TypeError if there is no server. */
export async function call(token, path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  return (await send(token, path, options)).json();
}

/** Pass on each event, and "away" when the stream ends; reconnect until `signal`. Throws Refused for a bad token. */
export async function listen(token, onEvent, signal, path = "admin/events?load") {
  let wait = 0;
  while (!signal.aborted) {
    const silence = new AbortController();
    try {
      const response = await send(token, path, { signal: AbortSignal.any([signal, silence.signal]) });
      for await (const [kind, data] of events(response.body, silence)) {
        wait = 0;
        onEvent(kind, data);
      }
    } catch (error) {
      if (error.status === 401) throw error;
    }
    if (signal.aborted) return;
    onEvent("away");
    wait = Math.min(Math.max(2 * wait, 500), LONGEST_WAIT);
    await new Promise((resume) => setTimeout(resume, wait));
  }
}

async function* events(body, silence) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const timer = setTimeout(() => silence.abort(), SILENCE);
    const { value, done } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const match = /^event: (.+)\ndata: (.*)$/.exec(block);
      if (match) yield [match[1], JSON.parse(match[2])];
    }
  }
}
