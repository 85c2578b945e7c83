// The time axis: curves and lanes above one another, brushed and zoomed together.
//
// Owns: which Steps are shown and selected, and the requests for them. Does not own: how a curve
// (track.js) or a lane (lanes.js) is drawn.

import { Latest, of } from "./api.js";
import { Chooser } from "./chooser.js";
import { el, empty, say, soon } from "./dom.js";
import { kindOf, Lane, WORK } from "./lanes.js";
import { chosenTracks, shortName, usual } from "./metrics.js";
import { Ruler } from "./ruler.js";
import { Track } from "./track.js";

const MOST = 2000;
const PAUSE = 1500;

export class Axis {
  #session;
  #ruler;
  #tracks = [];
  #lanes = [];
  #series = new Latest();
  #laned = new Latest();
  #place = el("div", { class: "axis" });
  #lanePlace = el("div", { class: "axis" });
  #tip = el("div", { class: "tip", hidden: true });
  #timer = 0;
  #asked = 0;
  #observer;

  constructor(session) {
    this.#session = session;
    this.#chooser = new Chooser(session, () => this.#build());
    this.#ruler = new Ruler({ range: this.#range, brush: this.#brush });
    this.element = this.#section();
    session.on("selection", () => soon(this.#select));
    session.on("view", () => this.refresh());
    session.on("live", () => soon(this.#bar));
    session.on("step", () => this.#later());
    session.on("run", () => soon(this.#bar));
    this.#observer = new ResizeObserver(() => soon(this.#resize));
    this.#observer.observe(this.#place);
    this.#themed = new MutationObserver(() => this.redraw());
    this.#themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    scheme.addEventListener("change", this.redraw);
    this.#build();
  }

  #chooser;
  #themed;

  close() {
    clearTimeout(this.#timer);
    this.#observer.disconnect();
    this.#themed.disconnect();
    scheme.removeEventListener("change", this.redraw);
    this.#series.stop();
    this.#laned.stop();
    for (const track of this.#tracks) track.destroy();
  }

  #section() {
    const button = (text, fn, props = {}) =>
      el("button", { type: "button", text, on: { click: fn }, ...props });
    const field = (label) =>
      el("input", {
        type: "number",
        min: 1,
        step: 1,
        "aria-label": label,
        placeholder: label.split(" ")[0],
        on: { change: () => this.#typed() },
      });
    [this.#from, this.#to] = [field("First Step selected"), field("Last Step selected")];
    this.#clear = button("Clear", () => this.#session.select(null));
    this.#zoom = button("Zoom to it", () => this.zoom());
    this.#all = button("All Steps", () => this.#session.zoom(null));
    this.#live = button("Live", () => this.#follow());
    const bar = el(
      "div",
      { class: "bar" },
      el("h2", { text: "Steps", id: "axis-title" }),
      el(
        "span",
        { class: "steps-of", role: "group", "aria-label": "Selected Steps" },
        el("span", { class: "soft", text: "Select" }),
        this.#from,
        el("span", { class: "soft", text: "to" }),
        this.#to,
        this.#clear,
        this.#zoom,
      ),
      this.#all,
      el("span", { class: "push" }),
      this.#chooser.button,
      this.#live,
    );
    this.#bar();
    return el(
      "section",
      { class: "card", "aria-labelledby": "axis-title" },
      bar,
      this.#chooser.element,
      this.#ruler.element,
      this.#place,
      this.#lanePlace,
      this.#tip,
    );
  }

  #from;
  #to;
  #clear;
  #zoom;
  #all;
  #live;

  #bar = () => {
    const { selection, view, live, running } = this.#session;
    for (const [field, step] of [
      [this.#from, selection?.from],
      [this.#to, selection?.to],
    ]) {
      if (field !== document.activeElement || !selection) field.value = step ?? "";
    }
    this.#clear.disabled = this.#zoom.disabled = !selection;
    this.#all.disabled = !view;
    this.#live.hidden = !running;
    this.#live.setAttribute("aria-pressed", live);
    say(this.#all, view ? `All Steps (now ${view.from} to ${view.to})` : "All Steps");
  };

  #follow() {
    if (this.#session.live) this.#session.unfollow();
    else this.#session.follow();
  }

  #typed() {
    const [from, to] = [this.#from, this.#to].map((field) => Number(field.value) || null);
    if (from ?? to) this.#brush.select(from ?? to, to ?? from);
  }

  /** Zooms to what is selected. */
  zoom() {
    if (this.#session.selection) this.#session.zoom({ ...this.#session.selection });
  }

  #brush = {
    select: (a, b) => {
      const within = (step) => Math.min(this.#session.last, Math.max(1, Math.round(step)));
      const [from, to] = [within(Math.min(a, b)), within(Math.max(a, b))];
      this.#session.select({ from, to });
    },
    clear: () => this.#session.select(null),
    hover: (step) => this.#ruler.hover(step),
  };

  #range = () => {
    const { view, last } = this.#session;
    return view ? [view.from - 0.5, view.to + 0.5] : [0.5, last + 0.5];
  };

  #select = () => {
    this.#bar();
    for (const each of this.#parts()) each.select(this.#session.selection);
  };

  #parts() {
    return [this.#ruler, ...this.#tracks, ...this.#lanes];
  }

  #resize = () => {
    this.#ruler.redraw();
    for (const track of this.#tracks) track.resize();
    for (const lane of this.#lanes) lane.redraw();
  };

  redraw = () => soon(this.#again);

  #again = () => {
    for (const each of this.#parts()) each.redraw();
  };

  // What is shown

  #build() {
    for (const track of this.#tracks) track.destroy();
    const chosen = this.#chooser.chosen;
    const specs = chosen ? chosenTracks(chosen) : usual(this.#session.run.metrics ?? []);
    this.#tracks = specs.map(
      ({ title, unit, names }) =>
        new Track({
          title,
          unit,
          range: this.#range,
          brush: this.#brush,
          lines: names.map((name) => ({
            name,
            label: shortName(name, names),
            sparse: name.startsWith("eval/"),
          })),
        }),
    );
    const nothing = chosen
      ? "No metric is chosen."
      : "No Step has ended yet; curves begin with the first.";
    this.#place.replaceChildren(...this.#tracks.map((track) => track.element));
    if (!this.#tracks.length) this.#place.replaceChildren(empty(nothing));
    this.refresh();
  }

  /** Asks for curves and lanes of the Steps that are shown. */
  async refresh() {
    this.#asked = performance.now();
    soon(this.#bar);
    await Promise.all([this.#curves(), this.#workers()]);
  }

  #bounds() {
    const { view } = this.#session;
    const points = Math.min(MOST, Math.max(200, Math.round(this.#place.clientWidth * 1.5)));
    return { from: view?.from, to: view?.to, points };
  }

  async #curves() {
    const names = this.#tracks.flatMap((track) => track.lines.map((line) => line.name));
    if (!names.length) return;
    const path = of(this.#session.name, "series");
    const found = await this.#series
      .get(path, { names: names.join(","), ...this.#bounds() })
      .catch(() => null);
    if (!found) return;
    soon(() => {
      this.#ruler.redraw();
      for (const track of this.#tracks) {
        track.show([
          found.steps,
          ...track.lines.map(({ name }) => found.series[name] ?? found.steps.map(() => null)),
        ]);
        track.select(this.#session.selection);
      }
    });
  }

  async #workers() {
    const { from, to, points } = this.#bounds();
    const path = of(this.#session.name, "lanes");
    const found = await this.#laned
      .get(path, { from, to, points: Math.min(500, points) })
      .catch(() => null);
    if (!found) return;
    const names = Object.keys(found.workers ?? {});
    if (names.join() !== this.#lanes.map((lane) => lane.worker).join()) this.#makeLanes(names);
    soon(() => {
      for (const lane of this.#lanes) lane.show(found.workers[lane.worker]);
      this.#select();
    });
  }

  #makeLanes(names) {
    const { workers = [], nodes = [] } = this.#session.run;
    const works = Object.fromEntries(nodes.map((node) => [node.name, node.work]));
    this.#lanes = names.map((worker) => {
      const known = workers.find((each) => each.name === worker);
      const where = [known?.host, ...(known?.nodes ?? [])].filter(Boolean).join(", ");
      return new Lane({
        worker,
        where,
        works,
        range: this.#range,
        brush: this.#brush,
        tip: this.#say,
      });
    });
    const kinds = new Set(nodes.map((node) => kindOf(node.work)));
    const title = el(
      "div",
      { class: "lanes-title" },
      el("h3", { text: "Workers" }),
      laneLegend(kinds),
    );
    this.#lanePlace.replaceChildren(
      ...(names.length ? [title, ...this.#lanes.map((lane) => lane.element)] : []),
    );
  }

  #say = (event, words = null) => {
    this.#tip.hidden = !words;
    if (!words) return;
    say(this.#tip, words);
    this.#tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 220)}px`;
    this.#tip.style.top = `${event.clientY + 16}px`;
  };

  /** A Step has ended: ask again, but not for each of many that end fast. */
  #later() {
    const had = new Set(this.#session.run.metrics ?? []);
    const more = Object.keys(this.#session.metrics).filter(
      (name) => name !== "step" && !had.has(name),
    );
    if (more.length) this.#session.run.metrics = [...had, ...more];
    if (more.length) return this.#build();
    if (this.#timer || this.#session.view) return undefined;
    const wait = Math.max(0, this.#asked + PAUSE - performance.now());
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      this.refresh();
    }, wait);
    return undefined;
  }

  /** Opens the choice of metrics. */
  choose() {
    this.#chooser.open();
  }

  focus() {
    this.#from.focus();
  }
}

const scheme = matchMedia("(prefers-color-scheme: dark)");

function laneLegend(kinds) {
  const dot = (name, words) => {
    const mark = el("span", { class: "dot", "aria-hidden": "true" });
    mark.style.background = `var(${name})`;
    return el("li", {}, mark, words);
  };
  const shown = Object.entries(WORK).filter(([kind]) => kinds.has(kind));
  return el(
    "ul",
    {},
    shown.map(([kind, words]) => dot(`--work-${kind}`, words)),
    dot("--wait", "waits"),
    dot("--idle", "idle"),
  );
}
