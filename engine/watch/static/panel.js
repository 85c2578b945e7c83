// The side panel: its frame, its focus, the way it opens and closes.
//
// Owns: the aside. Does not own: what is in it (edge.js, node.js, sample.js).

import { el, empty } from "./dom.js";

export class Panel {
  #aside;
  #close;
  #opener = null;
  #number = 0;

  /** close(): the reader wants it closed. */
  constructor(aside, close) {
    this.#aside = aside;
    this.#close = close;
  }

  get open() {
    return !this.#aside.hidden;
  }

  /** Shows what `make()` promises, an array of sections, below a title. */
  async show(kind, title, make, { quiet = false } = {}) {
    const number = (this.#number += 1);
    if (!this.open) this.#opener = document.activeElement;
    const heading = el("h2", { tabindex: "-1" }, el("span", { class: "kind", text: kind }), title);
    const button = el("button", {
      type: "button",
      class: "quiet",
      text: "Close",
      on: { click: () => this.#close() },
    });
    const place = el("div", {}, empty("Loading ..."));
    this.#aside.replaceChildren(el("div", { class: "bar" }, heading, button), place);
    this.#aside.hidden = false;
    if (!quiet) heading.focus({ preventScroll: true });
    let sections;
    try {
      sections = await make();
    } catch (error) {
      sections = [empty(error.message)];
    }
    if (number === this.#number) place.replaceChildren(...sections.filter(Boolean));
  }

  /** Closes it, and puts the focus where it was. */
  hide() {
    if (!this.open) return;
    this.#number += 1;
    this.#aside.hidden = true;
    this.#aside.replaceChildren();
    if (this.#opener?.isConnected) this.#opener.focus?.({ preventScroll: true });
    this.#opener = null;
  }
}

/** A titled part of the panel; null where there is nothing in it. */
export function section(title, ...children) {
  const there = children.flat().filter(Boolean);
  return there.length ? el("section", {}, el("h3", { text: title }), there) : null;
}
