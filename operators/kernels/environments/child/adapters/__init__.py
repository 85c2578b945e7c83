"""Adapters: how each kind of environment is spoken to. A file is one, named by its `Environment`.

An adapter has `load(target, arguments) -> factory`: called once in a template, so its imports are
shared by all processes that are forked from it. It starts no thread. target: the user's class,
function, functions, or a name. arguments: what JSON can hold.

The factory:

    columns: tuple[str, ...]     the dataset columns that `reset` takes; ("*",) for all
    tools: list[dict]            OpenAI's function schemas; may be empty
    make() -> environment        a new one; called in an episode's process

The environment, each method of which may return an awaitable:

    reset(seed: int, row: dict) -> str | list[message] | None      again for a next episode
    step(message: dict) -> (messages: list[message] | str, reward: float | None, done: bool)
    finish(reason: str) -> float | None                            a last reward
    state() -> dict                                                what is exported; after finish
    close() -> None
    tools: list[dict]            optional, looked at after reset; else the factory's

What it raises is a fault `raised`; `..faults.AnswerRefused(text)` is a fault `answer`: the library
returned something that is no answer. An adapter imports the standard library, its environments'
library, and this package by relative imports; it runs on Python 3.9.
"""
