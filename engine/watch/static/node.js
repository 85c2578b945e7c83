// A node in the panel: what it is, what was estimated and measured, its replicas, log and errors.

import { get, of } from "./api.js";
import { el, empty, facts, folded, svg, table } from "./dom.js";
import { weightsOf } from "./edge.js";
import { byNode, inWords, sharesOf } from "./figures.js";
import { bytes, count, percent, rate, seconds } from "./format.js";
import { shareBar } from "./life.js";
import { section } from "./panel.js";

/** Sections about a node. live(fn): `fn` is called when there are newer figures. */
export async function nodeSections(session, name, live) {
  const node = await get(of(session.name, "node", name));
  const now = el("div", {});
  const show = () => now.replaceChildren(...[replicas(session, name)].flat());
  show();
  live(show);
  return [
    section(
      "What it is",
      facts([
        ["operator", node.operator],
        ["call", node.call ? el("code", { text: node.call }) : null],
        ["source", node.source ? el("code", { text: node.source, title: node.file }) : null],
        ["kernel", node.kernel ? el("code", { text: node.kernel }) : null],
        ["region", node.region],
        ["layout", node.layout],
        ["Workers", (node.workers ?? []).join(", ")],
        ...weightsOf(session, name),
      ]),
    ),
    section("Replicas", now),
    node.work === "train" ? section("Trained rows by lag", lags(session.figures?.flow)) : null,
    section("Errors", errors(node.errors)),
    section("Estimate and measured", estimate(node)),
    section("Parameters", parameters(node.params)),
    section("Log", log(node.log)),
  ];
}

function replicas(session, name) {
  const figures = session.figures?.flow ? byNode(session.figures.flow).get(name) : null;
  if (!figures) return empty("No figures of this node yet.");
  const words = el("p", { class: "soft", text: `Figures of ${session.figures.words}` });
  const memory = (each) => memoryOf(session.figures, name, each.worker);
  const shown = figures.replicas.map((each) => replica(each, figures.length, memory(each)));
  return [words, el("div", {}, shown)];
}

/** How much memory a replica's Worker has, beside what the plan expects of the node in it. */
function memoryOf({ flow, plan }, name, worker) {
  const found = flow.workers?.[worker];
  if (!found?.memory) return "";
  const planned = plan?.[`${name}@${worker}`];
  const device = found.device ? `, ${bytes(found.device)} on its GPU` : "";
  const expected = planned ? `; planned for the node ${bytes(planned)}` : "";
  return `memory of its Worker ${bytes(found.memory)}${device}${expected}`;
}

/** Rows of each lag, in versions, of all sources. */
function lags(flow) {
  const rows = [];
  for (const cut of Object.values(flow?.cuts ?? {})) {
    (cut.lags ?? []).forEach((n, lag) => (rows[lag] = (rows[lag] ?? 0) + n));
  }
  const all = rows.reduce((sum, n) => sum + n, 0);
  if (!all) return null;
  const numbers = { class: "number" };
  return table(
    ["lag", { text: "rows", ...numbers }, { text: "share", ...numbers }],
    rows.map((n, lag) => [`${lag} version${lag === 1 ? "" : "s"}`, count(n), percent(n / all)]),
  );
}

function replica(each, length, memory) {
  const shares = sharesOf([each]);
  const bar = shareBar(0, 0, 200, 10);
  bar.show(shares);
  const picture = svg(
    "svg",
    {
      class: "share-bar",
      viewBox: "0 0 200 10",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    bar.g,
  );
  const rates = [
    each.rows ? rate(each.rows / length, "rows") : null,
    each.tokens ? rate(each.tokens / length, "tokens") : null,
    (each.version ?? -1) >= 0 ? `version ${each.version}` : null,
    each.in_flight ? `${count(each.in_flight)} rows in flight` : null,
  ].filter(Boolean);
  return el(
    "div",
    { class: "replica" },
    el("b", { text: each.worker }),
    picture,
    el("span", { class: "words", text: inWords(shares, percent) }),
    el("span", { class: "words", text: rates.join(", ") }),
    ...[blames(each), memory].filter(Boolean).map((text) => el("span", { class: "words", text })),
  );
}

function blames(each) {
  const found = [...Object.entries(each.blames ?? {}), ...Object.entries(each.outside ?? {})]
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3);
  if (!found.length) return "";
  return `waited for ${found.map(([name, spent]) => `${name} ${seconds(spent)}`).join(", ")}`;
}

function estimate({ estimate: planned, measured }) {
  if (!planned && !measured) return null;
  const parts = measured?.bytes && typeof measured.bytes === "object" ? measured.bytes : {};
  const all = typeof measured?.bytes === "number" ? measured.bytes : null;
  const names = [...new Set([...Object.keys(planned?.bytes ?? {}), ...Object.keys(parts)])];
  const size = (n) => (n === null || n === undefined ? "-" : bytes(n));
  const rows = names.map((name) => [name, size(planned?.bytes?.[name]), size(parts[name])]);
  rows.push([
    all === null ? "all" : "all; the peak of a Worker",
    size(planned?.total),
    size(all ?? parts.total),
  ]);
  rows.push(["seconds a Step", seconds(planned?.seconds), seconds(measured?.seconds)]);
  const numbers = { class: "number" };
  return table(["part", { text: "estimate", ...numbers }, { text: "measured", ...numbers }], rows);
}

function parameters(params) {
  const pairs = Object.entries(params ?? {});
  if (!pairs.length) return null;
  return table(
    ["parameter", "value"],
    pairs.map(([name, value]) => [
      el("code", { text: name }),
      String(value).length > 120
        ? folded(`${String(value).slice(0, 60)} ...`, String(value))
        : el("code", { text: value }),
    ]),
  );
}

function errors(found) {
  if (!found?.length) return null;
  const key = (k) =>
    Array.isArray(k) ? `position ${k[0]}, sample ${k[1]}, attempt ${k[2]}` : (k ?? "-");
  return found.map(({ step, key: row, error }) =>
    el(
      "div",
      { class: "how" },
      el("p", { text: `Step ${count(step)}, row: ${key(row)}` }),
      el("pre", { text: error }),
    ),
  );
}

function log(lines) {
  if (!lines?.length) return empty("Its Workers wrote no log.");
  const text = lines
    .map((line) => (typeof line === "string" ? line : JSON.stringify(line)))
    .join("\n");
  return el("pre", {
    class: "log",
    tabindex: "0",
    role: "region",
    "aria-label": "Last lines of the log",
    text,
  });
}
