"""Several runs compared: their graphs, plans and options, and the first number that differs.

Owns: this comparison as JSON. Does not own: the comparison of graphs (dataflow/program_diff.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataflow.program_diff import compare
from engine.keep.metrics.metric_lines import finite
from engine.keep.reader.metric_index import ascending_rows
from engine.keep.reader.open_folder import NotServed, OpenFolder
from engine.keep.reader.plan_records import KeptRecords
from engine.watch.run_description import options_of

MOST = 8
"""Runs side by side."""
_PLACE = ("name", "runs", "overwrite", "progress", "path")
"""Options that say nothing about what a run computes."""
_TIMES = ("time/", "cpu/", "queue/", "throughput/", "memory/", "weights/", "env/step/", "phase")
"""Metrics that differ between equal runs."""
_FIRST = ("reward/", "loss/", "eval/")
_LONGEST = 4 << 20
"""Bytes of a plan.txt."""


def compare_runs(
    names: Sequence[str], folders: Sequence[OpenFolder], records: Sequence[KeptRecords]
) -> dict[str, Any]:
    """Compare several runs, each with the first. Raises NotServed for fewer than two."""
    if not 2 <= len(names) <= MOST:
        raise NotServed(f"expected 2 to {MOST} runs, found {len(names)}", 400)
    runs = list(zip(names, folders, strict=True))
    first_run, *other_runs = runs
    first_record, *other_records = records
    graphs = [_compare_graphs(first_record, other) for other in other_records]
    plans = [_compare_plans(first_run, other) for other in other_runs]
    options = {name: options_of(folder) for name, folder in runs}
    return {
        "runs": list(names),
        "graph": _join_texts(names, graphs),
        "plan": _join_texts(names, plans),
        "options": _compare_options(options),
        "first": first_metric_difference(names, folders),
    }


def _join_texts(names: Sequence[str], texts: Sequence[str]) -> str:
    """One text of several, each under the two runs that it is of, where there are more than two."""
    if len(texts) == 1:
        return texts[0]
    first, *others = names
    pairs = zip(others, texts, strict=True)
    return "\n".join(f"{first} -> {name}\n{text}" for name, text in pairs)


def _compare_graphs(a: KeptRecords, b: KeptRecords) -> str:
    if a.graph is None or b.graph is None:
        return "\n".join([*a.problems, *b.problems])
    return str(compare(a.graph, b.graph))


def _compare_plans(a: tuple[str, OpenFolder], b: tuple[str, OpenFolder]) -> str:
    """The lines of plan.txt that differ, as `diff -u` shows them."""
    (a_name, a_folder), (b_name, b_folder) = a, b
    a_lines, b_lines = _read_plan(a_folder), _read_plan(b_folder)
    lines = difflib.unified_diff(a_lines, b_lines, a_name, b_name, n=1, lineterm="")
    return "\n".join(lines) or "no difference"


def _read_plan(folder: OpenFolder) -> list[str]:
    """The lines of plan.txt; none where it is missing."""
    content = folder.read("plan.txt", _LONGEST) or b""
    return content.decode("utf-8", "replace").splitlines()


def _compare_options(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options in which some run differs."""
    differing: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for run_options in options.values():
        names |= dict.fromkeys(run_options)
    for name in names:
        if name in _PLACE:
            continue
        choices = {run: run_options.get(name) for run, run_options in options.items()}
        first = next(iter(choices.values()))
        if any(choice != first for choice in choices.values()):
            flag = f"--{name.replace('_', '-')}"
            differing.append({"option": flag, "values": choices})
    return differing


def first_metric_difference(
    names: Sequence[str], folders: Sequence[OpenFolder]
) -> dict[str, Any] | None:
    """The first Step, and of it the first metric by name, in which all runs have a number and two
    of them differ; None where there is none. Times do not count.
    """
    for step, rows in _common_steps([ascending_rows(folder) for folder in folders]):
        for metric in sorted(_differing_metrics(rows), key=_order):
            numbers = [finite(row.get(metric)) for row in rows]
            if None not in numbers and not metric.startswith(_TIMES):
                numbers_by_run = dict(zip(names, numbers, strict=True))
                return {"step": step, "metric": metric, "values": numbers_by_run}
    return None


def _differing_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The metrics of the first row that have another number in some other one."""
    first, *others = rows
    for metric, number in first.items():
        if any(metric in row and row[metric] != number for row in others):
            yield metric


def _order(name: str) -> tuple[bool, str]:
    """Sort metrics of learning before those of cost, and each kind by name."""
    return not name.startswith(_FIRST), name


def _common_steps(
    runs: Sequence[Iterator[dict[str, Any]]],
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(Step, its row in each run) of the Steps that all have; Steps ascend in each."""
    rows = [next(run, None) for run in runs]
    while all(row is not None for row in rows):
        present_rows = [row for row in rows if row is not None]
        step = max(row["step"] for row in present_rows)
        if all(row["step"] == step for row in present_rows):
            yield step, present_rows
            rows = [next(run, None) for run in runs]
            continue
        # Those that are behind go on by a row; the others wait for them.
        rows = []
        for run, row in zip(runs, present_rows, strict=True):
            rows.append(next(run, None) if row["step"] < step else row)
