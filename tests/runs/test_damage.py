"""Runs with files that are damaged or refused: every verb lists them, says what cannot be read, and shows the rest."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_records import make_runs, try_damage
from reported import make_run, record, validate
from unprivileged import nobody

from trainer_cli.addons.view.serve_runs import ServedRuns
from trainer_cli.commands.command_line import main
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.strict_json import strict_json

Captured = pytest.CaptureFixture[str]
GARBAGE = b"\x00\xff{]\n" * 3
HUGE = b"[" * 2_000_000 + b"\n"
REFUSED, DIRECTORY = "refused", "directory"


def lines(count: str) -> str:
    return f"{count} of {{file}} cannot be read"


DAMAGED = "{file} is damaged"
ALIASES = b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 60))
ODD_LINES = b"""{"step": 1000000000000000000000000000000, "epoch": 0, "time": 1}
{"step": 1, "epoch": 0, "time": 1e15}
{"step": -1, "epoch": 0, "time": 1}
{"step": 1, "epoch": [[]], "time": 1}
{"step": 1, "epoch": 0, "time": 1700000000, "train/loss": [[]], "train/lr": [1], "a": 1%s}
""" % (b"0" * 400)
ODD_SUMMARY = b"""{"wall_time_s": Infinity, "checkpoints": 1e15, "step": 1e30, "total_steps": -1, "status": 3,
"best_metrics": [], "attempts": [7, {"attempt": 1, "changed_environment": -1}]}"""
CASES = [
    ("metrics.jsonl", None, None, "every"),
    ("metrics.jsonl", b"", None, "every"),
    ("metrics.jsonl", b'{"step": 1, "epo', None, "every"),
    ("metrics.jsonl", GARBAGE, lines("3 lines"), "every"),
    ("metrics.jsonl", HUGE, lines("1 line"), "every"),
    ("checkpoints.jsonl", HUGE, None, "every"),
    ("system.jsonl", GARBAGE, lines("3 lines"), "pages"),
    ("summary.json", None, None, "every"),
    ("summary.json", b"", DAMAGED, "pages"),
    ("summary.json", GARBAGE, DAMAGED, "pages"),
    ("summary.json", HUGE, DAMAGED, "pages"),
    ("config.yaml", b"", DAMAGED, "pages"),
    ("config.yaml", GARBAGE, DAMAGED, "pages"),
    ("config.yaml", b"[" * 100_000, DAMAGED, "pages"),
    ("config.yaml", b'["]", ' * 50_000, DAMAGED, "pages"),
    ("config.yaml", b"- " * 50_000, DAMAGED, "pages"),
    ("config.yaml", b"a: !!bool x\n", DAMAGED, "pages"),
    ("config.yaml", b"a: !!int ''\n", DAMAGED, "pages"),
    ("config.yaml", ALIASES, DAMAGED, "pages"),
    ("metrics.jsonl", ODD_LINES, lines("4 lines"), "every"),
    ("system.jsonl", ODD_LINES, lines("4 lines"), "pages"),
    ("checkpoints.jsonl", b'{"event": "saved", "name": "a", "reason": "", "step": 1, "time": -1e28}\n', None, "every"),
    ("summary.json", ODD_SUMMARY, "8 values of {file} cannot be read", "pages"),
    ("environment.json", GARBAGE, DAMAGED, "pages"),
    ("provenance.json", GARBAGE, DAMAGED, "pages"),
    *(
        (file, damage, f"{{file}} cannot be read: {why}", verbs)
        for damage, why in ((REFUSED, "Permission denied"), (DIRECTORY, "Is a directory"))
        for file, verbs in (
            ("metrics.jsonl", "every"), ("summary.json", "every"), ("checkpoints.jsonl", "every"),
            ("system.jsonl", "pages"), ("media.jsonl", "pages"), ("validation/validation.jsonl", "pages"),
        )
    ),
    ("config.yaml", REFUSED, "{file} cannot be read: Permission denied", "pages"),
    ("", REFUSED, "its directory cannot be read: Permission denied", "every"),
]  # fmt: skip


@contextmanager
def damaged(file: str, damage: bytes | str | None) -> Iterator[Path]:
    """A folder with a run `good` and a killed run `bad`, one of whose files is damaged."""
    with nobody() if damage == REFUSED else tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        for name in ("good", "bad"):
            run = make_run(root / name, steps=20, status=None)
            validate(run.validation_folder, {"checkpoints/step20": (20, 0.5)})
            for more in (run.system_file, run.path / "media.jsonl"):
                more.write_text(f"{strict_json(record(1, 10, 0.1, {}))}\n")
        path = root / "bad" / file
        if damage == REFUSED:
            path.chmod(0)
        else:
            path.unlink()
            if damage == DIRECTORY:
                path.mkdir()
            elif isinstance(damage, bytes):
                path.write_bytes(damage)
        yield root
        if damage == REFUSED:
            path.chmod(0o700)


def rows_of(table: dict[str, Any]) -> dict[str, dict[str, str]]:
    names = [column["name"] for column in table["columns"]]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table["rows"]}


def reported(root: Path) -> dict[str, Any]:
    output = root.parent / "report.html"
    assert main(["report", str(root), "-o", str(output)]) == 0
    text = output.read_text().partition('id="data">')[2].partition("</script>")[0]
    page: dict[str, Any] = json.loads(text)
    return page


@pytest.mark.parametrize(
    ("file", "damage", "problem", "verbs"),
    [pytest.param(*case, marks=pytest.mark.root if case[1] == REFUSED else ()) for case in CASES],
)
def test_a_damaged_run_is_listed_with_what_cannot_be_read_beside_what_can(
    file: str, damage: bytes | str | None, problem: str | None, verbs: str, capsys: Captured
) -> None:
    with damaged(file, damage) as root:
        text = (problem or "").format(file=os.path.basename(file) if "{file} is" in (problem or "") else file)
        page = reported(root)
        warnings = capsys.readouterr().err
        assert warnings == (f"warning: {root / 'bad'}: {text}\n" if text else "")
        summary = page["sections"][0]["blocks"][0]
        in_report = rows_of(summary)
        assert sorted(in_report) == ["bad", "good"]
        drawn = {
            line["run"]
            for section in page["sections"]
            for block in section["blocks"]
            for line in block.get("curves", ())
        }
        has_curves = file != "" and (file != "metrics.jsonl")
        assert {page["runs"][run] for run in drawn} >= ({"good", "bad"} if has_curves else {"good"})

        served = ServedRuns(root)
        try:
            overview = served.overview()
            for number in overview["runs"]:
                assert served.page([int(number)])["sections"], "also of that run alone"
            in_serve = rows_of(served.overview()["table"])
        finally:
            served.close()
        ended = "" if in_report["bad"]["state"] == "unreadable" else "the process ended without a summary"
        for table in (in_report, in_serve):
            assert table["bad"]["reason"] == "; ".join(filter(None, (ended, text)))
            assert table["good"]["reason"] == "the process ended without a summary"

        assert main(["top", "--json", str(root)]) == 0
        in_top = {Path(line["run"]).name: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
        assert (text in f"{in_top['bad']['reason']} {in_top['bad']['problem']}") == (verbs == "every" or not text)
        assert in_top["good"]["problem"] == ""
        if file:
            assert main(["tail", str(root / "bad")]) == 0
            assert (text in capsys.readouterr().out) == (verbs == "every" or not text)


def test_a_single_run_says_what_cannot_be_read_among_its_facts() -> None:
    with damaged("metrics.jsonl", GARBAGE) as root:
        _, facts = reported(root / "bad")["sections"][0]["blocks"]
        assert dict(facts["items"])["damage"] == "3 lines of metrics.jsonl cannot be read"


def test_damage_goes_with_the_lines_that_a_resume_drops(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a", steps=20, status=RunStatus.finished)
    whole = run.metrics_file.read_bytes()
    served = ServedRuns(tmp_path / "runs")
    try:
        for added, reason in ((b"", None), (GARBAGE, "3 lines"), (GARBAGE * 2, "6 lines"), (b"", None)):
            run.metrics_file.write_bytes(whole + added)
            number = int(next(iter(served.overview()["runs"])))
            served.page([number])
            row = rows_of(served.overview()["table"])["a"]
            assert row.get("reason") == (reason and f"{reason} of metrics.jsonl cannot be read")
    finally:
        served.close()


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 120), marks=pytest.mark.campaign, id="range(30, 120)")], ids=str
)
def test_no_reader_fails_by_odd_values_in_the_files_of_a_run(seeds: range, tmp_path: Path) -> None:
    make_runs(tmp_path / "whole")
    problems = [
        problem for seed in seeds for problem in try_damage(tmp_path / "whole", tmp_path / f"try{seeds.start}", seed)
    ]
    assert not problems, "\n".join(problems)
