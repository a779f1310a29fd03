"""`train serve`: what its page is answered, which requests are refused, and that it reads without writing."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from reported import HOSTILE, make_run, make_sweep, record, write_metrics
from serving import served
from small_parts import note

from trainer_cli.addons.view.serve_http import RunServer, is_local
from trainer_cli.addons.view.serve_runs import ServedRuns, end_of_log
from trainer_cli.commands.command_line import main
from trainer_cli.commands.tail import Tail
from trainer_cli.runs import columns as curves, run as runs_run
from trainer_cli.runs.run import Run
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.strict_json import strict_json


def ask(server: RunServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Status, content and headers of an answer; JSON is decoded."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=500)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        content = answer.read().decode()
        sent = dict(answer.getheaders())
        return answer.status, json.loads(content) if "json" in sent.get("Content-Type", "") else content, sent
    finally:
        connection.close()


def numbers(overview: dict[str, Any]) -> dict[str, int]:
    return {name: int(number) for number, name in overview["runs"].items()}


def append(run: RunDir, step: int, **metrics: float) -> None:
    line = {**record(step, step, 0.1, {}), **metrics}
    with open(run.metrics_file, "a") as file:
        file.write(f"{strict_json(line)}\n")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    """A sweep over two rates, each with two seeds."""
    folder = make_sweep(tmp_path_factory.mktemp("served") / "sweep", (0.1, 0.2, 0.3, 0.4))
    for lr, (seed, group) in {0.1: (1, "a"), 0.2: (2, "a"), 0.3: (1, "b"), 0.4: (2, "b")}.items():
        config = f"name: x{lr}\nseed: {seed}\ntags: [{group}, t]\nnotes: of {group}\nmodel: {{size: {group}}}\n"
        (folder / f"optimizer.lr={lr}" / "config.yaml").write_text(config)
    with served(folder) as server:
        yield server


def test_the_table_has_a_row_for_each_run_with_tags_notes_and_what_differs(sweep: RunServer) -> None:
    _, overview, _ = ask(sweep, "/api/runs")
    assert sorted(overview["runs"].values()) == [f"optimizer.lr={lr}" for lr in (0.1, 0.2, 0.3, 0.4)]
    table = overview["table"]
    columns = [column["name"] for column in table["columns"]]
    assert columns[-7:] == ["seed", "size", "time", "began (UTC)", "attempts", "tags", "notes"], "and no other keys"
    rows = {row[0]: dict(zip(columns, row, strict=True)) for row in table["rows"]}
    row = rows["optimizer.lr=0.3"]
    assert (row["tags"], row["notes"], row["size"], row["seed"]) == ("b, t", "of b", "b", "1")
    assert (row["state"], row["step"]) == ("finished", "20 of 20")
    assert [overview["runs"][str(number)] for number in table["runs"]] == [row[0] for row in table["rows"]]


def test_the_page_of_several_runs_names_curves_whose_points_come_when_asked_for(sweep: RunServer) -> None:
    _, overview, _ = ask(sweep, "/api/runs")
    chosen = [numbers(overview)[f"optimizer.lr={lr}"] for lr in (0.4, 0.1)]
    runs = ",".join(map(str, chosen))
    _, page, _ = ask(sweep, f"/api/page?runs={runs}")
    titles = [section["title"] for section in page["sections"]]
    assert titles[0] == "Metrics", "curves first; the table of all runs stands above"
    assert "Config" in titles
    loss = page["sections"][0]["blocks"][0]
    assert [(line["run"], line["name"], "y" in line) for line in loss["curves"]] == [
        (number, name, False) for name in ("train/loss", "val/loss") for number in chosen
    ]
    assert {mark["run"] for mark in loss["restarts"]} == set(chosen)
    _, curves, _ = ask(sweep, f"/api/curves?runs={runs}&name=train/loss&name=no/such&x=time")
    assert [(line["run"], line["name"]) for line in curves] == [(number, "train/loss") for number in chosen]
    assert (curves[0]["step"][:2], curves[0]["y"][:2], curves[0]["time"][:2]) == ([1, 2], [1.4, 0.9], [1, 2])
    assert "epoch" not in curves[0], "only the axis that is shown"


def test_a_single_run_has_its_log_and_facts(sweep: RunServer, tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20)
    head = "2026-01-02 03:04:05,678 INFO   "
    run.log_file.write_text("".join(f"{head} line {n}\n" for n in range(300)))
    with served(tmp_path) as server:
        _, overview, _ = ask(server, "/api/runs")
        _, page, _ = ask(server, f"/api/page?runs={numbers(overview)['x']}")
    titles = [section["title"] for section in page["sections"]]
    assert (titles[0], titles[-1]) == ("Summary", "Log")
    assert page["sections"][-1]["blocks"][0]["text"].splitlines() == [f"{head} line {n}" for n in range(100, 300)]


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_log_of_a_run_shows_the_messages_that_tail_shows(tmp_path: Path, level: str) -> None:
    run = make_run(tmp_path / "x", steps=20)
    run.config_file.write_text(f"logging: {{level: {level}}}\n")
    at = "2026-01-02 03:04:05,678"
    shown = [f"{at} INFO    first", f"{at} WARNING of two", "  lines"]
    hidden = [f"{at} DEBUG   the run failed", "Traceback:", *(f"  line {n}" for n in range(300))]
    run.log_file.write_text("\n".join([*shown, *hidden]) + "\n")
    lines = [*shown, *hidden] if level == "debug" else shown
    assert (end_of_log(Run(run.path)) or {})["text"].splitlines() == lines[-200:]
    assert Tail(run.path, 1000).read()[-len(lines) :] == lines


def test_the_page_of_several_runs_has_the_keys_by_which_they_can_be_grouped(sweep: RunServer) -> None:
    _, overview, _ = ask(sweep, "/api/runs")
    _, page, _ = ask(sweep, f"/api/page?runs={','.join(overview['runs'])}")
    groups = {key: {overview["runs"][run]: value for run, value in of.items()} for key, of in page["groups"].items()}
    names = [f"optimizer.lr={lr}" for lr in (0.1, 0.2, 0.3, 0.4)]
    assert groups == {
        "all runs": dict.fromkeys(names, ""),
        "seed": dict(zip(names, "1212", strict=True)),
        "model.size": dict(zip(names, "aabb", strict=True)),
    }, "not the learning rate, which differs in all of them"


def test_new_records_runs_and_removals_are_seen_and_only_new_lines_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", steps=20)
    parsed: list[int] = []
    columns_of = curves._columns_of
    monkeypatch.setattr(curves, "_columns_of", lambda rows: note(parsed, len(rows)) or columns_of(rows))
    runs = ServedRuns(tmp_path)

    def steps() -> list[int]:
        (number,) = map(int, runs.overview()["runs"])
        (line,) = json.loads(runs.curves([number], ["train/loss"], "step"))
        return list(line["step"])

    try:
        assert steps() == list(range(1, 21))
        before = runs.overview()["versions"]
        assert runs.overview()["versions"] == before
        append(run, 21)
        assert runs.overview()["versions"] != before
        assert steps() == list(range(1, 22))
        assert [count for count in parsed if count] == [20, 1]
        # A resume has dropped records.
        write_metrics(run, (record(step, 10, 0.5, {}) for step in range(1, 6)))
        assert steps() == [1, 2, 3, 4, 5]
        make_run(tmp_path / "b", steps=20)
        assert sorted(runs.overview()["runs"].values()) == ["a", "b"]
        shutil.rmtree(run.path)
        assert list(runs.overview()["runs"].values()) == ["b"]
    finally:
        runs.close()


def test_nothing_is_written(tmp_path: Path) -> None:
    make_sweep(tmp_path / "sweep", (0.1, 0.2))

    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = files()
    with served(tmp_path) as server:
        _, overview, _ = ask(server, "/api/runs")
        assert ask(server, f"/api/page?runs={','.join(overview['runs'])}")[0] == 200
    assert files() == before


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../etc/passwd", 404),
        ("/%2e%2e/%2e%2e/etc/passwd", 404),
        ("//etc/passwd", 404),
        ("/page.js/../serve.py", 404),
        ("/api/page?runs=../x", 400),
        ("/api/page?runs=1.5", 400),
        ("/api/page?runs=[1]", 400),
        ("/api/page?runs=true", 400),
        ("/api/page?runs=-1,99999999999999999999", 200),
        ("/api/page", 200),
        ("/api/curves?runs=0&x=__class__", 400),
        ("/api/runs?" + "a=1&" * 1500, 400),
        ("/api/page?runs=" + "[" * 20000, 400),
        (f"/api/curves?{urlencode({'runs': '0', 'name': HOSTILE})}", 200),
    ],
)
def test_no_request_leaves_the_runs(sweep: RunServer, path: str, status: int) -> None:
    got, content, _ = ask(sweep, path)
    assert got == status
    assert "root:" not in str(content)
    assert "def " not in str(content)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example:80", ""])
def test_another_host_name_is_refused(sweep: RunServer, host: str) -> None:
    assert ask(sweep, "/api/runs", Host=host)[0] == 403


def test_the_page_loads_only_its_own_script_and_no_method_but_get_is_answered(sweep: RunServer) -> None:
    status, page, headers = ask(sweep, "/", Host=f"localhost:{sweep.server_port}")
    assert (status, '<script src="/page.js"></script>' in page) == (200, True)
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(sweep, "/page.js")[2]["Content-Type"].startswith("text/javascript")
    assert {ask(sweep, "/api/runs", method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH")} == {501}


def test_an_address_of_other_machines_needs_the_token(sweep: RunServer) -> None:
    assert [is_local(host) for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2", "0.0.0.0", "10.0.0.1", "x")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
    sweep.token = "secret"
    try:
        refused = [ask(sweep, "/"), ask(sweep, "/?token=secre"), ask(sweep, "/", Cookie="train-serve=secret2")]
        assert [status for status, _, _ in refused] == [403, 403, 403]
        status, _, headers = ask(sweep, "/?token=secret", Host="10.0.0.1:80")
        cookie = headers["Set-Cookie"]
        assert (status, "HttpOnly" in cookie, "SameSite=Strict" in cookie) == (200, True, True)
        assert ask(sweep, "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    finally:
        sweep.token = None


def test_a_run_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "good", steps=20)
    bad = make_run(tmp_path / "bad", steps=20)
    bad.summary_file.write_bytes(b"\xff{")
    bad.config_file.write_bytes(b"\x00: [")
    bad.metrics_file.write_bytes(b'{"step": "x"}\n{"step": 1e400}\n\xff\n' + b"[" * 5000 + b"\n")
    with served(tmp_path) as server:
        _, overview, _ = ask(server, "/api/runs")
        assert sorted(overview["runs"].values()) == ["bad", "good"]
        status, page, _ = ask(server, f"/api/page?runs={','.join(overview['runs'])}")
        assert (status, page["sections"][0]["title"]) == (200, "Metrics")


def test_a_chosen_run_that_vanished_is_said_to_be_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20)
    runs = ServedRuns(tmp_path)
    try:
        (number,) = map(int, runs.overview()["runs"])
        runs.page([number])
        shutil.rmtree(run.path)
        (section,) = runs.page([number])["sections"]
    finally:
        runs.close()
    assert (section["blocks"][0]["state"], section["blocks"][0]["text"]) == (
        "unreadable",
        "unreadable: its directory is gone",
    )


def test_a_run_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "x", steps=20)
    monkeypatch.setattr(runs_run, "_RETRY_S", 1e-6)
    runs = ServedRuns(tmp_path)

    def fail(_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.metrics_file))

    try:
        (number,) = map(int, runs.overview()["runs"])
        with monkeypatch.context() as patch:
            patch.setattr(curves.GrowingColumns, "read", fail)
            assert "metrics.jsonl cannot be read: Input/output error" in strict_json(runs.page([number]))
        page = strict_json(runs.page([number]))
    finally:
        runs.close()
    assert "cannot be read" not in page
    assert "train/loss" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no"], "there is no folder no"),
        ([".", "--port", "70000"], "--port is 70000, but it must be between 0 and 65535"),
        ([".", "--host", "192.0.2.1"], "192.0.2.1:0 cannot be used"),
        ([".", "--host", "no such name"], "no such name:0 cannot be used"),
    ],
)
def test_mistakes_are_one_message(
    empty_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err
