// Life in the drawing: bars of shares, rates, queues, versions, the cut, the critical path.
//
// Owns: the elements that it adds to the drawing. It touches only what has changed. Does not own:
// the drawing, nor how figures are made (figures.js).

import { say, set, svg } from "./dom.js";
import { placeOf } from "./drawing.js";
import {
  byEdge,
  byNode,
  byWeight,
  folded,
  headline,
  inWords,
  lengthOf,
  shortState,
  STATES,
} from "./figures.js";
import { bytes, count, percent, rate, seconds } from "./format.js";

const CHARACTER = 5.7;
const THIN = 1.4;
const WIDE = 8;

export class Life {
  #nodes;
  #edges;
  #weights;
  #cuts;
  #figures = null;
  #places = new Map();
  #found = new Map();
  #moved = new Map();
  #ends;
  #most = 1;
  #seen = () => true;

  /** planned: names of the nodes that the plan has. */
  constructor(index, planned) {
    this.#nodes = index.nodes.map((node) => new NodeLife(node, planned));
    this.#ends = index.edges;
    this.#edges = index.edges.map((edge) => new EdgeLife(edge));
    this.#weights = index.weights.filter((w) => w.reader).map((each) => new WeightLife(each));
    this.#cuts = index.cuts.map((each) => new CutLife(each));
  }

  /** Notes where each part is in the drawing, whose root is at `origin` on the screen. */
  measure(origin, zoom) {
    for (const { g } of [...this.#nodes, ...this.#edges, ...this.#weights]) {
      const { left, top, right, bottom } = g.getBoundingClientRect();
      const place = [
        left - origin.left,
        top - origin.top,
        right - origin.left,
        bottom - origin.top,
      ];
      this.#places.set(
        g,
        place.map((x) => x / zoom),
      );
    }
  }

  /** Touches only parts that meet this box of the drawing: the others are not in sight. */
  within([left, top, right, bottom]) {
    this.#seen = ({ g }) => {
      const [a, b, c, d] = this.#places.get(g) ?? [left, top, right, bottom];
      return c >= left && a <= right && d >= top && b <= bottom;
    };
    this.#draw();
  }

  /** Shows the figures; null takes them away. */
  show(figures) {
    this.#figures = figures;
    this.#found = byNode(figures?.flow ?? {});
    this.#moved = byEdge(figures?.flow ?? {}, this.#ends);
    const edges = [...this.#moved.values()];
    this.#most = edges.reduce((most, edge) => Math.max(most, edge?.bytes ?? 0), 1);
    this.#draw();
  }

  #draw() {
    const flow = this.#figures?.flow ?? {};
    const length = lengthOf(flow);
    const critical = new Set(this.#figures?.critical ?? []);
    const inSight = (parts) => parts.filter(this.#seen);
    for (const node of inSight(this.#nodes)) node.show(this.#found, length, critical);
    for (const edge of inSight(this.#edges)) edge.show(this.#moved.get(edge.id), this.#most, length);
    const weights = byWeight(flow);
    for (const each of inSight(this.#weights)) each.show(weights.get(each.id));
    for (const cut of this.#cuts) cut.show(flow.cuts?.[cut.source]);
  }
}

/** A bar of shares in a box of this size; `show(shares)` sets it. */
export function shareBar(x, y, width, height) {
  const parts = Object.keys(STATES).map((name) =>
    svg("rect", { class: `fill-${name}`, y, height }),
  );
  const outline = svg("rect", { class: "frame-line", x, y, width, height, rx: 1.5 });
  const g = svg(
    "g",
    { class: "live-bar" },
    svg("rect", { class: "back", x, y, width, height }),
    parts,
    outline,
  );
  const show = (shares) => {
    let at = x;
    Object.keys(STATES).forEach((name, i) => {
      const wide = Math.round((shares?.[name] ?? 0) * width * 10) / 10;
      set(parts[i], "x", at.toFixed(1));
      set(parts[i], "width", wide);
      at += wide;
    });
  };
  return { g, show };
}

/** The words of the drawing and of the life in a part, in their order. */
function seen(g) {
  const texts = [...g.querySelectorAll("text")].map((each) => each.textContent.trim());
  return texts.filter(Boolean).join(" ");
}

/** What a part is, without the words that are seen, which its name begins with. */
function labelOf(g) {
  const label = g.getAttribute("aria-label") ?? "";
  const words = `${seen(g)}. `;
  return label.startsWith(words) ? label.slice(words.length) : label;
}

/** Says what a part is and does. The words that are seen come first, as one would speak to it. */
function describe(g, label, words) {
  set(g, "aria-label", [seen(g), label, words].filter(Boolean).join(". "));
}

class NodeLife {
  constructor({ g, names }, planned) {
    this.g = g;
    this.names = names;
    this.planned = names.some((name) => planned.has(name));
    this.label = labelOf(g);
    this.key = null;
    const strip = g.querySelector("g.life");
    if (strip) this.#build(strip);
  }

  #build(strip) {
    const { x, y, width } = placeOf(strip);
    this.strip = strip;
    this.place = { x: x + 4, y, width: width - 8 };
    this.left = svg("text", { class: "live-text", x: x + 4, y: y + 21 });
    this.right = svg("text", {
      class: "live-text",
      x: x + width - 4,
      y: y + 21,
      "text-anchor": "end",
    });
    this.beside = svg("text", {
      class: "live-text",
      x: x + width - 4,
      y: y + 10,
      "text-anchor": "end",
    });
    strip.append(" ", this.beside, " ", this.left, " ", this.right);
    this.#bar(0);
  }

  /** A bar that leaves room for so many characters beside it. */
  #bar(characters) {
    const { x, y, width } = this.place;
    this.bar?.g.remove();
    this.characters = characters;
    this.bar = shareBar(x, y + 2, width - (characters ? characters * CHARACTER + 8 : 0), 8);
    this.strip.prepend(this.bar.g);
  }

  show(found, length, critical) {
    const replicas = this.names.flatMap((name) => found.get(name)?.replicas ?? []);
    const figures = replicas.length ? folded(replicas, length) : null;
    this.#mark(this.names.some((name) => critical.has(name)));
    if (!this.bar) return;
    const without = this.planned ? "" : "left out, nothing reads it";
    const [left, right, waits] = figures ? this.#texts(figures) : [without, "", false];
    const beside = figures ? this.#beside(figures) : "";
    const shares = figures ? Object.values(figures.shares).map((s) => s.toFixed(2)) : [];
    const key = [left, right, beside, ...shares].join();
    if (key === this.key) return;
    this.key = key;
    if (beside.length !== this.characters) this.#bar(beside.length);
    this.bar.show(figures?.shares);
    say(this.beside, beside);
    say(this.left, left);
    say(this.right, right);
    set(this.left, "class", waits ? "live-text is-waiting" : "live-text");
    this.#describe(figures);
  }

  /** Its replicas and the version of its weights, where it has some. */
  #beside({ version, replicas }) {
    const parts = [
      replicas.length > this.names.length ? `\u00d7${replicas.length}` : null,
      version === null ? null : `v${version}`,
    ];
    return parts.filter(Boolean).join(" ");
  }

  #texts({ shares, rows, tokens, inFlight }) {
    const [kind, name, share] = headline(shares);
    const left = `${shortState(name)} ${percent(share)}`;
    const parts = [
      inFlight > 0 ? `${count(inFlight)} live` : null,
      rows > 0 ? rate(rows, "rows") : null,
      tokens > 0 ? rate(tokens, "tok") : null,
    ].filter(Boolean);
    const room = this.place.width - (left.length + 2) * CHARACTER;
    const joined = () => parts.join(" \u00b7 ");
    while (parts.length && joined().length * CHARACTER > room) parts.pop();
    return [left, joined(), kind === "wait"];
  }

  #describe(figures) {
    if (!figures) return describe(this.g, this.label, "");
    const { shares, rows, tokens, version, inFlight } = figures;
    const more = [rate(rows, "rows"), tokens ? rate(tokens, "tokens") : null];
    if (version !== null) more.push(`version ${version}`);
    if (inFlight) more.push(`${count(inFlight)} rows in flight`);
    const words = `${inWords(shares, percent)}; ${more.filter(Boolean).join(", ")}`;
    return describe(this.g, this.label, words);
  }

  #mark(critical) {
    if (critical === this.critical) return;
    this.critical = critical;
    this.key = null;
    this.g.classList.toggle("critical", critical);
    this.tag?.remove();
    if (critical) this.g.append(" ", (this.tag = this.#tag()));
  }

  /** The words on its lower edge, where no edge arrives: an outline alone would say nothing. */
  #tag() {
    const box = this.g.querySelector(".box");
    const place = ["x", "y", "width", "height"].map((name) => Number(box?.getAttribute(name) ?? 0));
    const [x, y, width, height] = place;
    const wide = 70;
    return svg(
      "g",
      { class: "mark-critical", "aria-hidden": "true" },
      svg("rect", { x: x + width - wide - 6, y: y + height - 5, width: wide, height: 15, rx: 3 }),
      svg("text", {
        x: x + width - 6 - wide / 2,
        y: y + height + 6,
        "text-anchor": "middle",
        text: "critical path",
      }),
    );
  }
}

class EdgeLife {
  constructor({ g, id }) {
    this.id = id;
    this.g = g;
    this.wire = g.querySelector(".wire");
    this.label = labelOf(g);
    const at = g.querySelector("g.queue");
    if (!at) return;
    const { x, y } = placeOf(at);
    this.x = x;
    this.rect = svg("rect", { y: y - 8, height: 16, rx: 8 });
    this.text = svg("text", { x, y: y + 3.5, "text-anchor": "middle" });
    this.pill = svg("g", { class: "queue-pill", visibility: "hidden" }, this.rect, this.text);
    at.append(this.pill);
  }

  show(edge, most, length) {
    const moved = edge?.bytes ?? 0;
    const share = moved > 0 ? Math.log1p(moved) / Math.log1p(most) : 0;
    const width = edge ? (THIN + (WIDE - THIN) * share ** 3).toFixed(1) : "";
    if (this.wire && width !== this.wide)
      this.wire.style.strokeWidth = width && `${(this.wide = width)}px`;
    if (this.pill) this.#queue(edge);
    const waiting = edge?.waiting_rows ?? 0;
    const words = edge
      ? `${rate((edge.rows ?? 0) / length, "rows")}, ${bytes(moved / length)}/s, ` +
        `${count(waiting)} rows wait`
      : "";
    if (words !== this.described) describe(this.g, this.label, (this.described = words));
  }

  #queue(edge) {
    const waiting = edge?.waiting_rows ?? 0;
    const age = edge?.age ?? 0;
    const words = waiting
      ? `${count(waiting)} rows${age >= 0.1 ? ` \u00b7 ${seconds(age)}` : ""}`
      : "";
    if (words === this.words) return;
    this.words = words;
    set(this.pill, "visibility", words ? "visible" : "hidden");
    set(this.pill, "class", age >= 10 ? "queue-pill full" : "queue-pill");
    say(this.text, words);
    const wide = words.length * CHARACTER + 14;
    set(this.rect, "x", this.x - wide / 2);
    set(this.rect, "width", wide);
  }
}

class WeightLife {
  constructor({ g, model, reader }) {
    this.id = `${model}->${reader}`;
    this.g = g;
    this.label = g.getAttribute("aria-label") ?? this.id;
    this.rect = svg("rect", { height: 14, rx: 3 });
    this.text = svg("text", { "text-anchor": "middle" });
    this.note = svg(
      "g",
      { class: "weight-note", visibility: "hidden", "aria-hidden": "true" },
      this.rect,
      this.text,
    );
    g.append(this.note);
  }

  show(edge) {
    const words = edge ? this.#words(edge) : "";
    if (words === this.words) return;
    this.words = words;
    set(this.note, "visibility", words ? "visible" : "hidden");
    if (!words) return;
    const wide = words.length * CHARACTER + 8;
    const { x, y } = this.#place(wide);
    say(this.text, words);
    for (const [name, value] of [
      ["x", x],
      ["y", y + 3.5],
    ])
      set(this.text, name, value);
    for (const [name, value] of [
      ["x", x - wide / 2],
      ["y", y - 7],
      ["width", wide],
    ])
      set(this.rect, name, value);
    set(this.g, "aria-label", `${this.label}. ${words}`);
  }

  #words({ offered, loaded }) {
    return offered === loaded ? `v${loaded}` : `v${offered} offered, v${loaded} loaded`;
  }

  /** Behind the words at the arrow's end, else on the middle of the line. */
  #place(wide) {
    const words = this.g.querySelector(":scope > text");
    if (words) {
      const { x, y, width, height } = words.getBBox();
      return { x: x + width + wide / 2, y: y + height / 2 };
    }
    const path = this.g.querySelector(".wire");
    return path ? path.getPointAtLength(path.getTotalLength() / 2) : { x: 0, y: 0 };
  }
}

class CutLife {
  constructor({ g, source }) {
    this.source = source;
    const at = g.querySelector("g.life");
    if (!at) return;
    const { x, y, width, height } = placeOf(at);
    this.width = Math.min(96, width || 96);
    const middle = y + (height || 10) / 2;
    this.ready = svg("rect", { class: "ready", x, y: middle - 5, height: 10, width: 0 });
    this.text = svg("text", { x: x + this.width + 8, y: middle + 4 });
    const back = svg("rect", { class: "back", x, y: middle - 5, width: this.width, height: 10 });
    this.g = svg("g", { class: "cut-life", visibility: "hidden" }, back, this.ready, this.text);
    at.append(this.g);
  }

  show(cut) {
    if (!this.g) return;
    set(this.g, "visibility", cut ? "visible" : "hidden");
    if (!cut) return;
    const [ready, wanted] = [cut.ready ?? 0, cut.wanted ?? 0];
    set(this.ready, "width", wanted ? (Math.min(1, ready / wanted) * this.width).toFixed(1) : 0);
    say(this.text, `${count(ready)} of ${count(wanted)} prompts ready`);
  }
}
