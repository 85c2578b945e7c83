"""How well the longest answers of a Step are known before anything is generated.

    python -m benchmarks.length_ranks [--quick] [--json FILE]

Owns: the answers that are compared, the ranker's run, recall and the share of a Step. Does not own:
the task and its model (length_task.py), what recall is (engine/run/worker/weight_metrics.py).

A model writes answers to prompts of mixed difficulty. Of each prompt, eight answers are those of a
Step, and the fifth of the Step's prompts whose mean length is greatest is to be found. By what is
known of a prompt:

    mean         the mean length of 64 other answers: nearly all that can be known
    statistics   the mean log length of eight earlier answers
    ranker       a small Model's score, which `grpo_ranked` trained on other prompts
    chance       nothing

The ranker's share of a Step is that of the seconds of its nodes, which take turns with all others.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers import AutoModelForTokenClassification, AutoTokenizer

from benchmarks import length_task
from benchmarks.generate import Alone
from benchmarks.report import SavedResults, SideResult
from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model, linear
from dataflow.schema import Prompt
from engine.api import run
from engine.plan.options import RunOptions
from engine.run.worker.weight_metrics import find_recall, find_tau
from graphs.grpo_ranked import grpo_ranked
from operators.kernels.torch.generate import TorchGenerate

EARLIER, STEP, KNOWN = 8, 8, 64
"""Answers to a prompt: of earlier visits, of the Step, and by which its mean is known."""
BATCH = 64
"""Prompts of a Step."""
DRAWS = 25
"""How often prompts are dealt to Steps, and answers to what is known and what is to be found."""
STATISTICS_GOAL, RANKER_GOAL, SHARE_GOAL = 0.9, 0.9, 0.02
RANKING = ("tasks", "rank", "weight_of", "answer_length", "length", "ranks", "train_ranker")
"""The nodes that a ranker adds."""
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured. taught: updates of the model's teaching; steps: of the ranker's run;
    prompts: that are not in it, all of which are one Step after another.
    """

    taught: int = 600
    steps: int = 100
    prompts: int = 512
    every: int = 2


QUICK = Scale(taught=30, steps=5, prompts=64)


def write_answers(base: str, prompts: Sequence[str]) -> np.ndarray:
    """int64 [prompts, answers]: how many tokens each answer to each prompt has."""
    count = EARLIER + STEP + KNOWN
    kernel = TorchGenerate()
    params = {"n": count, "max_tokens": length_task.LONGEST}
    models = {"policy": Model("policy", base)}
    node = KernelNode(name="rollout", operator="generate", models=models, params=params)
    kernel.open(node, Layout(slots=256, threads=torch.get_num_threads()), Alone())
    keys = Keys.of(range(len(prompts)))
    rows = {"prompt": Batch.make(keys, {"prompt": list(prompts)}, Prompt)}
    lengths = np.zeros((len(prompts), count), np.int64)
    for batch in kernel.run(Chunk(id=0, step=1, keys=keys, inputs=rows)):
        lengths[batch.keys.position, batch.keys.sample] = batch.lengths("completion_mask")
    kernel.close()
    return lengths


def train_ranker(folder: Path, scale: Scale, seed: int) -> tuple[Path, list[Mapping[str, float]]]:
    """Run `grpo_ranked` on prompts that come once; the ranker's directory, and the Steps' metrics.

    The policy's rate is so small that lengths stay as they are.
    """
    graph = grpo_ranked(
        str(folder / "model"),
        str(folder / "train.parquet"),
        length_task.sorts_digits,
        ranker_base=str(folder / "ranker"),
        n=STEP,
        batch=BATCH,
        max_tokens=length_task.LONGEST,
        lr=1e-8,
        ranker_lr=linear(4e-3, 2e-4, scale.steps),
        every=scale.every,
    )
    rows: list[Mapping[str, float]] = []
    options = RunOptions(
        steps=scale.steps,
        seed=seed,
        name=f"ranked-{seed}",
        runs=folder / "runs",
        workers="one",
        threads=torch.get_num_threads(),
        progress=False,
        samples_every=10**9,
    )
    result = run(graph, options, on_step=[lambda row: rows.append(dict(row))])
    return Path(result.trained["ranker"]), rows


@torch.inference_mode()
def score_prompts(ranker: Path, prompts: Sequence[str]) -> np.ndarray:
    """float64 [prompts]: the scalar head at the end token behind each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(ranker)
    module = AutoModelForTokenClassification.from_pretrained(ranker, num_labels=1).eval()
    scores: list[float] = []
    for prompt in prompts:
        ids = torch.tensor([[*tokenizer.encode(prompt), tokenizer.eos_token_id]])
        scores.append(float(module(input_ids=ids).logits[0, -1, 0]))
    return np.array(scores)


def compare_orders(lengths: np.ndarray, scores: np.ndarray) -> dict[str, tuple[float, float]]:
    """(recall, tau) by what is known, the mean over Steps of BATCH prompts each, dealt DRAWS times
    from these prompts and answers.
    """
    rng = np.random.default_rng(0)
    measured: dict[str, list[tuple[float, float]]] = {}
    for _ in range(DRAWS):
        dealt = rng.permuted(lengths, axis=1)
        order = rng.permutation(len(lengths))
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            for name, numbers in _compare_step(dealt[rows], scores[rows]):
                measured.setdefault(name, []).append(numbers)
    means: dict[str, tuple[float, float]] = {}
    for name, pairs in measured.items():
        recall, tau = np.mean(pairs, axis=0).tolist()
        means[name] = recall, tau
    return means


def _compare_step(
    lengths: np.ndarray, scores: np.ndarray
) -> Iterator[tuple[str, tuple[float, float]]]:
    """What is known, with (recall, tau) of the prompts of one Step."""
    earlier, step, known = np.split(lengths, (EARLIER, EARLIER + STEP), axis=1)
    knowledge = {
        "mean": known.mean(axis=1),
        "statistics": np.log1p(earlier).mean(axis=1),
        "ranker": scores,
        "chance": np.zeros(len(lengths)),
    }
    mean_length = step.mean(axis=1)
    for name, weight in knowledge.items():
        recall = find_recall(weight, mean_length) or 0.0
        tau = find_tau(weight, mean_length) or 0.0
        yield name, (recall, tau)


def find_share(rows: Sequence[Mapping[str, float]]) -> float:
    """The share of the seconds of the Steps behind the warm-up that ranking takes. Of all together,
    as the ranker is not trained in each.
    """
    ranking, steps = 0.0, 0.0
    for row in rows[WARM_UP:]:
        ranking += sum(row.get(f"time/{node}", 0.0) for node in RANKING)
        steps += row["time/step"]
    return ranking / steps


def list_results(
    numbers: Mapping[str, tuple[float, float]], share: float, last: float
) -> list[SideResult]:
    """What is reported. last: the recall that the run itself measured in its last Steps."""
    results: list[SideResult] = []
    for name, (recall, tau) in numbers.items():
        results.append(SideResult(name=f"{name}/recall", value=recall, unit="of the fifth"))
        results.append(SideResult(name=f"{name}/tau", value=tau, unit="tau-b"))
    mean, earlier, ranker = (numbers[name][0] for name in ("mean", "statistics", "ranker"))
    results += [
        SideResult(name="statistics to mean", value=earlier / mean, unit="x", goal=STATISTICS_GOAL),
        SideResult(name="ranker to statistics", value=ranker / earlier, unit="x", goal=RANKER_GOAL),
        SideResult(
            name="ranking of a Step", value=share, unit="share", goal=SHARE_GOAL, least=False
        ),
        SideResult(name="weight/recall of the run, last Steps", value=last, unit="of the fifth"),
    ]
    return results


def main(*, quick: bool = False, json: Path | None = None, every: int = 2) -> None:
    """Measure.

    Args:
        quick: a model that was hardly taught and five Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        every: the ranker is trained in each `every`-th Step.
    """
    scale = QUICK if quick else Scale(every=every)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        length_task.make_model(folder / "model", scale.taught)
        length_task.make_ranker(folder / "ranker")
        unseen = length_task.draw_prompts(scale.prompts, seed=0)
        train = length_task.draw_prompts(BATCH * scale.steps, seed=1, without=frozenset(unseen))
        length_task.save_prompts(folder / "train.parquet", train)
        lengths = write_answers(str(folder / "model"), unseen)
        ranker, rows = train_ranker(folder, scale, seed=0)
        numbers = compare_orders(lengths, score_prompts(ranker, unseen))
    last = statistics.fmean(row["weight/recall"] for row in rows[-10:])
    results = SavedResults(json)
    results.add(*list_results(numbers, find_share(rows), last))
    results.show("the longest fifth of a Step's prompts, by what is known of them")


if __name__ == "__main__":
    tyro.cli(main)
