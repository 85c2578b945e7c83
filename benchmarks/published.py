"""Published results beside what this project's cost model gives for the same systems.

    python -m benchmarks.published [--quick] [--fitted] [--json FILE]

Owns: which results are compared. Does not own: the inputs and their sources, what was once fitted
to the results (published.toml), when a number counts as reproduced, and the table
(published_table.py), the systems' schedules (published_schedules.py, published_areal.py), what our
own coordinator gives (published_ours.py), the coefficients, which are those of the catalogue for
every row (engine/plan/cost/catalogue.toml) and fitted to none.

With --fitted the values that were fitted to AReaL's and StreamRL's results stand in for these, and
every number that rests on one names it. With --json FILE the table is also written as FILE's
`.table.md`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.published_areal import AdmissionRule, asynchronous
from benchmarks.published_ours import StreamSplits, areal_by_us, streamrl_by_us
from benchmarks.published_schedules import (
    Engines,
    Pool,
    Reached,
    Rollouts,
    Trainer,
    allocation,
    best_streamed,
    cache_room,
    colocated,
    cost_gain,
    decoded_rate,
    gpus,
    overlapped,
    synchronous,
)
from benchmarks.published_table import Row, ordered, summary, table
from benchmarks.report import machine, write_json
from engine.plan.cost.devices import KINDS, Coefficients
from engine.plan.cost.distribution import lognormal
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape, formula

DATA = Path(__file__).with_suffix(".toml")
SCALE = 8
"""AReaL's engines and rows are an eighth of the published number, which changes no ratio."""

STREAM_STEPS = 20
"""Of an asynchronous run with StreamRL's prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was fitted to published results. reached: coefficients of all GPUs, None for the
    catalogue's; share: of generation in the cost of StreamRL's Step, None for that of the
    simulated Step. decoding, training, sharing: the names of what numbers rest on that rest on
    such passes, or on that share.
    """

    reached: Reached | None = None
    share: float | None = None
    decoding: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    sharing: tuple[str, ...] = ()

    @property
    def passes(self) -> tuple[str, ...]:
        """What numbers rest on that rest on passes of both kinds."""
        return (*self.decoding, *self.training)


UNTUNED = Fit()


def inputs() -> Mapping[str, Any]:
    """published.toml."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def sizes(data: Mapping[str, Any], name: str) -> Sizes:
    """A model of published.toml, in bfloat16."""
    shape = Shape(**data["models"][name]["shape"])
    return Sizes(parameters=formula(shape, {"model_type": "qwen2"}), shape=shape)


def fit_of(data: Mapping[str, Any]) -> Fit:
    """What was fitted, of published.toml."""
    areal, streamrl = data["fitted"]["areal"], data["fitted"]["streamrl"]
    names = tuple(areal["names"])
    return Fit(
        reached={kind: Coefficients(**areal[kind], origin="fitted") for kind in KINDS},
        share=streamrl["share"],
        decoding=tuple(name for name in names if name.startswith("decode")),
        training=tuple(name for name in names if name.startswith("train")),
        sharing=("share",),
    )


def rows(*, quick: bool = False, fit: Fit = UNTUNED) -> list[Row]:
    """All results. quick: shorter runs of AReaL, and without its exact intake."""
    data = inputs()
    return [*areal(data, fit, quick=quick), *streamrl(data, fit), *earl(data, fit)]


def areal(data: Mapping[str, Any], fit: Fit, *, quick: bool) -> Iterator[Row]:
    """Asynchronous over synchronous training, and the seconds of either's Steps."""
    said, ratios = data["areal"], list[float]()
    for run in said["runs"]:
        name = f"areal/{run['model']}"
        model, source = sizes(data, run["model"]), said["source"]
        waiting = _synchronous(said, run, model, fit, batches=1 if quick else 3)
        found = {
            exact: _asynchronous(said, run, model, fit, exact=exact, steps=20 if quick else 40)
            for exact in ((False,) if quick else (False, True))
        }
        published = run["hours"][0] / run["hours"][1]
        ratios.append(waiting / found[False])
        row_source: dict[str, Any] = {"source": source, "fitted": fit.passes}
        row_source["assumed"] = run.get("assumed", False)
        yield Row(
            name=f"{name}/asynchronous", published=published, simulated=ratios[-1], **row_source
        )
        if not quick:
            exact = waiting / found[True]
            yield Row(name=f"{name}/exact", published=None, simulated=exact, fitted=fit.passes)
        for kind, hours, seconds in zip(
            ("synchronous", "asynchronous"), run["hours"], (waiting, found[False]), strict=True
        ):
            yield Row(
                name=f"{name}/{kind}_step",
                published=hours * 3600 / run["steps"],
                simulated=seconds,
                unit="s",
                **row_source,
            )
    yield Row(
        name="areal/sizes_in_order",
        published=len(ratios) - 1,
        simulated=sum(a > b for a, b in pairwise(ratios)),
        unit="pairs",
        within=0.0,
        source=said["source"],
        fitted=fit.passes,
    )


def _rollouts(said: Mapping[str, Any]) -> Rollouts:
    lengths = lognormal(**said["lengths"])
    return Rollouts(
        rows=said["rows"], prompt=said["prompt"], lengths=lengths, microbatch=said["microbatch"]
    )


def _sides(
    said: Mapping[str, Any],
    run: Mapping[str, Any],
    model: Sizes,
    fit: Fit,
    *,
    share: float,
    scored: int,
) -> tuple[Engines, Trainer]:
    """AReaL's engines on this share of the devices, and its trainer on the others."""
    tensor, generating = run["tensor"], round(run["gpus"] * share)
    training = run["gpus"] - generating
    engines = Engines(
        model=model,
        where=gpus(said["device"], fit.reached, tensor=tensor),
        replicas=generating // tensor,
        memory=said["memory"],
    )
    trainer = Trainer(
        model=model,
        where=gpus(said["device"], fit.reached, data=training // tensor, tensor=tensor),
        updates=said["updates"],
        recomputed=said["recomputed"],
        scored=scored,
    )
    return engines, trainer


def _synchronous(
    said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, fit: Fit, *, batches: int
) -> float:
    sides = _sides(said, run, model, fit, share=said["generating_synchronous"], scored=0)
    return synchronous(_rollouts(said), *sides, batches=batches)


def _asynchronous(
    said: Mapping[str, Any],
    run: Mapping[str, Any],
    model: Sizes,
    fit: Fit,
    *,
    exact: bool,
    steps: int,
) -> float:
    engines, trainer = _sides(said, run, model, fit, share=said["generating"], scored=1)
    rule = AdmissionRule(eta=said["eta"], exact=exact)
    return asynchronous(_rollouts(said), engines, trainer, rule, steps=steps, scale=SCALE).seconds


def streamrl(data: Mapping[str, Any], fit: Fit) -> Iterator[Row]:
    """Streamed over colocated Steps, allocation over an even split, and what H20s save."""
    said = data["streamrl"]
    rollouts, source = _rollouts(said), said["source"]
    answers = rollouts.answers(0, rollouts.rows)
    least, most = said["colocated"]
    for run in said["runs"]:
        pool = _pool(said, run, sizes(data, run["model"]), fit)
        streamed, _ = best_streamed(pool, rollouts, answers)
        gain = colocated(pool, rollouts, answers) / streamed
        yield Row(
            name=f"streamrl/{run['model']}/streamed",
            published=None,
            simulated=gain,
            least=least,
            most=most,
            source=source,
            fitted=fit.passes,
        )
        yield Row(
            name=f"streamrl/{run['model']}/allocation",
            published=None,
            simulated=allocation(pool, rollouts, answers)[0],
            most=said["allocation"],
            source=source,
            fitted=fit.passes,
        )
        for kind, seconds in _stream_steps(said, pool, rollouts, answers):
            yield Row(
                name=f"streamrl/{run['model']}/{kind}",
                published=None,
                simulated=seconds,
                unit="s",
                source=source,
                fitted=fit.passes,
                assumed=said["assumed"],
            )
    yield from _cost(data, rollouts, answers, fit)


def _stream_steps(
    said: Mapping[str, Any], pool: Pool, rollouts: Rollouts, answers: np.ndarray
) -> Iterator[tuple[str, float]]:
    """Seconds of its own Steps, each at its best split: streamed, against which both orders of ours
    are measured; one step off, which is the longer of generation and training; and fully
    asynchronous at that split, where engines never wait: AReaL's schedule, with StreamRL's prices,
    since StreamRL's own needs a buffer of which the paper says no more.
    """
    seconds, _ = best_streamed(pool, rollouts, answers)
    yield "streamed_step", seconds
    yield "streamed_in_order_step", seconds
    split = allocation(pool, rollouts, answers)[1]
    yield "one_step_off_step", overlapped(pool, split, rollouts, answers)
    sides = pool.engines(split), pool.trainer(pool.gpus - split)
    rule = AdmissionRule(eta=said["eta"])
    run = asynchronous(rollouts, *sides, rule, steps=STREAM_STEPS, scale=1)
    yield "asynchronous_step", run.seconds


def _pool(said: Mapping[str, Any], run: Mapping[str, Any], model: Sizes, fit: Fit) -> Pool:
    return Pool(
        model=model,
        reached=fit.reached,
        device=said["device"],
        gpus=run["gpus"],
        tensor=tuple(run["tensor"]),
        **{key: said[key] for key in ("node", "memory", "trained", "scored", "recomputed")},
    )


def _cost(
    data: Mapping[str, Any], rollouts: Rollouts, answers: np.ndarray, fit: Fit
) -> Iterator[Row]:
    """Of a Step whose generation is moved to cheaper devices, if both kinds of devices are as fast
    as their memory, and as fast as decode says. Generation's share of the cost is that of the
    devices that generate at the best allocation, or the one that was fitted.
    """
    streamrl = data["streamrl"]
    cost, source = streamrl["cost"], streamrl["source"]
    model = sizes(data, cost["model"])
    seconds, rates = list[float](), list[float]()
    for name in (cost["device"], streamrl["device"]):
        where = gpus(name, fit.reached, tensor=cost["tensor"])
        engines = Engines(model=model, where=where, replicas=8, memory=streamrl["memory"])
        seconds.append(float(engines.ends(rollouts, answers).max()))
        rates.append(where.device.memory_rate)
    share, names = fit.share, fit.sharing
    if share is None:
        run = next(run for run in streamrl["runs"] if run["model"] == cost["model"])
        share = allocation(_pool(streamrl, run, model, fit), rollouts, answers)[1] / run["gpus"]
    for kind, relative, fitted_to in (
        ("memory", rates[1] / rates[0], names),
        ("decode", seconds[0] / seconds[1], (*names, *fit.decoding)),
    ):
        yield Row(
            name=f"streamrl/cost_by_{kind}",
            published=cost["published"],
            simulated=cost_gain(share, relative / cost["price"]),
            source=f"{source}; generation costs {relative / cost['price']:.2f} of what it did,"
            f" and was {share:.2f} of the cost",
            fitted=fitted_to,
            assumed=streamrl["assumed"],
        )


def earl(data: Mapping[str, Any], fit: Fit) -> Iterator[Row]:
    """How much more tokens a device and second TP 8 gives than TP 4."""
    said, right = data["earl"], list[bool]()
    source = said["source"]
    for context, row in said["grid"].items():
        for answers, published in zip(said["answers"], row, strict=False):
            few, many = _rates(data, fit, int(context), answers)
            found = 100.0 * (many / few - 1.0)
            right.append((found > 0) == (published > 0))
            yield Row(
                name=f"earl/{context}x{answers}",
                published=published,
                simulated=found,
                unit="%",
                source=source,
                fitted=fit.decoding,
            )
    yield Row(
        name="earl/signs",
        published=len(right),
        simulated=sum(right),
        unit="cells",
        within=0.0,
        source=source,
        fitted=fit.decoding,
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


def _rates(data: Mapping[str, Any], fit: Fit, context: int, answers: int) -> list[float]:
    earl = data["earl"]
    model = sizes(data, earl["model"])
    places = [gpus(earl["device"], fit.reached, tensor=tensor) for tensor in earl["tensor"]]
    return [decoded_rate(model, where, earl["memory"], context, answers) for where in places]


def with_ours(found: list[Row], data: Mapping[str, Any]) -> list[Row]:
    """The rows, with what this project's coordinator gives where that was planned."""
    said, ours = data["areal"], dict[str, float]()
    for run in said["runs"]:
        ours |= areal_by_us(said, run, sizes(data, run["model"]))
    said, by_name = data["streamrl"], {row.name: row for row in found}
    rollouts = _rollouts(said)
    answers = rollouts.answers(0, rollouts.rows)
    for run in said["runs"]:
        model = sizes(data, run["model"])
        pool = _pool(said, run, model, UNTUNED)
        splits = StreamSplits(
            streamed=best_streamed(pool, rollouts, answers)[1],
            overlapped=allocation(pool, rollouts, answers)[1],
        )
        ours |= streamrl_by_us(said, run, model, splits)
        name = f"streamrl/{run['model']}/streamed"
        if f"{name}_step" in ours:
            colocated_step = by_name[name].simulated * by_name[f"{name}_step"].simulated
            ours[name] = colocated_step / ours[f"{name}_step"]
    return [replace(row, ours=ours.get(row.name)) for row in found]


def main(*, quick: bool = False, fitted: bool = False, json: Path | None = None) -> None:
    """Print published beside simulated; where each number is from, published.toml says.

    Args:
        quick: shorter runs, and without this project's own coordinator.
        fitted: with what was fitted to AReaL's and StreamRL's results, in the catalogue's place,
            and without this project's own coordinator.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    data = inputs()
    found = rows(quick=quick, fit=fit_of(data) if fitted else UNTUNED)
    if not (quick or fitted):
        found = with_ours(found, data)
    head, cells = table(found)
    shown = Table(*head[:-1], title="Published and simulated")
    for *row, _ in cells:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    console.print(summary(found), highlight=False)
    if json is not None:
        write_json(json, [result for row in ordered(found) for result in row.results()], machine())
        lines = (head, ("---",) * len(head), *cells)
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        text = f"# Published and simulated\n\n{summary(found)}.\n\n{text}"
        json.with_suffix(".table.md").write_text(text)


if __name__ == "__main__":
    tyro.cli(main)
