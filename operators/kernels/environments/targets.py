"""What a template is told to load, and by which interpreter.

Owns: an environment's class or functions on their way: pickled for the run's own interpreter, by
name or by file for another one; the template's command. Does not own: loading (child/target.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from dataflow.errors import KernelError
from dataflow.import_order import interpreter, is_installed
from dataflow.shipping import by_value
from operators.environments import Environment
from operators.kernels.scoring_child import STACK_SIGNAL, Caught

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child")
_TITLE = "operators.kernels.environments.child.template"
_BOOTSTRAP = """
import importlib.util
name, folder = "dataflow_environments", sys.argv[3]
spec = importlib.util.spec_from_file_location(
    name, folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
from dataflow_environments.template import main
main(int(sys.argv[4]))
"""
"""Loads the child package by its path, under a name of its own."""
_OTHER = "import sys\nsys.path[:] = [folder for folder in sys.path if folder]\n"
"""The first words of another interpreter: nothing is imported from the current folder."""
_OTHERS_VARIABLES = ("PYTHONHOME", "PYTHONPATH")
"""They name what the run's own interpreter imports."""


@dataclass(frozen=True, kw_only=True)
class TemplateSetting:
    """What a template is started with. python: another interpreter than the run's own. is_shared:
    whether all its episodes run in it. frames: of its load, in order.
    """

    python: str | None
    is_shared: bool
    frames: Sequence[bytes]

    def command(self, descriptors: Sequence[int]) -> list[str]:
        """Its command line. descriptors: the first is its socket to the pool."""
        arguments = [_CHILD, str(descriptors[0])]
        if self.python is None:
            return interpreter(_BOOTSTRAP, _TITLE, *arguments)
        python = shutil.which(self.python) or self.python
        return [os.path.abspath(python), "-c", _OTHER + _BOOTSTRAP, _TITLE, "", *arguments]

    def environment(self) -> dict[str, str]:
        """Its variables."""
        variables = dict(os.environ)
        if self.python is not None:
            for variable in _OTHERS_VARIABLES:
                variables.pop(variable, None)
        return variables


def describe_template(name: str, environment: Environment) -> TemplateSetting:
    """What templates of this environment are started with. Raises KernelError where the
    interpreter or adapter does not exist, or the target cannot get there.
    """
    _check(name, environment)
    frames: list[bytes] = []
    if environment.python is None:
        described = {"kind": "pickle"}
        frames.append(_pickle_target(name, environment.target))
    else:
        described = describe_target(name, environment.target)
    setting = {
        "adapter": environment.adapter,
        "target": described,
        "arguments": _read_arguments(name, environment.arguments),
        "isolation": environment.isolation,
        "stack_signal": int(STACK_SIGNAL),
        "limits": {
            "memory_mb": environment.memory_mb,
            "cpu_seconds": environment.cpu_seconds,
            "open_files": environment.open_files,
        },
    }
    frames.insert(0, json.dumps(setting).encode())
    return TemplateSetting(
        python=environment.python, is_shared=environment.isolation == "shared", frames=frames
    )


def _check(name: str, environment: Environment) -> None:
    adapters = Path(_CHILD, "adapters")
    known = sorted(file.stem for file in adapters.glob("*.py") if file.stem != "__init__")
    if environment.adapter not in known:
        raise KernelError(
            f"environment {name!r}: expected an adapter, found {environment.adapter!r}. Fix: one of"
            f" {', '.join(known)}."
        )
    python = environment.python
    if python is not None and shutil.which(python) is None:
        raise KernelError(
            f"environment {name!r}: expected a Python interpreter, found {python!r}, which cannot"
            " be run. Fix: python=/path/to/venv/bin/python."
        )
    if environment.isolation == "shared" and environment.cpu_seconds is not None:
        raise KernelError(
            f"environment {name!r}: expected no cpu_seconds with isolation='shared', found"
            f" {environment.cpu_seconds}: its episodes have no processes of their own. Fix:"
            " isolation='process', or no cpu_seconds."
        )


def _read_arguments(name: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise KernelError(
            f"environment {name!r}: expected arguments that JSON can hold, found {error}. Fix:"
            " numbers, texts, lists and dicts; let the environment make the rest."
        ) from error


def _pickle_target(name: str, target: Any) -> bytes:
    with by_value(), Caught() as caught:
        return cloudpickle.dumps(target)
    problem = caught.fault.text if caught.fault else ""
    raise KernelError(
        f"environment {name!r}: cannot be sent to a process of its own: {problem}. Fix: make locks,"
        " connections and files inside the environment, or run with inproc."
    )


def describe_target(name: str, target: Any) -> dict[str, Any]:
    """A target by name or by file, as child/target.py finds it in another interpreter. Raises
    KernelError for what has neither.
    """
    if isinstance(target, str):
        return {"kind": "text", "text": target}
    if isinstance(target, list | tuple):
        members = [describe_target(name, member) for member in target]
        return {"kind": "list", "members": members}
    qualname = getattr(target, "__qualname__", None)
    module = getattr(target, "__module__", None)
    if not isinstance(qualname, str) or not isinstance(module, str):
        raise _not_importable(name, f"{target!r:.60}, which has no name")
    if "<" in qualname:
        raise _not_importable(name, f"{qualname}, which is defined inside a function")
    file = _defining_file(target, module, qualname)
    if module != "__main__" and (file is None or is_installed(file)):
        return {"kind": "module", "module": module, "qualname": qualname, "folder": ""}
    if file is None:
        raise _not_importable(name, f"{qualname}, which is defined in a notebook or a shell")
    folder = _importing_folder(file, module)
    if folder is None:
        return {"kind": "file", "path": file, "qualname": qualname}
    return {"kind": "module", "module": module, "qualname": qualname, "folder": folder}


def _not_importable(name: str, what: str) -> KernelError:
    return KernelError(
        f"environment {name!r}: expected a class or function that another interpreter can import,"
        f" found {what}. Fix: define it at the top of a file (.py), or leave out python=."
    )


def _defining_file(target: Any, module: str, qualname: str) -> str | None:
    """The Python file in which something is defined; None if there is none. What was sent to this
    process by value is not in a module here, but its code still names the file.
    """
    files: list[str | None] = []
    if _is_defined_by(sys.modules.get(module), qualname, target):
        files.append(getattr(sys.modules[module], "__file__", None))
    members = list(vars(target).values()) if isinstance(target, type) else [target]
    files += [_code_file(member, qualname) for member in members]
    for file in files:
        if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file):
            return os.path.abspath(file)
    return None


def _is_defined_by(module: Any, qualname: str, target: Any) -> bool:
    thing = module
    for name in qualname.split("."):
        thing = getattr(thing, name, None)
    return thing is target


def _code_file(member: Any, qualname: str) -> str | None:
    """The file of a function's code, if it is defined under this name: a decorator's is not."""
    function = getattr(member, "__func__", member)  # of a static or class method
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType) and code.co_qualname.startswith(qualname):
        return code.co_filename
    return None


def _importing_folder(file: str, module: str) -> str | None:
    """The folder from which an import of this module finds this file; None if there is none."""
    tail = os.path.join(*module.split("."))
    for end in (f"{tail}.py", os.path.join(tail, "__init__.py")):
        if file.endswith(os.sep + end):
            return file[: -len(end) - 1] or os.sep
    return None
