"""Bad models: bases that are missing, damaged, or not what their Model says, and prompts that they
cannot read.

Owns: running the cases (spoilt_models.py). One child process makes a small good model, spoils a
copy of it for each case, and runs each on the command line; what is held to is one line that names
node and file:line with its fix, an exit code, nothing generated, no traceback, and no process left.
`python -m tests.torture.models FOLDER ...` is that child.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tests.torture.outcome import Outcome
from tests.torture.spoilt_models import Case, cases

ROOT = Path(__file__).parents[2]
LIMIT = 900.0
"""Seconds for all cases together."""

GRAPHS = '''
"""Graphs for bad models."""
from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import gae, group_advantage
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores, values
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


def trained(policy, rollout, score=None, **asked):
    advantage = group_advantage(rollout, score or reward(seen, rollout))
    return Graph("bad", train(policy, rollout, loss=clipped_policy_loss(advantage, **asked), lr=1e-3))


def plain(base: str) -> Graph:
    return trained(*rows_of(base))


def stopped(base: str) -> Graph:
    return trained(*rows_of(base, stop="a"))


def chat(base: str) -> Graph:
    return trained(*rows_of(base, data="messages"))


def long_answers(base: str) -> Graph:
    return trained(*rows_of(base, max_tokens=64))


def long_prompts(base: str) -> Graph:
    return trained(*rows_of(base, data="long"))


def no_prompt_left(base: str) -> Graph:
    return trained(*rows_of(base, data="long", overlong_prompt="drop"))


def of_a_type(base: str) -> Graph:
    return trained(*rows_of(Model("policy", base, trainable=True, dtype="float15").base))


def judged(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    return trained(policy, rollout, scores(Model("judge", base, head="scalar"), rollout, name="judge"))


def valued(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    critic = values(Model("critic", base, head="scalar"), rollout, name="critic")
    loss = policy_gradient_loss(gae(rollout, reward(seen, rollout), critic))
    return Graph("bad", train(policy, rollout, loss=loss, lr=1e-3))


def taught(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    return trained(policy, rollout, reference=logprobs(Model("teacher", base), rollout), beta=0.1)


def shown(base: str) -> Graph:
    policy = Model("policy", base, trainable=True)
    rows = demonstrations(str(HERE / "demos.jsonl"), batch=2)
    return Graph("bad", train(policy, rows, loss=supervised_loss(), lr=1e-3))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the command line did."""

    code: int
    out: str
    err: str


def arguments(case: Case, folder: Path, *more: str) -> list[str]:
    """Of `dataflow run`."""
    target = [
        str(folder / "bad.py") + f":{case.graph}",
        "--base",
        str(folder / "bases" / named(case)),
    ]
    return [
        "run",
        *target,
        "--runs",
        str(folder / "runs"),
        "--name",
        named(case),
        "--steps",
        "1",
        "--threads",
        "1",
        *more,
    ]


def named(case: Case) -> str:
    return re.sub("[^a-z]+", "_", case.name.lower())


def here(case: Case, folder: Path) -> Said:
    """The command line as a call in this process."""
    from engine.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments(case, folder, "--no-progress"))
    return Said(code=code, out=out.getvalue(), err=err.getvalue())


def apart(case: Case, folder: Path, *more: str) -> Said:
    """The command line as a process, which has to leave none behind."""
    command = [sys.executable, "-c", "import sys; from engine.cli import main; sys.exit(main())"]
    made = subprocess.Popen(
        [*command, *arguments(case, folder, "--no-progress", *more)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = made.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(made.pid, 9)
        out, err = made.communicate()
        err += "\nhangs"
    left = _of_session(made.pid)
    return Said(
        code=made.returncode, out=out, err=err + "".join(f"\nprocess left: {each}" for each in left)
    )


def _of_session(session: int) -> list[str]:
    """Processes of a session that are not gone, a second later at most."""
    end = time.monotonic() + 1.0
    while (
        len(found := list(_members(session))) > (session == os.getsid(0)) and time.monotonic() < end
    ):
        time.sleep(0.05)
    return found


def _members(session: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(name)
    return found


def fault_of(case: Case, folder: Path, said: Said) -> tuple[str, str]:
    """(what did not hold, the line that the user sees)."""
    lines = [line for line in said.err.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    wrong = []
    if said.code == 0:
        wrong.append("exit code 0")
    if "Traceback" in said.err + said.out:
        wrong.append("a traceback")
    if not re.search(r"\bbad\.py:\d+ ", last):
        wrong.append("no file and line in the last line")
    wrong += [f"{part!r} is not in it" for part in (case.says, "Fix: ") if part not in last]
    if (
        case.node not in last and "train_policy" not in last
    ):  # of several Workers that read it any may be the first
        wrong.append(f"{case.node!r} is not in it")
    if (folder / "generated").exists():
        wrong.append("something was generated")
        (folder / "generated").unlink()
    if list((folder / "runs" / named(case)).glob("samples/*")):
        wrong.append("a Step was made")
    wrong += [line for line in lines if line.startswith(("process left", "hangs"))]
    return "; ".join(wrong), last


def prepare(folder: Path, seed: int) -> None:
    """A good model, a spoilt copy for each case, the graphs, and their data."""
    import shutil

    from tests.kit.models import save_tiny

    save_tiny(folder / "good")
    for case in cases():
        copy = folder / "bases" / named(case)
        shutil.copytree(folder / "good", copy)
        case.spoil(copy, random.Random(f"{seed}/{case.name}"))
    (folder / "bad.py").write_text(GRAPHS)
    texts = {
        "text": [{"prompt": "2+2"}] * 8,
        "long": [{"prompt": "a prompt of some length, " * 2}] * 8,
        "messages": [{"prompt": [{"role": "user", "content": "2+2"}]}] * 8,
        "demos": [{"prompt": "2+2", "completion": "it is four, I am told"}] * 8,
    }
    for name, rows in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, seed: int, *, short: bool) -> list[Outcome]:
    """Short: as calls in this process, some of those of open kernels, and one in several Workers.
    Else all, each as a process of its own, and those of open kernels once more in several Workers.
    """
    prepare(folder, seed)
    every, late = cases(), [case for case in cases() if case.at_open]
    drawn = (
        random.Random(seed).sample([case.name for case in late], 6)
        if short
        else [case.name for case in late]
    )
    outcomes = []
    for case in every:
        if case.at_open and case.name not in drawn:
            continue
        call = here if short else apart
        outcomes.append(outcome(case, folder, lambda case=case, call=call: call(case, folder)))
    for case in late[:1] if short else late:
        more = ("--workers", "apart", "--overwrite")
        outcomes.append(
            outcome(
                case,
                folder,
                lambda case=case, more=more: apart(case, folder, *more),
                kind=", apart",
            )
        )
    if Path("hostile").exists() or (folder / "hostile").exists():
        outcomes.append(
            Outcome(part="models", case="weights that run code", fault="the code was run")
        )
    left = [name for name in _of_session(os.getsid(0)) if not name.startswith(f"{os.getpid()} ")]
    return [*outcomes, Outcome(part="models", case="processes left", fault=", ".join(left))]


def outcome(case: Case, folder: Path, call: Callable[[], Said], kind: str = "") -> Outcome:
    """One case, timed."""
    begun = time.monotonic()
    fault, line = fault_of(case, folder, call())
    return Outcome(
        part="models",
        case=case.name + kind,
        fault=fault,
        said=line,
        seconds=time.monotonic() - begun,
    )


def torture(short: bool, seed: int) -> list[Outcome]:
    """Every case, in a child: what it imports and what it leaves is its own."""
    with tempfile.TemporaryDirectory(prefix="torture-models-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "tests.torture.models",
            name,
            str(seed),
            "short" if short else "long",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        made = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            start_new_session=True,  # what is left is found by it
        )
        found = folder / "outcomes.json"
        if not found.exists():
            said = (made.stderr.strip().splitlines() or [""])[-1]
            return [
                Outcome(
                    part="models",
                    case="all",
                    fault=f"the child ended with {made.returncode}",
                    said=said,
                )
            ]
        return [Outcome(**each) for each in json.loads(found.read_text())]


if __name__ == "__main__":
    import dataclasses

    place, drawn, length = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    told = [dataclasses.asdict(one) for one in run(place, drawn, short=length == "short")]
    (place / "outcomes.json").write_text(json.dumps(told))
