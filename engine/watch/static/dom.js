// Makes elements, and batches what changes them into one animation frame.
//
// Owns: how text becomes nodes (always textContent). Does not own: what is shown.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (value === false && !name.startsWith("aria-")) continue;
    if (name === "on")
      for (const [type, fn] of Object.entries(value)) node.addEventListener(type, fn);
    else if (name === "text") node.textContent = value;
    else if (["value", "checked", "selected"].includes(name)) node[name] = value;
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element: attributes, `text`, `on: {event: function}`, then children. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Sets text only where it differs: what has not changed is not touched. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute only where it differs. */
export function set(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** A list of names and values: `[["route", "shm"], ...]`; what has no value is left out. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "facts" },
    ...shown.map(([name, value]) => [
      el("dt", { text: name }),
      value instanceof Node ? el("dd", {}, value) : el("dd", { text: value }),
    ]),
  );
}

/** A table. heads: words, or `{text, class}`; rows: of text or elements. */
export function table(heads, rows, props = {}) {
  const cells = (tag, row) =>
    row.map((cell, i) => {
      const of = typeof heads[i] === "object" ? heads[i].class : null;
      const extra = tag === "th" ? { scope: "col" } : {};
      if (cell instanceof Node) return el(tag, { class: of, ...extra }, cell);
      return el(tag, { class: of, text: cell?.text ?? cell ?? "", ...extra });
    });
  return el(
    "table",
    props,
    el("thead", {}, el("tr", {}, cells("th", heads))),
    el(
      "tbody",
      {},
      rows.map((row) => el("tr", {}, cells("td", row))),
    ),
  );
}

/** Words for a place that has nothing to show. */
export function empty(text) {
  return el("p", { class: "empty", text });
}

/** A text that is long, behind a summary. */
export function folded(summary, text) {
  return el("details", { class: "fold" }, el("summary", { text: summary }), el("pre", { text }));
}

const due = new Set();
let asked = false;

/** Calls `fn` in the next animation frame, once, however often it is asked for. */
export function soon(fn) {
  due.add(fn);
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const now = [...due];
    due.clear();
    for (const each of now) each();
  });
}

/** A colour of tokens.css as a canvas takes it. */
export function colour(name) {
  probe.style.color = `var(${name})`;
  if (!probe.isConnected) document.body.append(probe);
  return getComputedStyle(probe).color;
}
const probe = el("span", { class: "unseen", "aria-hidden": "true" });
