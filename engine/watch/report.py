"""One run as one HTML file, to send to somebody: no scripts, no request to anywhere.

Owns: what is in it, and its HTML. Does not own: the drawing and the charts (dataflow/draw), what is
read of the run (run_description.py and its neighbours).

All words are escaped, and a policy in the file itself forbids whatever would run or load something.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from dataflow.draw.chart import Points, draw_chart
from dataflow.safe_text import one_line, printable, shown_bytes, shown_number
from engine.keep.reader.open_folder import NotServed
from engine.keep.reader.sample_index import SampleQuery
from engine.keep.reader.sample_rows import as_text
from engine.watch.run_questions import ServedRuns

_POINTS = 400
_SAMPLES = 4
_LONGEST = 6000
"""Characters of a completion."""
_LINES = 6
_PACKAGES = ("dataflow-rl", "torch", "transformers", "vllm")
CHARTS: Mapping[str, str] = {
    "reward": r"(rows/[^/]+/)?reward/(.*/)?mean",
    "evaluation": r"eval/(?!initial/|(.*/)?(rows|reward)$).*",
    "loss": r"loss/.*",
    "length": r"completion/length/(mean|max)",
    "mismatch of sampler and trainer": r"[a-z_]+/([^/]+/)?mismatch/mean",
    "lag": r"[a-z_]+/lag/(mean|max)",
    "tokens a second": r"throughput/tokens_per_second",
}
"""Title -> the names of a chart's metrics."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --paper: #fff; --line: #d8dce3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #a3adbb; --paper: #14181f; --line: #333b47; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 72rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.number { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
figure { display: inline-block; margin: 0 .8rem .8rem 0; max-width: 100%; }
figure svg, .drawing svg { max-width: 100%; height: auto; }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .9rem;
  margin: .6rem 0; }
.soft { color: var(--soft); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def make_report(served: ServedRuns, name: str, *, now: float) -> str:
    """Write the page of a run. now: Unix time, which it says. Raises NotServed where there is
    none.
    """
    run = served.run(name, None)
    title = f"{run['graph'] or name}: {name}"
    curves = "".join(_charts(served, name, run["metrics"]))
    waits = _waits(served, name, run["state"] == "running")
    parts = [f"<h1>{_text(title)}</h1>", _summary(run, now)]
    parts.append(_section("Graph", _drawing(served, name)))
    parts.append(_section("Curves", curves))
    parts.append(_section("Who waits for whom", waits))
    parts.append(_section("Nodes", _nodes(served, name, run)))
    for heading, samples in _samples(served, name):
        parts.append(_section(heading, samples))
    options = _table(("option", "value"), sorted(_flat(run["options"])))
    parts.append(_section("Changes that a resume accepted", _changes(run)))
    parts.append(_section("Errors", _errors(served, name, run)))
    parts.append(_section("Options", options))
    return _document(title, "\n".join(part for part in parts if part))


def _document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _text(words: object) -> str:
    """Any words, in one line and for HTML."""
    return escape(one_line(str(words)))


def _lines(text: str) -> str:
    """A text with its lines."""
    return f"<pre>{escape(printable(text))}</pre>"


def _section(title: str, inside: str) -> str:
    """A part with a heading; nothing if there is nothing in it."""
    if inside:
        return f"<section>\n<h2>{_text(title)}</h2>\n{inside}\n</section>"
    return ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; nothing without rows."""
    lines = [_cells(row) for row in rows]
    if not lines:
        return ""
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    inside = f"<tbody>{body}</tbody>"
    if any(heads):
        head = "".join(map(_head_cell, heads))
        inside = f"<thead><tr>{head}</tr></thead>\n{inside}"
    return f'<div class="wide"><table>{inside}</table></div>'


def _head_cell(words: str) -> str:
    return f'<th scope="col">{_text(words)}</th>'


def _cells(row: Sequence[object]) -> str:
    return "".join(f"<td>{_text(cell)}</td>" for cell in row)


def _summary(run: Mapping[str, Any], now: float) -> str:
    if run["steps"] is None:
        steps = f"{run['step']}"
    else:
        steps = f"{run['step']} of {run['steps']}"
    state = run["state"]
    if run["reason"]:
        state = f"{state}: {run['reason']}"
    facts = {
        "state": state,
        "steps": steps,
        "began": _time(run["began"]),
        "ended": _time(run["ended"]),
        "command": run["command"],
        **_versions(run["versions"]),
        "report made": _time(now),
    }
    known_facts = [(title, fact) for title, fact in facts.items() if fact]
    return _table(("", ""), known_facts)


def _versions(versions: Any) -> dict[str, str]:
    """Choose what tells most of versions.json, which somebody else may have written."""
    record = _dict_or_empty(versions)
    packages = _dict_or_empty(record.get("packages"))
    git = _dict_or_empty(record.get("git"))
    known: list[str] = []
    if "python" in record:
        known.append(f"Python {record['python']}")
    known += [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    commit = ""
    if git.get("commit"):
        commit = str(git["commit"])
        if git.get("changed"):
            commit += ", changed"
    return {"versions": ", ".join(known), "commit": commit}


def _dict_or_empty(document: Any) -> dict[str, Any]:
    if isinstance(document, dict):
        return document
    return {}


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _drawing(served: ServedRuns, name: str) -> str:
    """The drawing, in the page itself."""
    svg = made_or_nothing(lambda: served.drawing(name, life=False))
    if svg:
        return f'<div class="drawing wide">{_inline(svg)}</div>'
    return ""


def _inline(svg: str) -> str:
    """An SVG file as a part of the page."""
    return svg[svg.index("<svg") :]


def _charts(served: ServedRuns, name: str, metrics: Sequence[str]) -> Iterator[str]:
    """A chart of each kind of metric that the run has."""
    for title, pattern in CHARTS.items():
        names = [metric for metric in metrics if re.fullmatch(pattern, metric)]
        if not names:
            continue
        curves = served.series(name, names[:_LINES], None, None, _POINTS)
        lines: dict[str, Points] = {}
        for metric, numbers in curves["series"].items():
            points = zip(curves["steps"], numbers, strict=True)
            lines[metric] = [(step, number) for step, number in points if number is not None]
        lines = _distinct(lines)
        if lines:
            yield f"<figure>{_inline(draw_chart(title, lines))}</figure>\n"


def _distinct(lines: Mapping[str, Points]) -> dict[str, Points]:
    """Leave out lines that are empty, or lie on another: one function's mean is the reward's."""
    distinct: dict[str, Points] = {}
    for metric, points in lines.items():
        if points and points not in distinct.values():
            distinct[metric] = points
    return distinct


def _waits(served: ServedRuns, name: str, running: bool) -> str:
    """The sentences of all Steps; of a run that goes on, before them those of its last seconds."""
    stretches = [served.flow(name, None, None)]
    if running:
        stretches.append(served.flow(name, 0, None))
    sentences_by_stretch: dict[str, Sequence[str]] = {}
    for stretch in stretches:
        if stretch["flow"] is not None:
            sentences_by_stretch[stretch["words"]] = stretch["sentences"]
    parts = [_waits_in(words, sentences) for words, sentences in sentences_by_stretch.items()]
    return "".join(parts)


def _waits_in(words: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return f"<p>In {_text(words)} nothing waits for long.</p>"
    lines = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<p>In {_text(words)}:</p><ul>{lines}</ul>"


def _nodes(served: ServedRuns, name: str, run: Mapping[str, Any]) -> str:
    seconds, memory = ("seconds, planned", "measured"), ("memory, planned", "of its Worker")
    heads = ("node", "call", "on", *seconds, *memory)
    rows: list[Sequence[object]] = []
    for node in run["nodes"]:
        measured = served.node(name, node["name"])["measured"]
        estimate = node["estimate"]
        call = node["call"] or node["operator"]
        seconds = (_seconds(estimate["seconds"]), _seconds(measured["seconds"]))
        memory = (_bytes(estimate["total"]), _bytes(measured["bytes"]))
        workers = ", ".join(node["workers"])
        rows.append((node["name"], call, workers, *seconds, *memory))
    return _table(heads, rows)


def _bytes(size: int | None) -> str:
    if size:
        return shown_bytes(size)
    return ""


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{shown_number(seconds)} s"


def _samples(served: ServedRuns, name: str) -> Iterator[tuple[str, str]]:
    """(heading, samples): the newest, the best and the worst."""
    for order in ("newest", "best", "worst"):
        query = SampleQuery(order=order, limit=_SAMPLES)
        rows = served.samples(name, query)["rows"]
        samples = [_sample(served, name, row) for row in rows]
        yield f"Samples: the {order}", "".join(samples)


def _sample(served: ServedRuns, name: str, row: Mapping[str, Any]) -> str:
    key = (row["step"], row["node"] or "", row["position"], row["sample"])
    try:
        whole = served.sample(name, *key)
    except NotServed:  # what is not in the list is damaged, or the run has made the file anew
        whole = {**row, "rewards": {}}
    facts = [f"step {row['step']}"]
    facts.append(f"prompt {row['position']}, sample {row['sample']}")
    rewards = {"reward": row["reward"], **whole["rewards"]}
    for title, number in rewards.items():
        if isinstance(number, int | float):
            facts.append(f"{title} {shown_number(number, 4)}")
    if row["length"] is not None:
        facts.append(f"{row['length']} tokens")
    if row["turns"] is not None:
        facts.append(f"{row['turns']} turns")
    if row["finish"]:
        facts.append(str(row["finish"]))
    head = _text(", ".join(facts))
    inside = f'<p class="soft">{head}</p>{_say(whole)}'
    return f'<div class="sample">{inside}</div>\n'


def _say(whole: Mapping[str, Any]) -> str:
    """What was asked and answered; of an episode its first messages."""
    messages = whole.get("episode", {}).get("page", {}).get("messages")
    if not messages:
        prompt = _lines(as_text(whole["prompt"])[:_LONGEST])
        answer = _lines(as_text(whole["completion"])[:_LONGEST])
        return f"{prompt}<hr>{answer}"
    parts: list[str] = []
    for message in messages:
        who = f"{message['role']} {message['name']}".strip()
        parts.append(f"{who}: {message['text']}")
        for call in message["calls"]:
            arguments = [f"{name}={text}" for name, text in call["arguments"]]
            parts.append(f"  calls {call['name']}({', '.join(arguments)})")
    return _lines("\n".join(parts)[:_LONGEST])


def _changes(run: Mapping[str, Any]) -> str:
    changes = [change for change in run["changes"] if isinstance(change, dict)]
    heads = ("from step", "where", "what", "old", "new")
    keys = ("step", *heads[1:])
    rows: list[Sequence[object]] = []
    for change in changes:
        rows.append([change.get(key, "") for key in keys])
    return _table(heads, rows)


def _errors(served: ServedRuns, name: str, run: Mapping[str, Any]) -> str:
    rows: list[Sequence[object]] = []
    for node in run["nodes"]:
        for error in served.node(name, node["name"])["errors"][:20]:
            rows.append((error["step"], node["name"], error["key"] or "", error["error"]))
    damaged = served.samples(name, SampleQuery(limit=0))["problems"]
    problems = [("", "", "", problem) for problem in (*run["problems"], *damaged)]
    return _table(("step", "node", "row", "error"), [*rows, *problems])


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, choice in options.items():
        if choice not in (None, "", [], {}, False):
            yield f"--{name.replace('_', '-')}", str(choice)


def made_or_nothing(make: Callable[[], str]) -> str:
    """Make a part of the report; an empty one where the run lacks what it is made of."""
    try:
        return make()
    except NotServed:
        return ""
