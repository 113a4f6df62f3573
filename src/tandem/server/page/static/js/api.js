// The server, as this page asks it: the key, errors as sentences, streams of events.

let key = "";
let askForKey = async () => false;

/** Tell how the key is asked for: an async function that returns whether one was given. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** Keep a key for later requests; in memory alone. */
export function setKey(value) {
  key = value.trim();
}

export function hasKey() {
  return key !== "";
}

/** An answer that is an error, in words for a person. */
export class ServerError extends Error {
  constructor(sentence, { status = 0, code = "", retryAfter = null } = {}) {
    super(sentence);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const OPENINGS = {
  0: "The server cannot be reached",
  400: "The server did not accept this",
  401: "The server asks for a key",
  403: "The server does not allow this",
  404: "The server does not have this",
  408: "The request took too long to arrive",
  409: "This contradicts what the server is doing",
  413: "The request is too large",
  429: "The server has too much to do",
  500: "The server failed",
  503: "The server cannot answer now",
  504: "The time for this request was over",
};

/** Make a sentence of a status and what the server says: `The server …: reason.` */
export function describe(status, message, retryAfter = null) {
  const opening = OPENINGS[status] ?? (status >= 500 ? OPENINGS[500] : OPENINGS[400]);
  const reason = (message || "").trim().replace(/[.\s]+$/, "");
  const later = retryAfter ? ` Try again in ${retryAfter} s.` : "";
  return `${opening}${reason ? `: ${reason}` : ""}.${later}`;
}

async function readError(response) {
  let message = "";
  let code = "";
  try {
    const { error } = await response.json();
    message = error.message;
    code = error.code ?? "";
  } catch {
    message = response.statusText;
  }
  const retryAfter = response.headers.get("retry-after");
  return new ServerError(describe(response.status, message, retryAfter), {
    status: response.status,
    code,
    retryAfter,
  });
}

/** Ask the server; returns the response of a success, asks for the key where one is wanted. */
export async function ask(path, { body = null, signal = null, quiet = false } = {}) {
  for (;;) {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const options = { headers, signal, cache: "no-store", credentials: "omit" };
    if (body !== null) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(describe(0, "it may have stopped, or the network is down"));
    }
    if (response.ok) return response;
    const failure = await readError(response);
    if (response.status === 401 && !quiet && (await askForKey(failure))) continue;
    throw failure;
  }
}

/** Ask for JSON. */
export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** Yield the JSON of each server-sent event until `[DONE]`; an error among them is thrown. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The answer broke off: the connection to the server was lost.");
      rest += value;
      for (let end; (end = rest.indexOf("\n")) >= 0; ) {
        const line = rest.slice(0, end).trimEnd();
        rest = rest.slice(end + 1);
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) {
          throw new ServerError(describe(Number(event.error.code) || 500, event.error.message));
        }
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The answer broke off: the connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
