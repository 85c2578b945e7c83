// The graph: its drawing, zoom and pan, focus by arrow keys, the choice of a part.
//
// Owns: the section with the drawing. Does not own: the figures in it (life.js).

import { getText, of } from "./api.js";
import { el, empty, say, soon, svg } from "./dom.js";
import { indexed, parsed } from "./drawing.js";
import { besideOf, STATES } from "./figures.js";
import { Life } from "./life.js";
import { percent } from "./format.js";

const LEAST = 0.15;
const MOST = 3;
const READABLE = 0.8;

export class Graph {
  #session;
  #choose;
  #view;
  #zoom = 1;
  #drawing = null;
  #index = null;
  #life = null;
  #drawn;
  #options = { by: "graph", fold: undefined };

  /** choose(kind, id): a part was opened. */
  constructor(session, choose) {
    this.#session = session;
    this.#choose = choose;
    this.#view = el("div", { class: "view" });
    this.#listen();
    this.element = this.#section();
    session.on("figures", () => soon(this.#update));
    session.on("run", () => soon(this.#update));
    session.on("run", () => this.#follow());
    this.load();
  }

  /** Asks for the drawing again where another layout has other Workers. */
  #follow() {
    if (this.#drawn !== undefined && this.#places() !== this.#drawn) this.load();
  }

  /** Which Workers each node has, as text. */
  #places() {
    const nodes = this.#session.run.nodes ?? [];
    return JSON.stringify(nodes.map(({ name, workers }) => [name, workers]));
  }

  #section() {
    this.#caption = el("span", { class: "soft", id: "figures-of" });
    this.#percent = el("span", { class: "zoom", role: "status", "aria-label": "zoom" });
    const button = (text, label, fn) =>
      el("button", { type: "button", text, "aria-label": label, on: { click: fn } });
    const unfold = () => this.set({ fold: unfolded.checked ? 0 : undefined });
    const unfolded = el("input", { type: "checkbox", on: { change: unfold } });
    const bar = el(
      "div",
      { class: "bar" },
      el("h2", { text: "Graph", id: "graph-title" }),
      this.#caption,
      el("span", { class: "push" }),
      this.#phases(),
      this.#segments(),
      el("label", { class: "choice" }, unfolded, "Unfold chains"),
      el(
        "span",
        { class: "segments", role: "group", "aria-label": "Zoom" },
        button("\u2212", "Zoom out", () => this.zoomBy(1 / 1.2)),
        button("+", "Zoom in", () => this.zoomBy(1.2)),
        button("Fit", "Fit the graph to its frame", () => this.fit()),
      ),
      this.#percent,
    );
    return el(
      "section",
      { class: "card graph", "aria-labelledby": "graph-title" },
      bar,
      hatches(),
      this.#view,
      this.#legend(),
    );
  }

  /** What few nodes do stands in it only where one does it. */
  #legend() {
    const lines = legend();
    this.#outside = lines.querySelector(".of-outside");
    return lines;
  }

  #caption;
  #outside;
  #percent;

  #segments() {
    const group = el("span", {
      class: "segments",
      role: "radiogroup",
      "aria-label": "Boxes around nodes",
    });
    const choices = [
      ["graph", "By graph"],
      ["worker", "By Worker"],
    ];
    const buttons = choices.map(([by, text]) =>
      el("button", {
        type: "button",
        role: "radio",
        text,
        "aria-checked": by === "graph",
        on: { click: () => this.set({ by }) },
      }),
    );
    group.append(...buttons);
    this.#mark = () =>
      choices.forEach(([by], i) =>
        buttons[i].setAttribute("aria-checked", by === this.#options.by),
      );
    return group;
  }

  #mark;

  /** Of a Program: which phase's graph is drawn. */
  #phases() {
    const { phases = [], phase } = this.#session.run;
    if (phases.length < 2) return null;
    const choice = el(
      "select",
      { "aria-label": "Phase", on: { change: () => this.set({ phase: choice.value }) } },
      phases.map(({ number, title }) =>
        el("option", {
          value: number,
          text: `Phase ${number}: ${title}`,
          selected: number === phase,
        }),
      ),
    );
    return choice;
  }

  get by() {
    return this.#options.by;
  }

  /** Changes `by` or `fold`, and asks for the drawing again. */
  set(changes) {
    Object.assign(this.#options, changes);
    this.#mark();
    return this.load();
  }

  async load() {
    this.#drawn = this.#places();
    try {
      const text = await getText(of(this.#session.name, "drawing"), this.#options);
      this.#adopt(parsed(text));
    } catch (error) {
      this.#view.replaceChildren(empty(`The graph cannot be drawn: ${error.message}`));
    }
  }

  #adopt(drawing) {
    this.#drawing = drawing;
    this.#view.replaceChildren(drawing);
    this.#index = indexed(drawing);
    for (const { g } of this.#index.edges) {
      const wire = g.querySelector(".wire");
      if (wire && !g.querySelector(".hit")) g.prepend(svg("path", { class: "hit", d: wire.getAttribute("d") }));
    }
    this.#life = new Life(this.#index, this.#planned());
    const parts = this.#parts();
    parts.forEach(({ g }, i) => g.setAttribute("tabindex", i ? "-1" : "0"));
    this.fit(READABLE);
    this.#life.measure(drawing.getBoundingClientRect(), this.#zoom);
    this.#look();
    this.#update();
  }

  #planned() {
    return new Set((this.#session.run.nodes ?? []).map((node) => node.name));
  }

  /** Tells the life which part of the drawing is in sight. */
  #look = () => {
    if (!this.#drawing?.isConnected) return;
    const [frame, root] = [
      this.#view.getBoundingClientRect(),
      this.#drawing.getBoundingClientRect(),
    ];
    const box = [
      frame.left - root.left,
      frame.top - root.top,
      frame.right - root.left,
      frame.bottom - root.top,
    ];
    this.#life.within(box.map((x) => x / this.#zoom));
  };

  #update = () => {
    const figures = this.#session.figures;
    this.#life?.show(figures);
    const replicas = Object.values(figures?.flow?.nodes ?? {});
    this.#outside.hidden = !replicas.some((each) => each.for_outside > 0);
    say(this.#caption, figures?.flow ? `Figures of ${figures.words}` : this.#without());
  };

  #without() {
    return this.#session.running ? "No figures yet" : "This run recorded no figures of its flow";
  }

  #parts() {
    return [...(this.#index?.nodes ?? []), ...(this.#index?.edges ?? [])];
  }

  /** Marks the part that the panel shows; null: none. */
  mark(kind, id) {
    for (const part of this.#parts()) {
      const same = kind === "node" ? part.names?.includes(id) : kind === "edge" && part.id === id;
      part.g.classList.toggle("chosen", Boolean(same));
    }
  }

  /** Ids of the plan's edges whose rows go beside a drawn edge. */
  beside(id) {
    const edges = this.#index?.edges ?? [];
    const drawn = new Set(edges.map((edge) => edge.id));
    const ids = (this.#session.run.edges ?? []).map((edge) => edge.id);
    return ids.filter((other) => !drawn.has(other) && besideOf(other, edges) === id);
  }

  /** Puts the focus on a node, by default the first. */
  focus() {
    this.#parts()
      .find(({ g }) => g.getAttribute("tabindex") === "0")
      ?.g.focus();
  }

  // Zoom and pan

  #size() {
    const { width, height } = this.#drawing.viewBox.baseVal;
    return { width: width || 1, height: height || 1 };
  }

  #scale(zoom) {
    this.#zoom = Math.min(MOST, Math.max(LEAST, zoom));
    const { width, height } = this.#size();
    this.#drawing.style.width = `${Math.round(width * this.#zoom)}px`;
    this.#drawing.style.height = `${Math.round(height * this.#zoom)}px`;
    say(this.#percent, percent(this.#zoom));
    soon(this.#look);
  }

  /** As large as the frame allows, at most as drawn and at least `least`. */
  fit(least = LEAST) {
    if (!this.#drawing) return;
    const { width, height } = this.#size();
    const tall = parseFloat(getComputedStyle(this.#view).maxHeight) || height;
    const room = Math.min((this.#view.clientWidth - 2) / width, tall / height);
    this.#scale(Math.max(least, Math.min(1, room)));
    this.#centre();
  }

  /** Where the drawing is wider than its frame: its nodes in the middle, or the first of them. */
  #centre() {
    const view = this.#view;
    const boxes = (this.#index?.nodes ?? []).map(({ g }) => g.getBoundingClientRect());
    if (!boxes.length) return;
    const left = Math.min(...boxes.map((box) => box.left));
    const right = Math.max(...boxes.map((box) => box.right));
    const [from, to] = right - left > view.clientWidth ? [boxes[0].left, boxes[0].right] : [left, right];
    view.scrollLeft += (from + to) / 2 - view.getBoundingClientRect().left - view.clientWidth / 2;
  }

  /** Zooms, keeping the point (x, y) of the frame, by default its middle, where it is. */
  zoomBy(factor, x = this.#view.clientWidth / 2, y = this.#view.clientHeight / 2) {
    if (!this.#drawing) return;
    const view = this.#view;
    const before = this.#zoom;
    const [left, top] = [(view.scrollLeft + x) / before, (view.scrollTop + y) / before];
    this.#scale(before * factor);
    view.scrollLeft = left * this.#zoom - x;
    view.scrollTop = top * this.#zoom - y;
  }

  #listen() {
    const view = this.#view;
    view.addEventListener("scroll", () => soon(this.#look), { passive: true });
    view.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    view.addEventListener("pointerdown", (event) => this.#hold(event));
    view.addEventListener("click", (event) => this.#open(event.target));
    view.addEventListener("keydown", (event) => this.#key(event));
    view.addEventListener("focusin", (event) => this.#rove(event.target));
  }

  #wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = this.#view.getBoundingClientRect();
    this.zoomBy(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }

  #hold(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const view = this.#view;
    const from = { x: event.clientX + view.scrollLeft, y: event.clientY + view.scrollTop };
    const move = (at) => {
      view.classList.add("held");
      view.scrollLeft = from.x - at.clientX;
      view.scrollTop = from.y - at.clientY;
    };
    const end = () => {
      view.classList.remove("held");
      window.removeEventListener("pointermove", move);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
    window.addEventListener("pointercancel", end, { once: true });
  }

  // Focus and choice

  #partOf(target) {
    const g = target.closest?.("g.node, g.edge.data");
    return g ? this.#parts().find((part) => part.g === g) : null;
  }

  #open(target) {
    const part = this.#partOf(target);
    if (part) this.#choose(part.names ? "node" : "edge", part.id);
  }

  #rove(target) {
    const part = this.#partOf(target);
    if (!part) return;
    for (const { g } of this.#parts()) g.setAttribute("tabindex", g === part.g ? "0" : "-1");
  }

  #key(event) {
    const part = this.#partOf(event.target);
    if (!part) return;
    if (event.key === "Enter" || event.key === " ") this.#open(event.target);
    else {
      const next = this.#next(part, event.key);
      if (!next) return;
      next.g.focus();
      next.g.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** Down and up follow edges, left and right go to the part beside it. */
  #next(part, key) {
    const { nodes, edges } = this.#index;
    const node = (name) => nodes.find(({ names }) => names.includes(name));
    if (key === "Home") return nodes[0];
    if (key === "End") return nodes.at(-1);
    if (key === "ArrowDown") {
      return part.names
        ? edges.find((edge) => part.names.includes(edge.producer))
        : node(part.consumer);
    }
    if (key === "ArrowUp") {
      return part.names
        ? edges.find((edge) => part.names.includes(edge.consumer))
        : node(part.producer);
    }
    if (key !== "ArrowLeft" && key !== "ArrowRight") return null;
    const beside = part.names ? nodes : edges.filter((edge) => edge.producer === part.producer);
    const at = beside.indexOf(part) + (key === "ArrowRight" ? 1 : -1);
    return beside[(at + beside.length) % beside.length];
  }
}

/** What the colours and patterns of a bar mean. */
function legend() {
  const one = ([name, words]) =>
    el(
      "li",
      { class: name === "for_outside" ? "of-outside" : null, hidden: name === "for_outside" },
      svg(
        "svg",
        { width: 22, height: 10, "aria-hidden": "true" },
        svg("rect", { class: `fill-${name}`, width: 22, height: 10 }),
      ),
      words,
    );
  return el(
    "ul",
    { class: "legend", "aria-label": "What the bars show" },
    Object.entries(STATES).map(one),
  );
}

/** The patterns of the reasons to wait, so that no hue alone tells them apart. */
function hatches() {
  const ground = () => svg("rect", { class: "ground", width: 6, height: 6 });
  const made = (id, ...ink) =>
    svg(
      "pattern",
      { id: `hatch-${id}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      ground(),
      ink,
    );
  const line = (d) => svg("path", { class: "ink", d });
  return svg(
    "svg",
    { class: "hatches", "aria-hidden": "true" },
    svg(
      "defs",
      {},
      made("rows", line("M-1 7 7 -1M-1 1 1 -1M5 7 7 5")),
      made("weights", svg("circle", { class: "ink", cx: 3, cy: 3, r: 0.9 })),
      made("turn", line("M3 0V6")),
      made("room", line("M0 3H6M3 0V6")),
      made("outside", line("M0 3H6")),
    ),
  );
}
