"""What two cores allow for a Step of one of against_trl's settings: kernels alone, two at a time.

    python -m benchmarks.two_cores [SETTING] [--quick]

Owns: the kernels' milliseconds on one thread, in two processes at the same time, and the bounds
that follow. Does not own: the settings (settings.py), runs of the engine (against_trl.py).

Nothing of the engine is in it: no coordinator, no rows or weights between processes, no sum of
gradients, no core that waits for the other one. Two processes of one thread each run kernels side
by side, on rows as a Step has them:

    halves      each core generates half of the prompts, then trains half of the rows
    apart       one core generates all rows, the other one trains all rows

At lag 0 rows are trained after they were generated, with the weights of the Step before. `halves`
keeps both cores busy from the first token to the update. Were all rows decoded on one core, the
other one could train only groups that have ended, and most of them end late (docs/from-trl.md has
the numbers): that is slower. At lag 1 nothing waits: the slower side of `apart`, or `halves`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow.parquet as pq
import torch
import tyro

from benchmarks.generate import Alone
from benchmarks.settings import SETTINGS, Run, prepare
from benchmarks.train_step import OneProcess
from dataflow.batch import Batch, Keys
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout
from dataflow.loss import Loss, LossTerm
from dataflow.model import Model
from dataflow.schema import Advantage, Prompt
from operators import losses
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.train import TorchTrain

WARM_UP = 2
ROUNDS = 12
SLOTS, TOKENS = 256, 16384
"""As a plan has them for these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePhase:
    """One phase of a Step on one core. work: generate or train; part: which of the cores' parts, of
    so many prompts each.
    """

    work: str
    prompts: int
    step: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds of a Step's two phases, each on one core beside the other core's work."""

    half_generation: float
    """Half of the prompts, as the mean of both cores."""
    half_training: float
    all_generation: float
    """All prompts, beside the training of all rows."""
    all_training: float

    @property
    def synchronous(self) -> float:
        """The shortest Step at lag 0: no core waits."""
        return self.half_generation + self.half_training

    @property
    def lagged(self) -> float:
        """The shortest Step at lag 1."""
        return min(self.synchronous, max(self.all_generation, self.all_training))


class StepKernels:
    """The kernels of generation and training on one thread, without an engine around them."""

    def __init__(self, run: Run) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(run.seed)
        self._run = run
        self._texts = pq.read_table(run.data, columns=["prompt"])["prompt"].to_pylist()
        self._generate, self._train = TorchGenerate(), TorchTrain()
        shape = {"n": run.num_generations, "max_tokens": run.max_new_tokens}
        models = {"policy": Model("policy", run.model_dir)}
        layout = Layout(slots=SLOTS, tokens=TOKENS, threads=1)
        node = KernelNode(name="rollout", operator="generate", models=models, params=shape)
        self._generate.open(node, layout, Alone())
        clipped = LossTerm(function=losses.CLIPPED_POLICY, label="loss", params=(("clip", 0.2),))
        trained = {"model": Model("policy", run.model_dir, trainable=True)}
        update = {"loss": Loss((clipped,)), "lr": run.lr, "minibatches": 1}
        train_node = KernelNode(name="train", operator="train", models=trained, params=update)
        self._train.open(train_node, layout, OneProcess())

    def generate(self, first: int, count: int) -> Batch:
        """Answer so many prompts of the data from the first one on."""
        numbers = np.arange(first, first + count)
        texts = [self._texts[number % len(self._texts)] for number in numbers.tolist()]
        keys = Keys.of(numbers)
        prompts = Batch.make(keys, {"prompt": texts}, Prompt)
        chunk = Chunk(id=0, step=1, keys=keys, inputs={"prompt": prompts})
        return Batch.concat(list(self._generate.run(chunk))).sort()

    def train(self, rows: Batch, step: int) -> None:
        """One update with these rows, whose advantages are drawn at random."""
        ids = rows.ragged("completion_ids")
        gain = np.random.default_rng(step).standard_normal(len(ids.values)).astype(np.float32)
        advantage = Batch.make(rows.keys, {"advantage": ids.like(gain)}, Advantage)
        inputs = {"rows": rows, "loss.advantage": advantage}
        self._train.step(Assignment(sequence=step, step=step, keys=rows.keys, inputs=inputs))


def take_turn(kernels: StepKernels, phase: CorePhase) -> float:
    """Do one phase of a Step, once the other core can begin too; milliseconds."""
    first = 2 * phase.step * phase.prompts + phase.part * phase.prompts
    rows = kernels.generate(first, phase.prompts) if phase.work == "train" else None
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    if rows is None:
        kernels.generate(first, phase.prompts)
    else:
        kernels.train(rows, phase.step)
    return 1e3 * (time.perf_counter() - begun)


def serve_phases(run: Run) -> None:
    """Be one of the two processes: read a phase a line, print its milliseconds."""
    kernels = StepKernels(run)
    print("open", flush=True)
    for line in sys.stdin:
        print(json.dumps(take_turn(kernels, CorePhase(**json.loads(line)))), flush=True)


class CoreProcess:
    """One of the processes, seen from the one that measures."""

    def __init__(self, setting: str) -> None:
        command = [sys.executable, "-m", "benchmarks.two_cores", setting, "--serve"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def expect(self) -> str:
        """Read its next line. Exits if the process has ended."""
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise SystemExit("two_cores: a process of the kernels ended, see above")
        return line

    def tell(self, line: str) -> None:
        """Write it a line."""
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(line + "\n")
            stdin.flush()

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


def time_side_by_side(cores: Sequence[CoreProcess], phases: Sequence[CorePhase]) -> list[float]:
    """Begin a phase on each core at the same time; milliseconds of each."""
    for core, phase in zip(cores, phases, strict=True):
        core.tell(json.dumps(asdict(phase)))
    for core, _ in zip(cores, phases, strict=True):
        core.expect()
    for core, _ in zip(cores, phases, strict=True):
        core.tell("")
    return [float(core.expect()) for core, _ in zip(cores, phases, strict=True)]


def measure_step(setting: str, rounds: int = ROUNDS) -> StepTimes:
    """The times of a Step of this setting; medians over rounds, in which the pairs take turns."""
    prompts = SETTINGS[setting].prompts_per_step
    taken: dict[str, list[float]] = {"generate": [], "train": [], "all": [], "trained": []}
    with open_cores(setting) as cores:
        for step in range(rounds + WARM_UP):
            halves: dict[str, float] = {}
            for work in ("generate", "train"):
                phases = [
                    CorePhase(work=work, prompts=prompts // 2, step=step, part=part)
                    for part in range(2)
                ]
                halves[work] = statistics.fmean(time_side_by_side(cores, phases))
            generation = CorePhase(work="generate", prompts=prompts, step=step, part=0)
            training = CorePhase(work="train", prompts=prompts, step=step, part=0)
            whole = time_side_by_side(cores, (generation, training))
            if step >= WARM_UP:
                taken["generate"].append(halves["generate"])
                taken["train"].append(halves["train"])
                taken["all"].append(whole[0])
                taken["trained"].append(whole[1])
    return StepTimes(
        half_generation=statistics.median(taken["generate"]),
        half_training=statistics.median(taken["train"]),
        all_generation=statistics.median(taken["all"]),
        all_training=statistics.median(taken["trained"]),
    )


@contextmanager
def open_cores(setting: str) -> Iterator[Sequence[CoreProcess]]:
    """Two processes with the kernels open."""
    prepare(SETTINGS[setting])
    cores = [CoreProcess(setting) for _ in range(2)]
    try:
        for core in cores:
            core.expect()
        yield cores
    finally:
        for core in cores:
            core.close()


def main(
    setting: tyro.conf.Positional[str] = "long_tail", *, quick: bool = False, serve: bool = False
) -> None:
    """Print what two cores allow.

    Args:
        setting: one of against_trl's.
        quick: few rounds; not to be quoted.
        serve: be one of the two processes.
    """
    if serve:
        serve_phases(prepare(SETTINGS[setting]))
        return
    times = measure_step(setting, 3 if quick else ROUNDS)
    print(times)
    print(f"a Step: {times.synchronous:.0f} ms at lag 0, {times.lagged:.0f} ms at lag 1")


if __name__ == "__main__":
    tyro.cli(main)
