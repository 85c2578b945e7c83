// One row of the time axis: a label with the newest values, and a plot of some metrics by Step.
//
// Owns: a uPlot and its label. Does not own: which Steps are shown or selected (axis.js).

import uPlot from "./vendor/uplot.js";
import { colour, el, say, svg } from "./dom.js";
import { number } from "./format.js";

/** Left and right of every plot and lane, in pixels: one Step is at one place in all of them. */
export const LEFT = 54;
export const RIGHT = 14;
const HEIGHT = 84;
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2]];
const SYNC = "steps";
const FEW = 48;

/** The look of line number i: a colour and a dash. */
export function look(i) {
  return { colour: `--line-${(i % 6) + 1}`, dash: DASHES[i % DASHES.length] };
}

export function swatch(i) {
  const { colour: name, dash } = look(i);
  const line = svg("line", { x1: 0, y1: 4, x2: 18, y2: 4, "stroke-dasharray": dash.join(" ") });
  line.style.stroke = `var(${name})`;
  return svg("svg", { class: "swatch", viewBox: "0 0 18 8", "aria-hidden": "true" }, line);
}

export class Track {
  #plot = null;
  #data = null;
  #values = [];
  #range;
  #brush;
  #shown = null;

  /** lines: `[{name, label}]`; range(): the Steps shown; brush: `{select(from, to), clear()}`. */
  constructor({ title, unit, lines, range, brush }) {
    this.lines = lines;
    this.#range = range;
    this.#brush = brush;
    this.#values = lines.map(() => el("span", { class: "value" }));
    this.place = el("div", { class: "plot" });
    const list = el(
      "ul",
      { class: "lines" },
      lines.map((line, i) =>
        el(
          "li",
          { title: line.name },
          swatch(i),
          el("span", { class: "name", text: line.label }),
          this.#values[i],
        ),
      ),
    );
    // A metric's name may break after its slashes.
    const name = title.split("/").flatMap((part, i) => (i ? ["/", el("wbr"), part] : [part]));
    const words = unit ? [...name, " ", el("span", { class: "unit", text: unit })] : name;
    this.element = el(
      "div",
      { class: "track", role: "group", "aria-label": `${title} by Step` },
      el("div", { class: "label" }, el("h3", {}, ...words), list),
      this.place,
    );
  }

  /** data: `[steps, values, ...]`, values in the order of the lines. */
  show(data) {
    this.#data = data;
    if (this.#plot) this.#plot.setData(data, true);
    else this.#make();
    this.#say(null);
    this.select(this.#shown);
  }

  #make() {
    const width = this.place.clientWidth;
    if (!width) return;
    this.#plot = new uPlot(this.#options(width), this.#data, this.place);
    this.#plot.root.setAttribute("aria-hidden", "true");
  }

  #options(width) {
    const few = (this.#data?.[0].length ?? 0) <= FEW;
    const line = (spec, i) => ({
      label: spec.label,
      stroke: colour(look(i).colour),
      dash: look(i).dash,
      width: 1.5,
      spanGaps: true,
      points: { show: few || spec.sparse, size: 4 },
    });
    return {
      width,
      height: HEIGHT,
      padding: [10, RIGHT, 4, 0],
      legend: { show: false },
      scales: { x: { time: false, range: () => this.#range() }, y: { range: padded } },
      axes: [{ show: false }, this.#yAxis()],
      series: [{}, ...this.lines.map(line)],
      cursor: this.#cursor(),
      select: { show: true },
      hooks: {
        setSelect: [() => this.#selected()],
        setCursor: [(plot) => this.#pointed(plot.cursor.idx)],
      },
    };
  }

  #yAxis() {
    const faint = { stroke: colour("--line"), width: 1 };
    return {
      size: LEFT,
      stroke: colour("--soft"),
      font: "11px Inter",
      gap: 6,
      space: 26,
      grid: faint,
      ticks: { show: false },
      values: (_, splits) => splits.map((value) => number(value)),
    };
  }

  #cursor() {
    return {
      sync: { key: SYNC, setSeries: false },
      y: false,
      points: { size: 6 },
      drag: { x: true, y: false, setScale: false, dist: 3 },
      bind: {
        dblclick: () => () => this.#brush.clear(),
        click: (plot) => () => this.#click(plot),
      },
    };
  }

  /** A drag has ended: its Steps. */
  #selected() {
    const plot = this.#plot;
    const { left, width } = plot.select;
    if (!width || this.#own) return;
    this.#dragged = true;
    this.#brush.select(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  #own = false;
  #dragged = false;

  #click(plot) {
    const dragged = this.#dragged;
    this.#dragged = false;
    const at = plot.posToVal(plot.cursor.left, "x");
    if (!dragged && plot.cursor.left >= 0) this.#brush.select(at, at);
  }

  /** Shows a selection, `{from, to}` or null. */
  select(chosen) {
    this.#shown = chosen;
    const plot = this.#plot;
    if (!plot) return;
    this.#own = true;
    const [from, to] = chosen ? [chosen.from - 0.5, chosen.to + 0.5] : [0, 0];
    const [left, right] = chosen ? [plot.valToPos(from, "x"), plot.valToPos(to, "x")] : [0, 0];
    const height = plot.over.clientHeight;
    plot.setSelect({ left, width: Math.max(chosen ? 2 : 0, right - left), top: 0, height }, false);
    this.#own = false;
  }

  #pointed(at) {
    this.#say(at);
    this.#brush.hover(at === null ? null : this.#data[0][at]);
  }

  #say(at) {
    const [steps, ...all] = this.#data ?? [[]];
    all.forEach((values, i) => {
      let k = at ?? steps.length - 1;
      while (k > 0 && (values[k] === null || values[k] === undefined)) k -= 1;
      if (this.#values[i]) say(this.#values[i], number(values[k]));
    });
  }

  /** Draws again at the width that it has now, in the colours of the theme. */
  redraw() {
    this.#plot?.destroy();
    this.#plot = null;
    if (this.#data) this.#make();
    this.select(this.#shown);
  }

  resize() {
    const width = this.place.clientWidth;
    if (!this.#plot) this.redraw();
    else if (width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
    this.select(this.#shown);
  }

  destroy() {
    this.#plot?.destroy();
  }
}

/** A little room above and below; a constant has some too. */
function padded(_, least, most) {
  if (least === null || most === null) return [0, 1];
  const room = (most - least || Math.abs(most) || 1) * 0.12;
  return [least - room, most + room];
}
