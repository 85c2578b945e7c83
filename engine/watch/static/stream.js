// The server-sent events of one run, opened again by itself when the server was away.
//
// Owns: the connection. Does not own: what the events mean (session.js).

import { get, of, Refused, tellReachable } from "./api.js";

const FIRST = 500;
const LONGEST = 5000;

/** Calls `heard(name, data)` for each event until `close()`. `again()`: connected after a gap. */
export class Stream {
  #run;
  #heard;
  #again;
  #source = null;
  #timer = 0;
  #wait = FIRST;
  #gap = false;

  constructor(run, heard, again) {
    [this.#run, this.#heard, this.#again] = [run, heard, again];
    this.#open();
  }

  close() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  #open() {
    const source = (this.#source = new EventSource(of(this.#run, "stream")));
    for (const name of ["flow", "step", "state"]) {
      source.addEventListener(name, (event) => this.#heard(name, JSON.parse(event.data)));
    }
    source.addEventListener("open", () => this.#opened());
    source.addEventListener("error", () => this.#lost(source));
  }

  #opened() {
    this.#wait = FIRST;
    tellReachable(true);
    if (this.#gap) this.#again();
    this.#gap = false;
  }

  #lost(source) {
    source.close();
    if (source !== this.#source) return;
    this.#gap = true;
    this.#timer = setTimeout(() => this.#retry(), this.#wait);
    this.#wait = Math.min(this.#wait * 1.6, LONGEST);
  }

  /** Asks for the run first: a server that answers, but not with this run, is told apart. */
  async #retry() {
    try {
      await get(of(this.#run));
    } catch (error) {
      if (error instanceof Refused) tellReachable(false, refusal(error));
      if (this.#source) this.#lost(this.#source);
      return;
    }
    if (this.#source) this.#open();
  }
}

function refusal(error) {
  if (error.status !== 401 && error.status !== 403) return error.message;
  return "The server was started anew with another token. Open the address that it printed.";
}
