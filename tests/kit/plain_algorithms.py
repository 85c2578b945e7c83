"""The shipped algorithms as textbook loops over a Hugging Face model, without any part of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Batch
from tests.kit import plain_loop as loop
from tests.kit.algorithms import OF_EPISODES
from tests.kit.models import EOS
from tests.kit.plain_formulas import (
    PlainRun,
    Tokens,
    UpdateLoss,
    against_group,
    centred,
    clipped,
    imitated,
    mean_of,
    punished,
    reinforced,
    sequence_sum,
    standardised,
    surrogate,
    whitened,
)
from tests.kit.plain_loop import TrainedStep, spread, token_mean
from tests.kit.rows import padded_logits, plain
from tests.kit.run_graphs import vowels


def sft(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    return imitated(world, step.rows)


def best_of_n(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    assert [len(rows) for rows in loop.groups(step.rows)] == [1] * world.numbers["batch"]
    return imitated(world, step.rows)


def grpo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    return clipped(world, step.rows, against_group(world, step.rows))


def grpo_by_length(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    """The order in which rows are generated changes none."""
    return grpo(world, step)


def dr_grpo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, of = step.rows, world.numbers
    gain = spread(centred(world.rewards(rows), loop.groups(rows)), rows)
    divisor = of["batch"] * of["n"] * of["max_tokens"] / of["minibatches"]
    return clipped(world, rows, gain, mean=lambda parts: torch.cat(list(parts)).sum() / divisor)


def dapo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, of = step.rows, world.numbers
    numbers, groups = world.rewards(rows), loop.groups(rows)
    assert all(np.ptp(numbers[group]) > 0 for group in groups)
    over = rows.ragged("completion_ids").lengths - (of["max_tokens"] - of["buffer"])
    shaped = numbers - np.clip(over / of["buffer"], 0.0, 1.0)
    return clipped(world, rows, spread(standardised(shaped, groups), rows), (0.2, 0.28))


def rloo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows = step.rows
    total = np.array([float(t.sum()) for t in punished(world, rows, world.numbers["beta"])])
    gain = np.zeros(len(total))
    for group in loop.groups(rows):
        for row in group:
            gain[row] = total[row] - np.mean([total[r] for r in group if r != row])
    return reinforced(world, rows, spread(gain, rows))


def reinforce_pp(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rewards = punished(world, step.rows, world.numbers["beta"])
    to_go = [tokens.flip(0).cumsum(0).flip(0) for tokens in rewards]
    return clipped(world, step.rows, whitened(to_go))


def reinforce_pp_baseline(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, beta = step.rows, world.numbers["beta"]
    gain = whitened(spread(centred(world.rewards(rows), loop.groups(rows)), rows))
    old, anchor = world.before(rows), world.anchor(rows)
    away = lambda i, now: beta * 0.5 * (now - anchor[i]) ** 2
    return mean_of(world, rows, lambda i, now: surrogate(now, old[i], gain[i]) + away(i, now))


def remax(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows = step.rows
    greedy = [_greedy(world, rows, i) for i in range(len(rows))]
    baseline = np.array(vowels(completions=greedy))
    return reinforced(world, rows, spread(world.rewards(rows) - baseline, rows))


def _greedy(world: PlainRun, rows: Batch, row: int) -> str:
    """The likeliest token, again and again."""
    tokenizer = loop.AutoTokenizer.from_pretrained(world.base)
    ids = rows.ragged("prompt_ids")[row].tolist()
    start = len(ids)
    module = world.learners["policy"].module
    while len(ids) - start < world.numbers["max_tokens"]:
        with torch.no_grad():
            ids.append(int(module(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def gspo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, old = step.rows, world.before(step.rows)
    gain = standardised(world.rewards(rows), loop.groups(rows))
    part = lambda i, now: surrogate((now - old[i]).mean(), 0.0, gain[i], 3e-4, 4e-4)
    return mean_of(world, rows, part, sequence_sum)


def cispo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, old = step.rows, world.before(step.rows)
    gain = against_group(world, rows)
    weight = lambda i, now: (now.detach() - old[i]).exp().clamp(max=5.0)
    return mean_of(world, rows, lambda i, now: -weight(i, now) * gain[i] * now)


def dual_generator(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    """The last half of a group was sampled at the bold temperature, and is trained at it."""
    rows, n = step.rows, world.numbers["n"]
    heat = [world.numbers["bold"] if sample >= n else 1.0 for sample in rows.keys.sample.tolist()]

    def now() -> Tokens:
        by_heat = {t: world.now(rows, temperature=t) for t in set(heat)}
        return [by_heat[t][i] for i, t in enumerate(heat)]

    with torch.no_grad():
        old = now()
    loop.require_close(loop.column(step, "rows", "sampler_logprobs"), old, "sampler_logprobs")
    gain = against_group(world, rows)
    return lambda chosen: token_mean([surrogate(now()[i], old[i], gain[i]) for i in chosen])


def distill(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    """Reverse KL over the teacher's likeliest tokens, and all others as one."""
    rows, k = step.rows, world.numbers["top_k"]
    teacher = plain(str(Path(world.base).parent / "teacher"))
    with torch.no_grad():
        theirs = [x.log_softmax(-1).topk(k) for x in padded_logits(teacher, rows)]

    def loss(chosen: Sequence[int]) -> Tensor:
        parts, logits = [], padded_logits(world.learners["policy"].module, rows)
        for i in chosen:
            mine = logits[i].log_softmax(-1).gather(-1, theirs[i].indices)
            kept = (mine.exp() * (mine - theirs[i].values)).sum(-1)
            rest, other = (1 - x.exp().sum(-1) for x in (mine, theirs[i].values))
            parts.append(kept + rest * (rest.log() - other.log()))
        return token_mean(parts)

    return loss


def sft_and_rl(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    """Each of the two losses is a mean over its own rows' tokens."""
    rows, demos = step.rows, step.inputs["supervised_loss.rows"]
    improved = clipped(world, rows, against_group(world, rows))
    taught = imitated(world, demos)

    def loss(chosen: Sequence[int]) -> Tensor:
        every = taught(range(len(demos)))
        return improved(range(len(rows))) + world.numbers["weight"] * every

    return loss


def max_rl(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, numbers = step.rows, world.rewards(step.rows)
    groups = loop.groups(rows)
    gain = centred(numbers, groups)
    for group in groups:
        gain[group] /= numbers[group].mean() or np.inf
    return reinforced(world, rows, spread(gain, rows))


def opo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, numbers, gain = step.rows, world.rewards(step.rows), np.zeros(len(step.rows))
    lengths = rows.ragged("completion_ids").lengths
    for group in loop.groups(rows):
        weighted = (lengths[group] * numbers[group]).sum() / lengths[group].sum()
        gain[group] = numbers[group] - weighted
    return reinforced(world, rows, spread(gain, rows), token_mean)


def process_reward(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    """A character is a token, so a step ends at its separator or the answer's last character."""
    tokenizer, to_go = loop.AutoTokenizer.from_pretrained(world.base), []
    for row in range(len(step.rows)):
        ids = loop.ids_of(step.rows, row)
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        reward, at = torch.zeros(len(ids)), 0
        for piece in text.split(world.numbers["split"]):
            end = min(at + len(piece), len(ids) - 1)
            if piece:
                reward[end] += vowels(completions=[piece])[0]
            at += len(piece) + 1
        to_go.append(reward.flip(0).cumsum(0).flip(0))
    return clipped(world, step.rows, whitened(to_go))


def decoupled_ppo(
    world: PlainRun, step: TrainedStep, sampled: Tokens | None = None, temperature: float = 1.0
) -> UpdateLoss:
    """sampled: log-probs of what was sampled; None: as recorded."""
    rows, near = step.rows, world.before(step.rows, temperature=temperature)
    loop.require_close(
        loop.column(step, "decoupled_policy_loss.proximal", "logprobs"), near, "near"
    )
    sampled = sampled or loop.column(step, "rows", "sampler_logprobs")
    gain = against_group(world, rows)
    weights = [(n - s).exp() for n, s in zip(near, sampled, strict=True)]
    weights = [torch.where(w > 5.0, 0.0, w) for w in weights]
    part = lambda i, now: weights[i] * surrogate(now, near[i], gain[i])
    return mean_of(world, rows, part, temperature=temperature)


def ppo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    if step.node == "train_critic":
        return world.notes.pop("critic")
    rows, critic = step.rows, world.learners["critic"].module
    with torch.no_grad():
        before = loop.values(critic, rows)
    rewards = punished(world, rows, world.numbers["beta"])
    pairs = zip(rewards, before, strict=True)
    gain = [loop.generalised(r, v, 1.0, 0.95) for r, v in pairs]
    goals = [g + v for g, v in zip(gain, before, strict=True)]

    def squared(chosen: Sequence[int]) -> Tensor:
        errors, now = [], loop.values(critic, rows)
        for i in chosen:
            held = before[i] + (now[i] - before[i]).clamp(-0.2, 0.2)
            errors.append(torch.maximum((now[i] - goals[i]) ** 2, (held - goals[i]) ** 2) / 2)
        return token_mean(errors)

    world.notes["critic"] = squared
    return clipped(world, rows, whitened(gain))


def self_play_two_models(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    rows, model = step.rows, step.node.removeprefix("train_")
    keys = list(zip(rows.keys.position.tolist(), rows.keys.sample.tolist(), strict=True))
    if model == "solver":
        of_task: dict[tuple[int, int], list[float]] = {}
        tasks = [(p, s // world.numbers["n"]) for p, s in keys]
        numbers = world.rewards(rows)
        for task, number in zip(tasks, numbers, strict=True):
            of_task.setdefault(task, []).append(number)
        world.notes["solved"] = solved = {t: np.mean(n) for t, n in of_task.items()}
        gain = np.array([n - solved[t] for n, t in zip(numbers, tasks, strict=True)])
    else:
        solved = world.notes.pop("solved")
        gain = standardised(-np.array([solved[key] for key in keys]), loop.groups(rows))
    return clipped(world, rows, spread(gain, rows), model=model)


def preferred(world: PlainRun, rows: Batch, pairs: Sequence[tuple[int, int]]) -> UpdateLoss:
    """DPO over these (chosen, rejected) rows."""
    anchor, beta = world.anchor(rows), world.numbers["beta"]

    def loss(chosen: Sequence[int]) -> Tensor:
        margin = [(n - a).sum() for n, a in zip(world.now(rows), anchor, strict=True)]
        gaps = [margin[win] - margin[lose] for win, lose in pairs if win in chosen]
        return -torch.nn.functional.logsigmoid(beta * torch.stack(gaps)).mean()

    return loss


def dpo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    samples = step.rows.keys.sample
    pairs = [(a, b) if samples[a] == 0 else (b, a) for a, b in loop.groups(step.rows)]
    return preferred(world, step.rows, pairs)


def online_dpo(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    numbers = world.rewards(step.rows)
    assert all(numbers[a] != numbers[b] for a, b in loop.groups(step.rows))
    pairs = [(a, b) if numbers[a] > numbers[b] else (b, a) for a, b in loop.groups(step.rows)]
    return preferred(world, step.rows, pairs)


def turn_rewards(world: PlainRun, rows: Batch) -> Tokens:
    """On the last token of each turn, a run of trained tokens, its share of vowels; of a turn that
    was cut short, as the row was full, nothing.
    """
    tokenizer, by_row = loop.AutoTokenizer.from_pretrained(world.base), []
    for row in range(len(rows)):
        ids = loop.ids_of(rows, row)
        edges = np.flatnonzero(np.diff(rows.ragged("completion_mask")[row], prepend=0, append=0))
        reward = torch.zeros(len(ids))
        for begin, end in edges.reshape(-1, 2).tolist():
            text = tokenizer.decode(ids[begin:end].tolist(), skip_special_tokens=True)
            is_cut = end == OF_EPISODES["max_tokens"] and ids[end - 1] != EOS
            reward[end - 1] = 0.0 if is_cut else vowels(completions=[text])[0]
        by_row.append(reward)
    return by_row


def clipped_turns(world: PlainRun, rows: Batch, gain: Tokens) -> UpdateLoss:
    """PPO's loss of the tokens that the model wrote, around its recorded log-probs."""
    mask = [m == 1 for m in loop.flags(rows, "completion_mask")]
    old = world.before(rows)
    part = lambda i, now: surrogate(now, old[i], gain[i])[mask[i]]
    return mean_of(world, rows, part)


def agent(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    numbers = np.array([float(reward.sum()) for reward in turn_rewards(world, step.rows)])
    gain = standardised(numbers, loop.groups(step.rows))
    return clipped_turns(world, step.rows, spread(gain, step.rows))


def agent_turns(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    to_go = [r.flip(0).cumsum(0).flip(0) for r in turn_rewards(world, step.rows)]
    every = torch.cat(to_go)[torch.cat(loop.flags(step.rows, "completion_mask")) == 1]
    scale = (every.var(unbiased=True) + 1e-8).sqrt()
    return clipped_turns(world, step.rows, [(r - every.mean()) / scale for r in to_go])
