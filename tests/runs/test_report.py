"""The HTML report: what it says of one run, of several, of a sweep and of a validation, whatever the files hold."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from printed import message as printed_message
from reported import BEGAN, HOSTILE, make_run, make_sweep, outcome, validate, write_metrics

from trainer_cli.addons.view.report import report
from trainer_cli.addons.view.report_sweep import importance, parameter_axis
from trainer_cli.commands.command_line import main
from trainer_cli.steps.run_status import RunStatus

Captured = pytest.CaptureFixture[str]


def data_of(output: Path, *paths: Path) -> dict[str, Any]:
    """The data in a report of these paths."""
    report(paths, output, now=BEGAN + 5000)
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', output.read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def blocks(found: Mapping[str, Any], title: str, kind: str) -> list[dict[str, Any]]:
    return [
        block
        for section in found["sections"] if section["title"] == title
        for block in section["blocks"] if block["kind"] == kind
    ]  # fmt: skip


def rows(table: Mapping[str, Any]) -> list[dict[str, str]]:
    names = [column["name"] for column in table["columns"]]
    return [dict(zip(names, row, strict=True)) for row in table["rows"]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run with some values that are not finite, and the results of `train validate`."""
    folder = tmp_path_factory.mktemp("one")
    run = make_run(folder / "mine", steps=100, metrics={"train/odd": lambda step: math.nan if step in (7, 8) else step})
    found = {f"{run.path}/checkpoints/step{step}": (step, 1 / step) for step in (40, 60, 80, 100)}
    validate(run.validation_folder, {**found, f"{run.path}/checkpoints/step60": (60, 9.0)})
    validate(run.validation_folder, {f"{run.path}/checkpoints/step60": (60, 0.001)})
    return data_of(folder / "r.html", run.path)


def test_the_sections_are_those_that_have_content(one: dict[str, Any]) -> None:
    assert [section["title"] for section in one["sections"]] == [
        "Summary", "Metrics", "Checkpoints", "Validation of checkpoints", "Learning rates and norms",
        "Throughput and pauses", "Config", "Attempts", "Environment",
    ]  # fmt: skip
    assert (one["title"], one["runs"]) == ("mine", ["mine"])


def test_metrics_of_one_name_share_a_chart_over_steps_epochs_and_time(one: dict[str, Any]) -> None:
    loss, odd, accuracy = blocks(one, "Metrics", "chart")
    assert [chart["title"] for chart in (loss, odd, accuracy)] == ["loss", "odd", "accuracy"]
    train, val = loss["curves"]
    assert (train["name"], train["step"][:2], train["y"][:2]) == ("train/loss", [1, 2], [1.1, 0.6])
    assert (val["name"], val["step"][:2], val["epoch"][:2], val["time"][:2]) == ("val/loss", [10, 20], [1, 2], [10, 20])
    assert val["time"][-1] == 1100
    assert loss["restarts"] == [{"run": 0, "step": 50, "epoch": 5.0, "time": 1050, "text": "attempt 2"}]
    assert odd["curves"][0]["y"][5:9] == [6, None, None, 9]
    assert odd["curves"][0]["bad"] == [2, 7]
    assert [chart["title"] for chart in blocks(one, "Learning rates and norms", "chart")] == ["lr", "grad_norm"]


def test_each_checkpoint_tells_why_it_was_saved_and_what_became_of_it(one: dict[str, Any]) -> None:
    (drawn,) = blocks(one, "Checkpoints", "timeline")
    assert drawn["lanes"] == ["regular, kept", "ephemeral, removed"]
    assert {mark["step"]: mark["kept"] for mark in drawn["marks"]} == {n: n % 20 == 0 for n in range(10, 101, 10)}
    found = {row["checkpoint"]: row for row in rows(*blocks(one, "Checkpoints", "table"))}
    assert found["step10"]["saved because"] == "every 10 steps"
    assert found["step10"]["then"] == "removed: ephemeral, and step20 is newer"
    assert found["step20"]["then"] == "on the disk"
    assert found["step100"]["then"] == "kept: final"
    assert found["step20"]["val/loss"] == "0.2"


def test_the_newest_result_of_each_checkpoint_counts_beside_what_the_training_measured(one: dict[str, Any]) -> None:
    loss, accuracy = blocks(one, "Validation of checkpoints", "chart")
    validated, trained = loss["curves"]
    assert (validated["name"], validated["step"]) == ("val/loss", [40, 60, 80, 100])
    assert validated["y"] == [0.025, 0.001, 0.0125, 0.01]
    assert (trained["name"], trained["step"]) == ("val/loss in training", list(range(10, 101, 10)))
    assert [curve["name"] for curve in accuracy["curves"]] == ["val/accuracy in training"]
    (table,) = blocks(one, "Validation of checkpoints", "table")
    assert [table["rows"][at][1] for at in table["marked"]] == ["60"]


def test_attempts_config_and_environment_are_tables(one: dict[str, Any]) -> None:
    first, second = rows(*blocks(one, "Attempts", "table"))
    assert (first["status"], first["reason"], first["to step"]) == ("stopped", "SIGTERM", "50")
    assert (second["from step"], second["changed"]) == ("50", "device")
    config = {row["key"]: (row["value"], row["set by"]) for row in rows(*blocks(one, "Config", "table"))}
    assert config == {
        "name": ("mine", "default"), "optimizer.lr": ("0.1", "command line"),
        "model.hidden": ("[8]", "configs/model/mlp.yaml:3"), "model.note": ("null", "default"),
    }  # fmt: skip
    environment = {row[0]: row[1] for row in blocks(one, "Environment", "table")[0]["rows"]}
    assert (environment["host"], environment["versions.torch"]) == ("here", "2.10")


def test_each_metric_of_a_table_has_the_mode_in_which_its_best_value_comes_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = make_run(tmp_path / "runs" / name, metrics={"val/own": float, "val/unknown": float})
        run.config_file.write_text("checkpoint: {keep_best: {metric: val/own, mode: max}}\nmodel: {loss: x, step: 1}\n")
        validate(run.validation_folder, {f"{run.path}/checkpoints/step20": (20, 0.5)})
    found = data_of(tmp_path / "r.html", tmp_path / "runs")
    expected = {"val/loss": "min", "val/accuracy": "max", "val/own": "max", "val/unknown": None}
    of_section: dict[str, Mapping[str, str | None]] = {
        "Summary": {f"best {name}": mode for name, mode in expected.items() if mode is not None},
        "Checkpoints": expected,
        "Validation of checkpoints": {"loss": "min"},
    }
    for section, modes in of_section.items():
        (table,) = blocks(found, section, "table")
        columns = {column["name"]: column.get("best") for column in table["columns"]}
        assert {name: columns[name] for name in modes} == modes, section


def test_a_pause_is_told_with_what_happened_meanwhile(tmp_path: Path) -> None:
    run = make_run(tmp_path / "slow")
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    for line in lines:
        line["time"] += 30 * (line["step"] > 20) + 60 * (line["step"] > 33)
    write_metrics(run, lines)
    table = blocks(data_of(tmp_path / "r.html", run.path), "Throughput and pauses", "table")
    assert [[row["steps"], row["seconds"], row["meanwhile"]] for row in rows(*table)] == [
        ["33 to 34", "61.0", "nothing that is recorded"],
        ["20 to 21", "31.0", "evaluation"],
    ]


def test_a_sweep_has_its_best_run_first_and_parallel_coordinates(tmp_path: Path) -> None:
    found = data_of(tmp_path / "r.html", make_sweep(tmp_path / "runs/x/sweep", (1.0, 0.01, 0.1)))
    assert sorted(found["runs"]) == ["lr=0.01", "lr=0.1", "lr=1.0"]
    runs, never = blocks(found, "Summary", "table")
    assert [row["run"] for row in rows(runs)] == ["lr=0.01", "lr=0.1", "lr=1.0"]
    assert [row["best val/loss"] for row in rows(runs)] == ["0.11 (step 20)", "0.2 (step 20)", "1.1 (step 20)"]
    assert (runs["marked"], [found["runs"][at] for at in runs["runs"]]) == ([0], ["lr=0.01", "lr=0.1", "lr=1.0"])
    assert never["rows"] == [["9.0", "not begun"]]
    moved = shutil.copytree(tmp_path / "runs", tmp_path / "moved") / "x/sweep"
    assert sorted(data_of(tmp_path / "r.html", moved)["runs"]) == ["lr=0.01", "lr=0.1", "lr=1.0"]
    alone = data_of(tmp_path / "r.html", moved / "optimizer.lr=0.1")
    assert blocks(alone, "Summary", "table") == [], "nothing of the other jobs"
    (parallel,) = blocks(found, "Summary", "parallel")
    assert [axis["label"] for axis in parallel["axes"]] == ["lr", "best val/loss", "best val/accuracy"]
    assert sorted(parallel["axes"][0]["values"]) == [-2, -1, 0], "logarithmic"
    assert sorted(parallel["axes"][0]["ticks"].values()) == ["0.01", "0.1", "1.0"]
    assert [found["runs"][at] for at in parallel["runs"]] == found["runs"]
    (scatter,) = blocks(found, "Summary", "scatter")
    assert scatter["axes"] == parallel["axes"]


@pytest.mark.parametrize(("count", "bars"), [(3, []), (7, []), (8, [[["lr", 1.0, "100%"]]])])
def test_a_share_that_a_parameter_explains_needs_eight_runs(count: int, bars: list[Any], tmp_path: Path) -> None:
    found = data_of(tmp_path / "r.html", make_sweep(tmp_path / "sweep", tuple((n + 1) / 10 for n in range(count))))
    assert [block["bars"] for block in blocks(found, "Summary", "bars")] == bars


@pytest.mark.parametrize(
    ("texts", "in_order"),
    [
        (["10ep", "2ep", "0.5ep"], ["0.5ep", "2ep", "10ep"]),
        (["1h", "90s", "30min"], ["90s", "30min", "1h"]),
        (["1000", "20st", "3"], ["3", "20st", "1000"]),
        (["10ep", "3st", "2ep"], ["2ep", "10ep", "3st"]),
        (["null", "10", "9"], ["9", "10", "null"]),
        (["block10", "block9", "(not set)", "block"], ["block", "block9", "block10", "(not set)"]),
        (["true", "false"], ["false", "true"]),
        (["1e-1", "1e-5", "1e-3"], ["1e-5", "1e-3", "1e-1"]),
    ],
    ids=lambda texts: "-".join(texts),
)
def test_values_of_a_parameter_stand_in_their_order(texts: list[str], in_order: list[str]) -> None:
    axis = parameter_axis("x", texts)
    assert [axis["ticks"][key] for key in sorted(axis["ticks"], key=float)] == in_order
    assert [texts[at] for at in sorted(range(len(texts)), key=axis["values"].__getitem__)] == in_order


def test_importance_is_the_share_of_the_ranks_that_a_parameter_explains() -> None:
    loss = [0.1, 0.11, 0.2, 0.21, 0.3, 0.31]
    parameters = {"noise": ["a", "b"] * 3, "size": list("112233"), "seed": list("152634"), "same": ["x"] * 6}
    shares = importance(parameters, loss)
    assert list(shares) == ["size", "seed", "noise"]
    assert shares["size"] > 0.8
    assert shares["noise"] == 0
    assert importance(parameters, [0.5] * 6) == {}


def test_restarts_are_marked_only_in_charts_of_their_own_run(tmp_path: Path) -> None:
    for name, more in {"a": {"only/mine": float}, "b": {}}.items():
        make_run(tmp_path / name, steps=20, metrics=more)
    drawn = blocks(data_of(tmp_path / "r.html", tmp_path), "Metrics", "chart")
    of_title = {chart["title"]: [mark["run"] for mark in chart["restarts"]] for chart in drawn}
    assert (of_title["mine"], of_title["loss"]) == ([0], [0, 1])


def test_the_goodput_is_named_among_the_shares_of_the_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    run.summary_file.write_text(
        json.dumps(run.read_summary() | {"time_s": {"training": 1.0, "lost": 0.0, "data": 3.0}})
    )
    facts = dict(blocks(data_of(tmp_path / "r.html", run.path), "Summary", "facts")[0]["items"])
    assert facts["where the time went"] == "data 75.0%, training 25.0% (goodput)"


def test_tags_and_notes_are_facts_of_a_run_that_has_some(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    facts = [dict(blocks(data_of(tmp_path / "r.html", run.path), "Summary", "facts")[0]["items"])]
    run.config_file.write_text("tags: [a, b]\nnotes: what it is for\n")
    facts += [dict(blocks(data_of(tmp_path / "r.html", run.path), "Summary", "facts")[0]["items"])]
    assert [(found.get("tags"), found.get("notes")) for found in facts] == [(None, None), ("a, b", "what it is for")]


@pytest.mark.parametrize(
    ("configs", "groups"),
    [
        (["{lr: 1}"], {}),
        (["{lr: 1}", "{lr: 2}"], {"all runs": ["", ""]}),
        (["{lr: 1}", "{lr: 2}", "{lr: 1}"], {"all runs": ["", "", ""], "lr": ["1", "2", "1"]}),
        (
            ["{lr: 1, notes: x}", "{notes: y}", "{notes: y}"],
            {"all runs": [""] * 3, "lr": ["1", "(not set)", "(not set)"]},
        ),
    ],
)
def test_runs_are_grouped_by_keys_that_some_share(
    tmp_path: Path, configs: list[str], groups: dict[str, list[str]]
) -> None:
    runs = [make_run(tmp_path / f"run{number}", steps=10) for number, _ in enumerate(configs)]
    for run, config in zip(runs, configs, strict=True):
        run.config_file.write_text(config)
    assert data_of(tmp_path / "r.html", *(run.path for run in runs))["groups"] == groups


def test_of_several_runs_it_shows_what_differs(tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.2)):
        make_run(tmp_path / "runs" / name, lr=lr)
    validate(tmp_path / "runs/validation-1", {f"{tmp_path}/runs/b/checkpoints/step20": (20, 0.5)})
    found = data_of(tmp_path / "r.html", tmp_path / "runs/a", tmp_path / "runs", tmp_path / "runs/b")
    assert found["runs"] == ["a", "b"], "each once"
    validated = blocks(found, "Validation of checkpoints", "chart")[0]["curves"][0]
    assert (validated["run"], validated["name"], validated["y"]) == (1, "val/loss", [0.5])
    differs, whole = blocks(found, "Config", "table")
    assert rows(differs) == [{"key": "optimizer.lr", "a": "0.1", "b": "0.2"}]
    sides = [row for row in rows(whole) if row["key"] in ("name", "optimizer.lr", "model.note")]
    assert sides == [
        {"key": "name", "a": "a", "b": "b"},
        {"key": "optimizer.lr", "a": "0.1", "b": "0.2"},
        {"key": "model.note", "a": "null", "b": "null"},
    ]
    assert [whole["rows"][at][0] for at in whole["marked"]] == ["optimizer.lr"]
    same, different = blocks(found, "Environment", "table")
    assert ["host", "here"] in same["rows"]
    assert different["rows"] == [["run_id", "a", "b"]]
    loss = blocks(found, "Metrics", "chart")[0]
    assert [(curve["run"], curve["name"]) for curve in loss["curves"]] == [
        (0, "train/loss"), (1, "train/loss"), (0, "val/loss"), (1, "val/loss"),
    ]  # fmt: skip


def test_results_of_checkpoints_in_another_folder_belong_to_their_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    config = tmp_path / "runs/a/config.yaml"
    config.write_text(f"{config.read_text()}checkpoint: {{folder: {tmp_path}/elsewhere}}\n")
    validate(tmp_path / "runs/validation-1", {f"{tmp_path}/elsewhere/step20": (20, 0.5)})
    found = data_of(tmp_path / "r.html", tmp_path / "runs")
    assert found["runs"] == ["a"]
    curve = blocks(found, "Validation of checkpoints", "chart")[0]["curves"][0]
    assert (curve["run"], curve["y"]) == (0, [0.5])


def test_a_folder_of_results_alone_is_reported(tmp_path: Path) -> None:
    results = {f"runs/{name}/checkpoints/step{step}": (step, 1 / step) for name in "ab" for step in (10, 20)}
    validate(tmp_path / "validation-1", results)
    found = data_of(tmp_path / "r.html", tmp_path / "validation-1")
    assert [section["title"] for section in found["sections"]] == ["Validation of checkpoints"]
    (chart,) = blocks(found, "Validation of checkpoints", "chart")
    assert [(curve["run"], curve["name"]) for curve in chart["curves"]] == [(0, "val/loss"), (1, "val/loss")]
    assert found["runs"] == ["a", "b"]
    runs, table = blocks(found, "Validation of checkpoints", "table")
    assert (runs["rows"], runs["runs"], runs["choose"]) == ([["a", "2"], ["b", "2"]], [0, 1], True)
    assert [table["rows"][at][0] for at in table["marked"]] == ["runs/a/checkpoints/step20"], "of all runs"


@pytest.mark.parametrize(
    ("missing", "content"),
    [
        *((name, b'{\xff\x00\n{"step": 1, "ti') for name in ("metrics.jsonl", "summary.json", "checkpoints.jsonl")),
        ("provenance.json", b"{"),
        ("overrides.yaml", None),
    ],
)
def test_files_that_are_missing_or_torn_leave_the_rest(tmp_path: Path, missing: str, content: bytes | None) -> None:
    run = make_run(tmp_path / "x", steps=20, status=None)
    (run.path / missing).unlink()
    if content is not None:
        (run.path / missing).write_bytes(content)
    report = data_of(tmp_path / "r.html", run.path)
    (facts,) = blocks(report, "Summary", "facts")
    assert facts["items"][0] == ["state", "killed"]
    assert blocks(report, "Checkpoints", "timeline"), "from the disk, or the record"
    assert blocks(report, "Config", "table")


def test_a_run_that_has_only_begun_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20, status=None)
    for file in (run.metrics_file, run.summary_file, run.history_file, *run.checkpoints_folder.rglob("*.json")):
        file.unlink()
    report = data_of(tmp_path / "r.html", run.path)
    assert [section["title"] for section in report["sections"]] == ["Summary", "Config", "Environment"]


def test_of_checkpoints_in_an_object_store_the_record_is_told_and_the_store_not_asked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=40)
    shutil.rmtree(run.checkpoints_folder)
    run.config_file.write_text("name: x\ncheckpoint: {folder: 's3://bucket-that-is-not-there/x'}\n")
    (drawn,) = blocks(data_of(tmp_path / "r.html", run.path), "Checkpoints", "timeline")
    assert {mark["step"]: mark["kept"] for mark in drawn["marks"]} == {10: False, 20: True, 30: False, 40: True}
    run.config_file.write_text("name: x\n")
    (table,) = blocks(data_of(tmp_path / "r.html", run.path), "Checkpoints", "table")
    assert [row["then"] for row in rows(table)][1] == "removed; the reason was not recorded"


def test_names_of_a_hostile_run_stay_texts_and_the_page_asks_no_network_for_anything(tmp_path: Path) -> None:
    more = {f"train/{HOSTILE}": float, f"{HOSTILE}/loss": float}
    run = make_run(tmp_path / "x", steps=20, status=RunStatus.failed, metrics=more)
    run.config_file.write_text(json.dumps({"name": HOSTILE, HOSTILE: {"<b>": HOSTILE}}))
    report = data_of(tmp_path / "r.html", run.path)
    assert f"{HOSTILE}.<b>" in [row["key"] for row in rows(*blocks(report, "Config", "table"))]
    (facts,) = blocks(report, "Summary", "facts")
    assert dict(facts["items"])["state"] == "failed"
    page = (tmp_path / "r.html").read_text()
    assert HOSTILE not in page
    assert "<img" not in page.rpartition('id="data">')[2]
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page
    ours = re.sub('id="data">.*?</script>', "", page, flags=re.DOTALL).replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)|@import|url\((?!#)|https?://", ours)


def test_the_command_writes_a_report_and_replaces_only_a_report(empty_folder: Path, capsys: Captured) -> None:
    make_run(empty_folder / "runs/x", steps=20)
    for replaced in ("", r" \(replaced\)"):
        assert main(["report", "runs/x"]) == 0
        line = rf"report\.html{replaced}: 1 run, 9 charts, [5-7]\d(\.\d)? kB; open it in a browser\n"
        assert re.fullmatch(line, capsys.readouterr().out)
    assert main(["report", "--json", "runs/x"]) == 0
    size = Path("report.html").stat().st_size
    facts = {"file": "report.html", "runs": 1, "charts": 9, "size_bytes": size, "problems": []}
    assert json.loads(capsys.readouterr().out) == facts
    for arguments, message in {
        ("runs/x", "-o", "runs/x/config.yaml"): "runs/x/config.yaml exists, and is not a report",
        ("runs/x", "-o", "runs"): "runs is a folder",
        ("runs/x", "-o", "no/r.html"): "there is no folder no",
        ("runs/y",): "runs/y holds no run. Did you mean 'runs/x'?",
        ("runs/x/checkpoints",): "runs/x/checkpoints holds no run",
    }.items():
        assert main(["report", *arguments]) == 2
        assert message in printed_message(capsys.readouterr().err)


def test_the_page_knows_the_earliest_state_to_replay_from(tmp_path: Path) -> None:
    whole, started_late, removed = (make_run(tmp_path / name) for name in ("a run", "late", "removed"))
    for run in (started_late, removed):
        summary = json.loads(run.summary_file.read_text())
        # As if copied from where the first attempt had begun.
        summary["attempts"] = [{**summary["attempts"][0], "start_step": 10}]
        run.summary_file.write_text(json.dumps(summary))
    shutil.rmtree(removed.checkpoints_folder)
    looks = data_of(tmp_path / "r.html", whole.path, started_late.path, removed.path)["looks"]
    assert [look["start"] for look in looks] == [0, 20, None]
    assert looks[0]["run"] == f"'{whole.path}'", "as a shell reads it"


def test_the_use_of_the_machine_is_drawn_over_time_in_units_that_people_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", steps=20)
    lines = [
        {
            "step": step, "epoch": 0.1, "time": BEGAN + 10 * at, "cpu_percent": 50, "memory_free_bytes": 2**30 * at,
            "gpu0_percent": 9, "gpu1_percent": 8, "process_read_bytes_per_s": 2e6,
        }
        # A resume makes steps again.
        for at, step in enumerate([5, 15, 10, 20])
    ]  # fmt: skip
    run.system_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn = {chart["title"]: chart for chart in blocks(data_of(tmp_path / "r.html", run.path), "Machine", "chart")}
    assert list(drawn) == [
        "processor, % (of the process: of one core)", "memory, GiB", "GPU use, %", "disk, MB a second",
    ]  # fmt: skip
    (memory,) = drawn["memory, GiB"]["curves"]
    assert (memory["time"], memory["y"], drawn["memory, GiB"]["axis"]) == ([0, 10, 20, 30], [0, 1, 2, 3], "time")
    assert [line["name"] for line in drawn["GPU use, %"]["curves"]] == ["machine/gpu0_percent", "machine/gpu1_percent"]
    assert drawn["disk, MB a second"]["curves"][0]["y"] == [2, 2, 2, 2]


def test_the_decisions_of_a_search_are_in_units_of_its_metric_and_a_run_trained_on_is_not_paused(
    tmp_path: Path,
) -> None:
    lines: list[dict[str, Any]] = [{"sweep.prune": "asha", "sweep.rungs": ["0.1dur"]}]
    jobs = ["KEY,optimizer.lr,status,step,reason,run_dir"]
    for key, paused_at, accuracy in (("a", 20, 0.25), ("b", 10, None)):
        run = make_run(tmp_path / key, steps=20, status=None)
        run.end_attempt(outcome(RunStatus.finished, 20, "hard_stop at 20 steps"), now=BEGAN + 2000)
        loss = None if accuracy is None else -accuracy
        lines.append({"event": "measure", "trial": key, "rung": 0, "loss": loss, "metric": "val/accuracy"})
        jobs.append(f"{key},{key},paused,{paused_at},not this one,{run.path}")
    (tmp_path / "search.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "sweep.csv").write_text("\n".join(jobs) + "\n")
    _, decisions = blocks(data_of(tmp_path / "r.html", tmp_path), "Summary", "table")
    assert decisions["title"] == "What the search has decided by val/accuracy"
    assert decisions["rows"] == [["lr=a", "0.25", "paused", "not this one"], ["lr=b", "", "finished", ""]]
