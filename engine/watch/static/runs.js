// The list of runs.

import { get } from "./api.js";
import { el, empty } from "./dom.js";
import { count, number, seconds, when } from "./format.js";

const EVERY = 5000;

export class Runs {
  #timer = 0;
  #chosen = new Set();
  #body = el("tbody");
  #place = el("div", { class: "scroll" }, empty("Loading ..."));
  #compare;
  #rows = new Map();

  constructor() {
    document.title = "runs - dataflow watch";
    this.#compare = el("button", {
      type: "button",
      text: "Compare",
      on: { click: () => this.#go() },
    });
    this.element = el(
      "section",
      { class: "card", "aria-labelledby": "runs-title" },
      el(
        "div",
        { class: "bar" },
        el("h2", { text: "Runs", id: "runs-title" }),
        el("span", { class: "soft", text: "Choose two or more to compare them" }),
        el("span", { class: "push" }),
        this.#compare,
      ),
      this.#place,
    );
    this.headline = [el("h1", { text: "Runs" })];
    this.#count();
    this.#load();
  }

  close() {
    clearTimeout(this.#timer);
  }

  async #load() {
    const found = await get("/api/runs").catch(() => null);
    if (found) this.#show(Array.isArray(found) ? found : found.runs);
    this.#timer = setTimeout(() => this.#load(), EVERY);
  }

  #show(runs) {
    if (!runs.length) {
      this.#place.replaceChildren(
        empty("There is no run here yet. `dataflow run GRAPH` makes one; it appears by itself."),
      );
      return;
    }
    const numbers = { class: "number" };
    if (!this.#body.isConnected) {
      const heads = [
        ["", ""],
        ["Run", ""],
        ["Graph", "wide"],
        ["State", ""],
        ["Step", "number"],
        ["Reward", "number"],
        ["Began", "wide"],
        ["Took", "number wide"],
      ];
      const row = heads.map(([text, kind], i) =>
        i ? el("th", { scope: "col", class: kind, text }) : el("td", { class: numbers.x }),
      );
      this.#place.replaceChildren(
        el("table", { class: "runs" }, el("thead", {}, el("tr", {}, row)), this.#body),
      );
    }
    const rows = runs.map((run) => this.#row(run));
    const same =
      rows.length === this.#body.children.length &&
      rows.every((row, i) => row === this.#body.children[i]);
    if (!same) this.#body.replaceChildren(...rows);
  }

  /** A run's row: the one that is there, unless something has changed. */
  #row(run) {
    const key = JSON.stringify(run);
    const before = this.#rows.get(run.name);
    if (before?.key === key) return before.row;
    const box = el("input", {
      type: "checkbox",
      checked: this.#chosen.has(run.name),
      "aria-label": `Compare ${run.name}`,
      on: { change: () => this.#choose(run.name, box.checked) },
    });
    const took = run.began
      ? seconds(Math.max(0, (run.ended ?? Date.now() / 1000) - run.began))
      : "-";
    const cell = (text, kind) => el("td", { class: kind, text });
    const row = el(
      "tr",
      {},
      el("td", {}, box),
      el("td", {}, el("a", { href: `#/run/${encodeURIComponent(run.name)}`, text: run.name })),
      cell(run.graph ?? "-", "wide"),
      el("td", {}, pill(run)),
      cell(steps(run), "number"),
      cell(number(run.reward), "number"),
      cell(when(run.began), "wide"),
      cell(took, "number wide"),
    );
    this.#rows.set(run.name, { key, row });
    return row;
  }

  #choose(name, chosen) {
    if (chosen) this.#chosen.add(name);
    else this.#chosen.delete(name);
    this.#count();
  }

  #count() {
    this.#compare.disabled = this.#chosen.size < 2;
    this.#compare.textContent =
      this.#chosen.size < 2 ? "Compare" : `Compare ${this.#chosen.size} runs`;
  }

  #go() {
    location.hash = `#/compare/${[...this.#chosen].map(encodeURIComponent).join(",")}`;
  }
}

const STATES = { ended: "ended without a word" };

/** A run's state: a shape, a colour and a word. */
export function pill(run) {
  return el("span", { class: `pill ${run.state}`, text: STATES[run.state] ?? run.state });
}

export function steps(run) {
  const done = count(run.step ?? 0);
  return run.steps ? `${done} of ${count(run.steps)}` : done;
}
