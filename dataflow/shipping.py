"""Functions on their way to another process of the same run.

Owns: which modules are sent by value, as no other process can import them by name. Does not own:
the receivers (engine/run/launch, operators/kernels/scoring_process.py): they use a private pipe, as
anybody who can write a pickle there can run anything.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import cloudpickle

from dataflow.errors import RunError
from dataflow.import_order import import_path, is_installed

_SHIPPING = threading.Lock()
"""Which modules go by value is a setting of cloudpickle for the whole process."""
_REFUSALS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """Inside it, cloudpickle sends by value what came from files that an import of their name would
    not find.
    """
    # Registrations are undone before the lock is given up.
    with _SHIPPING, contextlib.ExitStack() as after:
        folders = import_path()
        # A module can have two names: in a spawned process, __main__ is __mp_main__ too.
        for module in dict.fromkeys(list(sys.modules.values())):
            if not _loaded_by_path(module, folders):
                continue
            cloudpickle.register_pickle_by_value(module)
            after.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def pickle_by_value(thing: Any, what: str) -> bytes:
    """Pickle a thing that has functions. Raises RunError, naming `what`, if it cannot be sent."""
    with by_value():
        try:
            return cloudpickle.dumps(thing)
        except _REFUSALS as error:
            raise RunError(
                f"{what}: cannot be sent to another process: {type(error).__name__}: {error}. "
                "Fix: make locks, connections and files inside the functions, or run with inproc."
            ) from error


def _loaded_by_path(module: ModuleType, folders: Sequence[str]) -> bool:
    """Whether a module came from a file that an import of its name would not find (mostly the
    user's graph file). folders: those that are imported from.
    """
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "__main__")
    # cloudpickle sends what __main__ defines by value anyway.
    if name == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
        return False
    if is_installed(file):
        return False
    is_current = sys.modules.get(name) is module
    return is_current and os.path.abspath(file) != _find_file(name, folders)


def _find_file(name: str, folders: Sequence[str]) -> str:
    """The file that an import of this name finds; empty if there is none."""
    tail = name.replace(".", os.sep)
    for folder in folders:
        # The receiver looks in this order, too: a package before a file.
        for end in (f"{os.sep}__init__.py", ".py"):
            place = os.path.join(folder, tail + end)
            if os.path.isfile(place):
                return place
    return ""
