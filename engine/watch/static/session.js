// What the views of one run have in common: the run, the selected Steps, the newest figures.
//
// Owns: that state and who is told of a change. Does not own: any element.
//
// Topics: run, figures, step, selection (while a brush moves), settled (once it rests), view, live.

import { get, Latest, of } from "./api.js";
import { Stream } from "./stream.js";

/** Milliseconds for which a selection does not change before anything is asked for it. */
const SETTLES = 140;

export class Session {
  #topics = new Map();
  #flow = new Latest();
  #stream = null;
  #closed = false;
  #settling = 0;

  constructor(run) {
    this.name = run.name;
    this.run = run;
    this.metrics = {};
    /** Selected Steps, `{from, to}`, or null. */
    this.selection = null;
    /** Steps on the axis, or null for all. */
    this.view = null;
    this.live = run.state === "running";
    /** `{flow, sentences, critical, words}` as shown now. */
    this.figures = null;
    this.newest = null;
  }

  get running() {
    return this.run.state === "running";
  }

  /** The Steps that there are; at least one, so that an axis has a length. */
  get last() {
    return Math.max(1, this.run.step ?? 0);
  }

  on(topic, fn) {
    if (!this.#topics.has(topic)) this.#topics.set(topic, new Set());
    this.#topics.get(topic).add(fn);
    return () => this.#topics.get(topic).delete(fn);
  }

  tell(topic) {
    if (!this.#closed) for (const fn of this.#topics.get(topic) ?? []) fn();
  }

  /** Begins to listen where the run goes on. */
  open() {
    if (this.running) this.#listen();
    this.refreshFigures();
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#settling);
    this.#stream?.close();
    this.#flow.stop();
  }

  #listen() {
    const again = () => this.reload();
    this.#stream = new Stream(this.name, (name, data) => this.#heard(name, data), again);
  }

  #heard(name, data) {
    if (name === "flow") this.#flowed(data);
    else if (name === "step") this.#stepped(data);
    else this.#changed(data);
  }

  #flowed(data) {
    this.newest = { ...data, words: "the last second" };
    if (!this.selection && this.live) this.#show(this.newest);
  }

  #stepped({ step, metrics }) {
    const back = step < (this.run.step ?? 0);
    this.run.step = step;
    this.metrics = metrics;
    this.tell("step");
    if (back) this.#again();
  }

  /** The run went back to a checkpoint, or was resumed: what was asked for is of other Steps. */
  #again() {
    for (const topic of ["view", "settled"]) this.tell(topic);
  }

  #changed(data) {
    const before = this.run.state;
    Object.assign(this.run, data);
    if (this.running || before !== "running") return this.tell("run");
    this.#stream?.close();
    this.live = false;
    return this.reload();
  }

  /** Asks for the run again: after a gap, and as it ends. */
  async reload() {
    const run = await get(of(this.name)).catch(() => null);
    if (!run || this.#closed) return;
    this.run = run;
    this.tell("run");
    this.tell("step");
    this.refreshFigures();
  }

  #show(figures) {
    this.figures = figures;
    this.tell("figures");
  }

  /** The figures of the selected Steps; of a run that has ended, of all its Steps. */
  async refreshFigures() {
    const chosen = this.selection ?? (this.running ? null : { from: 1, to: this.last });
    if (!chosen && this.live && this.newest) return this.#show(this.newest);
    const words = this.#words(chosen);
    const found = await this.#flow.get(of(this.name, "flow"), chosen ?? {}).catch(() => null);
    if (!this.#closed && found?.flow) this.#show({ ...found, words });
    else if (!this.#closed && !this.figures) this.tell("figures");
    return undefined;
  }

  #words(chosen) {
    if (!chosen) return "the last Step";
    if (!this.selection) return `all ${this.last} Steps`;
    const { from, to } = chosen;
    return from === to ? `Step ${from}` : `Steps ${from} to ${to}`;
  }

  /** Selects Steps in every view; null clears. */
  select(chosen) {
    const same = JSON.stringify(chosen) === JSON.stringify(this.selection);
    if (same) return;
    this.selection = chosen;
    if (chosen) this.live = false;
    this.tell("live");
    this.tell("selection");
    clearTimeout(this.#settling);
    this.#settling = setTimeout(() => this.#settled(), SETTLES);
  }

  /** A brush rests: now requests are worth it. */
  #settled() {
    this.tell("settled");
    this.refreshFigures();
  }

  /** Shows these Steps on the axis; null: all. */
  zoom(view) {
    this.view = view;
    if (view) this.live = false;
    this.tell("live");
    this.tell("view");
  }

  /** Follows the run: no selection, all Steps, the last second. */
  follow() {
    this.live = this.running;
    this.view = null;
    this.selection = null;
    for (const topic of ["live", "selection", "settled", "view"]) this.tell(topic);
    this.refreshFigures();
  }

  unfollow() {
    this.live = false;
    this.tell("live");
  }
}
