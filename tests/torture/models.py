"""Bad models: bases that are missing, damaged or not what their Model says; unreadable prompts.

A copy of a small good model is spoilt for each case of spoilt_models.py and runs on the command
line. What has to hold: one line that names node and file:line with its fix, an exit code, nothing
generated, no traceback, no process left.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

from engine.cli import main as dataflow
from tests.kit.models import save_tiny
from tests.kit.nothing_left import require_gone
from tests.kit.processes import COMMAND_LINE, MARK, ROOT, call_python, new_mark
from tests.torture.outcome import CaseResult, timed
from tests.torture.rewards import all_marked, left_of
from tests.torture.spoilt_models import ModelCase, cases

GRAPHS = '''
"""Graphs for bad models."""
from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import gae, group_advantage
from operators.data import demonstrations, prompts
from operators.forward import scores, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.reward import reward
from operators.train import train

HERE = Path(__file__).parent
GOOD = str(HERE / "good")


def seen(completions, **columns):
    (HERE / "generated").touch()
    return [float(len(text)) for text in completions]


def rows_of(base, data="text", **asked):
    policy = Model("policy", base, trainable=True)
    source = prompts(str(HERE / f"{data}.jsonl"), batch=2)
    return policy, generate(policy, source, n=2, name="rollout", **({"max_tokens": 4} | asked))


def trained(policy, rollout, score=None):
    loss = clipped_policy_loss(group_advantage(rollout, score or reward(seen, rollout)))
    return Graph("bad", train(policy, rollout, loss=loss, lr=1e-3))


def plain(base: str) -> Graph:
    return trained(*rows_of(base))


def chat(base: str) -> Graph:
    return trained(*rows_of(base, data="messages"))


def long_prompts(base: str) -> Graph:
    return trained(*rows_of(base, data="long"))


def no_prompt_left(base: str) -> Graph:
    return trained(*rows_of(base, data="long", overlong_prompt="drop"))


def of_a_type(base: str) -> Graph:
    return trained(*rows_of(Model("policy", base, trainable=True, dtype="float15").base))


def judged(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    judge = Model("judge", base, head="scalar")
    return trained(policy, rollout, scores(judge, rollout, name="judge"))


def valued(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    critic = values(Model("critic", base, head="scalar"), rollout, name="critic")
    loss = policy_gradient_loss(gae(rollout, reward(seen, rollout), critic))
    return Graph("bad", train(policy, rollout, loss=loss, lr=1e-3))


def shown(base: str) -> Graph:
    policy = Model("policy", base, trainable=True)
    rows = demonstrations(str(HERE / "demos.jsonl"), batch=2)
    return Graph("bad", train(policy, rows, loss=supervised_loss(), lr=1e-3))
'''


Done = subprocess.CompletedProcess[str]


def arguments(case: ModelCase, folder: Path, *more: str) -> list[str]:
    """Of `dataflow run`."""
    name = named(case)
    target = f"{folder}/bad.py:{case.graph} --base {folder}/bases/{name}"
    options = f"--runs {folder}/runs --name {name} --steps 1 --threads 1 --no-progress"
    return ["run", *target.split(), *options.split(), *more]


def named(case: ModelCase) -> str:
    return re.sub("[^a-z]+", "_", case.name.lower())


def in_process(case: ModelCase, folder: Path) -> Done:
    """The command line as a call in this process."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = dataflow(arguments(case, folder))
    return Done([], code, out.getvalue(), err.getvalue())


def in_a_process_of_its_own(case: ModelCase, folder: Path, *more: str) -> Done:
    """The command line as a process, which has to leave none behind."""
    words, mark = arguments(case, folder, *more), new_mark()
    done = call_python("-c", COMMAND_LINE, *words, cwd=ROOT, env={MARK: mark})
    if done.returncode == -signal.SIGKILL:
        done.stderr += "\nhangs"
    try:
        require_gone(mark)
    except AssertionError as error:
        done.stderr += f"\nprocess left: {error}"
    return done


def fault_of(case: ModelCase, folder: Path, call: Callable[[], Done]) -> tuple[str, str]:
    """(what did not hold, the line that the user sees)."""
    done = call()
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    generated = folder / "generated"
    wrong = {
        "exit code 0": done.returncode == 0,
        "a traceback": "Traceback" in done.stderr + done.stdout,
        "no file and line in the last line": not re.search(r"\bbad\.py:\d+ ", last),
        f"{case.says!r} is not in it": case.says not in last,
        "'Fix: ' is not in it": "Fix: " not in last,
        # of several Workers that read it any may be the first
        f"{case.node!r} is not in it": case.node not in last and "train_policy" not in last,
        "something was generated": generated.exists(),
        "a Step was made": any((folder / "runs" / named(case)).glob("samples/*")),
    }
    generated.unlink(missing_ok=True)
    left = [line for line in lines if line.startswith(("process left", "hangs"))]
    return "; ".join([*(fault for fault, holds in wrong.items() if holds), *left]), last


def prepare(folder: Path) -> None:
    """A good model, a spoilt copy for each case, the graphs, and their data."""
    save_tiny(folder / "good")
    for case in cases():
        copy = folder / "bases" / named(case)
        shutil.copytree(folder / "good", copy)
        case.spoil(copy)
    (folder / "bad.py").write_text(GRAPHS)
    texts = {
        "text": {"prompt": "2+2"},
        "long": {"prompt": "a prompt of some length, " * 2},
        "messages": {"prompt": [{"role": "user", "content": "2+2"}]},
        "demos": {"prompt": "2+2", "completion": "it is four, I am told"},
    }
    for name, row in texts.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)


def run(folder: Path, seed: int, *, short: bool) -> list[CaseResult]:
    """Short: most cases in this process, one in several Workers. Else each in processes too."""
    prepare(folder)
    late = [case for case in cases() if case.at_open]
    drawn = random.Random(seed).sample(late, 6) if short else late
    asked = [case for case in cases() if not case.at_open or case.name in {c.name for c in drawn}]
    call = in_process if short else in_a_process_of_its_own
    calls = [(case, "", partial(call, case, folder)) for case in asked]
    for case in late[:1] if short else late:
        again = partial(in_a_process_of_its_own, case, folder, "--workers", "apart", "--overwrite")
        calls.append((case, ", apart", again))
    results = [
        timed("models", case.name + kind, partial(fault_of, case, folder, call))
        for case, kind, call in calls
    ]
    if Path("hostile").exists() or (folder / "hostile").exists():
        fault = "the code was run"
        results.append(CaseResult(part="models", case="weights that run code", fault=fault))
    return results


def torture(short: bool, seed: int) -> list[CaseResult]:
    """Every case, and what all of them left."""
    call_python("-c", "")  # what forks all others has started now, and without the mark
    with tempfile.TemporaryDirectory(prefix="torture-models-") as name, all_marked() as mark:
        results = run(Path(name), seed, short=short)
        return [*results, CaseResult(part="models", case="processes left", fault=left_of(mark))]
