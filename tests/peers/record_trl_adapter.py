"""TRL's adapters after ten Steps of its SFTTrainer and its GRPOTrainer, with peft.

Runs in TRL's environment, from the root of the repository: python -m tests.peers.record_trl_adapter

The trainers are whole: their loops, losses, optimizer, clipping and, in GRPO, the base as the
reference, with the adapter off. Rows come by the data set and by `rollout_func`, so that nothing is
drawn.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.peers import adapter_steps as steps

ROWS = steps.GROUPS * steps.SAMPLES
USUAL: dict[str, Any] = {
    "per_device_train_batch_size": ROWS,
    "max_steps": steps.STEPS,
    "learning_rate": steps.LR,
    "lr_scheduler_type": "constant",
    "adam_beta1": steps.BETAS[0],
    "adam_beta2": steps.BETAS[1],
    "weight_decay": 0.0,
    "max_grad_norm": steps.CLIP_NORM,
    "optim": "adamw_torch",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "shuffle_dataset": False,
}


def make_base() -> Qwen2ForCausalLM:
    """The base, in float32."""
    module = Qwen2ForCausalLM(Qwen2Config(**steps.CONFIG)).float()
    fill(module, steps.draw_weight)
    return module


@torch.no_grad()
def fill(module: torch.nn.Module, draw: Any, only: str = "") -> None:
    """Give the module's weights with this word in their names what they begin with."""
    for name, weight in module.named_parameters():
        if only in name:
            numbers = draw(shared_name(name), tuple(weight.shape))
            weight.copy_(torch.tensor(numbers).view(weight.shape))


def shared_name(name: str) -> str:
    """A weight's name in the files of a base and of an adapter."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """As many words as the base has ids: the trainers want one."""
    words = {f"t{number}": number for number in range(steps.CONFIG["vocab_size"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="t96", eos_token="t97", unk_token="t0"
    )


def make_adapter() -> peft.LoraConfig:
    """Ours in peft's words."""
    return peft.LoraConfig(
        r=steps.RANK,
        lora_alpha=steps.ALPHA,
        target_modules=list(steps.TARGETS),
        task_type="CAUSAL_LM",
    )


def train(trainer: Any) -> dict[str, list[float]]:
    """The adapter's weights after all Steps, by the names of its files."""
    fill(trainer.model, steps.draw_adapter, only="lora_")
    trainer.train()
    assert trainer.state.global_step == steps.STEPS
    weights: dict[str, list[float]] = {}
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            numbers = weight.detach().flatten().tolist()
            weights[shared_name(name)] = [float(f"{number:.9g}") for number in numbers]
    return weights


def train_sft(folder: str) -> dict[str, list[float]]:
    """By SFTTrainer: the answers' log-probs, a mean over all their tokens."""
    examples: list[dict[str, list[int]]] = []
    for rows in steps.list_steps():
        for row in rows:
            mask = [0] * len(row.prompt) + [1] * len(row.answer)
            examples.append({"input_ids": row.prompt + row.answer, "completion_mask": mask})
    settings = SFTConfig(
        output_dir=folder,
        completion_only_loss=True,
        train_sampling_strategy="sequential",
        **USUAL,
    )
    return train(
        SFTTrainer(
            model=make_base(),
            args=settings,
            train_dataset=Dataset.from_list(examples),
            processing_class=make_tokenizer(),
            peft_config=make_adapter(),
        )
    )


def train_grpo(folder: str) -> dict[str, list[float]]:
    """By GRPOTrainer, with a KL to the base."""
    turns = steps.list_steps()
    current: list[steps.StepRow] = []

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        current[:] = next(turns)
        assert len(prompts) == len(current)
        return {
            "prompt_ids": [row.prompt for row in current],
            "completion_ids": [row.answer for row in current],
            "logprobs": None,
        }

    def reward(completions: list[Any], **others: Any) -> list[float]:
        return [row.reward for row in current]

    settings = GRPOConfig(
        output_dir=folder,
        num_generations=steps.SAMPLES,
        loss_type="grpo",
        beta=steps.BETA,
        use_bias_correction_kl=False,  # ours has no such weight: docs/from-trl.md says so
        epsilon=steps.CLIP,
        temperature=1.0,
        max_completion_length=8,
        **USUAL,
    )
    prompts = [{"prompt": "t1"} for _ in range(steps.STEPS * steps.GROUPS)]
    return train(
        GRPOTrainer(
            model=make_base(),
            args=settings,
            reward_funcs=reward,
            rollout_func=roll_out,
            train_dataset=Dataset.from_list(prompts),
            processing_class=make_tokenizer(),
            peft_config=make_adapter(),
        )
    )


def main() -> None:
    """Write them, a line for each weight."""
    with tempfile.TemporaryDirectory() as folder:
        trained = {"sft": train_sft(folder), "grpo": train_grpo(folder)}
    releases = {"trl": trl.__version__, "peft": peft.__version__}
    parts = [f'"releases": {json.dumps(releases)}']
    for trainer, weights in trained.items():
        lines = [f'"{name}": {json.dumps(numbers)}' for name, numbers in weights.items()]
        parts.append(f'"{trainer}": {{\n' + ",\n".join(lines) + "\n}")
    path = Path(__file__).parent / "adapters" / "trl.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{path}: {len(trained)} adapters of {releases}")


if __name__ == "__main__":
    main()
