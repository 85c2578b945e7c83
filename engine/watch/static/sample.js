// A sample in full in the panel: conversation, tokens, rewards, its group, the same prompt.

import { get, of } from "./api.js";
import { allTokens, conversation as turns, episodeFacts } from "./conversation.js";
import { el, facts, folded, table } from "./dom.js";
import { number, plural, signed } from "./format.js";
import { section } from "./panel.js";
import { asTable, tokenView } from "./tokens.js";

const LONG = 4000;

/** The key of a sample as text, and back. */
export function keyOf({ step, node, position, sample }) {
  return [step, node ?? "", position, sample].join(",");
}
export function fromKey(text) {
  const [step, node, position, sample] = text.split(",");
  return { step: Number(step), node, position: Number(position), sample: Number(sample) };
}

/** Sections about a sample. open(key): show another one; tip(event, words): the tooltip. */
export async function sampleSections(session, text, open, tip) {
  const key = fromKey(text);
  const { sample: _, ...prompt } = key;
  const nothing = () => ({ rows: [] });
  const [row, group, same] = await Promise.all([
    get(of(session.name, "sample"), key),
    get(of(session.name, "group"), prompt).catch(nothing),
    get(of(session.name, "same"), prompt).catch(nothing),
  ]);
  return [
    section("Rewards", rewards(row)),
    row.episode ? section("Episode", episodeFacts(row)) : null,
    section(
      "Conversation",
      row.episode?.page.total ? turns(session, key, row, tip) : conversation(row, tip),
    ),
    row.episode ? section("Tokens", allTokens(session, key, row, tip)) : null,
    section(
      "Facts",
      facts([
        ["trained by", row.node],
        ["position, sample", `${row.position}, ${row.sample}`],
        [
          "length",
          row.length === null || row.length === undefined ? null : plural(row.length, "token"),
        ],
        ["finish", row.episode ? null : row.finish],
        [
          "oldest version",
          row.version === null || row.version === undefined ? null : String(row.version),
        ],
        ["advantage, mean", isNumber(row.advantage) ? signed(row.advantage) : null],
      ]),
    ),
    section(
      "Its group, by reward",
      near(rowsIn(group).sort(byReward), key, open, (each) => `sample ${each.sample}`),
    ),
    section(
      "The same prompt over the Steps",
      near(rowsIn(same), key, open, (each) => `Step ${each.step}`),
    ),
  ];
}

const isNumber = (x) => typeof x === "number";
const rowsIn = (found) => [...(Array.isArray(found) ? found : (found.rows ?? found.samples ?? []))];
const byReward = (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity);

function rewards(row) {
  const parts = Object.entries(row.rewards ?? {});
  const shown = parts.map(([name, value]) => [name, number(value)]);
  if (isNumber(row.reward)) shown.unshift(["reward, as trained", number(row.reward)]);
  if (!shown.length) return null;
  return table(["function", { text: "reward", class: "number" }], shown);
}

function conversation(row, tip) {
  const said = messages(row.prompt).map(message);
  const tokens = row.tokens?.length ? row.tokens : null;
  if (!tokens) {
    said.push(message({ role: "assistant", content: row.completion }));
    const why = row.episode
      ? null
      : el("p", {
          class: "soft",
          text: "Tokens are not recorded; `run --samples full` keeps them.",
        });
    return [el("ol", { class: "talk" }, said), why];
  }
  const [scale, element] = tokenView(tokens, tip);
  said.push(
    el("li", { class: "assistant" }, el("span", { class: "who", text: "assistant" }), element),
  );
  return [scale, el("ol", { class: "talk" }, said), asTable(tokens)];
}

/** A prompt as messages: a text is one of the user's; what is none in a list is its own content. */
function messages(prompt) {
  if (!Array.isArray(prompt)) return [{ role: "prompt", content: prompt ?? "" }];
  return prompt.map((each) => (isMessage(each) ? each : { content: each }));
}

function isMessage(each) {
  return each !== null && typeof each === "object" && !Array.isArray(each);
}

function message({ role = "message", content, tool_calls: calls, name }) {
  const who = name ? `${role}, ${name}` : role;
  const text =
    typeof content === "string" ? content : content ? JSON.stringify(content, null, 1) : "";
  const tool = role === "tool";
  const body =
    tool || text.length > LONG
      ? el("div", { class: "body" }, folded(summary(text, tool), text))
      : el("div", { class: "body", text });
  const called = (Array.isArray(calls) ? calls : []).map((call) =>
    folded(
      `calls ${call?.function?.name ?? "a tool"}`,
      JSON.stringify(call?.function ?? call, null, 1),
    ),
  );
  return el(
    "li",
    { class: role },
    el("span", { class: "who", text: who }),
    text ? body : null,
    called,
  );
}

function summary(text, tool) {
  return tool
    ? `the tool's answer, ${plural(text.length, "character")}`
    : `${text.slice(0, 80)} ...`;
}

function near(rows, key, open, first) {
  if (!rows.length) return null;
  const same = (row) => keyOf({ node: key.node, ...row }) === keyOf(key);
  return el(
    "div",
    { class: "near" },
    rows.map((row) =>
      el(
        "button",
        {
          type: "button",
          "aria-current": same(row) ? "true" : null,
          on: { click: () => open({ node: key.node, ...row }) },
        },
        el("span", { class: "soft", text: first(row) }),
        el("span", { text: number(row.reward) }),
        el("span", { class: "text", text: row.completion ?? "" }),
      ),
    ),
  );
}
