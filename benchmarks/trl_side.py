"""TRL's half of the comparison; runs inside .venv-trl, which trl_env.sh makes.

    .venv-trl/bin/python -m benchmarks.trl_side RUN.json \\
        [--micro-batches N] [--cache NAME] [--compile]

Owns: TRL's GRPOTrainer with its settings for CPU (the options try others), and the clock
around its phases. Prints one JSON line. Does not own: the settings (settings.py), what is
compared (against_trl.py). Imports nothing from the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class StepClock:
    """Notes on each Step: seconds of its phases, and the lengths of its completions."""

    ends: list[float] = field(default_factory=list)
    generation: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def trainer_class(clock: StepClock) -> type:
    """GRPOTrainer that times generation, and generation plus scoring; otherwise unchanged."""
    from trl import GRPOTrainer

    class ClockedTrainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            clock.generation.append(time.perf_counter() - start)
            clock.lengths.append([len(ids) for ids in result[0]])
            clock.prompts.append([len(ids) for ids in prompt_ids])
            return result

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_and_score_completions(inputs)
            clock.rollout.append(time.perf_counter() - start)
            return result

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            rewards = super()._calculate_rewards(*args, **kwargs)
            clock.rewards.append(rewards.mean().item())
            return rewards

    return ClockedTrainer


def step_ends(clock: StepClock) -> Any:
    """A callback that notes when Steps end."""
    from transformers import TrainerCallback

    class StepEnds(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.ends.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.ends.append(time.perf_counter())

    return StepEnds()


def arguments(run: dict[str, Any], options: argparse.Namespace, folder: str) -> Any:
    """TRL's settings: one update per batch, fp32, no reference, nothing logged or saved."""
    from trl import GRPOConfig

    rows = run["prompts_per_step"] * run["num_generations"]
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows // options.micro_batches,
        gradient_accumulation_steps=options.micro_batches,
        num_generations=run["num_generations"],
        num_iterations=1,
        max_completion_length=run["max_new_tokens"],
        max_steps=run["warmup_steps"] + run["steps"],
        learning_rate=run["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        seed=run["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        cache_implementation=options.cache,
        torch_compile=options.compile,
        optim=options.optim,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(run: dict[str, Any], options: argparse.Namespace) -> StepClock:
    """One whole training run; returns the clock's notes."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.rewards import REWARDS

    torch.set_num_threads(run["threads"])
    clock = StepClock()

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(clock)(
            model=AutoModelForCausalLM.from_pretrained(run["model_dir"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(run["model_dir"]),
            args=arguments(run, options, folder),
            reward_funcs=REWARDS[run["reward"]],
            train_dataset=Dataset.from_parquet(run["data"], cache_dir=folder),
            callbacks=[step_ends(clock)],
        )
        trainer.train()
    return clock


def measured(run: dict[str, Any], clock: StepClock) -> dict[str, float]:
    """Means over the Steps after the warm-up; slot waste is 1 - tokens / (rows * longest row)."""
    first = run["warmup_steps"]
    rows = run["prompts_per_step"] * run["num_generations"]
    seconds = clock.ends[-1] - clock.ends[first]
    steps = [
        end - start
        for start, end in zip(clock.ends[first:-1], clock.ends[first + 1 :], strict=True)
    ]
    lengths = clock.lengths[first:]
    tokens = sum(sum(step) for step in lengths)
    slots = sum(len(step) * max(step) for step in lengths)
    rollout = statistics.mean(clock.rollout[first:])
    prompts = [length for step in clock.prompts[first:] for length in step]
    return {
        "samples_per_second": rows * len(steps) / seconds,
        "tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * statistics.median(steps),
        "generation_ms": 1e3 * statistics.mean(clock.generation[first:]),
        "rollout_ms": 1e3 * rollout,
        "train_ms": 1e3 * (seconds / len(steps) - rollout),
        "prompt_tokens": statistics.mean(prompts),
        "completion_tokens": tokens / (rows * len(lengths)),
        "slot_waste": 1 - tokens / slots,
        "reward": statistics.mean(clock.rewards[first:]),
        "reward_last": clock.rewards[-1],
        "steps": len(steps),
    }


def main() -> None:
    """Read the run, train, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="split the batch for the backward pass"
    )
    parser.add_argument(
        "--cache", default=None, help="generation's cache_implementation, such as static"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--optim", default="adamw_torch_fused")
    options = parser.parse_args()
    run = json.loads(options.run.read_text())
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    print(json.dumps({"phase": "measured", **measured(run, train(run, options))}))


if __name__ == "__main__":
    main()
