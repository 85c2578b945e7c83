"""What scripts/newcomer checks: what the distributions hold, and each command that a newcomer
types.

    newcomer_steps.py distributions SDIST WHEEL
    newcomer_steps.py bytecode FROM TO              folders of packages
    newcomer_steps.py walk [TURN]                   in an empty folder of a fresh environment

TURN: of .ci/run, which takes a third of the steps. To add a step, add a line to the theme's list.
Runs with nothing but Python's own library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"dataflow", "operators", "graphs", "engine"}
SOURCES = (
    "examples/tiny.py", "docs/design.md", "docs/drawings/grpo.svg", "tests/unit/test_docs.py",
    "requirements/cpu.lock", "scripts/setup", "Makefile", "README.md", "CHANGELOG.md", "LICENSE",
)  # fmt: skip
"""Some of what the source distribution has."""
LIMIT = 600.0
"""Seconds after which a step has failed."""


@dataclass(frozen=True, slots=True)
class NewcomerStep:
    """A command as it is typed; what its output says; its exit code; a file that it makes.

    folder: where it is typed, from the first one. lacks: what its output does not say.
    """

    command: str
    says: tuple[str, ...] = ()
    code: int = 0
    makes: str = ""
    folder: str = "."
    lacks: tuple[str, ...] = ()


MINE = "mine"


def _written(path: str, text: str) -> NewcomerStep:
    """A file that a user writes in the project's folder."""
    return NewcomerStep(f"cat > {path} <<'END'\n{text}END", makes=path, folder=MINE)


def _in_mine(command: str, *says: str, lacks: tuple[str, ...] = (), code: int = 0) -> NewcomerStep:
    """A command in the project's folder."""
    return NewcomerStep(command, says, code=code, folder=MINE, lacks=lacks)


SMALL = "--base tiny/model --data tiny/train.jsonl --batch 8 --max-tokens 8"
DIGITS = f"{SMALL} --reward-fn mine_reward.py:digits"
CHECK_DAPO = (
    "dataflow check my_dapo.py:dapo --base tiny/model --data tiny/train.jsonl"
    " --reward-fn mine_reward.py:digits --max-tokens 8 --buffer 2"
)
FITS = "awk '{ print } length > 60 { wide = 1 } END { exit wide }'"
"""Prints what it reads; its exit code is 1 where a line has more than 60 columns."""

COMMAND_LINE = (
    NewcomerStep("dataflow --version", ("0.",)),
    NewcomerStep("dataflow --help", ("usage: dataflow COMMAND", "init", "resume", "runs")),
    NewcomerStep("python -c 'import dataflow; print(dataflow.__version__)'", ("0.",)),
    NewcomerStep("dataflow graphs", ("grpo ", "dapo ")),
    NewcomerStep("dataflow chekc", ("no command 'chekc'", "Fix: dataflow check"), code=2),
)
PROJECT = (  # made by init, with the three commands of its README
    NewcomerStep("dataflow init mine", ("cd mine", "pytest"), makes="mine/test_mine.py"),
    _in_mine("dataflow check mine.py:graph", "every rule holds"),
    _in_mine("pytest -q", "14 passed"),
    NewcomerStep(
        "dataflow run mine.py:graph --steps 6",
        ("step 6/6", "all steps are done: step 6", "sampled entropy", "no signal", "eval/digits"),
        makes="runs/mine/metrics.jsonl",
        folder=MINE,
    ),
    NewcomerStep("dataflow init mine", ("not empty", "Fix: another name"), code=2),
    NewcomerStep("dataflow init torch", ("Python has a module 'torch' already",), code=2),
)
LOOKING = (
    _in_mine("dataflow run mine.py:graph --help", "--max-tokens", "--steps", "temperature=1.0"),
    _in_mine("dataflow explain mine.py:graph", "where streaming ends"),
    _in_mine(
        "dataflow simulate mine.py:graph --threads 1 --steps 3"
        " --seconds score=0.001 brevity=0.001 greedy_score=0.001",
        "tokens/s",
        "critical path of Step 2",
        "us an event",
    ),
    _in_mine("dataflow peek mine.py:graph score --rows 2", "reward"),
    NewcomerStep("dataflow draw mine.py:graph --out graph.svg", makes="graph.svg", folder=MINE),
    _in_mine(f"COLUMNS=60 dataflow check mine.py:graph | {FITS}", "every rule holds"),
)
FOLDERS = (  # run folders and their graph.json are targets
    _in_mine("dataflow check runs/mine", "mine: 10 nodes, every rule holds"),
    _in_mine("dataflow check runs/mine/graph.json", "mine: 10 nodes, every rule holds"),
    _in_mine("dataflow draw runs/mine", "generate(policy, n=8"),
    _in_mine("dataflow draw runs/mine/graph.json", "generate(policy, n=8"),
    _in_mine("dataflow explain runs/mine", "64 completions a Step"),
    _in_mine("dataflow explain runs/mine/graph.json", "64 completions a Step"),
    _in_mine(
        "dataflow simulate runs/mine --lengths runs/mine --steps 3 --what-if score=1,2",
        "2 plans, all with the same rows", "tokens/s",
    ),
    _in_mine("dataflow diff mine.py:graph runs/mine/graph.json", "no difference"),
    _in_mine(
        "dataflow run runs/mine --steps 3 --name warm --set rollout.temperature=1.2 --log-every 2",
        "imports mine_reward from", "step 2/3", "step 3/3", "all steps are done: step 3",
        lacks=("step 1/3",),
    ),
    _in_mine("dataflow run runs/mine/graph.json --help", "--steps", "temperature=1.0"),
    _in_mine(
        "dataflow diff runs/mine runs/warm",
        "temperature: 1 -> 1.2", "Options", "--log-every  0", "Metrics", "reward/mean",
    ),
    _in_mine("dataflow diff runs/mine/graph.json runs/warm/graph.json", "temperature: 1 -> 1.2"),
    _in_mine(
        "dataflow runs", "state", "reward", "size", "finished  6/6", "finished  3/3", "MiB"
    ),
    NewcomerStep(
        "dataflow report runs/mine --out mine.html", ("report of mine in mine.html",),
        makes="mine.html", folder=MINE,
    ),
    _in_mine("dataflow watch nobody", "dataflow watch: ", "Fix: ", code=2),
    _in_mine(f"COLUMNS=60 dataflow runs | {FITS}", "finished  steps 6/6  reward", "size"),
    _in_mine(
        f"COLUMNS=60 dataflow top mine --once | {FITS}",
        "finished  Step 6/6", "nodes in Steps 1 to 6", "train_policy", "workers",
    ),
    _in_mine("dataflow top nobody", "no run 'nobody' in 'runs'", code=2),
    _in_mine("dataflow explain runs/mine --measured runs/mine", "measured in 6 Steps", "error"),
)  # fmt: skip
RECORDS = (
    _in_mine(
        "dataflow run runs/mine --steps 2 --record all --name kept",
        "all steps are done: step 2",
    ),
    _in_mine(
        "dataflow rerun runs/kept --node train_policy --step 2",
        "trained steps 1 to 2", "train_policy: the same bits: the weights and ",
    ),
    _in_mine("dataflow rerun runs/mine --node score --step 1", "--record all", code=3),
    _in_mine("dataflow diff runs/kept runs/kept --rows", "rows: no difference"),
    _in_mine("rm -r runs/kept"),
)  # fmt: skip
RESUMING = (
    _written(
        "script.py",
        "from engine.api import run\n"
        "from engine.options import RunOptions\n"
        "from mine import graph\n\n"
        'if __name__ == "__main__":\n'
        '    run(graph(), RunOptions(steps=1, name="scripted"))\n',
    ),
    _in_mine("python script.py", "step 1/1", lacks=("will not be able",)),
    _in_mine(
        "dataflow resume runs/scripted --steps 3 --set train_policy.lr=1e-5 prompts.batch=4",
        "runs/scripted: from step 2 on:", "node train_policy: lr: 0.005 -> 1e-05",
        "node prompts: batch: 8 -> 4", "all steps are done: step 3",
    ),
    _in_mine(
        "dataflow resume runs/scripted",
        "nothing to do, as all 3 steps are done", "dataflow resume runs/scripted --steps 6",
    ),
    _in_mine(
        "dataflow resume runs/mine --steps 9 --set train_policy.start=2",
        "node train_policy: start cannot change from 0 to 2 in the middle of a run", code=3,
    ),
    _in_mine(
        "cp -r runs/mine runs/other && sed -i 's/\"n\": 8/\"n\": 4/' runs/other/graph.json"
        " && dataflow resume runs/other --steps 9",
        "node rollout: n: 8 -> 4", "--accept-changes", code=3,
    ),
    _in_mine("rm -r runs/other"),
    _in_mine("dataflow resume runs/mine --seed 1", "--seed does not change in a resume", code=2),
    _in_mine(
        "dataflow resume --help", "--set NODE.PARAM=VALUE", "--accept-changes",
        lacks=("--seed", "--name", "--overwrite", "--runs"),
    ),
    _written(
        "bare.py",
        "from engine.api import run\n"
        "from engine.options import RunOptions\n"
        "from graphs.grpo import grpo\n\n\n"
        "def lengths(completions, **kwargs):\n"
        "    return [float(len(text)) for text in completions]\n\n\n"
        'made = grpo("tiny/model", "tiny/train.jsonl", lengths, n=2, batch=4, max_tokens=4)\n'
        'run(made, RunOptions(steps=1, name="bare", inproc=True))\n',
    ),
    _in_mine(
        "python bare.py",
        "`dataflow resume` will not be able to go on with this run", "'lengths' (bare.py:6)",
        "step 1/1",
    ),
)  # fmt: skip
BUILT_IN = (  # a graph that comes with it, from the command line alone
    _written(
        "short.py",
        "def short(completions, **kwargs):\n"
        "    return [-len(text) / 8 for text in completions]\n",
    ),
    _in_mine(
        "dataflow run graphs.grpo:grpo --help", "--eval-data", "--drop-uniform",
        "--help with the required flags lists the nodes",
        "--base BASE --data DATA --reward-fn MODULE:FUNCTION --help",
    ),
    _in_mine(
        f"dataflow run graphs.grpo:grpo {DIGITS} --help",
        "top_p=1.0", "on_error=stop", "by --max-tokens",
    ),
    _in_mine(
        f"COLUMNS=60 dataflow run graphs.grpo:grpo {SMALL} --name whole --steps 2 --beta 0.04"
        " --reward-fn mine_reward.py:digits,short.py:short --eval-data tiny/test.jsonl"
        " --eval-every 2 --drop-uniform --lr 'cosine(1e-4, 100)' --set score.weights=0.7,0.3"
        " score.on_error=drop_group rollout.temperature=0.7 rollout.top_p=0.9"
        f" rollout.max_prompt_tokens=32 rollout.overlong_prompt=drop | {FITS}",
        "reward/digits 0.", "reward/short -", "kl 0.", "sampled entropy", "no signal",
        "eval/short", "all steps are done: step 2",
    ),
    _in_mine(
        "dataflow draw runs/whole", "temperature=0.7", "top_p=0.9", "max_prompt_tokens=32",
        "overlong_prompt=drop", "weights=", "on_error=drop_group", "mixed_groups",
        "evaluate(policy, every=2)", "cosine 0.0001..0 in 100",
    ),
    _in_mine(
        f"dataflow check graphs.decoupled_ppo:decoupled_ppo {DIGITS} --set"
        " 'train_policy.decoupled_policy_loss.correction=importance(above=2.0)'",
        "correction=importance", "every rule holds",
    ),
    _in_mine(
        f"dataflow check graphs.grpo:grpo {DIGITS} --set rollout.max_tokens=9",
        "the graph function's own parameter max_tokens", "Fix: --max-tokens 9.", code=2,
    ),
    _in_mine(
        f"dataflow check graphs.grpo:grpo {DIGITS} --set rollout.temperatur=0.7",
        "has no parameter 'temperatur'", "Fix: rollout.temperature=0.7", code=2,
    ),
    _in_mine(
        f"dataflow check graphs.grpo:grpo {DIGITS} --lr 'cosin(1e-6, 100)'",
        "expected a number, or a schedule", code=2,
    ),
    _in_mine("dataflow --completion bash", "complete -o default -F _dataflow dataflow"),
    _in_mine(
        f"dataflow --complete bash 'dataflow run graphs.grpo:grpo {DIGITS} --set rollout.te'",
        "rollout.temperature=",
    ),
)  # fmt: skip
LINE = '{"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]}\n'
DATA = (
    _written("rows.csv", "prompt,answer\n1+1=,2\n2+3=,5\n"),
    _in_mine(
        "dataflow check graphs.grpo:grpo --base tiny/model --data rows.csv --batch 2"
        " --max-tokens 8 --reward-fn short.py:short",
        "prompts(rows.csv, batch=2)", "every rule holds",
    ),
    _written("demos.csv", "prompt,completion\n1+1=,2\n2+3=,5\n4+4=,8\n6+1=,7\n"),
    _in_mine(
        "dataflow run graphs.sft:sft --base tiny/model --data demos.csv --batch 2 --steps 2",
        "step 2/2  loss ", "all steps are done: step 2",
    ),
    _written("numbers.jsonl", '{"prompt": "1+1=", "completion": 2}\n'),
    _in_mine(
        "dataflow check graphs.sft:sft --base tiny/model --data numbers.jsonl --batch 1",
        "expected a column 'completion'", "found completion: int64", code=1,
    ),
    _written("chats.jsonl", 4 * LINE),
    _in_mine(
        "dataflow check graphs.sft:sft --base tiny/model --data chats.jsonl --batch 4",
        "the data has messages", "has no chat template", code=1,
    ),
    _in_mine("cp -r tiny/model chat"),
    _written("chat/chat_template.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"),
    _in_mine(
        "dataflow check graphs.sft:sft --base chat --data chats.jsonl --batch 4",
        "sft: 2 nodes, every rule holds",
    ),
    _in_mine(
        "dataflow check graphs.grpo:grpo --base chat --data chats.jsonl --batch 4 --max-tokens 8"
        " --reward-fn short.py:short",
        "grpo: 6 nodes, every rule holds",
    ),
    _in_mine(
        "dataflow check graphs.grpo:grpo --base tiny/model --data hf:openai/gsm8k"
        " --reward-fn short.py:short",
        "needs the library datasets", "pip install 'dataflow-rl[hub]'", code=1,
    ),
)  # fmt: skip
PEERS = (  # names and files of TRL and verl
    _in_mine(
        f"dataflow check graphs.grpo:grpo {DIGITS} --learning-rate 1e-6",
        "'--learning-rate' (TRL's name)", "Fix: --lr.", code=2,
    ),
    _in_mine(
        f"dataflow check graphs.grpo:grpo {DIGITS} actor_rollout_ref.rollout.n=8",
        "(verl's name)", "Fix: --n.", code=2,
    ),
    _in_mine(
        """python -c "from graphs.grpo import grpo; grpo('m', 'd', len, num_generations=8)" """,
        "'num_generations' (TRL's name). Fix: n=8", code=1,
    ),
    _in_mine(
        "python -c 'from engine.options import RunOptions; RunOptions(max_steps=8)'",
        "'max_steps' (TRL's name). Fix: steps=8", code=1,
    ),
    _written(
        "score.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.0\n",
    ),
    _in_mine(
        f"dataflow check graphs.grpo:grpo {SMALL} --reward-fn score.py:compute_score",
        "the parameters of verl's compute_score", "Fix: verl_reward(compute_score)", code=1,
    ),
)  # fmt: skip
OWN_PARTS = (
    _in_mine("dataflow test mine.py:brevity --examples 5", "kept"),
    NewcomerStep("dataflow graphs dapo > my_dapo.py", makes="my_dapo.py", folder=MINE),
    _in_mine(CHECK_DAPO, "every rule holds"),
)
SHADOWING = (  # folders with the names of our packages; last, as they stay
    NewcomerStep("mkdir graphs && touch graphs/other.py"),
    NewcomerStep("dataflow --version", ("graphs/ is hidden by dataflow-rl's package",)),
)
THIRDS = ((*FOLDERS,), (*RECORDS, *RESUMING), (*BUILT_IN, *DATA, *PEERS))
"""Steps that only an environment of its own adds to what tests prove: .ci/run takes one of these in
each turn.
"""


def steps(turn: str = "") -> tuple[NewcomerStep, ...]:
    """All, or those of a turn of .ci/run."""
    thirds = THIRDS if not turn else (THIRDS[int(turn) % len(THIRDS)],)
    middle = (step for third in thirds for step in third)
    return (*COMMAND_LINE, *PROJECT, *LOOKING, *middle, *OWN_PARTS, *SHADOWING)


def distributions(sdist: str, wheel: str) -> None:
    """The source distribution has examples, docs and tests; the wheel has the four packages."""
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SOURCES if name not in sources]
    machine = [name for name in sources if name.startswith((".ci", ".venv", "runs/", "dist/"))]
    with zipfile.ZipFile(wheel) as archive:
        installed = archive.namelist()
    tops = {name.partition("/")[0] for name in installed}
    others = {top for top in tops - PACKAGES if not top.endswith(".dist-info")}
    if missing or machine or others or not tops >= PACKAGES:
        found = f"missing {missing}, of a machine {machine[:5]}; beside the packages {others}"
        sys.exit(f"newcomer: the distributions are wrong: {found}")
    if "engine/cli/init_project/NAME.py.txt" not in installed:
        sys.exit("newcomer: the wheel lacks the files of `dataflow init`")


def bytecode(there: str, here: str) -> None:
    """Copy what is compiled in one environment into another with the same packages: a newcomer
    waits for that once, half a minute of a core. Python compiles anew what it is not that of.
    """
    for compiled in Path(there).rglob("__pycache__/*.pyc"):
        copy = Path(here) / compiled.relative_to(there)
        if copy.parents[1].is_dir():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(compiled, copy)


def walk(turn: str = "") -> None:
    """Each step in turn; ends at the first that does not do what it should."""
    for step in steps(turn):
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=step.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        wrong = _wrong(step, done.returncode, done.stdout)
        if wrong:
            sys.exit(f"newcomer: {step.command}\n{done.stdout[-4000:]}\nnewcomer: {wrong}")
        typed = step.command.partition("\n")[0]
        print(f"newcomer: {time.monotonic() - start:5.1f} s  {typed}", flush=True)


def _wrong(step: NewcomerStep, code: int, said: str) -> str:
    """What a step did not do, or nothing."""
    if code != step.code:
        return f"expected exit code {step.code}, found {code}"
    for phrase in step.says:
        if phrase not in said:
            return f"expected the output to have {phrase!r}"
    for phrase in step.lacks:
        if phrase in said:
            return f"expected the output not to have {phrase!r}"
    if step.makes and not Path(step.folder, step.makes).is_file():
        return f"expected it to make {step.makes}"
    return ""


if __name__ == "__main__":
    {"distributions": distributions, "bytecode": bytecode, "walk": walk}[sys.argv[1]](*sys.argv[2:])
