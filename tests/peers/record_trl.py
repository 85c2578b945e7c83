"""TRL's numbers: advantages and losses of its GRPO and RLOO trainers, its length penalty.

Runs in TRL's environment, from the root of the repository: python -m tests.peers.record_trl

Advantages are computed in the middle of the method that also generates; the statements that do it
are run as they stand there, from the trainer's own source. `_compute_loss` is called on an object
that has what it reads and a model that says given log-probs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, rloo_trainer

from tests.peers.inputs import EVEN, PeerVectors, padded, rows
from tests.peers.tensors import keep_loss, tensor

MAX_TOKENS = 8


def advantage_code(module: Any, trainer: Any) -> Any:
    """The statements from the rewards' groups to the advantages of all rows, compiled."""
    source = textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    texts = [ast.unparse(statement) for statement in function.body]
    first = next(i for i, text in enumerate(texts) if text.startswith("unscorable_mask ="))
    last = next(i for i, t in enumerate(texts) if t.startswith("advantages = torch.nan_to_num"))
    code = compile("\n".join(texts[first : last + 1]), module.__file__, "exec")

    def run(reward: list[float], **settings: Any) -> list[float]:
        trainer = SimpleNamespace(reward_weights=torch.ones(1), reward_func_names=["f"], **settings)
        given = {
            "self": trainer,
            "rewards_per_func": torch.tensor(reward, dtype=torch.float64).unsqueeze(1),
            "num_generations": EVEN[0],
            "device": "cpu",
            "gather": lambda x: x,
        }
        space = dict(vars(module)) | given
        exec(code, space)
        return space["advantages"].tolist()

    return run


def advantages(made: PeerVectors, given: Any) -> None:
    lengths, where = [len(m) for m in given["mask"]], "_generate_and_score_completions"

    def keep(called: str, how: Any, found: list[float]) -> None:
        by_token = [[a] * n for a, n in zip(found, lengths, strict=True)]
        made.case("even", f"{called}.{where}", "group_advantage", how, advantage=by_token)

    run = advantage_code(grpo_trainer, grpo_trainer.GRPOTrainer)
    for scale, ours in (("group", "std"), ("none", "none")):
        settings = {"scale_rewards": scale, "multi_objective_aggregation": "sum_then_normalize"}
        found = run(given["reward"], **settings)
        keep("GRPOTrainer", {"baseline": "mean", "scale": ours}, found)
    run = advantage_code(rloo_trainer, rloo_trainer.RLOOTrainer)
    found = run(given["reward"], beta=0.0, reward_clip_range=None, normalize_advantages=False)
    keep("RLOOTrainer", {"baseline": "leave_one_out", "scale": "none"}, found)


def lengths(made: PeerVectors, given: Any) -> None:
    how = {"max_tokens": 4, "buffer": 2, "factor": 1.0}
    penalty = get_soft_overlong_punishment(how["max_tokens"], how["buffer"])
    found = penalty([[1] * len(m) for m in given["mask"]])
    reward = [r + p for r, p in zip(given["reward"], found, strict=True)]
    made.case("even", "get_soft_overlong_punishment", "overlong_penalty", how, reward=reward)


def losses(made: PeerVectors, batch: str, given: Any) -> None:
    mask, like = tensor(given["mask"]), given["mask"]
    reference, whole = tensor(given["reference"]), padded(given["advantage"])

    rows_given = {
        "prompt_ids": torch.zeros(len(like), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(like), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor([row[0] for row in whole], dtype=torch.float64),
        "old_per_token_logps": tensor(given["old"]),
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }

    def keep(called: str, name: str, how: Any, **settings: Any) -> None:
        def loss_of(said: torch.Tensor) -> torch.Tensor:
            trainer = minimal(said, settings)
            return grpo_trainer.GRPOTrainer._compute_loss(trainer, None, dict(rows_given))

        keep_loss(made, batch, given, f"GRPOTrainer._compute_loss {called}", name, how, loss_of)

    clip = {"clip": [0.2, 0.28]}
    averages = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean"}
    for kind, aggregate in averages.items():
        keep(kind, "clipped_policy_loss", clip | {"aggregate": aggregate}, loss_type=kind)
    how = clip | {"aggregate": "constant", "constant": len(like) * MAX_TOKENS}
    keep("dr_grpo", "clipped_policy_loss", how, loss_type="dr_grpo")
    how = clip | {"aggregate": "token_mean", "dual_clip": 3.0}
    keep("bnpo, delta", "clipped_policy_loss", how, loss_type="bnpo", delta=3.0)
    how = clip | {"aggregate": "sequence_mean", "level": "sequence"}
    keep("grpo, sequence", "clipped_policy_loss", how, level="sequence")
    how = {"aggregate": "token_mean", "cap": 5.0}
    keep("cispo", "clipped_weight_loss", how, loss_type="cispo", high=5.0)
    how = {"aggregate": "sequence_mean", "tau_pos": 1.0, "tau_neg": 1.05}
    keep("sapo", "soft_clipped_policy_loss", how, loss_type="sapo")
    if batch == "near":
        how = clip | {"aggregate": "sequence_mean", "beta": 0.1, "kl": "k3"}
        keep("grpo, beta", "clipped_policy_loss", how, beta=0.1)


def minimal(said: torch.Tensor, settings: dict[str, Any]) -> Any:
    """What `_compute_loss` reads of a trainer, without a model, in one process."""
    same = {"gather": lambda x: x, "gather_for_metrics": lambda x: x}
    forward = said, torch.zeros_like(said), None
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **how: forward,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, **same),
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=settings.get("delta"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings.get("loss_type", "grpo"),
        epsilon_low=0.2,
        epsilon_high=settings.get("high", 0.28),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


if __name__ == "__main__":
    recorded = PeerVectors("trl", trl.__version__)
    even = recorded.batch("even", rows(7, EVEN, holes=False))
    advantages(recorded, even)
    lengths(recorded, even)
    losses(recorded, "near", recorded.batch("near", rows(8, EVEN)))
    losses(recorded, "far", recorded.batch("far", rows(9, EVEN, far=True)))
    recorded.write()
