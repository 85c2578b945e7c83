"""Layouts and places: in one process every node is colocated on the worker `main`.

Owns: workers, threads, what is admitted together, and which nodes share a module. Does not
own: searching over layouts, which comes with more than one device.
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.kernel import Layout
from dataflow.model import Model
from engine.plan.draft import Draft
from engine.plan.plan import ModelUse, PlannedModel, PlannedNode, PlannedSource

WORKER = "main"


def place(draft: Draft) -> Draft:
    """Everything in one worker that takes turns; all cores for each kernel; modules shared wherever that is safe."""
    threads = draft.threads or draft.cluster.cores
    sources = {s.name: s for s in draft.sources}
    models = {s.name: s for s in draft.graph.states if isinstance(s, Model)}
    writers = {u.model: n.name for n in draft.nodes for u in n.models if u.access == "write"}
    nodes = tuple(
        replace(
            n,
            workers=(WORKER,),
            layout=Layout(threads=threads),
            chunking="cohort",
            models=tuple(
                replace(u, module=_module(n, u, sources, models, writers)) for u in n.models + _tokenizer(n, draft)
            ),
        )
        for n in draft.nodes
    )
    cohorts = tuple(replace(s, cohort=0 if s.max_lag == 0 else s.batch) for s in draft.sources)
    return replace(draft, nodes=nodes, sources=cohorts, models=tuple(_models(models, writers, nodes)))


def _module(
    node: PlannedNode,
    use: ModelUse,
    sources: dict[str, PlannedSource],
    models: dict[str, Model],
    writers: dict[str, str],
) -> str:
    """The name of the module: the trained one by alias where the reader takes turns with its writer at lag 0.

    An evaluation takes turns with training at any lag. A frozen Model shares with every other of equal base, head and
    dtype.
    """
    model = models[use.model]
    if use.model in writers:
        lag = sources[node.source].max_lag if node.region == "stream" else 0
        return use.model if lag == 0 else f"{use.model}@{node.name}"
    if model.follows is not None:
        return use.model
    return f"frozen:{model.base}:{model.head}:{model.dtype}"


def _tokenizer(node: PlannedNode, draft: Draft) -> tuple[ModelUse, ...]:
    """Demonstrations are tokenised for the Model that is trained on them."""
    if node.operator != "demonstrations":
        return ()
    for other in draft.nodes:
        if other.source == node.name and other.models:
            return (ModelUse(param="tokenizer", model=other.models[0].model, access="read"),)
    return ()


def _models(models: dict[str, Model], writers: dict[str, str], nodes: tuple[PlannedNode, ...]) -> list[PlannedModel]:
    found = []
    for model in models.values():
        uses = [(n, u) for n in nodes for u in n.models if u.model == model.name and u.param != "tokenizer"]
        readers = tuple(n.name for n, u in uses if u.access == "read" and n.work != "evaluate")
        aliases = tuple(n.name for n, u in uses if u.access == "read" and u.module == model.name and n.name in readers)
        found.append(
            PlannedModel(
                name=model.name,
                base=model.base,
                writer=writers.get(model.name, ""),
                readers=readers,
                aliases=aliases if model.name in writers else (),
                follows=model.follows.name if model.follows else "",
                rate=model.rate,
                every=model.every,
            )
        )
    return found
