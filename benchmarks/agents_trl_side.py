"""TRL's half of the benchmark of agents; runs inside .venv-trl, which trl_env.sh makes.

    .venv-trl/bin/python -m benchmarks.agents_trl_side RUN.json

Owns: GRPOTrainer with an `environment_factory`, what its episodes were. Prints one JSON line. Does
not own: its other settings, the clock (trl_side.py). Imports nothing from the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agents_environment import NumberSearch
from benchmarks.trl_side import StepClock, arguments, step_ends, trainer_class

OPTIONS = argparse.Namespace(micro_batches=1, cache=None, compile=False, optim="adamw_torch_fused")
"""As benchmarks.trl_side has them unless told otherwise."""


@dataclass(slots=True)
class EpisodeNotes:
    """Per Step: seconds of its calls to generate, and the mean episode's numbers."""

    decoding: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)


def agent_trainer_class(clock: StepClock, notes: EpisodeNotes) -> type:
    """GRPOTrainer that notes what its episodes were; otherwise unchanged."""

    class AgentTrainer(trainer_class(clock)):
        def _generate(self, prompts: Any) -> Any:
            calls_before = len(clock.generation)
            episodes = super()._generate(prompts)
            notes.decoding.append(sum(clock.generation[calls_before:]))
            prompt_ids, _, tool_mask, messages = episodes[:4]
            turns: list[int] = []
            for row in messages:
                turns.append(sum(message["role"] == "assistant" for message in row))
            notes.turns.append(statistics.fmean(turns))
            notes.written.append(statistics.fmean(sum(mask) for mask in tool_mask))
            notes.answered.append(statistics.fmean(len(mask) - sum(mask) for mask in tool_mask))
            notes.prompts.append(statistics.fmean(len(ids) for ids in prompt_ids))
            return episodes

    return AgentTrainer


def train(run: dict[str, Any]) -> tuple[StepClock, EpisodeNotes]:
    """One whole training run."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(run["threads"])
    clock, notes = StepClock(), EpisodeNotes()

    with tempfile.TemporaryDirectory() as folder:
        how = arguments(run, OPTIONS, folder)
        how.max_tool_calling_iterations = run["turns"] - 1
        trainer = agent_trainer_class(clock, notes)(
            model=AutoModelForCausalLM.from_pretrained(run["model_dir"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(run["model_dir"]),
            args=how,
            environment_factory=NumberSearch,
            train_dataset=Dataset.from_parquet(run["data"], cache_dir=folder),
            callbacks=[step_ends(clock)],
        )
        trainer.train()
    return clock, notes


def measured(run: dict[str, Any], clock: StepClock, notes: EpisodeNotes) -> dict[str, float]:
    """Means over the Steps after the warm-up, by the names of agents.MeasuredEpisodes."""
    first = run["warmup_steps"]
    rows = run["prompts_per_step"] * run["num_generations"]
    seconds = clock.ends[-1] - clock.ends[first]
    step_count = len(clock.ends) - 1 - first
    rollout = statistics.fmean(clock.rollout[first:])
    return {
        "episodes_per_second": rows * step_count / seconds,
        "step_ms": 1e3 * seconds / step_count,
        "rollout_ms": 1e3 * rollout,
        "decode_ms": 1e3 * statistics.fmean(notes.decoding[first:]),
        "train_ms": 1e3 * (seconds / step_count - rollout),
        "turns": statistics.fmean(notes.turns[first:]),
        "prompt_tokens": statistics.fmean(notes.prompts[first:]),
        "written_tokens": statistics.fmean(notes.written[first:]),
        "answered_tokens": statistics.fmean(notes.answered[first:]),
        "reward": statistics.fmean(clock.rewards[first:]),
        "steps": step_count,
    }


def main() -> None:
    """Read the run, train, print one JSON line."""
    run = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    print(json.dumps(measured(run, *train(run))))


if __name__ == "__main__":
    main()
