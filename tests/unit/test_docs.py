"""Documents and code say the same: links, paths, metrics, tests; the README's graph and options."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from dataflow.draw import draw
from engine.options import RunOptions
from engine.plan.cluster_file import read_cluster
from graphs.grpo import grpo
from tests.kit.processes import call_python

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dataflow", "operators", "graphs", "engine")


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository, including uncommitted ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file())


def documents() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def prose(path: Path) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ +(.*?) *$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


OURS = re.compile(r"https://github\.com/dataflow-rl/dataflow-rl/(?:blob|raw|tree)/main/(.*)")
"""Our own files, as the README names them: it is shown outside of the repository, too."""


def links(path: Path) -> list[str]:
    """The targets of a document's links, in the line or defined below."""
    text = prose(path)
    return re.findall(r"\]\(([^)\s]+)\)", text) + list(definitions(text).values())


def definitions(text: str) -> dict[str, str]:
    """`[label]: target`, each on its line."""
    return dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("path", documents(), ids=named)
def test_links_to_files_resolve(path: Path) -> None:
    for target in links(path):
        own = OURS.fullmatch(target)
        if target.startswith(("http://", "https://")) and not own:
            continue
        file, _, anchor = (own.group(1) if own else target).partition("#")
        found = ((ROOT if own else path.parent) / file).resolve() if file else path
        assert found.exists(), f"{named(path)}: no {target}"
        assert not anchor or anchor in anchors(found), f"{named(path)}: no heading {target}"


def test_links_of_the_readme_are_absolute_and_defined() -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(ROOT / "README.md"))
    assert [target for target in links(ROOT / "README.md") if not target.startswith("https")] == []
    defined = definitions(text)
    written = re.sub(r"^\[[^\]]+\]: \S+$", "", text, flags=re.MULTILINE)
    used = set(re.findall(r"\[([^\]]+)\](?!\()", written))
    assert used == set(defined)


def test_lines_of_the_readme_are_short() -> None:
    """A table's row is one line, however long."""
    lines = enumerate((ROOT / "README.md").read_text().splitlines(), 1)
    assert {i: line for i, line in lines if len(line) > 120 and not line.startswith("|")} == {}


@pytest.mark.parametrize("path", documents(), ids=named)
def test_named_paths_exist(path: Path) -> None:
    """`engine/api.py`, `tests/schedules/` and the like, named from the root."""
    tops = "|".join(
        (*PACKAGES, *["tests", "examples", "benchmarks", "scripts", "docs", "requirements"])
    )
    for name in re.findall(rf"`((?:{tops})/[\w./-]*)`", prose(path)):
        assert (ROOT / name).exists(), f"{named(path)}: no {name}"


@pytest.mark.parametrize("path", documents(), ids=named)
def test_named_tests_exist(path: Path) -> None:
    for name in re.findall(r"`(test_\w+)(?:\[[^`]*\])?`", prose(path)):
        assert name in test_names(), f"{named(path)}: no test {name}"


@cache
def test_names() -> frozenset[str]:
    tests = [path.read_text() for path in tracked() if re.match(r"tests/.*\.py$", named(path))]
    return frozenset(name for text in tests for name in re.findall(r"def (test_\w+)", text))


test_names.__test__ = False  # type: ignore[attr-defined]


def test_no_path_of_a_machine() -> None:
    """No file names its author's home or working directory."""
    homes = ("/ho" + "me/", "/ro" + "ot/", "/wo" + "rk/", "/Us" + "ers/", "/tm" + "p/")
    places = re.compile("|".join(homes))
    for path in tracked():
        text = path.read_bytes().decode("utf-8", "replace")
        found = places.search(text)
        near = text[max(0, found.start() - 40) : found.end() + 20] if found else ""
        assert not found, f"{named(path)}: {near!r}"


GROUPS = "reward|completion|data|loss|optim|train|policy|value|dpo|eval|time|throughput|generate"
_METRIC = re.compile(rf"(?:{GROUPS})(?:/[\w*]+)+")
COLUMN = "reward/*"
"""A column of a Reward, no metric."""
READERS = ("engine/observe/figures.py", "engine/observe/silent_failures.py", "engine/cli/")
"""Files that read metrics and emit none."""


def documented() -> list[str]:
    """The names in docs/metrics.md."""
    return metrics_in((ROOT / "docs" / "metrics.md").read_text())


def metrics_in(text: str) -> list[str]:
    """The metrics that a text names, * for what stands in angle brackets."""
    names = re.findall(r"`([^`\s]+/[^`\s]*)`", text)
    return [re.sub(r"<[^>]*>", "*", name) for name in names]


def emitted() -> Iterator[tuple[str, str]]:
    """(file, name) of each string that looks like a metric's name, * for what is filled in."""
    for path in sources():
        for name in strings(ast.parse(path.read_text())):
            if _METRIC.fullmatch(name) and name != COLUMN:
                yield named(path), name


def sources() -> list[Path]:
    """The code that can emit metrics."""
    code = [path for path in tracked() if re.match(r"(operators|engine)/.*\.py$", named(path))]
    return [path for path in code if not named(path).startswith(READERS)]


def strings(node: ast.AST) -> Iterator[str]:
    """Strings and f-strings below a node, docstrings left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "*" for p in child.values]
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value.replace("*", "?")  # `reward/*` names columns
        else:
            yield from strings(child)


def covers(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^/]+"), name) is not None


def test_every_metric_in_the_code_is_documented() -> None:
    patterns, found = documented(), list(emitted())
    assert len(found) > 30
    for file, name in found:
        assert any(covers(pattern, name) for pattern in patterns), (
            f"{file}: {name} is not in docs/metrics.md"
        )


def test_every_documented_metric_is_in_the_code() -> None:
    """Names as they are in the code, or at least their last part."""
    ours = {name for _, name in emitted()}
    written = "\n".join(path.read_text() for path in sources())
    table = (ROOT / "docs" / "metrics.md").read_text()
    first_column = "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    names = metrics_in(first_column)
    assert len(names) > 40
    for name in names:
        last = name.rpartition("/")[2]
        as_it_is = any(covers(own, name) or covers(name, own) for own in ours)
        assert as_it_is or f"/{last}" in written or "*" in last, name


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_graph_of_the_readme_is_grpo() -> None:
    block = re.findall(r"^```python\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)[0]
    text = (ROOT / "graphs" / "grpo.py").read_text()
    assert text.endswith(f'    """\n{textwrap.indent(block, "    ")}')
    assert len(block.splitlines()) <= 12


def exact_match(completions: list[str], answer: list[str]) -> list[float]:
    raise AssertionError("only drawn")


def test_the_drawing_of_the_readme_is_what_draw_says() -> None:
    block = re.findall(r"^```text\n(.*?)^```", readme(), re.DOTALL | re.MULTILINE)[0]
    graph = grpo("path/to/model", "prompts.parquet", exact_match, beta=0.04, max_lag=1)
    assert block.rstrip() == draw(graph).rstrip()


def test_the_options_of_the_readme_are_the_run_options() -> None:
    tree = ast.parse((ROOT / "engine" / "options.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for field, meaning in pairwise(classes["RunOptions"].body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(meaning, ast.Expr)
            assert isinstance(meaning.value, ast.Constant)
            flag = field.target.id.replace("_", "-")
            row = re.search(rf"^\| `--{flag}` \| .* \| (.*) \|$", readme(), re.MULTILINE)
            assert row is not None, flag
            assert row.group(1) == meaning.value.value


def test_packages_are_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("page", ["reference", "troubleshooting"])
def test_a_page_is_what_its_script_writes(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    done = call_python(f"scripts/{page}.py", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text() == (ROOT / "docs" / f"{page}.md").read_text()


def test_what_troubleshooting_quotes_of_hosts_is_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("### What a Ray cluster may say")[2]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    assert len(quoted) > 15
    assert [phrase for phrase in quoted if phrase not in code] == []


def cluster_blocks(language: str, page: str = "clusters") -> list[str]:
    """The blocks of a page in one language."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_files_for_clusters_are_well_formed(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert [yaml.safe_load(block).get("kind") for block in cluster_blocks("yaml")] == [
        "RayJob",
        None,
    ]
    for block in cluster_blocks("bash"):
        done = subprocess.run(
            ["bash", "-n"], input=block, text=True, capture_output=True, check=False
        )
        assert done.stderr == ""
    (block,) = cluster_blocks("toml")
    (tmp_path / "hosts.toml").write_text(block)
    assert [host.name for host in read_cluster(tmp_path / "hosts.toml").hosts] == ["a", "b"]


def test_the_machines_of_the_page_on_costs_are_a_cluster(tmp_path: Path) -> None:
    (block,) = cluster_blocks("toml", "cost")
    (tmp_path / "hosts.toml").write_text(block)
    cluster = read_cluster(tmp_path / "hosts.toml")
    assert [len(host.gpus) for host in cluster.hosts] == [8] * 6
    assert cluster.way("train-0", "rollout-3").delay == 0.03


def test_flags_of_dataflow_for_clusters_are_options() -> None:
    """Those of the lines with `dataflow`, and of the lines that go on there."""
    known = {f"--{field.name.replace('_', '-')}" for field in fields(RunOptions)}
    text = "\n".join(cluster_blocks("bash") + cluster_blocks("yaml")).replace("\\\n", " ")
    lines = [
        line for line in text.splitlines() if "dataflow r" in line or line.startswith("options=")
    ]
    found = {flag for line in lines for flag in re.findall(r"(?<!\S)\(?(--[a-z-]+)", line)}
    assert {"--cluster", "--pin", "--grace", "--checkpoint-every"} <= found <= known
