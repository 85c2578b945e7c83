"""Our half of the benchmark of agents: graphs/agent.py on the engine, in a process of its own.

    python -m benchmarks.agents_our_side RUN.json

Owns: running one AgentRun and measuring it as the peer's side does. Does not own: the settings, the
pairing.

The run's threads are divided: a Worker of one thread each for as many replicas of the generation
and ranks of the training. The peer has them all in one process.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from benchmarks.agents_environment import NumberSearch
from benchmarks.agents_settings import AgentRun
from benchmarks.run_steps import StepRow, run_steps
from graphs.agent import agent


def measure(told: AgentRun) -> dict[str, float]:
    """Train as told; numbers over the Steps after the warm-up, by the names of
    agents.MeasuredEpisodes.
    """
    graph = agent(
        told.model_dir,
        told.data,
        NumberSearch,
        n=told.num_generations,
        batch=told.prompts_per_step,
        max_turns=told.turns,
        max_tokens=told.max_new_tokens,
        lr=told.lr,
    )
    layout: dict[str, Any] = {
        "workers": "apart",
        "threads": 1,
        "replicas": {"episode": told.threads},
        "ranks": {"train_policy": told.threads},
    }
    rows = run_steps(graph, told, **layout)
    return numbers(rows, told) | {"prompt_tokens": mean_prompt(told)}


def numbers(rows: Sequence[StepRow], told: AgentRun) -> dict[str, float]:
    """What a run's Steps say."""
    seconds = sum(row["time/step"] for row in rows)
    episodes = told.prompts_per_step * told.num_generations * len(rows)

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    return {
        "episodes_per_second": episodes / seconds,
        "step_ms": 1e3 * seconds / len(rows),
        # All but the update, as the peer's side has it.
        "rollout_ms": 1e3 * (seconds / len(rows) - mean("time/train_policy")),
        "train_ms": 1e3 * mean("time/train_policy"),
        "turns": mean("episode/turns"),
        "written_tokens": mean("generate/tokens"),
        "answered_tokens": mean("episode/tokens") - mean("generate/tokens"),
        "reward": mean("reward/mean"),
        "steps": len(rows),
    }


def mean_prompt(told: AgentRun) -> float:
    """Tokens of a prompt with its tools."""
    prompts = pq.read_table(told.data, columns=["prompt"])["prompt"].to_pylist()
    rendered = AutoTokenizer.from_pretrained(told.model_dir).apply_chat_template(
        prompts,
        tools=[get_json_schema(NumberSearch.guess)],
        add_generation_prompt=True,
        return_dict=False,
    )
    return statistics.fmean(len(ids) for ids in rendered)


if __name__ == "__main__":
    print(json.dumps(measure(AgentRun(**json.loads(Path(sys.argv[1]).read_text())))))
