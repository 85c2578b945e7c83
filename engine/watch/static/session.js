// What the views of one run have in common: the run, the selected Steps, the newest figures.
//
// Owns: that state and who is told of a change. Does not own: any element.
//
// Topics: run, figures, step, selection (while a brush moves), settled (once it rests), view, live.

import { Latest, of } from "./api.js";
import { Stream } from "./stream.js";

/** Milliseconds for which a selection does not change before anything is asked for it. */
const SETTLES = 140;

export class Session {
  #topics = new Map();
  #flow = new Latest();
  #run = new Latest();
  /** What events have told of the run since it was last asked for. */
  #since = {};
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
    this.#run.stop();
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
    this.newest = data;
    if (!this.selection && this.live) this.#show(this.newest);
  }

  #stepped({ step, metrics }) {
    const back = step < (this.run.step ?? 0);
    const switches = "relayout/switches";
    const relaid = metrics[switches] !== undefined && metrics[switches] !== this.metrics[switches];
    this.#note({ step });
    this.metrics = metrics;
    this.tell("step");
    if (back) this.#again();
    if (relaid) this.reload(); // another layout: other Workers, and why
  }

  /** The run went back to a checkpoint, or was resumed: what was asked for is of other Steps. */
  #again() {
    for (const topic of ["view", "settled"]) this.tell(topic);
  }

  #changed(data) {
    const before = this.run.state;
    this.#note(data);
    if (this.running || before !== "running") return this.tell("run");
    this.#stream?.close();
    this.live = false;
    return this.reload();
  }

  /** Notes what an event tells of the run. */
  #note(data) {
    Object.assign(this.run, data);
    Object.assign(this.#since, data);
  }

  /** Asks for the run again: after a gap, and as it ends. What events tell meanwhile is newer. */
  async reload() {
    this.#since = {};
    const run = await this.#run.get(of(this.name)).catch(() => null);
    if (!run || this.#closed) return;
    this.run = { ...run, ...this.#since };
    this.tell("run");
    this.tell("step");
    this.refreshFigures();
  }

  #show(figures) {
    this.figures = figures;
    this.tell("figures");
  }

  /** The figures of the selected Steps; without any, of what the server shows of the run now. */
  async refreshFigures() {
    const chosen = this.selection;
    if (!chosen && this.live && this.newest) return this.#show(this.newest);
    const found = await this.#flow.get(of(this.name, "flow"), chosen ?? {}).catch(() => null);
    if (this.#closed || chosen !== this.selection) return undefined;
    if (!chosen && this.live && this.newest) return this.#show(this.newest); // it came meanwhile
    if (found?.flow) this.#show(found);
    else if (!this.figures) this.tell("figures");
    return undefined;
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

  /** Follows the run: no selection, all Steps, the last seconds. */
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
