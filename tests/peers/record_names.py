"""The names of peers' configurations, as their sources declare them: names/<peer>.txt.

Runs where the peer is installed, or where its unpacked wheel is on PYTHONPATH, from the root of the
repository: python -m tests.peers.record_names trl. Nothing of the peer is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "names"
_NO_SETTINGS = ("_target_", "defaults")


def main(peer: str) -> None:
    names = sorted(set(PEERS[peer]()))
    text = "\n".join([f"# {peer} {version(peer.partition('_')[0])}", *names])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{peer}.txt").write_text(f"{text}\n")
    print(f"{peer}: {len(names)} names")


def recorded(peer: str) -> list[str]:
    """The names that were recorded last."""
    return (FOLDER / f"{peer}.txt").read_text().splitlines()[1:]


def trl() -> Iterator[str]:
    """The fields of the trainers' arguments and of those that they inherit."""
    for kind in ("base", "grpo", "rloo", "sft", "dpo", "model"):
        yield from fields(source("trl") / "trainer" / f"{kind}_config.py")
    yield from fields(source("transformers") / "training_args.py", "TrainingArguments")


def trl_ppo() -> Iterator[str]:
    yield from fields(source("trl") / "experimental" / "ppo" / "ppo_config.py")


def fields(file: Path, only: str = "") -> Iterator[str]:
    for kind in ast.walk(ast.parse(file.read_text())):
        if isinstance(kind, ast.ClassDef) and only in ("", kind.name):
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id


def verl() -> Iterator[str]:
    """The dotted keys of the trainers' YAML."""
    import yaml

    for name in ("_generated_ppo_trainer.yaml", "sft_trainer_engine.yaml"):
        text = (source("verl") / "trainer" / "config" / name).read_text()
        yield from keys(yaml.safe_load(text))


def keys(found: Mapping[str, Any], start: str = "") -> Iterator[str]:
    for key, value in found.items():
        if key not in _NO_SETTINGS:
            inside = isinstance(value, Mapping) and value
            yield from keys(value, f"{start}{key}.") if inside else (f"{start}{key}",)


def openrlhf() -> Iterator[str]:
    """The flags of its commands."""
    for name in ("ppo_ray", "sft", "dpo"):
        text = (source("openrlhf") / "cli" / f"train_{name}.py").read_text()
        yield from re.findall(r'"--([\w.-]+)"', text)


def source(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is not here"
    assert spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


PEERS: dict[str, Callable[[], Iterator[str]]] = {
    "trl": trl,
    "trl_ppo": trl_ppo,
    "verl": verl,
    "openrlhf": openrlhf,
}

if __name__ == "__main__":
    main(sys.argv[1])
