"""Several runs compared: their graphs, plans and options, and the first number that differs.

Owns: this comparison as JSON. Does not own: the comparison of graphs (dataflow/program_diff.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.program_diff import compare
from engine.watch.described import options_of
from engine.watch.metric_index import MetricIndex
from engine.watch.opened import NotServed, OpenFolder
from engine.watch.planned import KeptRecords

MOST = 8
"""Runs side by side."""
_PLACE = ("name", "runs", "overwrite", "progress", "path")
"""Options that say nothing about what a run computes."""
_TIMES = ("time/", "throughput/", "memory/", "phase")
"""Metrics that differ between equal runs."""
_LONGEST = 4 << 20
"""Bytes of a plan.txt."""


def compared(
    names: Sequence[str],
    folders: Sequence[OpenFolder],
    kept: Sequence[KeptRecords],
    indices: Sequence[MetricIndex],
) -> dict[str, Any]:
    """All of several runs, each beside the first. Raises NotServed for fewer than two."""
    if not 2 <= len(names) <= MOST:
        raise NotServed(f"expected 2 to {MOST} runs, found {len(names)}", 400)
    of = list(zip(names, folders, strict=True))
    return {
        "runs": list(names),
        "graph": _texts(names, [_graph(kept[0], other) for other in kept[1:]]),
        "plan": _texts(names, [_plan(of[0], other) for other in of[1:]]),
        "options": _options(dict(zip(names, map(options_of, folders), strict=True))),
        "first": first_difference(names, folders, indices),
    }


def _texts(names: Sequence[str], texts: Sequence[str]) -> str:
    """One text of several, each under the two runs that it is of, where there are more than two."""
    if len(texts) == 1:
        return texts[0]
    pairs = zip(names[1:], texts, strict=True)
    return "\n".join(f"{names[0]} -> {name}\n{text}" for name, text in pairs)


def _graph(a: KeptRecords, b: KeptRecords) -> str:
    if a.graph is None or b.graph is None:
        return "\n".join([*a.problems, *b.problems])
    return str(compare(a.graph, b.graph))


def _plan(a: tuple[str, OpenFolder], b: tuple[str, OpenFolder]) -> str:
    """The lines of plan.txt that differ, as `diff -u` shows them."""
    one, two = (_plan_text(folder) for _, folder in (a, b))
    lines = difflib.unified_diff(one, two, a[0], b[0], n=1, lineterm="")
    return "\n".join(lines) or "no difference"


def _plan_text(folder: OpenFolder) -> list[str]:
    return (folder.read("plan.txt", _LONGEST) or b"").decode("utf-8", "replace").splitlines()


def _options(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options in which some run differs."""
    found = []
    for name in dict.fromkeys(name for of in options.values() for name in of):
        values = {run: of.get(name) for run, of in options.items()}
        first = next(iter(values.values()))
        if name not in _PLACE and any(value != first for value in values.values()):
            found.append({"option": f"--{name.replace('_', '-')}", "values": values})
    return found


def first_difference(
    names: Sequence[str], folders: Sequence[OpenFolder], indices: Sequence[MetricIndex]
) -> dict[str, Any] | None:
    """The first Step, and of it the first metric by name, in which all runs have a number and two
    of them differ; None where there is none. Times do not count.
    """
    for folder, index in zip(folders, indices, strict=True):
        index.refresh(folder)
    common = set(indices[0].names).intersection(*(index.names for index in indices[1:]))
    found: tuple[int, str, dict[str, float | None]] | None = None
    for metric in sorted(name for name in common if not name.startswith(_TIMES)):
        columns = [_column(i, f, metric) for i, f in zip(indices, folders, strict=True)]
        step, values = _first(columns)
        if step is not None and (found is None or step < found[0]):
            found = step, metric, dict(zip(names, values, strict=True))
    if found is None:
        return None
    return {"step": found[0], "metric": found[1], "values": found[2]}


def _column(index: MetricIndex, folder: OpenFolder, metric: str) -> tuple[np.ndarray, np.ndarray]:
    column = dict(index.columns(folder, [metric]))[metric]
    known = np.isfinite(column)
    return index.steps[known], column[known]


def _first(columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int | None, list[float]]:
    """The first Step that all have in which they differ."""
    steps = columns[0][0]
    for of, _ in columns[1:]:
        steps = np.intersect1d(steps, of, assume_unique=True)
    if not len(steps):
        return None, []
    table = np.stack([values[np.searchsorted(of, steps)] for of, values in columns])
    differs = np.flatnonzero((table != table[0]).any(axis=0))
    if not len(differs):
        return None, []
    return int(steps[differs[0]]), table[:, differs[0]].tolist()
