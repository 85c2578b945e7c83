// Tokens of a completion, coloured by advantage or by the difference of log-probs.
//
// Owns: colours, marks of versions, the table for those who see or point at no colour.

import { el, table } from "./dom.js";
import { number, signed } from "./format.js";

export const BY = {
  advantage: "advantage",
  difference: "log-prob, trainer minus sampler",
  none: "no colour",
};

/** A completion's tokens in an element that `colourBy(name)` colours. */
export function coloured(tokens) {
  const spans = tokens.map((token, i) => span(token, i));
  const element = el("div", { class: "body" });
  let version = null;
  tokens.forEach((token, i) => {
    const at = token.version ?? null;
    const changed = at !== null && at !== version;
    if (changed) element.append(mark(at, version !== null));
    if (at !== null) version = at;
    element.append(spans[i]);
  });
  const colourBy = (name) => {
    const most = greatest(tokens, name);
    spans.forEach((each, i) => paint(each, tokens[i][name], most));
    return most;
  };
  return { element, colourBy };
}

/** Which of the two numbers any token has. */
export function known(tokens) {
  return ["advantage", "difference"].filter((name) =>
    tokens.some((token) => isNumber(token[name])),
  );
}

function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

function greatest(tokens, name) {
  return tokens.reduce(
    (most, token) => Math.max(most, isNumber(token[name]) ? Math.abs(token[name]) : 0),
    0,
  );
}

function span(token, i) {
  const out = token.mask === 0 || token.mask === false;
  return el("span", { class: out ? "token unmasked" : "token", "data-at": i, text: textOf(token) });
}

/** What a token says; without a known tokenizer its number. */
function textOf(token) {
  return token.text ?? `<${token.id}>`;
}

function paint(each, value, most) {
  const weight = isNumber(value) && most > 0 ? Math.abs(value) / most : 0;
  each.classList.toggle("above", weight > 0.02 && value > 0);
  each.classList.toggle("below", weight > 0.02 && value < 0);
  each.style.setProperty("--weight", weight.toFixed(3));
}

function mark(version, changed) {
  const words = changed ? `the weights change to version ${version} here` : `version ${version}`;
  return el("span", { class: "version-mark", title: words, "data-version": `v${version}` });
}

/** What a token says of itself. */
export function words(token, i) {
  const lines = [`token ${i + 1}: ${JSON.stringify(textOf(token))}`];
  if (isNumber(token.advantage)) lines.push(`advantage ${signed(token.advantage)}`);
  if (isNumber(token.difference))
    lines.push(`log-prob, trainer minus sampler: ${signed(token.difference)}`);
  if (isNumber(token.version)) lines.push(`version ${token.version}`);
  if (token.mask === 0 || token.mask === false) lines.push("not trained (mask 0)");
  return lines.join("\n");
}

/** All tokens as a table, made when it is opened. */
export function asTable(tokens) {
  const place = el("div", {
    class: "scroll",
    tabindex: "0",
    role: "region",
    "aria-label": "Tokens",
  });
  const details = el(
    "details",
    {},
    el("summary", { text: `All ${tokens.length} tokens as a table` }),
    place,
  );
  details.addEventListener("toggle", () => {
    if (!details.open || place.firstChild) return;
    const numbers = ["number", "advantage", "log-prob difference", "version", "mask"];
    const heads = ["#", "token", ...numbers.slice(1).map((text) => ({ text, class: "number" }))];
    const value = (x) => (isNumber(x) ? signed(x) : "-");
    place.append(
      table(
        heads,
        tokens.map((token, i) => [
          String(i + 1),
          el("code", { text: JSON.stringify(textOf(token)) }),
          value(token.advantage),
          value(token.difference),
          isNumber(token.version) ? number(token.version) : "-",
          isNumber(token.mask) ? String(token.mask) : "-",
        ]),
      ),
    );
  });
  return details;
}
