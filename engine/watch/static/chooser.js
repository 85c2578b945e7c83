// The choice of metrics: a search field and a box for each.
//
// Owns: the choice, kept in this browser by graph. Does not own: the curves.

import { el, empty } from "./dom.js";
import { byPrefix, usual } from "./metrics.js";

export class Chooser {
  #session;
  #changed;
  #search;
  #found = el("div", { class: "found" });

  constructor(session, changed) {
    this.#session = session;
    this.#changed = changed;
    this.button = el("button", {
      type: "button",
      text: "Metrics",
      "aria-expanded": "false",
      "aria-controls": "chooser",
      on: { click: () => (this.element.hidden ? this.open() : this.#close()) },
    });
    this.#search = el("input", {
      type: "search",
      placeholder: "Search metrics",
      "aria-label": "Search metrics",
      on: { input: () => this.#list() },
    });
    const usualOnes = el("button", {
      type: "button",
      text: "The usual ones",
      on: { click: () => this.#keep(null) },
    });
    const bar = el("div", { class: "steps-of" }, this.#search, usualOnes);
    this.element = el("div", { class: "chooser", id: "chooser", hidden: true }, bar, this.#found);
  }

  get #key() {
    return `dataflow-metrics:${this.#session.run.graph}`;
  }

  /** Names that were chosen, of those that there are; null: the usual ones. */
  get chosen() {
    const kept = localStorage.getItem(this.#key);
    if (kept === null) return null;
    const there = new Set(this.#session.run.metrics ?? []);
    return kept.split("\n").filter((name) => there.has(name));
  }

  open() {
    this.element.hidden = false;
    this.button.setAttribute("aria-expanded", "true");
    this.#list();
    this.#search.focus();
  }

  #close() {
    this.element.hidden = true;
    this.button.setAttribute("aria-expanded", "false");
  }

  #list() {
    const all = this.#session.run.metrics ?? [];
    const words = this.#search.value.trim().toLowerCase();
    const shown = all.filter((name) => name.toLowerCase().includes(words));
    const now = new Set(this.chosen ?? usual(all).flatMap((track) => track.names));
    const boxes = [...byPrefix(shown).values()].flat().map((name) => this.#box(name, now));
    this.#found.replaceChildren(
      ...(boxes.length ? boxes : [empty("No metric has that in its name.")]),
    );
  }

  #box(name, now) {
    const box = el("input", {
      type: "checkbox",
      checked: now.has(name),
      on: {
        change: () => {
          if (box.checked) now.add(name);
          else now.delete(name);
          this.#keep([...now]);
        },
      },
    });
    return el("label", { class: "choice" }, box, name);
  }

  #keep(names) {
    if (names) localStorage.setItem(this.#key, names.join("\n"));
    else localStorage.removeItem(this.#key);
    if (!names) this.#list();
    this.#changed();
  }
}
