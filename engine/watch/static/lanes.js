// One lane for each Worker: by Step, which nodes were busy, what waited, what was idle.
//
// Owns: the canvases. Does not own: which Steps are shown or selected (axis.js).

import { colour, el, say } from "./dom.js";
import { percent } from "./format.js";
import { LEFT, RIGHT } from "./track.js";

export const WORK = {
  source: "sources",
  decode: "generation",
  forward: "forward",
  host: "host",
  train: "training",
  evaluate: "evaluation",
};

/** The kind of box of a node's work, as in the drawing. */
export function kindOf(work) {
  return work in WORK ? work : work === "replay" ? "source" : "host";
}

export class Lane {
  #canvas;
  #band;
  #strip;
  #value;
  #data = null;
  #range;
  #works;
  #shown = null;

  constructor({ worker, where, works, range, brush, tip }) {
    this.worker = worker;
    this.#works = works;
    this.#range = range;
    this.#canvas = el("canvas", { "aria-hidden": "true" });
    this.#band = el("div", { class: "band", hidden: true });
    this.#strip = el("div", { class: "strip" }, this.#canvas, this.#band);
    this.#value = el("span", { class: "soft" });
    this.element = el(
      "div",
      { class: "lane", role: "group", "aria-label": `Worker ${worker}` },
      el("div", { class: "label", title: where }, el("b", { text: worker }), this.#value),
      this.#strip,
    );
    brushed(this.#strip, (x) => this.#stepAt(x), brush);
    this.#strip.addEventListener("pointermove", (event) => tip(event, this.#words(event.offsetX)));
    this.#strip.addEventListener("pointerleave", () => tip(null));
  }

  show(data) {
    this.#data = data;
    this.redraw();
  }

  #room() {
    return Math.max(1, this.#strip.clientWidth - LEFT - RIGHT);
  }

  #stepAt(x) {
    const [from, to] = this.#range();
    return from + ((x - LEFT) / this.#room()) * (to - from);
  }

  #xOf(step) {
    const [from, to] = this.#range();
    return LEFT + ((step - from) / (to - from)) * this.#room();
  }

  redraw() {
    const { clientWidth: width, clientHeight: height } = this.#strip;
    if (!width || !this.#data) return;
    const ratio = window.devicePixelRatio || 1;
    const canvas = this.#canvas;
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.#paint(context, width, height);
    this.select(this.#shown);
  }

  #paint(context, width, height) {
    const { steps, busy, waits } = this.#data;
    const shades = this.#shades(context);
    const [top, tall] = [4, height - 8];
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height);
    context.clip();
    steps.forEach((step, i) => {
      const until = steps[i + 1] ?? step + (i ? step - steps[i - 1] : 1);
      const [x, end] = [this.#xOf(step - 0.5), this.#xOf(until - 0.5)];
      const wide = end - x > 3 ? end - x - 0.5 : end - x + 0.3;
      let y = top + tall;
      const part = (share, fill) => {
        if (!share) return;
        context.fillStyle = fill;
        context.fillRect(x, y - share * tall, wide, share * tall);
        y -= share * tall;
      };
      context.fillStyle = shades.idle;
      context.fillRect(x, top, wide, tall);
      for (const [node, shares] of Object.entries(busy))
        part(shares[i], shades[kindOf(this.#works[node])]);
      part(waits?.[i], shades.waits);
    });
    context.restore();
  }

  #shades(context) {
    const kinds = Object.keys(WORK).map((kind) => [kind, colour(`--work-${kind}`)]);
    return { ...Object.fromEntries(kinds), idle: colour("--idle"), waits: hatch(context) };
  }

  /** Shows a selection, and how busy the Worker was in it. */
  select(chosen) {
    this.#shown = chosen;
    bandAt(this.#band, chosen, (step) => this.#xOf(step));
    if (this.#data) say(this.#value, `${percent(this.#mean(chosen))} busy`);
  }

  #mean(chosen) {
    const { steps, busy } = this.#data;
    const within = steps.map((step) => !chosen || (step >= chosen.from && step <= chosen.to));
    const n = within.filter(Boolean).length || 1;
    let sum = 0;
    for (const shares of Object.values(busy))
      shares.forEach((share, i) => (sum += within[i] ? (share ?? 0) : 0));
    return Math.min(1, sum / n);
  }

  #words(x) {
    const { steps, busy, waits, idle } = this.#data ?? { steps: [] };
    if (!steps.length || x < LEFT) return null;
    const at = this.#stepAt(x);
    let i = 0;
    while (i < steps.length - 1 && steps[i + 1] - 0.5 <= at) i += 1;
    const lines = Object.entries(busy)
      .filter(([, s]) => s[i] > 0.004)
      .map(([node, s]) => `${node} ${percent(s[i])}`);
    if (waits?.[i] > 0.004) lines.push(`waits ${percent(waits[i])}`);
    if (idle?.[i] > 0.004) lines.push(`idle ${percent(idle[i])}`);
    return [`${this.worker}, Step ${steps[i]}`, ...lines].join("\n");
  }
}

/** The pattern of waiting: the same as in the graph's bars. */
function hatch(context) {
  const tile = document.createElement("canvas");
  [tile.width, tile.height] = [6, 6];
  const paint = tile.getContext("2d");
  paint.fillStyle = colour("--wait-wash");
  paint.fillRect(0, 0, 6, 6);
  paint.strokeStyle = colour("--wait");
  paint.lineWidth = 1.4;
  for (const at of [-6, 0, 6]) {
    paint.beginPath();
    paint.moveTo(at - 1, 7);
    paint.lineTo(at + 7, -1);
    paint.stroke();
  }
  return context.createPattern(tile, "repeat");
}

/** Places a band over the selected Steps. */
export function bandAt(band, chosen, xOf) {
  band.hidden = !chosen;
  if (!chosen) return;
  const [left, right] = [xOf(chosen.from - 0.5), xOf(chosen.to + 0.5)];
  band.style.left = `${left}px`;
  band.style.width = `${Math.max(2, right - left)}px`;
}

/** Drag selects Steps, a click one, a double click none. */
export function brushed(strip, stepAt, brush) {
  strip.addEventListener("dblclick", () => brush.clear());
  strip.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const left = strip.getBoundingClientRect().left;
    const from = stepAt(event.clientX - left);
    const move = (at) => brush.select(from, stepAt(at.clientX - left));
    const end = (at) => {
      window.removeEventListener("pointermove", move);
      if (at.type === "pointerup") move(at);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
    window.addEventListener("pointercancel", end, { once: true });
  });
}
