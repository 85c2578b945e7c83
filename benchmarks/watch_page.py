"""A page of a very long run, and of one with five hundred nodes: how large and how fast it is.

Owns: these run folders, the browser that uses the page, what is measured of both. Does not own: how
results are shown (watch.py), the forms of the files (tests/kit/watched.py).

Input to paint is the duration of the browser's own event timing entries: from an input to the first
frame that shows what came of it. Shorter ones than 16 ms have no entry.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from playwright.sync_api import Locator, Page, sync_playwright

from benchmarks.report import SideResult
from dataflow.program_snapshot import write_snapshot
from engine.keep.flow.records import EdgeFlow, Flow, ReplicaFlow, WorkerFlow
from engine.keep.flow.segments import LiveSegments
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SampleWriter
from tests.kit.drawn_graphs import DrawnShape, drawn_graph
from tests.kit.page_client import PageClient, served
from tests.kit.watched import plan_of, sample_rows, watched_run, write_flows

METRICS, NODES = 80, 20
RESPONSIVE, LARGEST = 100.0, 200.0
"""Milliseconds from input to paint; MiB of the server."""
MANY = 500
PAUSE = 450.0
"""Milliseconds between what a reader does and the next."""
_OBSERVED = """
window.seen = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.seen.push([entry.name, entry.duration]);
}).observe({ type: "event", durationThreshold: 16, buffered: false });
"""


def long_run(path: Path, steps: int, samples: int) -> Path:
    """A run of so many Steps of 100 figures each, with samples in a thousand files."""
    run, names = _run(path, NODES)
    metrics = [f"group{i % 10}/metric_{i}" for i in range(METRICS - 2)]
    metrics += ["reward/mean", "time/step"]
    values = random.Random(0)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {"step": step} | {name: round(values.random(), 6) for name in metrics}
            file.write(json.dumps(row) + "\n")
    write_flows(run / "events", (flow_of(step, names) for step in range(1, steps + 1)))
    files = min(steps, 1000)
    writer = SampleWriter(run / "samples", every=steps // files)
    for step in range(steps // files, steps + 1, steps // files):
        writer.write(step, sample_rows(step, samples // files))
    (run / "options.json").write_text(json.dumps({"steps": steps, "seed": 0, "name": path.name}))
    return run


def _run(path: Path, nodes: int) -> tuple[Path, list[str]]:
    """A run folder without a Step, of a graph of so many nodes; and their names."""
    graph = drawn_graph(DrawnShape(nodes=nodes, models=0.0))
    names = [node.name for node in graph.nodes]
    work = dict.fromkeys(names, "host") | {names[-1]: "train"}
    workers = {name: [_worker(i)] for i, name in enumerate(names)}
    run = watched_run(path, steps=0, samples=0, events=False, plan=plan_of(work, workers))
    (run / "graph.json").write_text(write_snapshot(graph))
    return run, names


def _worker(i: int) -> str:
    return f"w{i % 8}"


def flow_of(step: int, names: list[str], wall: float = 0.0) -> Flow:
    """A Step of a second, in which every node has figures that move."""
    return Flow(
        step=step,
        start=step - 1.0,
        end=float(step),
        wall=wall or 1e9 + step,
        nodes={
            f"{name}@{_worker(i)}": ReplicaFlow(
                busy=(busy := (step * 7 + i) % 10 / 10),
                for_rows=1 - busy,
                blames={names[i - 1]: 1 - busy},
                rows=16 + step % 5,
                chunks=1,
            )
            for i, name in enumerate(names)
        },
        edges={
            f"{a}->{b}": EdgeFlow(rows=16, bytes=1600 + step % 900, waiting_rows=step % 7)
            for a, b in pairwise(names)
        },
        workers={_worker(i): WorkerFlow(memory=1 << 28, peak=1 << 29) for i in range(8)},
    )


@contextmanager
def browsing(server: PageClient, run: str) -> Iterator[Page]:
    """The page of a run, in headless Chromium, with its inputs observed."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        name, _, value = server.cookie.partition("=")
        base = f"http://127.0.0.1:{server.port}/"
        context.add_cookies([{"name": name, "value": value, "url": base}])
        page = context.new_page()
        page.goto(f"{base}#/run/{run}")
        page.locator("g.node").first.wait_for()
        page.evaluate(_OBSERVED)
        yield page
        browser.close()


def used(page: Page, rounds: int) -> dict[str, list[float]]:
    """Milliseconds from input to paint of what a reader does, by act: of each the longest of its
    inputs; 16 stands for all that is less.
    """
    acts = _acts(page)
    longest: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            page.evaluate("window.seen = []")
            act()
            page.wait_for_timeout(PAUSE)
            seen = [duration for _, duration in page.evaluate("window.seen")]
            longest[name].append(max([16.0, *seen]))
    return longest


def _acts(page: Page) -> dict[str, Callable[[], object]]:
    keys, first = page.keyboard, page.locator("g.node").first
    acts: dict[str, Callable[[], object]] = {
        "focus": first.focus,
        "to an edge": lambda: keys.press("ArrowDown"),
        "to a node": lambda: keys.press("ArrowDown"),
        "open": lambda: keys.press("Enter"),
        "close": lambda: keys.press("Escape"),
        "zoom in": page.get_by_label("Zoom in").click,
        "zoom out": page.get_by_label("Zoom out").click,
    }
    plot = page.locator(".axis .u-over").first
    if plot.count():
        acts |= {"brush": lambda: _brush(page, plot), "clear": lambda: keys.press("Escape")}
    search = page.get_by_label("Search samples")
    acts |= {"type": lambda: search.press("a"), "delete": lambda: search.press("Backspace")}
    return acts


def _brush(page: Page, plot: Locator) -> None:
    """Select the middle of a curve."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    y = box["y"] + 10
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=6)
    page.mouse.up()


def peak(pid: int) -> float:
    """MiB: the greatest resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def of_long_run(folder: Path, steps: int, samples: int, rounds: int) -> list[SideResult]:
    """The page and the server of a long run."""
    run = long_run(folder / "long", steps, samples)
    with served(folder) as server:
        begin = time.perf_counter()
        for part in ("/series?names=reward/mean", "/flow?from=1", "/lanes", ""):
            server.json(f"/api/runs/{run.name}{part}")
        first = time.perf_counter() - begin
        found = server.json(f"/api/runs/{run.name}/samples")
        while found["read"] < found["files"]:
            found = server.json(f"/api/runs/{run.name}/samples?order=best")
        with browsing(server, run.name) as page:
            page.locator(".samples .body .row").first.wait_for()
            seen = used(page, rounds)
        size = peak(server.process.pid)
    events = steps * (METRICS + NODES)
    return [
        *_paint(f"{events:,} events, {samples:,} samples", seen),
        SideResult(name="server, most memory", value=size, unit="MiB", goal=LARGEST, least=False),
        SideResult(name="the first answers of all views", value=first, unit="s"),
    ]


def _paint(what: str, seen: Mapping[str, list[float]]) -> Iterator[SideResult]:
    """Zooming draws all of a graph anew, so it is told apart."""
    zooms = [each for name, many in seen.items() if "zoom" in name for each in many]
    others = [each for name, many in seen.items() if "zoom" not in name for each in many]
    name = f"input to paint, 95 of 100, {what}"
    yield SideResult(name=name, value=_at(others), unit="ms", goal=RESPONSIVE, least=False)
    yield SideResult(name=f"the same of zooming, {what}", value=_at(zooms), unit="ms")


def _at(seen: list[float]) -> float:
    return statistics.quantiles(seen, n=100, method="inclusive")[94]


def of_wide_run(folder: Path, seconds: float, rounds: int) -> list[SideResult]:
    """The page and the stream of a run of five hundred nodes that goes on."""
    run, names = _run(folder / "wide", MANY)
    with RunFolder.open_existing(run), served(folder) as server, ThreadPoolExecutor(1) as pool:
        live, ends = LiveSegments(run / "events"), time.monotonic() + seconds + 5
        going = pool.submit(_go_on, live, names, ends)
        sizes, took = _streamed(server, run.name, seconds)
        with browsing(server, run.name) as page:
            seen = used(page, rounds)
        going.result()
        live.close()
    return [
        *_paint(f"{MANY} nodes live", seen),
        SideResult(
            name=f"stream of {MANY} nodes",
            value=sum(sizes) / took / 1000,
            unit="KB/s",
            goal=50.0,
            least=False,
        ),
        SideResult(
            name="events of the stream", value=len(sizes) / took, unit="/s", goal=5.0, least=False
        ),
    ]


def _go_on(live: LiveSegments, names: list[str], until: float) -> None:
    """A second's figures, ten times a second: more than any run writes."""
    step = 0
    while time.monotonic() < until:
        step += 1
        live.write(flow_of(step, names, time.time()))
        time.sleep(0.1)


def _streamed(server: PageClient, run: str, seconds: float) -> tuple[list[int], float]:
    """The bytes of each event of the stream, and the seconds from the one before it."""
    sizes: list[int] = []
    begin = now = time.monotonic()
    with server.stream(run) as events:
        for i, (_, data) in enumerate(events):
            now = time.monotonic()
            if i < 2:  # the run's state, and a first flow that was not waited for
                begin = now
                continue
            sizes.append(len(json.dumps(data, separators=(",", ":"))))
            if now - begin > seconds:
                break
    return sizes, now - begin
