"""What a page knows of a run: events that come while an answer is under way are newer than it."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from tests.browser.watched import Watched

# A session whose stream and answers the test itself sends.
STAGED = """async () => {
  const { Session } = await import("/static/session.js");
  const sources = [];
  window.EventSource = class extends EventTarget {
    constructor() { super(); sources.push(this); }
    close() {}
  };
  const asked = [];
  window.fetch = (path, { signal }) => new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    const answer = (body) => resolve(new Response(JSON.stringify(body)));
    asked.push({ path, answer });
  });
  const turn = () => new Promise((done) => setTimeout(done, 0));
  const send = (kind, data) =>
    sources[0].dispatchEvent(new MessageEvent(kind, { data: JSON.stringify(data) }));
  const session = new Session({ name: "a", state: "running", step: 4 });
  session.open();
"""


def staged(page: Page, script: str) -> Any:
    """What a script returns that has `session`, `asked`, `send` and `turn`."""
    return page.evaluate(f"{STAGED} return (async () => {{ {script} }})(); }}")


RUN = '{ name: "a", state: "running", step: 5, reward: 1 }'


def test_an_answer_does_not_turn_back_what_events_told_meanwhile(wide: Watched) -> None:
    found = staged(
        wide.page,
        f"""
        const done = session.reload();
        send("step", {{ step: 7, metrics: {{}} }});
        asked.find((each) => each.path === "/api/runs/a").answer({RUN});
        await done;
        return [session.run.step, session.run.reward];
        """,
    )
    assert found == [7, 1]


def test_of_two_answers_the_one_that_was_asked_for_last_counts(wide: Watched) -> None:
    found = staged(
        wide.page,
        f"""
        const first = session.reload();
        send("state", {{ state: "finished", reason: "done", step: 9 }});
        const [early, late] = asked.filter((each) => each.path === "/api/runs/a");
        late.answer({{ ...{RUN}, state: "finished", step: 9 }});
        early.answer({RUN});
        await first;
        await turn();
        return [session.run.state, session.run.step, session.live];
        """,
    )
    assert found == ["finished", 9, False]


def test_figures_that_were_asked_for_do_not_replace_newer_ones(wide: Watched) -> None:
    found = staged(
        wide.page,
        """
        const waiting = asked.filter((each) => each.path.startsWith("/api/runs/a/flow"));
        send("flow", { flow: {}, words: "the last 10 s" });
        waiting[0].answer({ flow: {}, words: "an older stretch" });
        await turn();
        await turn();
        return session.figures.words;
        """,
    )
    assert found == "the last 10 s"


def test_the_graph_is_drawn_again_once_its_nodes_have_other_workers(steady: Page) -> None:
    asked = steady.evaluate(
        """async () => {
          const { Graph } = await import("/static/graph.js");
          const drawings = [];
          const usual = window.fetch;
          window.fetch = (path, how) => {
            if (String(path).includes("/drawing")) drawings.push(path);
            return usual(path, how);
          };
          const heard = [];
          const on = (topic, hear) => topic === "run" && heard.push(hear);
          const nodes = [{ name: "rollout", workers: ["gen"] }];
          const session = { name: "steady", run: { nodes }, on };
          new Graph(session, () => {});
          const tell = () => heard.forEach((hear) => hear());
          const counts = [drawings.length];
          tell();
          counts.push(drawings.length);
          session.run = { nodes: [{ name: "rollout", workers: ["gen", "gen-1"] }] };
          for (const _ of [1, 2]) tell();
          counts.push(drawings.length);
          return counts;
        }"""
    )
    assert asked == [1, 1, 2]
