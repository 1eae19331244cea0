// Calls of the admin plane, and its stream of events. A token goes into headers, never into an address.

const SILENCE = 10_000; // ms: the stream says something each second
const LONGEST_WAIT = 8_000;

/** What the server has refused, in its own words. */
export class Refused extends Error {
  constructor(status, said) {
    super(said.error);
    this.status = status;
    this.kind = said.kind;
  }
}

async function send(token, path, options) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { cache: "no-store", headers, ...options });
  if (!answer.ok) {
    const said = await answer
      .json()
      .catch(() => ({ error: `the server answers with status ${answer.status}`, kind: "" }));
    throw new Refused(answer.status, said);
  }
  return answer;
}

/** A document: of a GET, or where there is a body, of a POST. Throws Refused, and TypeError where nobody answers. */
export async function call(token, path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  return (await send(token, path, options)).json();
}

/** Tell each event, and "away" when the stream ends; connect again until `signal`. Throws Refused for a bad token. */
export async function listen(token, tell, signal, path = "admin/events?load") {
  let wait = 0;
  while (!signal.aborted) {
    const silence = new AbortController();
    try {
      const answer = await send(token, path, { signal: AbortSignal.any([signal, silence.signal]) });
      for await (const [kind, data] of events(answer.body, silence)) {
        wait = 0;
        tell(kind, data);
      }
    } catch (error) {
      if (error.status === 401) throw error;
    }
    if (signal.aborted) return;
    tell("away");
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
      const found = /^event: (.+)\ndata: (.*)$/.exec(block);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}
