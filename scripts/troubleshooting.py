"""Writes docs/troubleshooting.md: beginners' mistakes, their messages, and what these mean.

    .venv/bin/python scripts/troubleshooting.py [FILE]

The mistakes are those of tests/mistakes; the messages are the golden ones, which
tests/processes/test_mistakes.py gets from the commands. FILE: docs/troubleshooting.md by default.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.mistakes import Mistake  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "mistakes"
WIDTH = 118

TITLES = {
    "data": "Data",
    "model": "Models",
    "reward": "Rewards",
    "environment": "Environments",
    "graph": "Graphs",
    "options": "The command line",
    "hosts": "Several hosts",
}

HEAD = """# When something goes wrong

Every message names the place, what was expected, what was found and the nearest fix. Below are
those that beginners meet, each with the command that led to it. `scripts/troubleshooting.py` writes
this page from commands that a test runs.

## Where to look first

| you see | look at |
|---|---|
| a message that is not clear | below, by its words; the command again with `--traceback` |
| a reward that stays the same | [how to debug a reward](how-to.md#debug-a-reward) |
| groups with fewer rows than n | episodes were lost: `data/lost_rows`, `env/errors`, and the log; \
[agents](agents.md#what-goes-wrong-in-an-environment) |
| episodes that end with `length` | `episode/overflow`, and [budgets](agents.md#budgets) |
| a run that stands still | after `--watchdog` seconds it stops and says who waits for whom |
| a run that was killed | `dataflow runs`; then `dataflow resume RUN_FOLDER` |
| too little memory | `dataflow explain TARGET`: what each node holds; \
[when memory runs out](how-to.md#when-memory-runs-out) |
| a process that failed | `logs/<worker>.log` in the run folder |
| another host that failed | `logs/host-<host>.log` ; [messages](#what-a-ray-cluster-may-say) |
| a breakpoint that is not reached | `--inproc` runs everything in one process |

"""

ON_RAY = """### What a Ray cluster may say

Messages of `--cluster ray`, without their names and numbers; [clusters](clusters.md) has more.

| message | meaning |
|---|---|
| `expected the package ray for --cluster ray, found none` | `pip install 'dataflow-rl[ray]'`, on \
every node |
| `expected a Ray cluster, found none` | no Ray runs on this machine, or RAY_ADDRESS names none: \
`ray start --head`, or `--cluster ray:local`; where the cluster wants a token, RAY_AUTH_MODE and \
the token are missing here ([security](clusters.md#security)) |
| `no node of the Ray cluster can be used` | each node is named with its reason below |
| `is left out` | a warning: the run goes on without this node, for the reason that follows; a \
pin to it is an error |
| `it has no cores` | the node was started with `--num-cpus=0` |
| `expected an answer within` | the node takes no task: its machine is gone or overloaded, or its \
environment has no dataflow-rl; Ray's own logs are in `session_latest/logs` of its temporary \
folder |
| `expected it to say what it has` | the task that asks the node has failed; mostly dataflow-rl \
is missing there, or its environment is broken |
| `as here, found` | another version of Python, torch or dataflow-rl on that node; or a model, \
data or the runs folder is not at the same path there, or is another one |
| `waiting for room in the Ray cluster` | a warning, every ten seconds: what is wanted, what of \
it fits on no node, and what each node has free |
| `no room within` | that lasted longer than `--wait`: other runs hold the cores or GPUs, or the \
plan asks for more than there is. `ray status` shows who waits |
| `expected its process to start` | the actor of that host ended as it started; the line says \
why, and Ray's own logs more |
| `it cannot be reached` | a warning: calls fail; the host is lost when the lease has ended, \
unless it answers before |
| `not heard of for` | the lease has ended: the host is lost. Its Workers begin again elsewhere, \
and nothing is to be done |
| `its Workers here are ended` | in the log of a host: the same, from its side; the run's process \
is gone, or the network between them |
| `was lost while something was asked of it` | a host was lost while the run waited for an \
answer, as at a checkpoint; the run goes back to its last one |
| `which all hosts have to share` | the host sees another folder, or none, at the path of the run \
folder: `--runs` in a file system that all nodes mount |
| `relative paths will not be found` | a warning in the log of a host: it has no folder of the \
name of the one in which the run was started. Give absolute paths, or start it in a shared folder |
| `is taken away` | Ray drains the node: replicas that come and go leave it, and if a Worker \
there has state, a checkpoint is written. Nothing is to be done if there are other nodes with room |
"""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(line for kind in TITLES for line in section(kind)) + "\n" + ON_RAY


def section(kind: str) -> Iterator[str]:
    """The mistakes of one kind."""
    yield f"## {TITLES[kind]}"
    yield ""
    for mistake in importlib.import_module(f"tests.mistakes.{kind}").MISTAKES:
        yield from entry(kind, mistake)


def entry(kind: str, mistake: Mistake) -> Iterator[str]:
    """A mistake: the command, its message, and what that means."""
    told = (GOLDEN / kind / f"{mistake.name}.txt").read_text(encoding="utf-8")
    yield f"### {mistake.what}"
    yield ""
    yield "```text"
    yield from wrapped(f"$ {mistake.command}")
    for line in told.strip().splitlines():
        yield from wrapped(line)
    yield "```"
    yield ""
    yield from textwrap.wrap(mistake.why, WIDTH, break_on_hyphens=False)
    yield ""


def wrapped(line: str) -> list[str]:
    """A line of a terminal; its further lines are indented."""
    lines = textwrap.wrap(
        line, WIDTH, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=True
    )
    return lines or [""]


def main(file: Path) -> None:
    """Write the page."""
    file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "troubleshooting.md")
