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
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.options import RunOptions
from graphs.grpo import grpo
from operators.generate import GENERATE
from tests.kit.processes import ROOT, call_python

README, CLUSTERS = ROOT / "README.md", ROOT / "docs/clusters.md"


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
        folder = path.parent
        if own := OURS.fullmatch(target):
            folder, target = ROOT, own.group(1)
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (folder / file).resolve() if file else path
        assert found.exists(), f"{named(path)}: no {target}"
        assert not anchor or anchor in anchors(found), f"{named(path)}: no heading {target}"


def test_links_of_the_readme_are_absolute_and_defined() -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(README))
    assert all(target.startswith("https") for target in links(README))
    defined = definitions(text)
    written = re.sub(r"^\[[^\]]+\]: \S+$", "", text, flags=re.MULTILINE)
    used = set(re.findall(r"\[([^\]]+)\](?!\()", written))
    assert used == set(defined)


def test_lines_of_the_readme_are_short() -> None:
    """A table's row is one line, however long."""
    lines = enumerate(README.read_text().splitlines(), 1)
    assert {i: line for i, line in lines if len(line) > 120 and not line.startswith("|")} == {}


TOPS = "dataflow|operators|graphs|engine|tests|examples|benchmarks|scripts|docs|requirements"


def test_named_paths_and_tests_exist() -> None:
    """`engine/api.py`, `tests/schedules/` and the like, named from the root."""
    tests = "".join(path.read_text() for path in tracked() if re.match(r"tests/.*py$", named(path)))
    missing: list[str] = []
    for path in documents():
        paths = re.findall(rf"`((?:{TOPS})/[\w./-]*)`", prose(path))
        missing += [f"{named(path)}: {name}" for name in paths if not (ROOT / name).exists()]
        names = re.findall(r"`(test_\w+)(?:\[[^`]*\])?`", prose(path))
        missing += [f"{named(path)}: {name}" for name in names if f"def {name}(" not in tests]
    assert missing == []


def test_no_path_of_a_machine() -> None:
    """No file names its author's home or working directory."""
    places = re.compile("/(ho[m]e|ro[o]t|wo[r]k|Us[e]rs|tm[p])/")
    for path in tracked():
        found = places.search(path.read_bytes().decode("utf-8", "replace"))
        assert not found, f"{named(path)}: {found}"


GROUPS = (
    "reward|completion|data|loss|optim|train|policy|value|dpo|eval|time|throughput|generate"
    "|episode|env|adapter"
)
_METRIC = re.compile(rf"(?:{GROUPS})(?:/[\w*]+)+")
COLUMN = "reward/*"
"""A column of a Reward, no metric."""
READERS = ("engine/session/figures.py", "engine/session/silent_failures.py", "engine/cli/")
"""Files that read metrics and emit none."""


def metrics_in(text: str) -> list[str]:
    """The metrics that a text names, * for what stands in angle brackets."""
    names = re.findall(r"`([^`\s]+/[^`\s]*)`", text)
    return [re.sub(r"<[^>]*>", "*", name) for name in names]


@cache
def emitted() -> tuple[tuple[str, str], ...]:
    """(file, name) of each string that looks like a metric's name, * for what is filled in."""
    texts = {named(path): path.read_text() for path in sources()}
    return tuple(
        (file, name)
        for file, text in texts.items()
        if re.search(rf"(?:{GROUPS})/", text)
        for name in strings(ast.parse(text))
        if _METRIC.fullmatch(name) and name != COLUMN
    )


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


def said_to_be_missing(text: str) -> list[str]:
    """Sentences that say that something is not there, and sections that only list such things."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    missing = [section for section in sections if section.startswith("Not there\n")]
    sentences = re.split(r"(?<=[.;|])\s", " ".join(text.split()))
    return [*missing, *(each for each in sentences if re.search(r"not there( yet)?\b", each))]


@pytest.mark.parametrize(
    "path",
    [*documents(), *sorted((ROOT / "dataflow/peer_names").glob("*.txt"))],
    ids=named,
)
def test_no_kernel_that_there_is_is_said_to_be_missing(path: Path) -> None:
    wrong = [
        f"{path.name}: {name} is a kernel of generate: {text[:80]}"
        for text in said_to_be_missing(path.read_text())
        for name in GENERATE.kernels
        if re.search(rf"\b{name}\b", text, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_metric_in_the_code_is_documented() -> None:
    patterns = metrics_in((ROOT / "docs/metrics.md").read_text())
    names = list(emitted())
    assert len(names) > 30
    for file, name in names:
        assert any(covers(pattern, name) for pattern in patterns), (
            f"{file}: {name} is not in docs/metrics.md"
        )


def test_every_documented_metric_is_in_the_code() -> None:
    """Names as they are in the code, or at least their last part."""
    ours = {name for _, name in emitted()}
    written = "\n".join(path.read_text() for path in sources())
    table = (ROOT / "docs/metrics.md").read_text()
    first_column = "\n".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    names = metrics_in(first_column)
    assert len(names) > 40
    for name in names:
        last = name.rpartition("/")[2]
        as_it_is = any(covers(own, name) or covers(name, own) for own in ours)
        assert as_it_is or f"/{last}" in written or "*" in last, name


def blocks(language: str, page: Path) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_graph_of_the_readme_is_grpo() -> None:
    block = blocks("python", README)[0]
    text = (ROOT / "graphs/grpo.py").read_text()
    assert text.endswith(f'    """\n{textwrap.indent(block, "    ")}')
    assert len(block.splitlines()) <= 12


def exact_match(completions: list[str], answer: list[str]) -> list[float]: ...


def test_the_drawing_of_the_readme_is_what_draw_says() -> None:
    block = blocks("text", README)[0]
    graph = grpo("path/to/model", "prompts.parquet", exact_match, beta=0.04, max_lag=1)
    assert block.rstrip() == draw(graph).rstrip()


def test_the_options_of_the_readme_are_the_run_options() -> None:
    tree = ast.parse((ROOT / "engine/plan/options.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    rows = re.findall(r"^\| `--([a-z-]+)` \| .* \| (.*) \|$", README.read_text(), re.MULTILINE)
    for field, meaning in pairwise(classes["RunOptions"].body):
        if isinstance(field, ast.AnnAssign):
            flag = ast.unparse(field.target).replace("_", "-")
            assert (flag, ast.literal_eval(ast.unparse(meaning))) in rows


def test_packages_are_typed() -> None:
    for package in ("dataflow", "operators", "graphs", "engine"):
        assert (ROOT / package / "py.typed").is_file()


@pytest.mark.long
@pytest.mark.parametrize("page", ["reference", "troubleshooting"])
def test_a_page_is_what_its_script_writes(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    done = call_python(f"scripts/{page}.py", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text() == (ROOT / f"docs/{page}.md").read_text()


def test_what_troubleshooting_quotes_of_hosts_is_in_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page.partition("### What a Ray cluster may say")[2]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    assert len(quoted) > 15
    assert [phrase for phrase in quoted if phrase not in code] == []


def cluster_of(page: str, folder: Path) -> Cluster:
    """That of a page's only block in TOML."""
    (block,) = blocks("toml", ROOT / f"docs/{page}.md")
    (folder / "hosts.toml").write_text(block)
    return read_cluster(folder / "hosts.toml")


def test_the_files_for_clusters_are_well_formed(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    kinds = [yaml.safe_load(block).get("kind") for block in blocks("yaml", CLUSTERS)]
    assert kinds == ["RayJob", None]
    for block in blocks("bash", CLUSTERS):
        done = subprocess.run(
            ["bash", "-n"], input=block, text=True, capture_output=True, check=False
        )
        assert done.stderr == ""
    assert [host.name for host in cluster_of("clusters", tmp_path).hosts] == ["a", "b"]


def test_the_machines_of_the_page_on_costs_are_a_cluster(tmp_path: Path) -> None:
    cluster = cluster_of("cost", tmp_path)
    assert [len(host.gpus) for host in cluster.hosts] == [8] * 6
    assert cluster.way("train-0", "rollout-3").delay == 0.03


def test_flags_of_dataflow_for_clusters_are_options() -> None:
    """Those of the lines with `dataflow`, and of the lines that go on there."""
    known = {f"--{field.name.replace('_', '-')}" for field in fields(RunOptions)}
    text = "\n".join(blocks("bash", CLUSTERS) + blocks("yaml", CLUSTERS)).replace("\\\n", " ")
    lines = [
        line for line in text.splitlines() if "dataflow r" in line or line.startswith("options=")
    ]
    flags = {flag for line in lines for flag in re.findall(r"(?<!\S)\(?(--[a-z-]+)", line)}
    assert {"--cluster", "--pin", "--grace", "--checkpoint-every"} <= flags <= known
