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
        *("prompt_tokens", "input_length", "ContextTokens", "Request tokens"),
        *("num_prefill_tokens", "input_tokens"),
    ),
    "answers": (
        *("completion_tokens", "output_length", "GeneratedTokens", "Response tokens"),
        *("num_decode_tokens", "output_tokens"),
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
    """What --lengths and --prompts say. Raises PlanError for a text that says nothing, DataError
    for files that cannot be read.
    """
    said = _seen(lengths) if lengths else SeenRows()
    return replace(said, prompts=distribution(prompts, "--prompts")) if prompts else said


def _seen(text: str) -> SeenRows:
    path = Path(text)
    if path.is_dir():
        return _of_run(path)
    if path.is_file():
        return _of_trace(path)
    return SeenRows(answers=distribution(text, "--lengths"))


def distribution(text: str, flag: str = "--lengths") -> LengthDistribution:
    """`512` or `lognormal:3000,0.9,20000`. Raises PlanError."""
    if text.isdecimal():
        return constant_length(int(text))
    found = _LOGNORMAL.fullmatch(text)
    if found is not None:
        return lognormal(float(found[1]), float(found[2]), int(found[3]))
    like = _LIKE if flag == "--lengths" else "200 or lognormal:200,0.5,1000"
    fix = "lognormal:3000,0.9,20000" if flag == "--lengths" else "lognormal:200,0.5,1000"
    raise PlanError(f"options: {flag}: expected {like}, found {text!r}. Fix: {flag} {fix}.")


# --- a run ----------------------------------------------------------------------------------------


def _of_run(folder: Path) -> SeenRows:
    if not is_run(folder):
        problem = "expected a run folder (with versions.json in it), found another folder"
        raise DataError(f"{folder}: {problem}. Fix: --lengths runs/NAME.")
    table = read_samples(folder / "samples")
    ids = table.column("prompt_ids")
    prompts = pc.list_value_length(ids).drop_null()  # type: ignore[attr-defined]
    functions = _functions(folder)
    return SeenRows(
        prompts=_lengths(prompts) if len(prompts) else None,
        answers=_lengths(table.column("length").drop_null()),
        seconds={name: cost.seconds for name, cost in functions.items()},
        cpu={name: cost.cpu for name, cost in functions.items() if cost.cpu is not None},
        kept=_kept(folder),
    )


def _lengths(column: Any) -> LengthDistribution:
    """Rows without a token count as one of a token: each takes a pass."""
    return of_lengths(np.maximum(1, column.to_numpy().astype(np.int64)))


def _functions(folder: Path) -> dict[str, RowCost]:
    """Of the nodes that compute with no Model: means over the Steps after the first. Of an
    evaluation whose rows no record counts, nothing is known.
    """
    functions = {n["name"] for n in _plan(folder / "plan.json")["nodes"] if _is_function(n)}
    planned = {name: rows for name, rows in _planned_rows(folder).items() if name in functions}
    steps = len(seconds_by_step(folder).get(0, []))
    costs = row_costs(folder, after=_WARM if steps > _WARM else 0, rows_a_step=planned)
    return {name: cost for name, cost in costs.items() if name in functions}


def _is_function(node: Mapping[str, Any]) -> bool:
    """Whether a node of a plan's file computes with no Model, if it reads one's tokenizer."""
    tokenizers = [use.get("param") == "tokenizer" for use in node["models"]]
    return all(tokenizers) and node["work"] not in ("source", "train")


def _kept(folder: Path) -> dict[str, float]:
    """The share of rows that each selection kept, of all that came to it in the run."""
    planned, rows = _planned_rows(folder), node_rows_by_step(folder)
    came: defaultdict[str, float] = defaultdict(float)
    stayed: defaultdict[str, float] = defaultdict(float)
    selects = [n["name"] for n in _plan(folder / "plan.json")["nodes"] if _is_selection(n)]
    for step, shares in enumerate(kept_by_step(folder), 1):
        node_rows = rows.get(step, {})
        for name in selects:
            if (share := shares.get(name)) is not None:
                incoming = (
                    node_rows[name] / share if share and node_rows.get(name) else planned[name]
                )
                came[name] += incoming
                stayed[name] += share * incoming
    return {name: stayed[name] / incoming for name, incoming in came.items() if incoming}


def _is_selection(node: Mapping[str, Any]) -> bool:
    return node.get("relation") == "subset"


def _planned_rows(folder: Path) -> dict[str, int]:
    """Rows of a Step, by node; 0 of those of an evaluation."""
    plan = _plan(folder / "plan.json")
    batches = {source["name"]: source["batch"] for source in plan["sources"]}
    return {n["name"]: batches.get(n["source"], 0) * n["rows"] for n in plan["nodes"]}


def _plan(path: Path) -> dict[str, Any]:
    """Of a graph alone. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected a plan: {error}. Fix: another run.") from error
    if not isinstance(found, dict) or not {"nodes", "sources"} <= found.keys():
        raise DataError(f"{path}: expected the plan of a graph. Fix: the run of one graph.")
    return found


# --- a trace --------------------------------------------------------------------------------------


def _of_trace(path: Path) -> SeenRows:
    table = _table(path)
    found: dict[str, LengthDistribution] = {}
    for what, names in _COLUMNS.items():
        name = next((name for name in names if name in table.column_names), None)
        if name is not None:
            found[what] = _tokens(path, name, table.column(name))
    if "answers" not in found:
        columns = ", ".join(table.column_names[:8]) or "none"
        problem = f"expected a column {' or '.join(_COLUMNS['answers'][:3])}, found {columns}"
        raise DataError(f"trace {path}: {problem}. Fix: rename one, completion_tokens.")
    return SeenRows(prompts=found.get("prompts"), answers=found["answers"])


def _tokens(path: Path, name: str, column: pa.ChunkedArray) -> LengthDistribution:
    values = column.drop_null()  # type: ignore[attr-defined]
    if not pa.types.is_integer(values.type) or not len(values):
        shown = f"{values.type}" if len(values) else "none"
        problem = f"column {name!r}: expected numbers of tokens, found {shown}"
        raise DataError(f"trace {path}: {problem}. Fix: whole numbers.")
    numbers = column.to_numpy()
    negative = np.flatnonzero(numbers < 0)
    if len(negative):
        problem = f"row {negative[0]}: column {name!r}: expected a number of tokens"
        shown = f"found {int(numbers[negative[0]])}"
        raise DataError(f"trace {path}: {problem}, {shown}. Fix: leave the row out.")
    return _lengths(values)


def _table(path: Path) -> pa.Table:
    readers = {".csv": pa_csv.read_csv, ".jsonl": pa_json.read_json, ".parquet": pq.read_table}
    reader = readers.get(path.suffix)
    if reader is None:
        found = f"expected a file ending in {', '.join(readers)}, found {path.suffix or 'none'}"
        raise DataError(f"trace {path}: {found}. Fix: one of these.")
    try:
        return reader(path)
    except (pa.ArrowException, OSError) as error:
        told = str(error).splitlines()[0]
        raise DataError(f"trace {path}: cannot be read: {told}. Fix: another file.") from error
