// A Step that is trained while it is generated, part by part, and rows that wait for a slot.
//
// Owns: that section; it is there only where a source is streamed or rows are bound late. Does not
// own: the figures (engine/protocol/progress.py).

import { el, say, soon, table } from "./dom.js";
import { count } from "./format.js";

/** What a part is doing, in words. */
const PART_STATES = {
  made: "rewards and log-probs run",
  ready: "ready",
  training: "training",
  summed: "summed",
};
const NUMBER = { class: "number" };

export class Parts {
  #session;
  #caption = el("span", { class: "soft" });
  #content = el("div", { class: "parts" });

  constructor(session) {
    this.#session = session;
    const heading = el("h2", { text: "Rows on their way", id: "parts-title" });
    this.element = el(
      "section",
      { class: "card", "aria-labelledby": "parts-title", hidden: true },
      el("div", { class: "bar" }, heading, this.#caption),
      this.#content,
    );
    session.on("figures", () => soon(this.#update));
  }

  #update = () => {
    const figures = this.#session.figures;
    const streams = Object.entries(figures?.flow?.streams ?? {});
    const pools = Object.entries(figures?.flow?.pools ?? {});
    this.element.hidden = !streams.length && !pools.length;
    if (this.element.hidden) return;
    say(this.#caption, `Figures of ${figures.words}`);
    const shown = [...streams.map(streamed), ...pools.map(pooled)];
    this.#content.replaceChildren(...shown);
  };
}

/** A source whose Step is streamed. */
function streamed([source, stream]) {
  const parts = (stream.parts ?? []).map(partCells);
  const groups = stream.waiting_groups ?? 0;
  if (groups) {
    parts.push(["-", count(groups), count(stream.waiting_tokens ?? 0), "waits for the watermark"]);
  }
  const heads = ["part", { text: "groups", ...NUMBER }, { text: "tokens", ...NUMBER }, "state"];
  return el(
    "div",
    { class: "of-parts" },
    el("h3", { text: source }),
    el("p", { class: "soft", text: streamWords(stream) }),
    parts.length ? scrolled(table(heads, parts), `Parts of ${source}`) : null,
  );
}

function partCells(part, number) {
  const state = part.state ?? "made";
  const words = PART_STATES[state] ?? state;
  const cell = state === "training" ? el("b", { text: words }) : words;
  return [String(number + 1), count(part.groups ?? 0), count(part.tokens ?? 0), cell];
}

function streamWords({ watermark = 0, ended_rows = 0, rows = 0, parts = [] }) {
  const ended = `${count(ended_rows)} of ${count(rows)} rows have ended`;
  const summed = parts.filter(({ state }) => state === "summed").length;
  const words = [ended, `watermark ${count(watermark)} tokens`];
  if (parts.length) words.push(`${count(summed)} of ${count(parts.length)} parts summed`);
  return words.join(", ");
}

/** A generation whose rows are bound late. */
function pooled([node, pool]) {
  const waiting = pool.waiting_rows ?? 0;
  const words = `${count(waiting)} ${waiting === 1 ? "row waits" : "rows wait"} for a slot`;
  const heads = [
    "replica",
    { text: "rows under way", ...NUMBER },
    { text: "slots", ...NUMBER },
    { text: "credit", ...NUMBER },
  ];
  const replicas = Object.entries(pool.under_way ?? {}).map(([worker, rows]) => [
    worker,
    count(rows),
    count(pool.slots ?? 0),
    count(pool.credit ?? 0),
  ]);
  return el(
    "div",
    { class: "of-parts" },
    el("h3", { text: node }),
    el("p", { class: "soft", text: words }),
    scrolled(table(heads, replicas), `Replicas of ${node}`),
  );
}

/** A Step may have many parts: the table scrolls by itself, also by keys. */
function scrolled(content, label) {
  const props = { class: "parts-table", tabindex: "0", role: "region", "aria-label": label };
  return el("div", props, content);
}
