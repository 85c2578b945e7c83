// Several runs side by side: curves together, what differs in graph and plan, the first difference.

import { get, of } from "./api.js";
import { el, empty, soon, table } from "./dom.js";
import { number } from "./format.js";
import { usual } from "./metrics.js";
import { Ruler } from "./ruler.js";
import { pill, steps } from "./runs.js";
import { swatch, Track } from "./track.js";

const POINTS = 1500;
const KINDS = { "+": "added", "-": "removed", "~": "changed" };
const SAME = "no difference";

/** The page that compares runs of these names. */
export async function openCompare(names) {
  const [found, ...runs] = await Promise.all([
    get("/api/compare", { runs: names.join(",") }),
    ...names.map((name) => get(of(name))),
  ]);
  return new ComparePage(names, runs, found);
}

class ComparePage {
  #runs;
  #tracks = [];
  #selection = null;
  #place = el("div", { class: "axis" }, empty("Loading ..."));
  #observer;
  #ruler = null;
  #last;

  constructor(names, runs, found) {
    document.title = `${names.join(" and ")} - dataflow watch`;
    this.#runs = runs;
    this.#last = Math.max(1, ...runs.map((run) => run.step ?? 0));
    this.headline = [
      el("h1", { text: `Compare ${names.join(", ")}` }),
      el("a", { href: "#/", class: "fact", text: "All runs" }),
    ];
    this.elements = [this.#who(), first(found.first), this.#curves(), differences(found)];
    this.#observer = new ResizeObserver(() => soon(this.#resize));
    this.#observer.observe(this.#place);
    this.#themed = new MutationObserver(() => soon(this.#redraw));
    this.#themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    this.#load();
  }

  #themed;

  close() {
    this.#observer.disconnect();
    this.#themed.disconnect();
    for (const track of this.#tracks) track.destroy();
  }

  act() {
    return false;
  }

  #resize = () => {
    this.#ruler?.redraw();
    for (const track of this.#tracks) track.resize();
  };

  #redraw = () => this.#tracks.forEach((track) => track.redraw());

  #who() {
    const one = (run, i) =>
      el(
        "li",
        {},
        swatch(i),
        el("a", { href: `#/run/${encodeURIComponent(run.name)}`, text: run.name }),
        pill(run),
        el("span", { class: "soft", text: `Step ${steps(run)}` }),
      );
    return el(
      "ul",
      { class: "run-keys", "aria-label": "Runs, and their lines" },
      this.#runs.map(one),
    );
  }

  #curves() {
    return el(
      "section",
      { class: "card", "aria-labelledby": "curves-title" },
      el(
        "div",
        { class: "bar" },
        el("h2", { text: "Curves", id: "curves-title" }),
        el("span", { class: "soft", text: "One line for each run, by Step" }),
      ),
      this.#place,
    );
  }

  async #load() {
    const names = [
      ...new Set(
        this.#runs.flatMap((run) => usual(run.metrics ?? []).flatMap((track) => track.names)),
      ),
    ];
    if (!names.length)
      return this.#place.replaceChildren(empty("None of these runs has ended a Step."));
    const ask = (run) => get(of(run.name, "series"), { names: names.join(","), points: POINTS });
    const series = await Promise.all(this.#runs.map(ask));
    const axis = [...new Set(series.flatMap((each) => each.steps))].sort((a, b) => a - b);
    const brush = {
      select: (a, b) => this.#select(a, b),
      clear: () => this.#select(null),
      hover: (step) => this.#ruler.hover(step),
    };
    const range = () => [0.5, this.#last + 0.5];
    this.#ruler = new Ruler({ range, brush });
    this.#tracks = names.map(
      (name) =>
        new Track({
          title: name,
          unit: usual([name])[0]?.unit,
          brush,
          range,
          lines: this.#runs.map((run) => ({
            name: run.name,
            label: run.name,
            sparse: name.startsWith("eval/"),
          })),
        }),
    );
    this.#place.replaceChildren(this.#ruler.element, ...this.#tracks.map((track) => track.element));
    this.#ruler.redraw();
    return soon(() =>
      this.#tracks.forEach((track, i) =>
        track.show([axis, ...series.map((s) => along(axis, s, names[i]))]),
      ),
    );
  }

  #select(a, b) {
    const within = (step) => Math.min(this.#last, Math.max(1, Math.round(step)));
    this.#selection =
      a === null ? null : { from: within(Math.min(a, b)), to: within(Math.max(a, b)) };
    for (const each of [this.#ruler, ...this.#tracks]) each.select(this.#selection);
  }
}

/** A run's values on the Steps of all runs. */
function along(axis, { steps: own, series }, name) {
  const values = new Map(own.map((step, i) => [step, series[name]?.[i] ?? null]));
  return axis.map((step) => values.get(step) ?? null);
}

function first(difference) {
  const title = el(
    "div",
    { class: "bar" },
    el("h2", { text: "First difference", id: "first-title" }),
  );
  const words = difference
    ? el(
        "div",
        {},
        el("p", { class: "soft", text: `Step ${difference.step}, ${difference.metric}` }),
        table(
          ["run", { text: "value", class: "number" }],
          Object.entries(difference.values ?? {}).map(([run, x]) => [run, exact(x)]),
        ),
      )
    : empty("No metric differs in the Steps that all of them have.");
  const place = el("div", { class: "pad" }, words);
  return el("section", { class: "card", "aria-labelledby": "first-title" }, title, place);
}

/** As many digits as there are: two values may differ in the last one. */
function exact(x) {
  return typeof x === "number" ? `${x}` : number(x);
}

function differences(found) {
  return el(
    "div",
    { class: "two" },
    diff("Graph", "graph", found.graph, "The graphs are the same."),
    diff("Plan", "plan", found.plan, "The plans are the same."),
    options(found),
  );
}

function options({ options: differ = [], runs }) {
  const text = (value) =>
    el("code", { text: typeof value === "string" ? value : JSON.stringify(value ?? null) });
  const rows = differ.map(({ option, values }) => [
    el("code", { text: option }),
    ...runs.map((run) => text(values[run])),
  ]);
  const shown = rows.length
    ? el("div", { class: "pad scroll" }, table(["option", ...runs], rows))
    : empty("The options are the same.");
  return el(
    "section",
    { class: "card", "aria-labelledby": "options-title" },
    el("div", { class: "bar" }, el("h2", { text: "Options", id: "options-title" })),
    shown,
  );
}

function diff(title, id, text, same) {
  const lines = (text ?? "").split("\n");
  const kind = (line) => KINDS[/^\s*([-+~])/.exec(line)?.[1]] ?? null;
  const shown =
    text?.trim() && text.trim() !== SAME
      ? el(
          "pre",
          { class: "diff", tabindex: "0", role: "region", "aria-label": `${title}: what differs` },
          el(
            "span",
            { class: "lines" },
            lines.map((line) =>
              el("span", { class: kind(line), text: kind(line) ? line || " " : `${line}\n` }),
            ),
          ),
        )
      : empty(same);
  return el(
    "section",
    { class: "card", "aria-labelledby": `${id}-title` },
    el("div", { class: "bar" }, el("h2", { text: title, id: `${id}-title` })),
    shown,
  );
}
