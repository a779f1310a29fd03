"""What was run is kept over interruptions, a time is kept to, and every failure names the command that repeats it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from small_parts import note

from campaign import ROOT, main, report
from campaign.fault_class import FaultClass, Size, Trials
from campaign.runner import Campaign
from campaign.verdict import PASSED, Outcome, Verdict

MACHINE = {"processors": 2, "memory, GiB": 8, "file system": "ext4", "date": "2026-01-02", "system": "Linux"}


class Clock:
    """A clock that a trial puts forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_class(key: str, run: Callable[[int], Outcome], count: int = 4) -> FaultClass:
    @contextmanager
    def prepare(folder: Path, asked: int, size: Size) -> Iterator[Trials]:
        assert list(folder.iterdir()) == []
        yield Trials(asked, run, together=1)

    return FaultClass(key, f"Title of {key}", f"What {key} does.", "L1", {Size.full: count}, prepare)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign((), Size.full, "abc", tmp_path / "state/train.json", 100.0, Clock())


def test_every_trial_runs_once_and_an_exception_is_a_hard_fail(campaign: Campaign) -> None:
    numbers: list[int] = []

    def run(number: int) -> Outcome:
        numbers.append(number)
        if number == 2:
            raise ValueError("what\nwent wrong")
        return Outcome(Verdict.passed, announced=3)

    fault = make_class("kills", run)
    state = replace(campaign, classes=[fault]).run()
    assert sorted(numbers) == [0, 1, 2, 3]
    results = report.make_report([fault], state, MACHINE)
    (row,) = results["rows"]
    assert (row["trials"], row["asked"], row["announced"]) == (4, 4, 9)
    assert row["verdicts"] == {"PASS": 3, "HARD_FAIL": 1, "SILENT_DIVERGENCE": 0, "LOST_WORK": 0}
    (line,) = report.failed_trials(results)
    assert line.startswith(
        "- HARD_FAIL: `scripts/faults full --only kills --trial 2`: ValueError: what went wrong (test_runner.py:"
    )


def test_a_call_that_was_broken_off_goes_on_with_the_next_trial(campaign: Campaign) -> None:
    numbers: list[int] = []

    def run(number: int) -> Outcome:
        if len(numbers) == 2 and not interrupted:
            interrupted.append(number)
            raise KeyboardInterrupt
        numbers.append(number)
        cast("Any", campaign.clock).now += 6
        return PASSED

    interrupted: list[int] = []
    whole = replace(campaign, classes=[make_class("kills", run)])
    with pytest.raises(KeyboardInterrupt):
        whole.run()
    state = whole.run()
    assert sorted(numbers) == [0, 1, 2, 3]
    assert state["classes"]["kills"]["seconds"] == 24


def test_trials_of_another_commit_or_size_are_run_again(campaign: Campaign) -> None:
    numbers: list[int] = []
    fault = make_class("kills", lambda number: note(numbers, number) or PASSED)
    for commit in ("abc", "abc", "def"):
        replace(campaign, classes=[fault], commit=commit).run()
    assert len(numbers) == 8


def test_classes_share_the_time_and_what_is_left_is_for_those_that_it_was_too_short_for(campaign: Campaign) -> None:
    def run(number: int) -> Outcome:
        cast("Any", campaign.clock).now += 10
        return PASSED

    classes = [
        make_class("long", run, 50),
        replace(make_class("larger", run, 50), share=2),
        make_class("short", run, 1),
    ]
    state = replace(campaign, classes=classes).run()
    counts = {key: len(row["trials"]) for key, row in state["classes"].items()}
    # A trial takes 10 s. At first the long one gets 25 s, the larger one two thirds of the rest; 10 s are left.
    assert counts == {"long": 4, "larger": 5, "short": 1}
    rows = report.make_report(classes, state, MACHINE)["rows"]
    assert "| Title of long | 4 of 50 | 4 |" in report.table(rows)


def test_a_long_preparation_leaves_half_of_the_share_to_the_trials(campaign: Campaign) -> None:
    def run(number: int) -> Outcome:
        cast("Any", campaign.clock).now += 10
        return PASSED

    @contextmanager
    def prepare(folder: Path, count: int, size: Size) -> Iterator[Trials]:
        cast("Any", campaign.clock).now += 40
        yield Trials(count, run, together=1)

    slow, last = (replace(make_class(key, run, 50), prepare=prepare) for key in ("slow", "last"))
    state = replace(campaign, classes=[slow, last]).run()
    counts = {key: len(row["trials"]) for key, row in state["classes"].items()}
    # Of the first one's 50 s, 25 s remain after its preparation. No trial of the last starts after the end of all.
    assert counts == {"slow": 3, "last": 0}


def test_the_row_shows_the_most_that_was_measured(campaign: Campaign) -> None:
    times = [0.2, 0.61, 0.0, 0.1]
    fault = make_class("signals", lambda number: Outcome(Verdict.passed, measured_s=times[number]))
    fault = replace(fault, measures="to the exit")
    rows = report.make_report([fault], replace(campaign, classes=[fault]).run(), MACHINE)["rows"]
    assert "| Title of signals; to the exit at most 0.61 s | 4 | 4 |" in report.table(rows)


def test_a_class_that_this_machine_cannot_run_says_why(campaign: Campaign) -> None:
    fault = replace(make_class("cuts", lambda number: PASSED), skipped=lambda: "needs the superuser")
    state = replace(campaign, classes=[fault]).run()
    assert "| Title of cuts | skipped: needs the superuser |" in report.table(
        report.make_report([fault], state, MACHINE)["rows"]
    )


def test_a_class_that_cannot_be_prepared_is_a_hard_fail(campaign: Campaign) -> None:
    @contextmanager
    def prepare(folder: Path, count: int, size: Size) -> Iterator[Trials]:
        raise OSError("no loop device")
        yield

    fault = replace(make_class("cuts", lambda number: PASSED), prepare=prepare)
    results = report.make_report([fault], replace(campaign, classes=[fault]).run(), MACHINE)
    assert [failure["verdict"] for failure in results["rows"][0]["failures"]] == ["HARD_FAIL"]


def test_the_page_and_the_row_of_the_readme_are_written_again_from_the_saved_results(
    campaign: Campaign, tmp_path: Path
) -> None:
    classes = [make_class("kills", lambda number: PASSED), make_class("cuts", lambda number: PASSED)]
    results = report.make_report(classes, replace(campaign, classes=classes).run(), MACHINE)
    peers = [
        replace(make_class(f"cuts_{name}", lambda number: PASSED), title="Power cut", contender=name)
        for name in ("train", "a", "DCP")
    ]
    facts = {**MACHINE, "versions": {"a": "saver-a 1.2"}}
    contenders = report.make_report(peers, replace(campaign, classes=peers).run(), facts)
    (tmp_path / "README.md").write_text("# a project\n\nText.\n\n## Documentation\n\nMore.\n")
    report.write({"train": results, "contenders": contenders}, tmp_path)
    written = {path: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    report.write(report.read(tmp_path), tmp_path)
    assert {path: path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()} == written
    readme, page = written[tmp_path / "README.md"], written[tmp_path / "RELIABILITY.md"]
    assert "| [2 kinds](RELIABILITY.md) | 8 | 8 | 0 | 0 | 0 |" in readme
    assert readme.endswith("\n\n## Documentation\n\nMore.\n")
    assert "\n| | `train` | others |\n| --- | --- | --- |\n| Power cut | 4 of 4 | DCP 4 |\n" in readme
    assert "\n| a (saver-a 1.2) | 4 PASS |\n| DCP | 4 PASS |\n" in page
    assert "`scripts/faults full --peers`, 2026-01-02" in page
    assert page.count("What cuts_train does.") == 1


def test_render_as_a_command_writes_the_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["scripts/faults", "--render"])
    assert main.main() == 2
    assert "docs/reliability/results.json is not there" in capsys.readouterr().out
    for path in (report.RESULTS, report.README):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    assert main.main() == 0
    assert (tmp_path / report.PAGE).read_bytes() == (ROOT / report.PAGE).read_bytes()
    assert (tmp_path / report.README).read_bytes() == (ROOT / report.README).read_bytes()


def test_a_contender_shows_each_verdict_and_why_it_was_not_run(campaign: Campaign) -> None:
    verdicts = [Verdict.hard_fail, Verdict.passed, Verdict.lost, Verdict.lost]
    failing = replace(make_class("cuts_a", lambda number: Outcome(verdicts[number])), title="cut", contender="a")
    skipped = replace(failing, key="cuts_b", contender="b", skipped=lambda: "b is not installed")
    late = replace(failing, key="cuts_c", contender="c", counts={Size.full: 0})
    classes = [failing, skipped, late]
    rows = report.make_report(classes, replace(campaign, classes=classes).run(), MACHINE)["rows"]
    assert report.contender_table(rows, {}).splitlines()[2:] == [
        "| a | 1 PASS, 1 HARD_FAIL, 2 LOST_WORK |",
        "| b | skipped: b is not installed |",
        "| c | not run: no time was left |",
    ]


def test_the_project_shows_what_was_found() -> None:
    """The page and the row of the README are what the saved results give; or there is none of them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not (ROOT / report.RESULTS).exists():
        assert not (ROOT / report.PAGE).exists()
        assert "RELIABILITY.md" not in readme
        return
    results = json.loads((ROOT / report.RESULTS).read_text(encoding="utf-8"))
    assert (ROOT / report.PAGE).read_text(encoding="utf-8") == report.page(results)
    assert report.with_section(readme, results) == readme
    assert report.failed_trials(results["train"]) == []
