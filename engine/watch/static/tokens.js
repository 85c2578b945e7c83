// Tokens of a completion, coloured by advantage or by the difference of log-probs.
//
// Owns: colours, marks of versions and turns, the table for those who see or point at no colour.

import { el, say, table } from "./dom.js";
import { number, signed } from "./format.js";

const BY = {
  advantage: "advantage",
  difference: "log-prob, trainer minus sampler",
  none: "no colour",
};

/** A choice of colours and the tokens in them: `[choice, element]`, the former perhaps null. tip: the
 * tooltip; first: the place of the first token in its completion.
 */
export function tokenView(tokens, tip, first = 0) {
  const made = coloured(tokens);
  listen(made.element, tokens, tip, first);
  return [scale(made, tokens), made.element];
}

/** A completion's tokens in an element that `colourBy(name)` colours. */
function coloured(tokens) {
  const spans = tokens.map((token, i) => span(token, i));
  const element = el("div", { class: "body" });
  let version = null;
  let turn = null;
  tokens.forEach((token, i) => {
    if (isNumber(token.turn) && token.turn !== turn) element.append(turnMark(token.turn));
    turn = token.turn ?? null;
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
function known(tokens) {
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

function turnMark(turn) {
  const words = `turn ${turn + 1} begins here`;
  return el("span", { class: "turn-mark", title: words, "data-turn": `turn ${turn + 1}` });
}

/** What a token says of itself. */
function words(token, i) {
  const lines = [`token ${i + 1}: ${JSON.stringify(textOf(token))}`];
  if (isNumber(token.turn)) lines.push(`turn ${token.turn + 1}`);
  if (isNumber(token.advantage)) lines.push(`advantage ${signed(token.advantage)}`);
  if (isNumber(token.difference))
    lines.push(`log-prob, trainer minus sampler: ${signed(token.difference)}`);
  if (isNumber(token.version)) lines.push(`version ${token.version}`);
  if (token.mask === 0 || token.mask === false) lines.push("not trained (mask 0)");
  return lines.join("\n");
}

function scale(made, tokens) {
  const found = known(tokens);
  const most = el("span");
  const ends = el(
    "span",
    { class: "steps-of" },
    el("span", { text: "below 0" }),
    el("span", { class: "ramp", "aria-hidden": "true" }),
    el("span", { text: "above 0" }),
    most,
  );
  const paint = (by) => {
    const greatest = made.colourBy(by);
    ends.hidden = by === "none";
    say(most, `(to \u00b1${number(greatest)})`);
  };
  if (!found.length) return null;
  const choice = el(
    "select",
    { "aria-label": "Colour tokens by", on: { change: () => paint(choice.value) } },
    [...found, "none"].map((name) => el("option", { value: name, text: BY[name] })),
  );
  paint(found[0]);
  return el("div", { class: "scale" }, "Colour by", choice, ends);
}

function listen(element, tokens, tip, first) {
  const at = (event) => event.target.closest?.(".token")?.dataset.at;
  element.addEventListener("pointermove", (event) => {
    const i = at(event);
    tip(event, i === undefined ? null : words(tokens[i], Number(i) + first));
  });
  element.addEventListener("pointerleave", () => tip(null));
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
