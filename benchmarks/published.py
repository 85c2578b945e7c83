"""Published results beside what this project's cost model gives for the same systems.

    python -m benchmarks.published [--quick] [--json FILE]

Owns: which results are compared, and the table. Does not own: the inputs and their sources
(published.toml), the systems' schedules (published_schedules.py, published_areal.py), what our own
coordinator gives (published_ours.py), the coefficients, which are those of the catalogue for every
row (engine/cost/catalogue.toml).

A row's error is how far the simulated number is from the published one, in per cent of it. Rows
that miss their goal come first, then EARL's cells of the wrong sign, then the others, the worst
first. With --json FILE the table is also written as FILE's `.table.md`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.published_areal import AdmissionRule, asynchronous
from benchmarks.published_ours import areal_by_us
from benchmarks.published_schedules import (
    Engines,
    Pool,
    Rollouts,
    Trainer,
    allocation,
    cache_room,
    colocated,
    cost_gain,
    decoded_rate,
    gpus,
    streamed,
    synchronous,
)
from benchmarks.report import SideResult, machine, write_json
from engine.cost.distribution import lognormal
from engine.cost.models import Shape, formula
from engine.cost.passes import Sizes

DATA = Path(__file__).with_suffix(".toml")
SCALE = 8
"""AReaL's engines and rows are an eighth of the published number, which changes no ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result. published: None where there is only a bound. least, most: the goal, if there is
    one; wrong: whether a number without a goal has the wrong sign. ours: what `dataflow simulate`
    gives with this project's coordinator, where that was run.
    """

    name: str
    published: float | None
    simulated: float
    unit: str = "x"
    least: float | None = None
    most: float | None = None
    wrong: bool = False
    source: str = ""
    ours: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.least is None and self.most is None:
            return None
        under = self.most is None or self.simulated <= self.most
        return under and (self.least is None or self.simulated >= self.least)

    @property
    def error(self) -> float | None:
        """Per cent of the published number; of percentages, their difference."""
        if self.published is None:
            return None
        if self.unit == "%":
            return self.simulated - self.published
        return 100.0 * (self.simulated / self.published - 1.0)

    def results(self) -> Iterator[SideResult]:
        """One for each bound, or one without a goal."""
        if self.holds is None:
            yield SideResult(name=self.name, value=self.simulated, unit=self.unit)
        for bound, least, suffix in ((self.least, True, "least"), (self.most, False, "most")):
            if bound is not None:
                yield SideResult(
                    name=f"{self.name}/{suffix}",
                    value=self.simulated,
                    unit=self.unit,
                    goal=bound,
                    least=least,
                )


def inputs() -> Mapping[str, Any]:
    """published.toml."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def sizes(data: Mapping[str, Any], name: str) -> Sizes:
    """A model of published.toml, in bfloat16."""
    shape = Shape(**data["models"][name]["shape"])
    return Sizes(parameters=formula(shape, {"model_type": "qwen2"}), shape=shape)


def rows(*, quick: bool = False) -> list[Row]:
    """All results. quick: shorter runs of AReaL, and without its exact intake."""
    data = inputs()
    return [*areal(data, quick=quick), *streamrl(data), *earl(data)]


def areal(data: Mapping[str, Any], *, quick: bool) -> Iterator[Row]:
    """Asynchronous over synchronous training, and the seconds of either's Steps."""
    said, ratios = data["areal"], list[float]()
    for run in said["runs"]:
        name = f"areal/{run['model']}"
        model, source = sizes(data, run["model"]), said["source"]
        waiting = _synchronous(said, run, model, batches=1 if quick else 3)
        found = {
            exact: _asynchronous(said, run, model, exact=exact, steps=20 if quick else 40)
            for exact in ((False,) if quick else (False, True))
        }
        published = run["hours"][0] / run["hours"][1]
        ratios.append(waiting / found[False])
        goal = (published * (1 - said["within"]), published * (1 + said["within"]))
        least, most = goal if run.get("goal") else (None, None)
        yield Row(
            name=f"{name}/asynchronous",
            published=published,
            simulated=ratios[-1],
            least=least,
            most=most,
            source=source,
        )
        if not quick:
            yield Row(name=f"{name}/exact", published=None, simulated=waiting / found[True])
        for kind, hours, seconds in zip(
            ("synchronous", "asynchronous"), run["hours"], (waiting, found[False]), strict=True
        ):
            yield Row(
                name=f"{name}/{kind}_step",
                published=hours * 3600 / run["steps"],
                simulated=seconds,
                unit="s",
                source=source,
            )
    yield Row(
        name="areal/sizes_in_order",
        published=len(ratios) - 1,
        simulated=sum(a > b for a, b in pairwise(ratios)),
        unit="pairs",
        least=len(ratios) - 1,
        source=said["source"],
    )


def _rollouts(said: Mapping[str, Any]) -> Rollouts:
    lengths = lognormal(**said["lengths"])
    return Rollouts(
        rows=said["rows"], prompt=said["prompt"], lengths=lengths, microbatch=said["microbatch"]
    )


def _sides(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, share: float, scored: int
) -> tuple[Engines, Trainer]:
    """AReaL's engines on this share of the devices, and its trainer on the others."""
    tensor, generating = run["tensor"], round(run["gpus"] * share)
    training = run["gpus"] - generating
    engines = Engines(
        model=model,
        where=gpus(said["device"], tensor=tensor),
        replicas=generating // tensor,
        memory=said["memory"],
    )
    trainer = Trainer(
        model=model,
        where=gpus(said["device"], data=training // tensor, tensor=tensor),
        updates=said["updates"],
        recomputed=said["recomputed"],
        scored=scored,
    )
    return engines, trainer


def _synchronous(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, *, batches: int
) -> float:
    sides = _sides(said, run, model, said["generating_synchronous"], 0)
    return synchronous(_rollouts(said), *sides, batches=batches)


def _asynchronous(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, *, exact: bool, steps: int
) -> float:
    engines, trainer = _sides(said, run, model, said["generating"], 1)
    rule = AdmissionRule(eta=said["eta"], exact=exact)
    return asynchronous(_rollouts(said), engines, trainer, rule, steps=steps, scale=SCALE).seconds


def streamrl(data: Mapping[str, Any]) -> Iterator[Row]:
    """Streamed over colocated Steps, allocation over an even split, and what H20s save."""
    said = data["streamrl"]
    rollouts, source = _rollouts(said), said["source"]
    answers = rollouts.answers(0, rollouts.rows)
    least, most = said["colocated"]
    for run in said["runs"]:
        pool = _pool(said, run, sizes(data, run["model"]))
        gain = colocated(pool, rollouts, answers) / streamed(pool, rollouts, answers)
        yield Row(
            name=f"streamrl/{run['model']}/streamed",
            published=None,
            simulated=gain,
            least=least,
            most=most,
            source=source,
        )
        yield Row(
            name=f"streamrl/{run['model']}/allocation",
            published=None,
            simulated=allocation(pool, rollouts, answers)[0],
            most=said["allocation"],
            source=source,
        )
    yield from _cost(data, said, rollouts, answers)


def _pool(said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes) -> Pool:
    return Pool(
        model=model,
        device=said["device"],
        gpus=run["gpus"],
        tensor=tuple(run["tensor"]),
        **{key: said[key] for key in ("node", "memory", "trained", "scored", "recomputed")},
    )


def _cost(
    data: Mapping[str, Any], said: Mapping[str, Any], rollouts: Rollouts, answers: np.ndarray
) -> Iterator[Row]:
    """Of a Step whose generation is moved to cheaper devices: at the share at which the published
    gain comes out if both devices are as fast as their memory, and as fast as decode says.
    """
    cost, source = said["cost"], said["source"]
    model = sizes(data, cost["model"])
    seconds, rates = list[float](), list[float]()
    for name in (cost["device"], said["device"]):
        where = gpus(name, tensor=cost["tensor"])
        engines = Engines(model=model, where=where, replicas=8, memory=said["memory"])
        seconds.append(float(engines.ends(rollouts, answers).max()))
        rates.append(where.device.memory_rate)
    for kind, relative in (("memory", rates[1] / rates[0]), ("decode", seconds[0] / seconds[1])):
        yield Row(
            name=f"streamrl/cost_by_{kind}",
            published=cost["published"],
            simulated=cost_gain(cost["share"], relative / cost["price"]),
            source=f"{source}; generation costs {relative / cost['price']:.2f} of what it did,"
            f" and was {cost['share']} of the cost",
        )


def earl(data: Mapping[str, Any]) -> Iterator[Row]:
    """How much more tokens a device and second TP 8 gives than TP 4."""
    said, right = data["earl"], list[bool]()
    source = said["source"]
    for context, row in said["grid"].items():
        for answers, published in zip(said["answers"], row, strict=False):
            few, many = _rates(data, said, int(context), answers)
            found = 100.0 * (many / few - 1.0)
            right.append((found > 0) == (published > 0))
            yield Row(
                name=f"earl/{context}x{answers}",
                published=published,
                simulated=found,
                unit="%",
                wrong=not right[-1],
                source=source,
            )
    yield Row(
        name="earl/signs",
        published=len(right),
        simulated=sum(right),
        unit="cells",
        least=said["least"],
        source=source,
    )
    context, answers = said["does_not_fit"]
    where = gpus(said["device"], tensor=said["tensor"][0])
    fits = cache_room(sizes(data, said["model"]), where, said["memory"])
    yield Row(
        name=f"earl/{context}x{answers}/of_the_cache_with_tp_{where.tensor}",
        published=None,
        simulated=context * answers / fits,
        least=1.0,
        source=f"{source}: out of memory",
    )


def _rates(
    data: Mapping[str, Any], said: Mapping[str, Any], context: int, answers: int
) -> list[float]:
    model = sizes(data, said["model"])
    places = [gpus(said["device"], tensor=tensor) for tensor in said["tensor"]]
    return [decoded_rate(model, where, said["memory"], context, answers) for where in places]


def ordered(found: Sequence[Row]) -> list[Row]:
    """Goals that are missed, numbers of the wrong sign, and the others, the worst first."""
    return sorted(found, key=lambda r: (r.holds is not False, not r.wrong, -abs(r.error or 0.0)))


def table(found: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and cells, as text. The column of our own coordinator is there if any row has it."""
    head = ("what", "published", "simulated", "error", "goal", "holds", "source")
    ours = any(row.ours is not None for row in found)
    cells = [_cells(row) for row in ordered(found)]
    if not ours:
        return head, cells
    more = [_number(row.ours, row.unit) for row in ordered(found)]
    head = (*head[:3], "with this coordinator", *head[3:])
    return head, [(*c[:3], m, *c[3:]) for c, m in zip(cells, more, strict=True)]


def with_ours(found: Sequence[Row], data: Mapping[str, Any]) -> list[Row]:
    """The rows, with what this project's coordinator gives where that was planned."""
    said = data["areal"]
    ours = dict(
        pair for run in said["runs"] for pair in areal_by_us(said, run, sizes(data, run["model"]))
    )
    return [replace(row, ours=ours.get(row.name)) for row in found]


def _cells(row: Row) -> tuple[str, ...]:
    bounds = (("", row.least), ("to ", row.most))
    goal = " ".join(f"{word}{bound:.3g}" for word, bound in bounds if bound is not None)
    held = {None: "wrong sign" if row.wrong else "", True: "yes", False: "NO"}[row.holds]
    error = "" if row.error is None else f"{row.error:+.0f} %"
    numbers = (_number(row.published, row.unit), _number(row.simulated, row.unit))
    return row.name, *numbers, error, goal, held, row.source


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Print published beside simulated.

    Args:
        quick: shorter runs, and without this project's own coordinator.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    found = rows(quick=quick)
    if not quick:
        found = with_ours(found, inputs())
    head, cells = table(found)
    shown = Table(*head, title="Published and simulated")
    for row in cells:
        shown.add_row(*row)
    Console().print(shown)
    if json is not None:
        write_json(json, [result for row in ordered(found) for result in row.results()], machine())
        lines = (head, ("---",) * len(head), *cells)
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        json.with_suffix(".table.md").write_text(f"# Published and simulated\n\n{text}")


if __name__ == "__main__":
    tyro.cli(main)
