// Requests to the server, and whether it answers.
//
// Owns: addresses, errors, the banner's state. Does not own: server-sent events (stream.js).

/** An answer of the server that is an error: `status` and its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const listeners = new Set();
let reachable = true;

/** Calls `fn(reachable, words)` whenever the server stops or begins to answer. */
export function onReachable(fn) {
  listeners.add(fn);
}

export function tellReachable(now, words = "The server does not answer. Trying again ...") {
  if (now === reachable && now) return;
  reachable = now;
  for (const fn of listeners) fn(now, words);
}

function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

async function asked(path, params, signal) {
  let response;
  try {
    response = await fetch(address(path, params), { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name !== "AbortError") tellReachable(false);
    throw error;
  }
  tellReachable(true);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Refused(response.status, body.error ?? `The server says ${response.status}.`);
}

/** The JSON at a path. Raises Refused, or TypeError where the server does not answer. */
export async function get(path, params, signal) {
  return (await asked(path, params, signal)).json();
}

/** The same as text. */
export async function getText(path, params, signal) {
  return (await asked(path, params, signal)).text();
}

/** The path of something of a run. */
export function of(run, ...parts) {
  return ["/api/runs", encodeURIComponent(run), ...parts.map(encodeURIComponent)].join("/");
}

/** One request at a time: a newer one gives the older one up. null where it was given up. */
export class Latest {
  #under = null;

  async get(path, params) {
    this.#under?.abort();
    const own = (this.#under = new AbortController());
    try {
      return await get(path, params, own.signal);
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  }

  stop() {
    this.#under?.abort();
  }
}
