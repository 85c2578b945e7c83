// The list of samples: search, filters, order; only the rows in sight are elements.
//
// Owns: the section. Does not own: a sample in full (sample.js).

import { get, of } from "./api.js";
import { el, empty, say, soon } from "./dom.js";
import { count, number, plural } from "./format.js";
import { keyOf } from "./sample.js";

const ROW = 46;
const PAGE = 50;
const BEYOND = 6;
const ORDERS = {
  newest: "Newest first",
  best: "Best first",
  worst: "Worst first",
  longest: "Longest first",
  mismatch: "Greatest mismatch first",
};

const FINISHES = ["stop", "length", "turns", "timeout", "error"];

export class Samples {
  #session;
  #open;
  #filters = { order: "newest", q: "", node: "", finish: "", step: "" };
  #total = 0;
  #pages = new Map();
  #kept = new Map(); // what is in sight while it is asked for anew
  #shown = new Map();
  #generation = 0;
  #active = 0;
  #chosen = null;
  #timer = 0;
  #most = 1;
  #unread = 0;

  /** open(row): a row was chosen. */
  constructor(session, open) {
    this.#session = session;
    this.#open = open;
    this.element = this.#section();
    session.on("settled", () => this.reload());
    session.on("step", () => this.#later());
    this.reload();
  }

  close() {
    clearTimeout(this.#timer);
  }

  #section() {
    this.search = el("input", {
      type: "search",
      placeholder: "Search prompts and completions",
      "aria-label": "Search samples",
      on: { input: () => this.#set("q", this.search.value, 250) },
    });
    this.#counted = el("span", { class: "soft", role: "status" });
    const step = el("input", {
      type: "number",
      min: 1,
      placeholder: "Step",
      "aria-label": "Samples of Step",
      on: { input: () => this.#set("step", step.value, 250) },
    });
    const orders = this.#choice("order", "Order", Object.entries(ORDERS));
    const nodes = trainers(this.#session.run);
    const bar = el(
      "div",
      { class: "bar" },
      el("h2", { text: "Samples", id: "samples-title" }),
      this.#counted,
      el("span", { class: "push" }),
      this.search,
      step,
      nodes.length > 1
        ? this.#choice("node", "Node", [["", "All nodes"], ...nodes.map((name) => [name, name])])
        : null,
      this.#choice("finish", "Finish", [
        ["", "Any finish"],
        ...FINISHES.map((name) => [name, name]),
      ]),
      orders,
    );
    this.#body = el("div", { class: "body", role: "rowgroup" });
    this.#list = el("div", { class: "list" }, this.#body);
    this.#list.addEventListener("scroll", () => soon(this.#draw));
    this.#list.addEventListener("keydown", (event) => this.#key(event));
    this.#grid = el(
      "div",
      { role: "grid", "aria-labelledby": "samples-title", "aria-rowcount": 0 },
      el("div", { role: "rowgroup" }, head()),
      this.#list,
    );
    this.#nothing = el("div", { hidden: true });
    this.#damaged = el("p", { class: "pad soft damaged", role: "note", hidden: true });
    return el(
      "section",
      { class: "card samples", "aria-labelledby": "samples-title" },
      bar,
      this.#damaged,
      this.#grid,
      this.#nothing,
    );
  }

  #counted;
  #body;
  #list;
  #grid;
  #nothing;
  #damaged;
  #problems = [];

  #choice(name, label, options) {
    const made = el(
      "select",
      { "aria-label": label, on: { change: () => this.#set(name, made.value) } },
      options.map(([value, text]) => el("option", { value, text })),
    );
    return made;
  }

  #set(name, value, wait = 0) {
    this.#filters[name] = value;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.reload(), wait);
  }

  /** New samples: asked for at most every two seconds, and only where the newest are in sight. */
  #later() {
    if (this.#timer || this.#filters.order !== "newest" || this.#list.scrollTop > ROW) return;
    this.#timer = setTimeout(() => this.reload({ keep: true }), 2000);
  }

  /** Asks for the rows anew. keep: those in sight stay until the others are there. */
  async reload({ keep = false } = {}) {
    this.#timer = 0;
    const generation = (this.#generation += 1);
    if (!keep) this.#list.scrollTop = 0;
    if (!keep) this.#active = 0;
    if (!keep) this.#kept = new Map();
    else if (!this.#kept.size) this.#kept = this.#pages;
    this.#pages = new Map();
    const found = await this.#fetch(0);
    if (generation !== this.#generation) return; // asked for anew meanwhile
    if (!found && keep) this.#pages = this.#kept;
    this.#kept = new Map();
    soon(this.#draw);
  }

  /** The server has read only some files yet: it goes on with the next request. */
  #again() {
    if (!this.#timer) this.#timer = setTimeout(() => this.reload({ keep: true }), 500);
  }

  #params(page) {
    const { selection } = this.#session;
    return {
      ...this.#filters,
      from: selection?.from,
      to: selection?.to,
      offset: page * PAGE,
      limit: PAGE,
    };
  }

  async #fetch(page) {
    if (this.#pages.has(page)) return this.#pages.get(page);
    const generation = this.#generation;
    this.#pages.set(page, null);
    const found = await get(of(this.#session.name, "samples"), this.#params(page)).catch(
      () => null,
    );
    if (generation !== this.#generation) return null;
    if (!found) {
      this.#pages.delete(page);
      return null;
    }
    this.#total = found.total;
    this.#unread = Math.max(0, (found.files ?? 0) - (found.read ?? 0));
    this.#problems = found.problems ?? [];
    if (this.#unread) this.#again();
    this.#pages.set(page, found.rows);
    for (const { reward } of found.rows) this.#most = Math.max(this.#most, Math.abs(reward ?? 0));
    soon(this.#draw);
    return found.rows;
  }

  #rowAt(i) {
    const page = Math.floor(i / PAGE);
    return (this.#pages.get(page) ?? this.#kept.get(page))?.[i % PAGE] ?? null;
  }

  #draw = () => {
    this.#count();
    const first = Math.max(0, Math.floor(this.#list.scrollTop / ROW) - BEYOND);
    const after = Math.min(
      this.#total,
      first + Math.ceil(this.#list.clientHeight / ROW) + 2 * BEYOND,
    );
    this.#body.style.height = `${this.#total * ROW}px`;
    const shown = new Map();
    for (let i = first; i < after; i += 1) {
      const row = this.#rowAt(i);
      if (!row) this.#fetch(Math.floor(i / PAGE));
      else shown.set(i, this.#element(i, row));
    }
    for (const [i, element] of this.#shown) if (shown.get(i) !== element) element.remove();
    this.#shown = shown;
    for (const element of shown.values()) if (!element.isConnected) this.#body.append(element);
    for (const [i, element] of shown) element.tabIndex = i === this.#active ? 0 : -1;
    if (!shown.has(this.#active)) shown.values().next().value?.setAttribute("tabindex", "0");
  };

  #count() {
    const { selection } = this.#session;
    const words = selection ? ` of Steps ${selection.from} to ${selection.to}` : "";
    say(
      this.#counted,
      this.#total ? `${plural(this.#total, "sample")}${words}${this.#reading()}` : this.#reading(),
    );
    this.#damaged.hidden = !this.#problems.length;
    say(this.#damaged, this.#problems.join("; "));
    this.#grid.hidden = !this.#total;
    this.#nothing.hidden = Boolean(this.#total);
    this.#grid.setAttribute("aria-rowcount", this.#total + 1);
    if (!this.#total) this.#nothing.replaceChildren(empty(this.#without()));
  }

  #reading() {
    return this.#unread ? `, ${plural(this.#unread, "file")} still to be read` : "";
  }

  #without() {
    const { q, node, finish, step } = this.#filters;
    if (q || node || finish || step || this.#session.selection)
      return "No sample fits the search, the filters and the selected Steps.";
    if (this.#problems.length) return "No sample can be read.";
    return "No sample is recorded yet. `run --samples-every` says of which Steps a run keeps rows.";
  }

  #element(i, row) {
    const key = keyOf(row);
    const before = this.#shown.get(i);
    if (before?.dataset.key === key) {
      before.classList.toggle("chosen", key === this.#chosen);
      return before;
    }
    const cells = [
      cell("soft", `${row.step}`),
      cell("cut prompt wide", text(row.prompt)),
      cell("cut", row.completion ?? ""),
      meter(row.reward, this.#most),
      cell("number wide", known(row.length) ? count(row.length) : "-"),
      cell("wide soft finish", ended(row)),
      cell("number wide", known(row.version) ? `v${row.version}` : "-"),
    ];
    const element = el(
      "div",
      {
        class: key === this.#chosen ? "row chosen" : "row",
        role: "row",
        "aria-rowindex": i + 2,
        "data-key": key,
        tabindex: "-1",
        on: { click: () => this.#take(i) },
      },
      cells,
    );
    element.style.top = `${i * ROW}px`;
    return element;
  }

  #take(i) {
    this.#active = i;
    const row = this.#rowAt(i);
    if (row) this.#open(row);
  }

  /** Marks the sample that the panel shows. */
  mark(key) {
    this.#chosen = key;
    soon(this.#draw);
  }

  #key(event) {
    const moves = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: 10,
      PageUp: -10,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key === "Enter" || event.key === " ") this.#take(this.#active);
    else if (event.key in moves) this.#move(moves[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #move(by) {
    this.#active = Math.min(this.#total - 1, Math.max(0, this.#active + by));
    const [top, list] = [this.#active * ROW, this.#list];
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight)
      list.scrollTop = top + ROW - list.clientHeight;
    this.#draw();
    this.#shown.get(this.#active)?.focus({ preventScroll: true });
  }

  /** Puts the focus on the list. */
  focus() {
    (this.#shown.get(this.#active) ?? this.search).focus();
  }
}

const known = (value) => value !== null && value !== undefined;

function trainers(run) {
  return (run.nodes ?? []).filter((node) => node.work === "train").map((node) => node.name);
}

function head() {
  const names = [
    ["Step", ""],
    ["Prompt", "wide"],
    ["Completion", ""],
    ["Reward", "number"],
    ["Tokens", "number wide"],
    ["Finish", "wide"],
    ["Version", "number wide"],
  ];
  return el(
    "div",
    { class: "row head", role: "row", "aria-rowindex": 1 },
    names.map(([text, kind]) => el("span", { class: kind, role: "columnheader", text })),
  );
}

/** How a completion ended; of an episode with its turns. */
function ended({ finish, turns }) {
  return known(turns) ? `${finish ?? "-"}\n${plural(turns, "turn")}` : (finish ?? "-");
}

function cell(kind, words) {
  return el("span", { class: kind, role: "gridcell", text: words });
}

/** A reward as a number, and as a length beside the greatest one. */
function meter(reward, most) {
  const fill = el("i");
  fill.style.width = `${Math.min(1, Math.max(0, (reward ?? 0) / most)) * 100}%`;
  return el(
    "span",
    { class: "meter", role: "gridcell" },
    el("span", { class: "gauge", "aria-hidden": "true" }, fill),
    el("span", { text: number(reward) }),
  );
}

/** A prompt as one text; of messages what comes after the system's. */
function text(prompt) {
  if (typeof prompt === "string") return prompt.replace(/^system: [\s\S]*?\nuser: /, "");
  return prompt?.at?.(-1)?.content ?? "";
}
