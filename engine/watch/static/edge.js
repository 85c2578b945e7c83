// An edge in the panel: its schema, its newest rows, what it carries.

import { get, of } from "./api.js";
import { el, empty, facts, folded, table } from "./dom.js";
import { byWeight, lengthOf } from "./figures.js";
import { bytes, count, rate, seconds } from "./format.js";
import { section } from "./panel.js";

const LONG = 80;
const KEYS = ["position", "sample", "attempt"];
const FROM = {
  recorded: "recorded rows (run --record)",
  newest: "the newest rows that its producer made",
  samples: "the recorded samples",
};

/** Sections about a data edge. live(fn): `fn` is called when there are newer figures. */
export async function edgeSections(session, id, live) {
  const edge = await get(of(session.name, "edge"), { id });
  const now = el("div", {});
  const show = () =>
    now.replaceChildren(
      facts([
        ["route", edge.route],
        ["bytes a row", edge.bytes_per_row ? bytes(edge.bytes_per_row) : null],
        ["rows below from", origin(edge)],
        ...carried(session.figures, id),
      ]),
    );
  show();
  live(show);
  return [
    section("What it carries", now),
    section(
      "Schema",
      table(
        ["column", "type"],
        (edge.columns ?? []).map(({ name, type }) => [
          el("code", { text: name }),
          el("code", { text: type }),
        ]),
      ),
    ),
    section("Newest rows", rowsOf(edge)),
  ];
}

export function edgeTitle(id) {
  return id.replace("->", " \u2192 ");
}

/** Edges without a line of their own, whose rows go beside one that is drawn. open(id). */
export function besideSection(ids, open) {
  const one = (id) =>
    el("li", {}, el("button", { type: "button", text: edgeTitle(id), on: { click: () => open(id) } }));
  return ids.length ? section("Rows that go beside it", el("ul", { class: "beside" }, ids.map(one))) : null;
}

function origin(edge) {
  const words = FROM[edge.from] ?? edge.from;
  return words && edge.step ? `${words}, Step ${edge.step}` : words;
}

function carried(figures, id) {
  const edge = figures?.flow?.edges?.[id];
  if (!edge) return [];
  const length = lengthOf(figures.flow);
  const waiting = edge.waiting_rows ?? 0;
  return [
    [`in ${figures.words}`, `${count(edge.rows ?? 0)} rows, ${bytes(edge.bytes ?? 0)}`],
    [
      "a second",
      `${rate((edge.rows ?? 0) / length, "rows")}, ${bytes((edge.bytes ?? 0) / length)}/s`,
    ],
    [
      "waiting",
      waiting ? `${count(waiting)} rows, the oldest for ${seconds(edge.age ?? 0)}` : "no rows",
    ],
  ];
}

function rowsOf(edge) {
  const rows = edge.rows ?? [];
  if (!rows.length)
    return empty("No row of this edge is kept. `run --record NODE` keeps all of a node's rows.");
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const heads = [
    ...KEYS.filter((key) => names.includes(key)),
    ...names.filter((name) => !KEYS.includes(name)),
  ];
  const body = rows.map((row) => heads.map((name) => cell(row[name])));
  const label = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Newest rows" };
  return el("div", label, table(heads, body));
}

/** A value of a row: short as it is, long behind a summary. */
export function cell(value) {
  if (value === null || value === undefined) return el("span", { class: "soft", text: "null" });
  const text = typeof value === "string" ? value : JSON.stringify(value);
  if (text.length <= LONG)
    return el("span", { class: typeof value === "number" ? "" : "mono", text });
  const more = Array.isArray(value) ? `${value.length} values` : `${text.length} characters`;
  return el("div", { class: "cell" }, folded(`${text.slice(0, 40)} ... (${more})`, text));
}

/** Facts of the weight edges to a node. */
export function weightsOf(session, node) {
  const found = [...byWeight(session.figures?.flow ?? {})].filter(([id]) =>
    id.endsWith(`->${node}`),
  );
  return found.map(([id, edge]) => [
    `weights of ${id.split("->")[0]}`,
    `version ${edge.loaded} loaded, ${edge.offered} offered; ` +
      `${edge.loads} loads in ${seconds(edge.seconds)}, ${bytes(edge.bytes)}`,
  ]);
}
