// The page of one run: headline, sentence, graph, axis, samples, panel.
//
// Owns: which sections there are, and what the panel shows. Does not own: the sections.

import { get, of } from "./api.js";
import { Axis } from "./axis.js";
import { el, empty, say, soon } from "./dom.js";
import { besideSection, edgeSections, edgeTitle } from "./edge.js";
import { number, seconds } from "./format.js";
import { Graph } from "./graph.js";
import { nodeSections } from "./node.js";
import { Parts } from "./parts.js";
import { pill, steps } from "./runs.js";
import { keyOf, sampleSections } from "./sample.js";
import { Samples } from "./samples.js";
import { Session } from "./session.js";

/** A run's page; null where the router has gone on meanwhile. */
export async function openRun(name, panel, go) {
  const run = await get(of(name));
  return new RunPage(run, panel, go);
}

class RunPage {
  #session;
  #panel;
  #go;
  #timer = 0;
  #said = sentencePlace();
  #how = el("div", { hidden: true });
  #part = null;
  #live = () => {};
  #tip = el("div", { class: "tip", hidden: true });

  /** go(part): changes the address to `{kind, id}` or null. */
  constructor(run, panel, go) {
    [this.#panel, this.#go] = [panel, go];
    const session = (this.#session = new Session(run));
    this.name = run.name;
    document.title = `${run.name} - dataflow watch`;
    this.graph = new Graph(session, (kind, id) => go({ kind, id }));
    this.parts = new Parts(session);
    this.axis = new Axis(session);
    this.samples = new Samples(session, (row) => go({ kind: "sample", id: keyOf(row) }));
    this.headline = this.#headline();
    this.elements = [
      this.#said.element,
      this.#how,
      this.graph.element,
      this.parts.element,
      this.axis.element,
      this.samples.element,
      this.#tip,
    ];
    for (const topic of ["run", "step", "figures"]) session.on(topic, () => soon(this.#update));
    session.on("settled", () => this.#refreshPanel());
    this.#timer = setInterval(() => soon(this.#clock), 1000);
    this.#update();
    session.open();
  }

  close() {
    clearInterval(this.#timer);
    this.#session.close();
    this.axis.close();
    this.samples.close();
    this.#panel.hide();
  }

  #headline() {
    const fact = (name) => {
      const value = el("b");
      return { value, element: el("span", { class: "fact" }, `${name} `, value) };
    };
    this.#facts = { step: fact("Step"), elapsed: fact("took"), reward: fact("reward") };
    this.#state = el("span", {}, pill(this.#session.run));
    const compare = el("a", { href: "#/", class: "fact", text: "All runs" });
    return [
      el("h1", { text: this.name }),
      this.#state,
      ...Object.values(this.#facts).map((f) => f.element),
      compare,
    ];
  }

  #facts;
  #state;

  #update = () => {
    const { run, figures, metrics } = this.#session;
    if (this.#state.textContent !== pill(run).textContent) this.#state.replaceChildren(pill(run));
    say(this.#facts.step.value, steps(run));
    const reward = metrics["reward/mean"] ?? run.reward;
    this.#facts.reward.element.hidden = reward === null || reward === undefined;
    say(this.#facts.reward.value, number(reward));
    this.#clock();
    this.#said.show(figures, this.#session);
    this.#live();
    this.#ended(run);
  };

  #clock = () => {
    const { began, ended } = this.#session.run;
    this.#facts.elapsed.element.hidden = !began;
    if (began)
      say(this.#facts.elapsed.value, seconds(Math.max(0, (ended ?? Date.now() / 1000) - began)));
  };

  /** How it ended, where that is not as planned; each switch to another layout, and why. */
  #ended(run) {
    const broken = run.state === "failed" || run.state === "ended";
    const told = run.state === "interrupted";
    const problems = [...relayouts(run), ...(run.problems ?? [])];
    this.#how.hidden = !(broken || told || problems.length);
    if (this.#how.hidden) return;
    this.#how.className = broken ? "how" : "how calm";
    const words = broken || told ? [el("p", { text: ending(run) })] : [];
    const reason = (broken || told) && run.reason ? [el("pre", { text: run.reason })] : [];
    this.#how.replaceChildren(...words, ...reason, ...problems.map((text) => el("p", { text })));
  }

  // The panel

  /** Shows a part in the panel, `{kind, id}`, or closes it. */
  show(part, { quiet = false } = {}) {
    this.#part = part;
    this.#live = () => {};
    this.graph.mark(part?.kind, part?.id);
    this.samples.mark(part?.kind === "sample" ? part.id : null);
    if (!part) return this.#panel.hide();
    const session = this.#session;
    const live = (fn) => (this.#live = fn);
    const open = (row) => this.#go({ kind: "sample", id: keyOf(row) });
    const shown = {
      edge: ["edge", edgeTitle(part.id), () => this.#edge(part.id, live)],
      node: ["node", part.id, () => nodeSections(session, part.id, live)],
      sample: [
        "sample",
        sampleTitle(part.id),
        () => sampleSections(session, part.id, open, this.#say),
      ],
    }[part.kind];
    return shown ? this.#panel.show(...shown, { quiet }) : this.#panel.hide();
  }

  async #edge(id, live) {
    const open = (other) => this.#go({ kind: "edge", id: other });
    const beside = besideSection(this.graph.beside(id), open);
    return [...(await edgeSections(this.#session, id, live)), beside];
  }

  #refreshPanel() {
    if (this.#part && this.#part.kind !== "sample") this.show(this.#part, { quiet: true });
  }

  #say = (event, words = null) => {
    this.#tip.hidden = !words;
    if (!words) return;
    say(this.#tip, words);
    const left = Math.max(8, Math.min(event.clientX + 12, window.innerWidth - 330));
    this.#tip.style.left = `${left}px`;
    this.#tip.style.top = `${event.clientY + 18}px`;
  };

  /** What keys do here; `false`: nothing. */
  act(name) {
    const session = this.#session;
    const acts = {
      graph: () => this.graph.focus(),
      steps: () => this.axis.focus(),
      samples: () => this.samples.focus(),
      search: () => this.samples.search.focus(),
      metrics: () => this.axis.choose(),
      live: () => (session.live ? session.unfollow() : session.follow()),
      worker: () => this.graph.set({ by: this.graph.by === "graph" ? "worker" : "graph" }),
      larger: () => this.graph.zoomBy(1.2),
      smaller: () => this.graph.zoomBy(1 / 1.2),
      fit: () => this.graph.fit(),
      zoom: () => this.axis.zoom(),
      all: () => session.zoom(null),
      escape: () => (this.#part ? this.#go(null) : session.select(null)),
    };
    return acts[name] ? (acts[name](), true) : false;
  }
}

function sampleTitle(id) {
  const [step, , position, sample] = id.split(",");
  return `Step ${step}, prompt ${position}, sample ${sample}`;
}

/** A line for each switch to another layout of the run. */
function relayouts({ changes = [] }) {
  const switches = changes.filter((each) => each.where === "plan of the run");
  return switches.map((each) => `From step ${each.step} on: layout ${each.new}`);
}

function ending({ state, step }) {
  const after = `after Step ${step ?? 0}`;
  if (state === "failed") return `The run failed, ${after}.`;
  if (state === "interrupted") return `The run was interrupted, ${after}.`;
  const cause = "its process was killed, or its machine went down";
  return `The run ended without a word, ${after}: ${cause}.`;
}

/** Who waits for whom: one sentence, the others on demand. */
function sentencePlace() {
  const first = el("p", { class: "first" });
  const summary = el("summary");
  const list = el("ul");
  const more = el("details", { hidden: true }, summary, list);
  const show = (figures, session) => {
    const [head, ...others] = figures?.sentences ?? [];
    say(first, head ? sentence(head) : without(figures, session));
    first.classList.toggle("of", !head);
    more.hidden = !others.length;
    say(summary, others.length === 1 ? "One more wait" : `${others.length} more waits`);
    others.forEach((text, i) => {
      if (!list.children[i]) list.append(el("li"));
      say(list.children[i], sentence(text));
    });
    while (list.children.length > others.length) list.lastChild.remove();
  };
  const element = el("section", { class: "said", "aria-label": "Who waits for whom" }, first, more);
  return { element, show };
}

function sentence(text) {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

function without(figures, { running, run }) {
  if (figures?.flow) return "Nothing waits for long.";
  if (running)
    return run.step
      ? "Figures come with the next second."
      : "The run has begun; its first Step is under way.";
  return "This run recorded no figures of who waited for whom.";
}

/** Words where a run cannot be opened. */
export function cannotOpen(name, error) {
  return [el("section", { class: "card" }, empty(`${name} cannot be opened: ${error.message}`))];
}
