// The ruler of the time axis: numbers of Steps at the places that curves and lanes have them.
//
// Owns: its ticks, the number under the pointer. Does not own: which Steps are shown (axis.js).

import { el, say } from "./dom.js";
import { count } from "./format.js";
import { bandAt, brushed } from "./lanes.js";
import { LEFT, RIGHT } from "./track.js";

const APART = 90;

export class Ruler {
  #range;
  #strip = el("div", { class: "strip" });
  #band = el("div", { class: "band", hidden: true });
  #at = el("span", { class: "at" });
  #ticks = el("div", { "aria-hidden": "true" });
  #shown = null;

  constructor({ range, brush }) {
    this.#range = range;
    this.#strip.append(this.#ticks, this.#band);
    this.element = el(
      "div",
      { class: "ruler" },
      el("div", { class: "label" }, el("span", { text: "Step" }), this.#at),
      this.#strip,
    );
    brushed(this.#strip, (x) => this.#stepAt(x), brush);
  }

  #room() {
    return Math.max(1, this.#strip.clientWidth - LEFT - RIGHT);
  }

  #stepAt(x) {
    const [from, to] = this.#range();
    return from + ((x - LEFT) / this.#room()) * (to - from);
  }

  #xOf = (step) => {
    const [from, to] = this.#range();
    return LEFT + ((step - from) / (to - from)) * this.#room();
  };

  redraw() {
    const [from, to] = this.#range();
    const by = between((to - from) / Math.max(1, this.#room() / APART));
    const ticks = [];
    for (let step = Math.ceil(from / by) * by; step <= to; step += by) {
      if (step < 1) continue;
      const tick = el("span", { class: "tick", text: count(step) });
      tick.style.left = `${this.#xOf(step)}px`;
      ticks.push(tick);
    }
    this.#ticks.replaceChildren(...ticks);
    this.select(this.#shown);
  }

  select(chosen) {
    this.#shown = chosen;
    bandAt(this.#band, chosen, this.#xOf);
  }

  /** Says which Step the pointer is at; null: none. */
  hover(step) {
    say(this.#at, step === null || step === undefined ? "" : count(step));
  }
}

/** The least of 1, 2, 5, 10, 20, ... that is not below x. */
function between(x) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, x)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= x) ?? 10 * power;
}
