"""Mistakes in rewards: finding the function, its parameters, what it returns."""

from __future__ import annotations

from tests.mistakes import RUN, Mistake, changed


def returning(value: str, before: str = "") -> dict[str, str]:
    """A file of a reward function that returns this."""
    body = f"    {before}\n" if before else ""
    return {"rewards.py": f"def exact(completions, answer, **kwargs):\n{body}    return {value}\n"}


MISTAKES = (
    Mistake(
        what="A reward function that is not in its file",
        command=changed("rewards.py:exact", "rewards.py:exakt"),
        why="The name after the colon is the function's.",
    ),
    Mistake(
        what="A reward file that is not there",
        command=changed("rewards.py:exact", "reward.py:exact"),
        why="Paths are taken from the folder in which the command is typed.",
    ),
    Mistake(
        what="A reward file that does not load",
        files={
            "rewards.py": "import nunpy\n\n\ndef exact(completions, **kwargs):\n    return []\n"
        },
        why="The file is imported as any module is; the message has the line that failed.",
    ),
    Mistake(
        what="A `compute_score` of verl",
        command=changed("rewards.py:exact", "rewards.py:compute_score"),
        files={
            "rewards.py": "def compute_score(data_source, solution_str, ground_truth, extra_info):"
            "\n    return 1.0\n"
        },
        why="verl's functions get one row, ours (as TRL's) a list of them.",
    ),
    Mistake(
        what="One number for all completions",
        command=RUN,
        files=returning("1.0"),
        why="A reward function gets a list of completions and returns as many numbers.",
    ),
    Mistake(
        what="A list of the wrong length",
        command=RUN,
        files=returning("[1.0]"),
        why="Each completion has its number, or None where the function does not apply.",
    ),
    Mistake(
        what="Rewards that are text",
        command=RUN,
        files=returning('["1.0" for _ in completions]'),
        why="Convert what a parser or a judge returned to numbers.",
    ),
    Mistake(
        what="A reward that is not finite",
        command=RUN,
        files=returning('[float("nan") for _ in completions]'),
        why="Return None where there is no reward; a nan would spoil the whole group.",
    ),
    Mistake(
        what="A reward function that raises",
        command=RUN,
        files=returning("[1 / len(completions[0:0])]"),
        why="`dataflow peek TARGET rollout` shows the completions that it gets."
        " `--set score.on_error=drop_group` drops the prompts on which it fails.",
    ),
    Mistake(
        what="A reward function that exits",
        command=RUN,
        files=returning("[]", "raise SystemExit(1)"),
        why="An exit is an exception like any other; scripts that were not written as functions"
        " often have one.",
    ),
)
