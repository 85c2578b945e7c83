// An episode as a conversation by turns: who says what, what a turn took and brought, its tokens.
//
// Owns: the messages of one page, the way to the others. Tokens are asked for when they are opened.
// Does not own: their colours (tokens.js), the panel (sample.js). All words are text nodes.

import { get, of } from "./api.js";
import { el, facts, folded } from "./dom.js";
import { count, number, plural, seconds, signed } from "./format.js";
import { tokenView } from "./tokens.js";

const LONG = 4000;
const SHORT = 1000;
const ROLES = ["system", "user", "assistant", "tool"];
const MESSAGES = 40;

/** What is known of an episode as a whole: facts beside those of any sample. */
export function episodeFacts({ finish, length, episode }) {
  const answered = Math.max(0, (length ?? 0) - episode.written);
  const time = (spent) => (spent === null ? null : seconds(spent));
  return facts([
    ["finish", finish],
    ["turns", count(episode.turns)],
    ["row of its episode", episode.segment === null ? null : count(episode.segment + 1)],
    ["tokens", `${count(episode.written)} written, ${count(answered)} answered`],
    ["final reward", episode.final_reward === null ? null : number(episode.final_reward)],
    ["rewards of turns, sum", episode.turn_reward === null ? null : number(episode.turn_reward)],
    ["seconds of the model", time(episode.model_seconds)],
    ["seconds of the environment", time(episode.environment_seconds)],
    ["state at its end", state(episode.state)],
  ]);
}

function state(written) {
  if (!written) return null;
  const text = indented(written);
  return text.length > 120 ? folded(`${text.slice(0, 80)} ...`, text) : el("code", { text });
}

/** JSON in lines; what is none as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

/** The conversation, a page of messages at a time. key: of the sample. */
export function conversation(session, key, row, tip) {
  const place = el("div", { class: "conversation" });
  const show = (page) => {
    const list = el(
      "ol",
      { class: "talk" },
      page.messages.map((message) => spoken(session, key, message, tip)),
    );
    const pagers = [pager(page, go), pager(page, go)];
    place.replaceChildren(...[pagers[0], list, pagers[1]].filter(Boolean));
  };
  const go = async (from) => {
    try {
      show(await get(of(session.name, "conversation"), { ...key, from }));
    } catch (error) {
      place.append(el("p", { class: "soft", text: error.message }));
      return;
    }
    place.scrollIntoView({ block: "start" });
    place.querySelector(".pager button:not(:disabled)")?.focus({ preventScroll: true });
  };
  show(row.episode.page);
  return place;
}

function pager({ from, total }, go) {
  if (total <= MESSAGES) return null;
  const last = Math.floor((total - 1) / MESSAGES) * MESSAGES;
  const button = (text, at, there) =>
    el("button", { type: "button", text, disabled: !there, on: { click: () => go(at) } });
  const until = Math.min(total, from + MESSAGES);
  return el(
    "div",
    { class: "pager", role: "group", "aria-label": "Messages" },
    button("First", 0, from > 0),
    button("Back", Math.max(0, from - MESSAGES), from > 0),
    el("span", { text: `Messages ${count(from + 1)} to ${count(until)} of ${count(total)}` }),
    button("Next", until, until < total),
    button("Last", last, until < total),
  );
}

function spoken(session, key, message, tip) {
  const { role, name, turn, errors = [], calls = [] } = message;
  const who = name ? `${role} ${name}` : role;
  const place = isNumber(turn) ? `turn ${turn + 1}, ${who}` : who;
  return el(
    "li",
    { class: ROLES.includes(role) ? role : "message" },
    el(
      "div",
      { class: "head" },
      el("span", { class: "who", text: place }),
      el("span", { class: "soft took", text: measured(message) }),
    ),
    message.reasoning
      ? folded(`reasoning, ${plural(message.reasoning.length, "character")}`, message.reasoning)
      : null,
    body(message),
    calls.map(called),
    errors.map((text) => el("p", { class: "unread", text: `a call that cannot be read: ${text}` })),
    message.to > message.from ? tokens(session, key, message, tip) : null,
  );
}

/** What a turn took and brought: `reward +0.5, model 410 ms, environment 1.20 s, v3`. */
function measured(message) {
  const parts = [
    isNumber(message.turn_reward) ? `reward ${signed(message.turn_reward)}` : null,
    isNumber(message.model_seconds) ? `model ${seconds(message.model_seconds)}` : null,
    isNumber(message.environment_seconds)
      ? `environment ${seconds(message.environment_seconds)}`
      : null,
    versions(message.versions),
  ];
  return parts.filter(Boolean).join(", ");
}

function versions(range) {
  if (!range) return null;
  const [oldest, newest] = range;
  return oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
}

function body({ role, text }) {
  if (!text) return null;
  const most = role === "tool" ? SHORT : LONG;
  if (text.length <= most) return el("div", { class: "body", text });
  const words = `${text.slice(0, 80)} ... (${plural(text.length, "character")})`;
  return el("div", { class: "body" }, folded(words, text));
}

/** A call of a tool: its name, and each argument by its name. */
function called({ name, arguments: given }) {
  const one = ([argument, text]) => [
    el("dt", { text: argument || "arguments" }),
    el("dd", {}, text.length > SHORT ? folded(`${text.slice(0, 80)} ...`, text) : text),
  ];
  return el(
    "div",
    { class: "call" },
    el("span", {}, "calls ", el("code", { text: name })),
    given.length ? el("dl", { class: "facts" }, given.map(one).flat()) : null,
  );
}

/** The tokens of a message, or of all that answers a turn; asked for when they are opened. */
function tokens(session, key, { from, to }, tip) {
  const place = el("div", {});
  const details = el(
    "details",
    { class: "fold" },
    el("summary", { text: plural(to - from, "token") }),
    place,
  );
  const ask = async (at) => {
    const asked = get(of(session.name, "tokens"), { ...key, from: at, to });
    const answer = await asked.catch((error) => ({ tokens: [], problem: error.message }));
    if (answer.problem) place.append(el("p", { class: "soft", text: answer.problem }));
    place.append(...tokenView(answer.tokens, tip, at).filter(Boolean));
    const next = at + answer.tokens.length;
    if (answer.tokens.length && next < to) place.append(further(next, to, ask));
  };
  details.addEventListener("toggle", () => {
    if (details.open && !place.firstChild) ask(from);
  });
  return details;
}

function further(next, to, ask) {
  const button = el("button", {
    type: "button",
    text: `${plural(to - next, "more token")}`,
    on: {
      click: () => {
        button.remove();
        ask(next);
      },
    },
  });
  return button;
}

/** All tokens of an episode, with a mark where a turn begins; a part of them at a time. */
export function allTokens(session, key, row, tip) {
  if (!row.length) return null;
  return tokens(session, key, { from: 0, to: row.length }, tip);
}

const isNumber = (x) => typeof x === "number";
