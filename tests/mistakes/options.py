"""Mistakes on the command line."""

from __future__ import annotations

from tests.mistakes import CHECK, GRAPH, RUN, Mistake, changed

MISTAKES = (
    Mistake(
        what="A misspelt command",
        command="dataflow chek graphs.grpo:grpo",
        why="`dataflow --help` lists the commands.",
    ),
    Mistake(
        what="A target without a function",
        command="dataflow check graphs.grpo",
        why="A TARGET is a graph function in a module or a file, a graph.json, or a run folder.",
    ),
    Mistake(
        what="A flag that is missing",
        command=changed(" --data train.jsonl", ""),
        why="Parameters of the graph function without a default have to be given.",
    ),
    Mistake(
        what="A misspelt flag",
        command=changed("--steps 1", "--step 1", RUN),
        why="`--help` lists the flags of the graph and of the run.",
    ),
    Mistake(
        what="A flag of TRL",
        command=f"{CHECK} --num-generations 8",
        why="[from-trl.md](from-trl.md) and [from-verl.md](from-verl.md) have all names.",
    ),
    Mistake(
        what="A text where a number is wanted",
        command=changed("--n 2", "--n two", RUN),
        why="Numbers may be written as 1e-6.",
    ),
    Mistake(
        what="A number out of range",
        command=changed("--n 2", "--n 0", RUN),
        why="The message has the range.",
    ),
    Mistake(
        what="A run folder that is there already",
        command=f"{RUN} --name first",
        why="No run replaces another unasked.",
        files={"runs/first/versions.json": "{}"},
    ),
    Mistake(
        what="A node that is not there",
        command=f"dataflow explain {GRAPH} --pin rolout=gen",
        why="`dataflow draw TARGET` shows the nodes' names.",
    ),
    Mistake(
        what="A resume of what is no run",
        command="dataflow resume runs/secnd",
        why="`dataflow runs` lists the run folders.",
        files={"runs/second/versions.json": "{}"},
    ),
)
