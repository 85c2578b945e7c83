"""Mistakes in data: files, columns, formats."""

from __future__ import annotations

import json
from pathlib import Path

from tests.mistakes import Mistake, changed

SUPERVISED = "dataflow check graphs.sft:sft --base model --data train.jsonl"


def without_template(folder: Path) -> None:
    """A tokenizer with no chat template."""
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


MISTAKES = (
    Mistake(
        what="A data file that is not there",
        command=changed("train.jsonl", "trian.jsonl"),
        why="Paths are taken from the folder in which the command is typed.",
    ),
    Mistake(
        what="A folder without data",
        command=changed("train.jsonl", "empty"),
        change=lambda folder: (folder / "empty").mkdir(),
        why="A folder is read as one data set: its Parquet, JSONL or CSV files, in order of name.",
    ),
    Mistake(
        what="Data without prompts",
        files={"train.jsonl": '{"question": "1+1=", "answer": "2"}\n'},
        why="Rename the column, or map it when the file is made; other columns go to the reward.",
    ),
    Mistake(
        what="A line that is no JSON",
        files={"train.jsonl": '{"prompt": "1+1="}\n{"prompt": "1+2=\n'},
        why="JSONL has one object on each line; the message names the line.",
    ),
    Mistake(
        what="An empty data file",
        files={"train.jsonl": ""},
        why="The script that writes it may have failed.",
    ),
    Mistake(
        what="A prompt that is a number",
        files={"train.jsonl": '{"prompt": 12, "answer": "2"}\n'},
        why="A prompt is a text or a list of messages. Quote numbers when the file is made.",
    ),
    Mistake(
        what="A reward that wants a column that the data lacks",
        files={"train.jsonl": '{"prompt": "1+1=", "solution": "2"}\n'},
        why="A reward function's parameters are columns of the data, by name.",
    ),
    Mistake(
        what="Messages for a model without a chat template",
        files={"train.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'},
        change=without_template,
        why="A base model that was never trained on chats has no template. Give texts as prompts,"
        " take the model's instruct version, or copy a template into its directory.",
    ),
    Mistake(
        what="An image among the messages",
        files={
            "train.jsonl": '{"prompt": [{"role": "user", "content": [{"type": "text", "text":'
            ' "What is this?"}, {"type": "image", "image": "cat.png"}]}], "answer": "a cat"}\n'
        },
        why="A content may be a text, or a list of parts that are text. Models here read text"
        " alone: leave rows with images out.",
    ),
    Mistake(
        what="Prompts for supervised training",
        command=SUPERVISED,
        why="Supervised training needs what is to be imitated; [data.md](data.md) lists the"
        " shapes.",
    ),
    Mistake(
        what="A file of another kind",
        command=changed("train.jsonl", "train.txt"),
        files={"train.txt": "1+1=\n"},
        why="Text needs columns: write JSONL with a key `prompt`.",
    ),
)
