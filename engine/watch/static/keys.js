// Keys: what each does, the dialog that lists them, the theme.
//
// Owns: the listeners on the document. Does not own: what a page does (act of run.js).

import { el } from "./dom.js";

const KEYS = [
  ["g", "graph", "to the graph"],
  ["s", "steps", "to the Steps: type the first and the last to select them"],
  ["r", "samples", "to the rows of samples"],
  ["/", "search", "search the samples"],
  ["m", "metrics", "choose metrics"],
  ["l", "live", "follow the run, or stop following"],
  ["w", "worker", "boxes by Worker, or not"],
  ["+", "larger", "zoom in"],
  ["-", "smaller", "zoom out"],
  ["f", "fit", "fit the graph to its frame"],
  ["z", "zoom", "zoom the curves to the selected Steps"],
  ["0", "all", "show all Steps"],
  ["Escape", "escape", "close the panel; clear the selection"],
];
const IN_GRAPH = [
  ["\u2193 \u2191", "along an edge, down or up"],
  ["\u2190 \u2192", "to the part beside it"],
  ["Enter", "look inside"],
];
const THEMES = ["auto", "light", "dark"];

/** Listens for keys. page(): the page that is shown. */
export function listen(page) {
  const dialog = document.getElementById("keys");
  dialog.append(...contents(dialog));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (isTyping(event.target) && event.key !== "Escape") return;
    if (act(event.key, page(), dialog)) event.preventDefault();
  });
  themes();
}

function act(key, page, dialog) {
  if (key === "?") return (dialog.showModal(), true);
  if (key === "t") return (nextTheme(), true);
  const found = KEYS.find(([each]) => each === key);
  return Boolean(found && page?.act?.(found[1]));
}

function isTyping(target) {
  if (target.tagName === "INPUT") return target.type !== "checkbox";
  return ["TEXTAREA", "SELECT"].includes(target.tagName);
}

function contents(dialog) {
  const row = ([key, words]) =>
    el("tr", {}, el("td", {}, el("kbd", { text: key })), el("td", { text: words }));
  const all = [
    ...KEYS.map(([key, , words]) => [key, words]),
    ["t", "theme: as the system, light, dark"],
    ["?", "these keys"],
  ];
  return [
    el("h2", { id: "keys-title", text: "Keys" }),
    el("table", {}, el("tbody", {}, all.map(row))),
    el("h3", { text: "In the graph" }),
    el("table", {}, el("tbody", {}, IN_GRAPH.map(row))),
    el("p", {
      class: "soft",
      text: "A drag over curves or lanes selects Steps, a double click clears. Ctrl and wheel zoom.",
    }),
    el("button", { type: "button", text: "Close", on: { click: () => dialog.close() } }),
  ];
}

function themes() {
  const button = document.getElementById("theme");
  button.addEventListener("click", nextTheme);
  nameTheme();
}

function theme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("dataflow-theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("dataflow-theme", next);
  }
  nameTheme();
}

function nameTheme() {
  const button = document.getElementById("theme");
  button.textContent = `Theme: ${theme()}`;
  button.setAttribute("aria-label", `Theme: ${theme()}. Change it`);
}
