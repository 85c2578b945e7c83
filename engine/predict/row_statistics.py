"""How long rows are, their functions take, and how many a selection keeps: as a text says, or as a
run or a trace was seen.

Owns: the texts of `--lengths` and `--prompts`, and reading run folders and traces for them. Does
not own: the distributions (engine/plan/cost/distribution.py), draws from them (simulate).

    512                      every row
    lognormal:3000,0.9,20000 median, sigma, the longest
    runs/first               the samples of a run, and seconds a row of its functions
    trace.csv                a row a request: CSV, JSON lines or Parquet with columns of _COLUMNS
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv
from pyarrow import json as pa_json
from pyarrow import parquet as pq

from dataflow.errors import DataError, PlanError
from engine.keep.run_folder import is_run
from engine.keep.run_measurements import (
    RowCost,
    kept_by_step,
    node_rows_by_step,
    row_costs,
    seconds_by_step,
)
from engine.keep.samples import read_samples
from engine.plan.cost.distribution import LengthDistribution, constant_length, lognormal, of_lengths

_COLUMNS: Mapping[str, Sequence[str]] = {
    "prompts": (
        "prompt_tokens",
        "input_length",
        "ContextTokens",
        "Request tokens",
        "num_prefill_tokens",
        "input_tokens",
    ),
    "answers": (
        "completion_tokens",
        "output_length",
        "GeneratedTokens",
        "Response tokens",
        "num_decode_tokens",
        "output_tokens",
    ),
}
"""What the columns are called by OpenAI's usage records, Mooncake, Azure, BurstGPT, Vidur, others.
"""
_WARM = 1
"""Steps of a run that do not count: functions load what they need in the first."""
_LIKE = "512, lognormal:3000,0.9,20000, a run folder or a trace"
_LOGNORMAL = re.compile(r"lognormal:(\d+(?:\.\d+)?),(\d+(?:\.\d+)?),(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRows:
    """None: nothing is said of it. seconds: a row, of the functions of a run; cpu: the share of
    these in which they computed, where the run measured it. kept: the share of rows that its
    selections kept.
    """

    prompts: LengthDistribution | None = None
    answers: LengthDistribution | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, float] = field(default_factory=dict)


def seen_rows(lengths: str, prompts: str = "") -> SeenRows:
    """Read what --lengths and --prompts say; a run's or a trace's prompts give way to --prompts.
    Raises PlanError for a text that says nothing, DataError for files that cannot be read.
    """
    rows = _read_lengths(lengths) if lengths else SeenRows()
    if prompts:
        rows = replace(rows, prompts=parse_distribution(prompts, "--prompts"))
    return rows


def _read_lengths(text: str) -> SeenRows:
    path = Path(text)
    if path.is_dir():
        return _read_run(path)
    if path.is_file():
        return _read_trace(path)
    return SeenRows(answers=parse_distribution(text, "--lengths"))


def parse_distribution(text: str, flag: str = "--lengths") -> LengthDistribution:
    """Parse `512` or `lognormal:3000,0.9,20000`. Raises PlanError."""
    if text.isdecimal():
        return constant_length(int(text))
    parts = _LOGNORMAL.fullmatch(text)
    if parts is not None:
        return lognormal(float(parts[1]), float(parts[2]), int(parts[3]))
    if flag == "--lengths":
        like, fix = _LIKE, "lognormal:3000,0.9,20000"
    else:
        like, fix = "200 or lognormal:200,0.5,1000", "lognormal:200,0.5,1000"
    raise PlanError(f"options: {flag}: expected {like}, found {text!r}. Fix: {flag} {fix}.")


# --- a run ----------------------------------------------------------------------------------------


def _read_run(folder: Path) -> SeenRows:
    if not is_run(folder):
        problem = "expected a run folder (with versions.json in it), found another folder"
        raise DataError(f"{folder}: {problem}. Fix: --lengths runs/NAME.")
    table = read_samples(folder / "samples")
    lengths = pc.list_value_length(table.column("prompt_ids"))  # type: ignore[attr-defined]
    prompts = lengths.drop_null()
    answers = table.column("length").drop_null()
    costs = _function_costs(folder)
    return SeenRows(
        prompts=_lengths(prompts) if len(prompts) else None,
        answers=_lengths(answers),
        seconds={name: cost.seconds for name, cost in costs.items()},
        cpu={name: cost.cpu for name, cost in costs.items() if cost.cpu is not None},
        kept=_shares_kept(folder),
    )


def _lengths(column: Any) -> LengthDistribution:
    """Rows without a token count as one of a token: each takes a pass."""
    lengths = column.to_numpy().astype(np.int64)
    return of_lengths(np.maximum(1, lengths))


def _function_costs(folder: Path) -> dict[str, RowCost]:
    """Costs of a row in the nodes that compute with no Model: means over the Steps after the first.
    Of an evaluation whose rows no record counts, nothing is known.
    """
    plan = _read_plan(folder)
    functions = {node["name"] for node in plan["nodes"] if _is_function(node)}
    planned = {name: rows for name, rows in _planned_rows(plan).items() if name in functions}
    steps = len(seconds_by_step(folder).get(0, []))
    # A run of one Step has no other that could count.
    costs = row_costs(folder, after=_WARM if steps > _WARM else 0, rows_a_step=planned)
    return {name: cost for name, cost in costs.items() if name in functions}


def _is_function(node: Mapping[str, Any]) -> bool:
    """Whether a node of a plan's file computes with no Model, at most with one's tokenizer."""
    if node["work"] in ("source", "train"):
        return False
    return all(use.get("param") == "tokenizer" for use in node["models"])


def _shares_kept(folder: Path) -> dict[str, float]:
    """The share of rows that each selection kept, of all that came to it in the run."""
    plan = _read_plan(folder)
    planned, rows_by_step = _planned_rows(plan), node_rows_by_step(folder)
    selections = [node["name"] for node in plan["nodes"] if _is_selection(node)]
    came: defaultdict[str, float] = defaultdict(float)
    stayed: defaultdict[str, float] = defaultdict(float)
    for step, shares in enumerate(kept_by_step(folder), 1):
        node_rows = rows_by_step.get(step, {})
        for name in selections:
            share = shares.get(name)
            if share is None:
                continue
            # From the rows that it kept; where it kept none, as many came as were planned.
            if share and node_rows.get(name):
                incoming = node_rows[name] / share
            else:
                incoming = planned[name]
            came[name] += incoming
            stayed[name] += share * incoming
    return {name: stayed[name] / incoming for name, incoming in came.items() if incoming}


def _is_selection(node: Mapping[str, Any]) -> bool:
    return node.get("relation") == "subset"


def _planned_rows(plan: Mapping[str, Any]) -> dict[str, int]:
    """Rows of a Step, by node; 0 of those of an evaluation."""
    batches = {source["name"]: source["batch"] for source in plan["sources"]}
    rows: dict[str, int] = {}
    for node in plan["nodes"]:
        rows[node["name"]] = batches.get(node["source"], 0) * node["rows"]
    return rows


def _read_plan(folder: Path) -> dict[str, Any]:
    """Read a run's plan. Raises DataError for what is none, and for that of a Program."""
    path = folder / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected a plan: {error}. Fix: another run.") from error
    if not isinstance(plan, dict) or not {"nodes", "sources"} <= plan.keys():
        raise DataError(f"{path}: expected the plan of a graph. Fix: the run of one graph.")
    return plan


# --- a trace --------------------------------------------------------------------------------------


def _read_trace(path: Path) -> SeenRows:
    table = _read_table(path)
    distributions: dict[str, LengthDistribution] = {}
    for what, names in _COLUMNS.items():
        name = next((name for name in names if name in table.column_names), None)
        if name is not None:
            distributions[what] = _read_column(path, name, table.column(name))
    if "answers" not in distributions:
        columns = ", ".join(table.column_names[:8]) or "none"
        names = " or ".join(_COLUMNS["answers"][:3])
        problem = f"expected a column {names}, found {columns}"
        raise DataError(f"trace {path}: {problem}. Fix: rename one, completion_tokens.")
    return SeenRows(prompts=distributions.get("prompts"), answers=distributions["answers"])


def _read_column(path: Path, name: str, column: pa.ChunkedArray) -> LengthDistribution:
    known = column.drop_null()  # type: ignore[attr-defined]
    if not pa.types.is_integer(known.type) or not len(known):
        what = f"{known.type}" if len(known) else "none"
        problem = f"column {name!r}: expected numbers of tokens, found {what}"
        raise DataError(f"trace {path}: {problem}. Fix: whole numbers.")
    # With the rows that have none: the message names a row by its number in the file.
    numbers = column.to_numpy()
    negative = np.flatnonzero(numbers < 0)
    if len(negative):
        row = negative[0]
        problem = f"row {row}: column {name!r}: expected a number of tokens"
        raise DataError(
            f"trace {path}: {problem}, found {int(numbers[row])}. Fix: leave the row out."
        )
    return _lengths(known)


def _read_table(path: Path) -> pa.Table:
    readers = {".csv": pa_csv.read_csv, ".jsonl": pa_json.read_json, ".parquet": pq.read_table}
    reader = readers.get(path.suffix)
    if reader is None:
        endings, ending = ", ".join(readers), path.suffix or "none"
        problem = f"expected a file ending in {endings}, found {ending}"
        raise DataError(f"trace {path}: {problem}. Fix: one of these.")
    try:
        return reader(path)
    except (pa.ArrowException, OSError) as error:
        cause = str(error).splitlines()[0]
        raise DataError(f"trace {path}: cannot be read: {cause}. Fix: another file.") from error
