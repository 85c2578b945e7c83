"""Wheels that travel to a machine with a card: of what it lacks beside torch and transformers.

Owns: which packages those are, fetching their wheels, installing from a folder without a network,
and the project's own metadata where it is not installed. Does not own: versions
(requirements/cpu.lock).
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESENT = ("torch", "transformers", "pyarrow")
"""Packages that such a machine has, with all that they need: too large to carry."""
PYTHON = "3.12"
_GLIBC = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
"""Of glibc 2: pip takes wheels for exactly the platforms that it is told."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def normalised(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named_packages(requirements: Iterable[str]) -> list[str]:
    """The normalised names of requirements such as `pytest>=8`."""
    names: list[str] = []
    for requirement in requirements:
        match = _NAME.match(requirement.strip())
        if match is not None:
            names.append(normalised(match.group()))
    return names


def wanted_packages(pyproject: str) -> list[str]:
    """What a run and its tests need by pyproject.toml: the core, [lora], [test], and pytest's
    plugins.
    """
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    plugins = [each for each in extras["dev"] if each.startswith("pytest")]
    return named_packages([*project["dependencies"], *extras["lora"], *extras["test"], *plugins])


def with_needs(names: Iterable[str], needs: Mapping[str, Sequence[str]]) -> set[str]:
    """These packages and all that they need, directly or not. needs: of each by name."""
    all_names: set[str] = set()
    unvisited = list(names)
    while unvisited:
        name = unvisited.pop()
        if name not in all_names:
            all_names.add(name)
            unvisited += needs.get(name, ())
    return all_names


def locked_versions(lock: str) -> dict[str, str]:
    """Name -> version, of a lock's lines `name==version`."""
    versions: dict[str, str] = {}
    for line in lock.splitlines():
        name, pinned, version = line.partition("==")
        if pinned and not line.startswith("#"):
            versions[normalised(name)] = version.strip()
    return versions


def travelling(
    pyproject: str, lock: str, needs: Mapping[str, Sequence[str]], present: Iterable[str] = PRESENT
) -> list[str]:
    """Requirements, with versions, of what has to travel. Raises KeyError for a package that the
    lock does not have.
    """
    versions = locked_versions(lock)
    names = with_needs(wanted_packages(pyproject), needs) - with_needs(present, needs)
    return [f"{name}=={versions[name]}" for name in sorted(names)]


def installed_needs() -> dict[str, list[str]]:
    """What each package of this environment needs, without extras, for Python 3.12 on Linux."""
    from packaging.requirements import Requirement

    where = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    needs: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        names: list[str] = []
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(where):
                names.append(normalised(requirement.name))
        needs[normalised(distribution.metadata["Name"])] = names
    return needs


def collect_wheels(folder: Path) -> None:
    """Fetch the wheels into a folder. Raises CalledProcessError if pip fails, which says why."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    lock = (ROOT / "requirements/cpu.lock").read_text()
    requirements = travelling(pyproject, lock, installed_needs())
    words = ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--dest", str(folder)]
    words += ["--python-version", PYTHON]
    for minor in _GLIBC:
        words += ["--platform", f"manylinux_2_{minor}_x86_64"]
    words += ["--platform", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *words, *requirements]
    subprocess.run(command, check=True)


def missing_wheels(folder: Path) -> list[Path]:
    """The wheels of a folder whose packages this environment lacks."""
    missing: list[Path] = []
    for wheel in sorted(folder.glob("*.whl")):
        if not _is_installed(wheel.name.partition("-")[0]):
            missing.append(wheel)
    return missing


def install_wheels(folder: Path, target: Path) -> int:
    """Install those into a folder to import from; returns how many. Raises CalledProcessError."""
    wheels = missing_wheels(folder)
    if wheels:
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        words += ["--target", str(target), *map(str, wheels)]
        subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    return len(wheels)


def describe_project(target: Path) -> None:
    """Write the project's metadata into a folder to import from, unless it is installed: a run
    records its version, and pytest finds its plugin there.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    if _is_installed(name):
        return
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{entry} = {module}" for entry, module in entries.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
