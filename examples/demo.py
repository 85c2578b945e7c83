"""The demo: a graph that learns, in a few minutes on two cores.

    python examples/demo.py            (or: make demo)

Makes a small character model, and one Program of two phases for it: a warm start with graphs/sft.py
on a careless teacher, who spells a word backward in one of three answers and just repeats it in the
others, stopped early; then graphs/grpo.py, with reasoning-gym's own scorer as the reward. The words
shown at the end were never trained on.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import demo_task as task
import pyarrow.parquet as pq
import tyro
from rich.console import Console
from rich.table import Table

from dataflow.adapters import Adapter, lora
from dataflow.draw import draw
from dataflow.graph import Graph, Phase, Threshold
from dataflow.model import Model, Number, linear
from dataflow.program import Program
from engine.api import Result, peek, plan, run
from engine.options import RunOptions
from engine.plan.explain import explain
from engine.run.loop.signals import code
from graphs.grpo import grpo
from graphs.sft import sft
from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import evaluate

GOOD = 0.85
"""Exact match on held-out words, greedy and sampled, that the demo must reach."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of the demo; docs/demo.md says how they were found."""

    words: int = 40_000
    lazy: float = 0.65
    """How often the teacher repeats the word instead of spelling it backward."""
    noise: float = 0.1
    """How often the teacher mistypes a letter."""
    layers: int = 2
    hidden: int = 128
    warm_steps: int = 1400
    warm_lr: float = 1e-3
    stop_at: float = 0.1
    """The warm start ends when this share of sampled answers to validation words is right."""
    steps: int = 300
    batch: int = 32
    n: int = 8
    lr: float = 5e-4
    adapter_lr: float = 1.5e-3
    minibatches: int = 2
    adapter: int | None = None
    """The rank of the adapter that GRPO trains, at `adapter_lr`; None: it trains all weights."""


def with_evaluation(
    graph: Graph, policy: Model, test: str, reward_fn: RewardFn, *, every: int
) -> Graph:
    """The graph with two evaluations on held-out words: greedy, and sampled at temperature 1."""
    held_out = prompts(test, shuffle=False, name="held_out")
    greedy = generate(policy, held_out, max_tokens=10, temperature=0.0, name="greedy_rollout")
    sampled = generate(policy, held_out, max_tokens=10, name="sampled_rollout")
    return graph.extend(
        evaluate(policy, reward(reward_fn, greedy, name="greedy_reward"), every=every),
        evaluate(
            policy, reward(reward_fn, sampled, name="sampled_reward"), every=every, name="sampled"
        ),
    )


def warm_start(base: str, demonstrations: str, validation: str, *, lr: Number = 1e-3) -> Graph:
    """Supervised fine-tuning with an evaluation, so that it can be stopped early."""
    graph = sft(base, demonstrations, batch=128, lr=lr)
    policy = Model("policy", base, trainable=True)
    return with_evaluation(graph, policy, validation, task.exact_match, every=20)


def spell_backward(
    base: str,
    data: str,
    test: str,
    *,
    reward_fn: RewardFn = task.exact_match,
    n: int = 8,
    batch: int = 32,
    lr: Number = 5e-4,
    minibatches: int = 2,
    adapter: Adapter = None,
) -> Graph:
    """GRPO on words, evaluated on held-out words."""
    graph = grpo(
        base,
        data,
        reward_fn,
        n=n,
        batch=batch,
        max_tokens=10,
        lr=lr,
        minibatches=minibatches,
        adapter=adapter,
    )
    policy = Model("policy", base, trainable=True, adapter=adapter)
    return with_evaluation(graph, policy, test, task.exact_match, every=20)


def prepare(folder: Path, recipe: Recipe, seed: int) -> None:
    """Data and model: train, validation and test words are disjoint; the model is untrained."""
    folder.mkdir(parents=True, exist_ok=True)
    found = task.words(recipe.words, seed)
    train = [row for word, row in found.items() if not task.held_out(word)]
    rest = [row for word, row in found.items() if task.held_out(word)]
    random.Random(seed).shuffle(rest)
    task.write_prompts(folder / "train.parquet", train)
    task.write_prompts(folder / "validation.parquet", rest[:128])
    task.write_prompts(folder / "test.parquet", rest[128:640])
    copies = 1 + recipe.warm_steps * 128 // len(train)
    demonstrations = folder / "demonstrations.parquet"
    task.write_demonstrations(
        demonstrations, train, lazy=recipe.lazy, noise=recipe.noise, copies=copies, seed=seed
    )
    task.make_model(folder / "model", layers=recipe.layers, hidden=recipe.hidden, seed=seed)


def warm_phase(folder: Path, recipe: Recipe) -> Phase:
    """The warm start, stopped early."""
    demonstrations, validation = (
        str(folder / f"{name}.parquet") for name in ("demonstrations", "validation")
    )
    graph = warm_start(str(folder / "model"), demonstrations, validation, lr=recipe.warm_lr)
    good_enough = Threshold("eval/sampled/exact_match", at_least=recipe.stop_at)
    return Phase(graph, recipe.warm_steps, until=good_enough)


def program(folder: Path, recipe: Recipe, reward_fn: RewardFn) -> Program:
    """The whole job: the warm start, and reinforcement of what it left."""
    adapter, rate = None, recipe.lr
    if recipe.adapter is not None:
        adapter, rate = lora(rank=recipe.adapter), recipe.adapter_lr
    graph = spell_backward(
        str(folder / "model"),
        str(folder / "train.parquet"),
        str(folder / "test.parquet"),
        reward_fn=reward_fn,
        n=recipe.n,
        batch=recipe.batch,
        lr=linear(rate, rate / 10, recipe.steps),
        minibatches=recipe.minibatches,
        adapter=adapter,
    )
    return Program(warm_phase(folder, recipe), (graph, recipe.steps))


def of_phase(result: Result, number: int) -> list[dict[str, float]]:
    """A phase's rows of the metrics."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["phase"] == number]


def warm_policy(result: Result) -> Path:
    """The policy as the warm start left it: in the checkpoint of its last Step."""
    last = int(of_phase(result, 1)[-1]["step"])
    return result.folder / "checkpoints" / f"step_{last}" / "train_policy"


def measured(result: Result, name: str) -> dict[str, float]:
    """Exact match on held-out words, as reinforcement began and ended."""
    rows = of_phase(result, 2)
    kind = "exact_match" if name == "greedy" else f"{name}/exact_match"
    return {"before": rows[0][f"eval/initial/{kind}"], "after": rows[-1][f"eval/{kind}"]}


def trained_policy(result: Result, recipe: Recipe) -> Model:
    """The policy as reinforcement left it: whole, or an adapter beside the warm start's weights."""
    weights = str(result.trained["policy"])
    if recipe.adapter is None:
        return Model("policy", weights)
    adapter = lora(rank=recipe.adapter, start=weights)
    return Model("policy", str(warm_policy(result)), adapter=adapter)


def show_samples(console: Console, folder: Path, before: Model, after: Model, count: int) -> None:
    """The same held-out words, answered greedily by both policies."""
    table = Table(
        "held-out word",
        "before RL",
        "after RL",
        "right answer",
        title="greedy answers to words never trained on",
    )
    test = str(folder / "test.parquet")
    answers = []
    for policy in (before, after):
        rollout = generate(policy, prompts(test, shuffle=False), max_tokens=10, temperature=0.0)
        shown = Graph("samples", evaluate(policy, reward(task.exact_match, rollout), every=1))
        answers.append(peek(shown, "generate", count).column("completion").to_pylist())
    for question, answer, was, now in zip(*_questions(folder, count), *answers, strict=True):
        table.add_row(question, _marked(was, answer), _marked(now, answer), answer)
    console.print(table)


def _questions(folder: Path, count: int) -> tuple[list[str], list[str]]:
    rows = pq.read_table(folder / "test.parquet").slice(0, count).to_pydict()
    return [a[::-1] for a in rows["answer"]], rows["answer"]


def _marked(found: str, right: str) -> str:
    return f"[green]{found}[/green]" if found == right else f"[red]{found}[/red]"


def show_change(
    console: Console, result: Result, recipe: Recipe, words: int, *, control: bool
) -> None:
    """What RL changed, in numbers, and what it did not."""
    found = {name: measured(result, name) for name in ("greedy", "sampled")}
    table = Table(
        "decoding", "before RL", "after RL", title=f"exact match on {words} held-out words"
    )
    for name, numbers in found.items():
        table.add_row(name, f"{numbers['before']:.2f}", f"{numbers['after']:.2f}")
    console.print(table)
    if control:
        console.print(
            "This was the control: rewards went to the wrong rows, so there was nothing to be"
            " learned."
        )
    elif min(numbers["after"] for numbers in found.values()) < GOOD:
        console.print(
            f"RL did not bring both to {GOOD}: with these settings and this seed the demo has"
            " failed."
        )
    else:
        console.print(
            f"What RL did: the teacher repeated the word in {recipe.lazy:.0%} of its answers, and"
            " so did the policy. Rewards made it choose to spell backward and do so reliably. What"
            " RL did not do: teach it the order of the letters, which it had from the teacher's"
            " other answers."
        )


def main(
    seed: int = 0,
    name: str = "demo",
    runs: Path = Path("runs"),
    permute_rewards: bool = False,
    threads: int | None = None,
    steps: int | None = None,
    warm_steps: int | None = None,
    kernel: str | None = None,
    adapter: int | None = None,
) -> None:
    """A graph that learns to spell words backward.

    Args:
        seed: of the data, the model and every draw.
        name: of the run folder.
        runs: folder that holds the run folders.
        permute_rewards: a control: rewards go to the wrong rows, so nothing should be learned.
        threads: per kernel; all cores by default.
        steps: Steps of GRPO, instead of the recipe's.
        warm_steps: at most this many Steps of the warm start, instead of the recipe's.
        kernel: of GRPO's generation; vllm generates with vLLM (make setup VLLM=1).
        adapter: GRPO trains an adapter of this rank beside the warm start's weights, which stay.
    """
    console = Console()
    recipe = Recipe()
    recipe = replace(
        recipe,
        steps=steps or recipe.steps,
        warm_steps=warm_steps or recipe.warm_steps,
        adapter=adapter,
    )
    began = time.perf_counter()
    folder = runs / f"{name}-data"
    options = RunOptions(
        seed=seed,
        name=name,
        runs=runs,
        overwrite=True,
        threads=threads,
        kernel={"rollout": kernel} if kernel else {},
        checkpoint_every=100,
        samples_every=20,
    )
    shutil.rmtree(folder, ignore_errors=True)
    console.rule("1. a character model and words, split so that a tenth is never trained on")
    prepare(folder, recipe, seed)

    console.rule("2. the Program and its plan")
    fn = task.permuted_exact_match if permute_rewards else task.exact_match
    whole = program(folder, recipe, fn)
    console.print(draw(whole), markup=False, highlight=False, soft_wrap=True)
    console.print(explain(plan(whole, options)), markup=False, highlight=False, soft_wrap=True)

    words = f"{recipe.steps} Steps of {recipe.batch} words x {recipe.n} answers"
    console.rule(f"3. a warm start on a careless teacher, stopped early; then GRPO, {words}")
    result = run(whole, options)
    if result.signal:
        console.print(f"stopped by a signal; go on with: dataflow resume {result.folder}")
        raise SystemExit(code(result.signal))

    console.rule("4. before and after")
    warm = Model("policy", str(warm_policy(result)))
    show_samples(console, folder, warm, trained_policy(result, recipe), 12)
    show_change(console, result, recipe, 512, control=permute_rewards)
    seconds = time.perf_counter() - began
    console.print(f"the run folder is {result.folder}; everything took {seconds:.0f} s")


if __name__ == "__main__":
    tyro.cli(main)
