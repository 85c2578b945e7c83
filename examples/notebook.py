"""The Python API, cell by cell; editors and Jupyter run a `# %%` file as a notebook.

Run: python examples/notebook.py
"""

# ruff: noqa: E402

from __future__ import annotations

from dataclasses import replace

# %% A model and data. In your notebook these are your own paths.
import tiny

files = tiny.make()


# %% A reward is a function; prints and breakpoints in it work with inproc=True.
def short_digits(completions: list[str], **kwargs: object) -> list[float]:
    """The share of digits among eight characters."""
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


# %% A graph is a value: draw it, check it.
from dataflow import check
from dataflow.draw import draw
from graphs.grpo import grpo

graph = grpo(files.model, files.train, short_digits, n=8, batch=8, max_tokens=8, lr=5e-3)
print(draw(graph))
print(check(graph).describe())

# %% The plan, before anything starts.
from engine.api import peek, plan, resume, run
from engine.options import RunOptions
from engine.plan.explain import explain

options = RunOptions(
    name="notebook", steps=6, overwrite=True, threads=1, inproc=True, progress=False
)
print(explain(plan(graph, options)))

# %% The first rows of a node; only what it needs is run.
print(
    peek(graph, "rollout", rows=2, options=options)
    .select(["position", "completion", "finish"])
    .to_pylist()
)

# %% A run. on_step gets each Step's metrics; until ends the run when it returns True.
curve: list[float] = []
result = run(
    graph,
    options,
    on_step=[lambda metrics: curve.append(metrics["reward/mean"])],
    until=lambda metrics: metrics["reward/mean"] > 0.9,
)
print(result.reason, result.folder, [round(reward, 3) for reward in curve])

# %% Continue from its checkpoint. The graph is passed again, as functions of a notebook cannot be
# imported.
result = resume(
    result.folder,
    graph=graph,
    on_step=[lambda metrics: curve.append(metrics["reward/mean"])],
    steps=10,
)
print(result.reason, [round(reward, 3) for reward in curve])

# %% How it went, as a table of every Step's metrics. In a notebook, a result as the last line of a
# cell shows plots; a graph shows its drawing, a plan its nodes, a batch its first rows.
print(result.history.select(["step", "reward/mean"]).to_pylist()[-1])

# %% A run in a thread: the notebook stays usable. A handle has the metrics so far, stops the run,
# has it write a checkpoint, and waits for its end.
handle = run(graph, replace(options, steps=1000), wait=False)
print(handle)
handle.stop()
print(handle.result().reason)

# %% The trained model is a Hugging Face directory.
print(result.trained["policy"])
