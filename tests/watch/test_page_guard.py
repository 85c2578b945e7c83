"""Who the page's server answers, and that no request leads out of its root."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.errors import RunError
from engine.keep.reader.open_folder import NotServed, OpenFolder, RunRoot, inside
from engine.watch.token_file import kept_token
from tests.kit.page_client import PageClient, served
from tests.kit.watched import watched_run

SECRET = "the secret of another folder"


def make_runs(folder: Path, name: str) -> Path:
    """A root with a run of this name, beside a run that is not the page's business."""
    outside = watched_run(folder / "outside", steps=1)
    (outside / "logs" / "gen.log").write_text(SECRET)
    watched_run(folder / "runs" / name, steps=1)
    return folder / "runs"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageClient]:
    folder = tmp_path_factory.mktemp("all")
    root = make_runs(folder, "good")
    (root / "linked").symlink_to(folder / "outside")
    with served(root) as client:
        yield client


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "another host"),
        ({"Host": "127.0.0.1"}, "another host"),
        ({"Host": "127.0.0.1.evil.example:{port}"}, "another host"),
        ({"Origin": "http://evil.example"}, "another origin"),
        ({"Origin": "http://127.0.0.1:1"}, "another origin"),
        ({"Origin": "null"}, "another origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site"),
        ({"Sec-Fetch-Site": "same-site"}, "another site"),
    ],
)
def test_other_hosts_and_sites_are_refused(
    page: PageClient, headers: dict[str, str], why: str
) -> None:
    given = {name: value.format(port=page.port) for name, value in headers.items()}
    for path in ("/", f"/?token={page.token}", "/api/runs", "/api/runs/good/stream"):
        answer = page.ask(path, **given)
        assert (answer.status, answer.json()) == (403, {"error": why})
        assert "set-cookie" not in answer.headers


def test_the_page_itself_may_ask(page: PageClient) -> None:
    host = f"localhost:{page.port}"
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert page.ask("/api/runs", **headers).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get(page: PageClient, method: str) -> None:
    assert page.ask("/api/runs", method).status == 405


def test_nothing_without_the_token(page: PageClient) -> None:
    stranger = replace(page, cookie="")
    for path in ("/", "/api/runs", "/metrics", "/static/index.html", "/api/runs/good/stream"):
        assert stranger.ask(path).status == 403
    for token in ("", "x", page.token[:-1], page.token + "x", "%C3%A4"):
        assert stranger.ask(f"/?token={token}").status == 403
    wrong = replace(page, cookie=page.cookie[:-1])
    assert wrong.ask("/api/runs").status == 403
    assert replace(page, cookie="a=b; \x01;;=").ask("/api/runs").status in (400, 403)


def test_a_program_sends_the_token_as_a_bearers(page: PageClient) -> None:
    stranger = replace(page, cookie="")
    found = stranger.ask("/metrics", Authorization=f"Bearer {page.token}")
    assert found.status == 200
    assert found.headers["content-type"].startswith("text/plain")
    for value in ("", "Bearer", "Bearer x", f"Basic {page.token}", page.token):
        assert stranger.ask("/metrics", Authorization=value).status == 403
    other = {"Authorization": f"Bearer {page.token}", "Origin": "http://evil.example"}
    assert stranger.ask("/metrics", **other).status == 403


def test_a_kept_token_is_the_same_at_each_start(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = kept_token(path)
    assert kept_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs", "--token-file", path) as client:
        assert client.token == token


@pytest.mark.parametrize("text", ["", "short", "a token with spaces in it", "x" * 600, "ä" * 20])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(RunError, match="expected 16 letters"):
        kept_token(path)
    path.chmod(0o644)
    with pytest.raises(RunError, match="others can read it"):
        kept_token(path)


def test_a_token_is_kept_in_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="its folder is not there"):
        kept_token(tmp_path / "nowhere" / "token")


def test_the_cookie_is_kept_from_scripts_and_other_sites(page: PageClient) -> None:
    cookie = page.ask(f"/?token={page.token}").headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))


def test_every_answer_has_the_headers_that_a_browser_heeds(page: PageClient) -> None:
    for path in ("/api/runs", "/nope", f"/?token={page.token}", "/api/runs/good/drawing"):
        headers = page.ask(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
    assert page.ask("/api/runs", Host="evil").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2foutside", "%2e%2e%2foutside", "linked", ".", "%00", "good%2f..", "~"],
)
def test_no_name_leads_out_of_the_root(page: PageClient, name: str) -> None:
    for what in ("", "/log", "/samples", "/drawing", "/stream"):
        answer = page.ask(f"/api/runs/{name}{what}")
        assert answer.status in (400, 403, 404)
        assert SECRET.encode() not in answer.body


@pytest.mark.parametrize(("question", "names"), [
    ("/static/", ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "index.html/..")),
    (
        "/api/runs/good/log?worker=",
        ("../../../outside/logs/gen", "..%2f..%2foutside%2flogs%2fgen", "%00"),
    ),
])  # fmt: skip
def test_static_files_are_the_pages_own_and_a_worker_is_no_path(
    page: PageClient, question: str, names: tuple[str, ...]
) -> None:
    for name in names:
        assert page.ask(f"{question}{name}").status == 404


@pytest.fixture
def own_page(tmp_path: Path) -> Iterator[tuple[PageClient, Path]]:
    root = make_runs(tmp_path, "bad")
    with served(root) as client:
        yield client, root / "bad"


def test_links_pipes_and_sockets_in_a_run_are_refused(own_page: tuple[PageClient, Path]) -> None:
    page, run = own_page
    outside, logs = run.parent.parent / "outside", run / "logs"
    for file in (logs / "gen.log", run / "metrics.jsonl"):
        file.unlink()
        file.symlink_to(outside / file.relative_to(run))
    os.mkfifo(logs / "pipe.log")
    os.link(outside / "logs" / "gen.log", logs / "hard.log")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(logs / "socket.log"))
        for worker in ("gen", "pipe", "hard", "socket"):
            assert page.ask(f"/api/runs/bad/log?worker={worker}").status == 403
    assert page.ask("/api/runs/bad/series?names=loss/x").status == 403


def test_a_folder_of_a_run_that_is_a_link_is_refused(own_page: tuple[PageClient, Path]) -> None:
    page, run = own_page
    for name, asked in (("samples", "samples"), ("events", "flow"), ("logs", "log?worker=gen")):
        (run / name).rename(run.parent.parent / name)
        (run / name).symlink_to(run.parent.parent / name)
        assert page.ask(f"/api/runs/bad/{asked}").status == 403
    assert page.ask("/api/runs").status == 200


def test_files_are_read_up_to_a_size(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=1)
    (tmp_path / "a" / "big").write_bytes(b"x" * 100)
    with RunRoot(tmp_path).open("a") as folder:
        assert folder.read("big", 100) == b"x" * 100
        with pytest.raises(NotServed, match="larger than 99 bytes"):
            folder.read("big", 99)


def test_an_open_folder_stays_the_same_whatever_takes_its_name(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=1)
    with RunRoot(tmp_path).open("a") as folder:
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "a").symlink_to("/etc")
        assert folder.open("passwd") is None
        with inside(folder, "logs") as logs:
            assert isinstance(logs, OpenFolder)
            assert logs.names() == ["gen.log"]
