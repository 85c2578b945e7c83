"""Mistakes with environments: the class, its columns, tools, what it answers."""

from __future__ import annotations

import json

from tests.mistakes import Mistake

TARGET = (
    "graphs.agent:agent --base model --data train.jsonl --environment game.py:Game"
    " --max-turns 2 --max-turn-tokens 4 --max-tokens 16"
)
CHECK = f"dataflow check {TARGET}"
RUN = f"dataflow run {TARGET} --batch 2 --n 2 --steps 1 --threads 1 --no-progress"
STOPS = f"{RUN} --set episode.on_error=stop episode.retries=0"
MESSAGES = "".join(
    json.dumps({"prompt": [{"role": "user", "content": f"{number}+1="}]}) + "\n"
    for number in range(8)
)
TOOLS = '''from operators.environments import tools


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


calculator = tools(add)
'''


def game(step: str, reset: str = "pass", *, columns: str = "", head: str = "") -> dict[str, str]:
    """A file of a class whose methods do this."""
    lines = (
        f"{head}class Game:",
        f"    def reset(self{columns}):",
        f"        {reset}",
        "",
        "    def step(self, message):",
        f"        {step}",
    )
    return {"game.py": "\n".join(lines) + "\n"}


def with_tools(command: str) -> str:
    """The same command with the functions of TOOLS."""
    return command.replace("game.py:Game", "game.py:calculator")


_UNTYPED = TOOLS.replace("a: int, b: int", "a, b")
_WITHOUT_DOCSTRING = TOOLS.replace('    """Adds two numbers."""\n', "")

MISTAKES = (
    Mistake(
        what="An environment that is not in its file",
        command=CHECK.replace("game.py:Game", "game.py:Gane"),
        files=game('return "", 1.0, True'),
        why="The name after the colon is a class, or what `tools(...)` and its like made there.",
    ),
    Mistake(
        what="A class without `reset`",
        command=CHECK,
        files={
            "game.py": "class Game:\n    def step(self, message):\n        return '', 1.0, True\n"
        },
        why="An environment has `reset` and `step`; a class with `reset` alone is one of TRL's.",
    ),
    Mistake(
        what="A column that the environment takes and the data lack",
        command=CHECK,
        files=game('return "", 1.0, True', columns=", word"),
        why="`reset` gets the dataset columns that its parameters name; one with a default may be"
        " missing.",
    ),
    Mistake(
        what="A tool without types",
        command=with_tools(CHECK),
        files={"game.py": _UNTYPED},
        why="Types, docstring and `Args:` are all that the model is told of a tool.",
    ),
    Mistake(
        what="A tool without a docstring",
        command=with_tools(CHECK),
        files={"game.py": _WITHOUT_DOCSTRING},
        why="The docstring says what the tool does; without it the model could only guess.",
    ),
    Mistake(
        what="Tools for prompts that are text",
        command=with_tools(RUN),
        files={"game.py": TOOLS},
        why="Tools are shown by the chat template, which text does not go through. Without tools,"
        " a class may read what the model wrote itself.",
    ),
    Mistake(
        what="A chat template that shows no tools",
        command=with_tools(RUN),
        files={"game.py": TOOLS, "train.jsonl": MESSAGES},
        why="Take a Model whose template knows tools (most instruct models), or write"
        " the tools into the prompt and read the calls in `step`.",
    ),
    Mistake(
        what="An environment that raises",
        command=STOPS,
        files=game('raise ValueError("no such word")'),
        why="By default (`on_error='drop_row'`) the episode is begun once more, and then its row is"
        " lost and its group goes on without it. `--inproc` stops at a breakpoint in it.",
    ),
    Mistake(
        what="An environment that hangs",
        command=f"{STOPS} episode.step_timeout=0.5",
        files=game("time.sleep(1e6)", head="import time\n\n\n"),
        why="`step_timeout` and `reset_timeout` are 60 seconds by default. The last lines say where"
        " it stood.",
    ),
    Mistake(
        what="A `step` that returns a number",
        command=STOPS,
        files=game("return 1.0"),
        why="`step` returns a `Turn`, or messages, reward and done; `Turn(reward=1.0, done=True)`"
        " ends an episode.",
    ),
    Mistake(
        what="An environment that answers nothing and goes on",
        command=STOPS,
        files=game('return "", 0.0, False'),
        why="There is nothing that the model could go on with: answer, or end the episode.",
    ),
)
