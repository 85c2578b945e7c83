"""Whether a plan's Steps are worked on in parts, and in how large ones, where nobody asked.

Owns: the choice by the price of whole plans, and what is said of it. Does not own: which nodes may
work on parts (passes/streaming.py), the price of a Step (step_price.py).

A train node that works on parts keeps sums of gradients, and memory decides layouts. So a plan with
parts is made as a whole and compared with the one without. With parts, Workers compute at the same
time that else take turns: where they would share the cores of a host, nothing is gained that a
price knows. Both are priced with assumed lengths of answers, and of nodes that are functions with
what a profile knows. Equal graphs, wishes and machines have equal choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dataflow.errors import PlanError
from engine.plan.cost.profile import Profile
from engine.plan.passes.streaming import (
    find_why_no_stream,
    least_part_tokens,
    let_rows_leave,
    set_part_tokens,
)
from engine.plan.placement import Placing
from engine.plan.plan import Plan
from engine.plan.priced_work import ASSUMED, StepLengths
from engine.plan.step_price import StepPrice, price_step
from engine.plan.worker_index import workers_by_host

LEAST_GAIN = 0.03
"""Of a Step: what parts have to be worth."""
_PARTS = (4, 8, 16, 32)
"""Parts of a Step that are tried."""


def choose_stream(
    placing: Placing,
    profile: Profile | None,
    make: Callable[[Placing], Plan],
    lengths: StepLengths = ASSUMED,
) -> Plan:
    """Make the plan of these wishes, with what they leave to the price: `stream="auto"`, and the
    size of parts, 0. make: makes a plan of wishes that leave nothing. Raises PlanError where no
    plan without parts can be made, or one with parts that was asked for. lengths: of answers.
    """
    if placing.stream == "off" or (placing.stream != "auto" and placing.part_tokens):
        return make(placing)
    if placing.stream != "auto":
        return _choose_tokens(placing, profile, make, lengths)[0]
    whole = make(replace(placing, stream="off"))
    if any(source.max_lag for source in whole.sources) or not _generates(whole):
        return whole  # nothing that could be said is news
    why_not = find_why_no_stream(whole) or _why_no_price(whole)
    if why_not:
        return _add_note(whole, f"no Step is streamed: {why_not}")
    seconds = price_step(whole, lengths, profile=profile).seconds()
    try:
        asked = replace(placing, stream="ordered")
        streamed, streamed_seconds = _choose_tokens(asked, profile, make, lengths)
    except PlanError as error:
        return _add_note(whole, f"no Step is streamed: no plan with parts: {error}")
    gain = 0.0
    if seconds:
        gain = 1.0 - streamed_seconds / seconds
    if not any(node.in_parts for node in streamed.nodes):
        ends = [note for note in streamed.notes if note.startswith("the stream ends at ")]
        return _add_note(whole, "; ".join(["no Step is streamed", *ends]))
    if shared := _find_shared_cores(streamed):
        return _add_note(whole, f"no Step is streamed: {shared}")
    shorter = "shorter" if gain > 0 else "longer"
    worth = f"a Step is {abs(gain):.0%} {shorter} by its price"
    if gain < LEAST_GAIN:
        wish = f"less than {LEAST_GAIN:.0%} gained: with parts {worth} (--stream ordered)"
        return _add_note(whole, f"no Step is streamed: {wish}")
    return _add_note(streamed, f"parts while a Step is generated: {worth}, with assumed answers")


def _find_shared_cores(plan: Plan) -> str:
    """Which kernels would compute at once on fewer cores than they have threads; empty if none."""
    assert plan.cluster is not None
    threads_by_worker: dict[str, int] = {}
    names: list[str] = []
    for node in plan.nodes:
        is_at_once = node.in_parts or node.layout.part_tokens
        if not is_at_once or not node.traits.computes or plan.is_on_gpus(node):
            continue
        names.append(node.name)
        for worker in node.workers:
            threads = max(node.layout.threads, threads_by_worker.get(worker, 0))
            threads_by_worker[worker] = threads
    for host, workers in workers_by_host(plan, threads_by_worker).items():
        threads = sum(threads_by_worker[worker] for worker in workers)
        cores = plan.cluster.on(host).cores
        if len(workers) > 1 and threads > cores:
            return f"{', '.join(names)} would share {cores} cores (--threads, or --stream ordered)"
    return ""


def _generates(plan: Plan) -> bool:
    return any(node.region == "stream" and node.traits.generates for node in plan.nodes)


def _add_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _why_no_price(plan: Plan) -> str:
    """Why the price of a Step is not known; empty if it is."""
    for node in plan.nodes:
        if node.region == "evaluation" or not node.traits.computes:
            continue
        if node.estimate.seconds is None:
            return f"the price of {node.name} is not known"
    return ""


def _choose_tokens(
    placing: Placing,
    profile: Profile | None,
    make: Callable[[Placing], Plan],
    lengths: StepLengths,
) -> tuple[Plan, float]:
    """The plan with the best size of parts, if no size was asked for, and its price."""
    plan = make(placing)
    if _why_no_price(plan) or not any(node.in_parts for node in plan.nodes):
        return plan, 0.0
    price = price_step(plan, lengths, profile=profile)
    best_tokens, best_seconds = placing.part_tokens, price.seconds()
    for tokens in () if placing.part_tokens else _list_sizes(plan, price):
        tried = replace(plan, sources=set_part_tokens(plan.sources, tokens))
        tried = replace(tried, nodes=let_rows_leave(tried.nodes, tried.sources))
        seconds = price_step(tried, lengths, profile=profile).seconds()
        if seconds < best_seconds:
            best_tokens, best_seconds = tokens, seconds
    if best_tokens != placing.part_tokens:
        plan = make(replace(placing, part_tokens=best_tokens))
    return plan, best_seconds


def _list_sizes(plan: Plan, price: StepPrice) -> Iterator[int]:
    """Sizes of parts, the largest first, each of which fills a micro-batch of every rank."""
    least = least_part_tokens(plan.nodes)
    tokens = sum(price.count_answers(s.name) for s in plan.sources if s.stream != "off")
    yield from dict.fromkeys(max(least, tokens // parts) for parts in _PARTS)
