"""Sweeps that draw and pause their trials, on real trainings: against plain runs, after kills, and with more trials."""

from __future__ import annotations

import contextlib
import csv
import io
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from chromium import needs_chromium, page
from command import Result, fork_jobs, make_project, records, running, train

from trainer_cli.commands.command_line import main
from trainer_cli.files import read_rows
from trainer_cli.parts import list_addons

pytestmark = [pytest.mark.slow, pytest.mark.addon("jobs")]

BASE = (
    "digits_mlp", "model.hidden=[8]", "loop.max_duration=20", "loop.eval_interval=2", "loop.log_interval=5",
    "scheduler.warmup=3", "loggers=jsonl", "report=false",
)  # fmt: skip
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1))", "model.hidden=[8],[16]")
ASHA = ("sweep.search=random", "sweep.prune=asha", "sweep.eta=2", "sweep.rungs=[2st,6st]")
COMMAND = ("fit", "-m", *BASE[:1], *BASE[2:], *SPACE, *ASHA)


def run_here(*words: str, cwd: Path) -> Result:
    """Run the command in this process; its runs are forks of a warm one."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.chdir(cwd)
        fork_jobs(patch)
        code = main(words)
    return Result(code, out.getvalue(), err.getvalue())


def rows_of(project: Path) -> list[dict[str, str]]:
    with open(sweep_of(project) / "sweep.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sweep_of(project: Path) -> Path:
    return project / "runs/digits_mlp/sweep"


def results_of(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The last weights of a run, and all that it has logged apart from times."""
    measured = [
        {
            key: value
            for key, value in row.items()
            if key in ("step", "epoch", "lr") or key.startswith(("train/loss", "val/"))
        }
        for row in records(run / "metrics.jsonl")
    ]
    return (run / "checkpoints/step20/rank0.safetensors").read_bytes(), measured


def train_plainly(row: dict[str, str], project: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The results of a trial that was never paused."""
    swept = [f"{key}={row[key]}" for key in ("optimizer.lr", "model.hidden")]
    name = f"plain-{row['optimizer.lr']}"
    result = train("fit", *BASE[:1], *BASE[2:], *swept, f"name={name}", cwd=project)
    assert result.code == 0, result.err
    return results_of(project / "runs" / name)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A finished search with four trials."""
    project = tmp_path_factory.mktemp("swept")
    return project, run_here(*COMMAND, "sweep.trials=4", cwd=project)


def test_trials_take_turns_at_rungs_and_decisions_are_recorded_with_reasons(swept: tuple[Path, Result]) -> None:
    project, result = swept
    assert result.code == 0, result.err
    rows = rows_of(project)
    by_status = {status: [row for row in rows if row["status"] == status] for status in ("finished", "paused")}
    assert by_status["finished"]
    assert len(by_status["finished"] + by_status["paused"]) == 4
    assert {row["step"] for row in by_status["paused"]} == {"2", "6"}
    assert all(row["reason"].endswith(", not this one") for row in by_status["paused"])
    assert "the best 2 of 4 go on at 2st, not this one" in result.out
    assert "next: the best job, trained twice as long:" in result.out
    header, *made = records(sweep_of(project) / "search.jsonl")
    assert header["sweep.eta"] == 2
    # Two trials are at the rung: the better one trains on before a third begins.
    assert [row["event"] for row in made[:6]] == ["begin", "measure", "begin", "measure", "go on", "measure"]
    assert made[4]["why"] == "the best 1 of 2 go on at 2st"
    losses = {row["trial"]: row["loss"] for row in made[:4] if row["event"] == "measure"}
    assert made[4]["trial"] == min(losses, key=losses.__getitem__)
    for row in made:
        if row["event"] == "measure":
            logged = records(sweep_of(project) / row["trial"] / "metrics.jsonl")
            until = [each["val/loss"] for each in logged if "val/loss" in each and each["step"] <= row["step"]]
            assert row["loss"] == min(until)


@needs_chromium
@pytest.mark.addon("view")
@pytest.mark.parametrize("name", ["report", "serve"])
def test_a_page_shows_which_trials_went_on_and_which_are_paused_and_why(
    name: str, swept: tuple[Path, Result], tmp_path: Path
) -> None:
    from serving import served

    project, _ = swept
    _, *made = records(sweep_of(project) / "search.jsonl")
    expected = []
    for row in rows_of(project):
        of_trial = [each for each in made if each["trial"] == row["KEY"]]
        losses = [f"{each['loss']:.4g}" for each in of_trial if each["event"] == "measure"]
        reasons = [each["why"] for each in of_trial if each["event"] == "go on"]
        reason = row["reason"] if row["status"] == "paused" else ""
        expected.append([*losses, *[""] * (3 - len(losses)), "; ".join(reasons), row["status"], reason])
    title = "What the search has decided by val/loss"
    table = f"[...document.querySelectorAll('h3')].find((one) => one.textContent === {title!r})?.parentNode"
    assert run_here("report", str(sweep_of(project)), "-o", str(tmp_path / "r.html"), cwd=project).code == 0
    with served(project / "runs") as server, page(tmp_path / "profile") as chromium:
        chromium.open(server.url if name == "serve" else (tmp_path / "r.html").as_uri())
        chromium.wait_for(table)
        cells = "[...row.cells].map((cell) => cell.textContent)"
        head, *rows = chromium.run(f"[...{table}.querySelectorAll('tr')].map((row) => {cells})")
        assert head == ["run", "2st", "6st", "end", "went on because", "state", "paused because"]
        assert sorted(cells for _, *cells in rows) == sorted(expected)
        assert [cells.count("") for _, *cells in rows[:1]] == [1], "one that has ended comes first"
        # The table of all runs says the same.
        runs = f"[...document.querySelectorAll('.runs tbody tr')].map((row) => {cells}.slice(1, 3))"
        assert sorted(chromium.run(runs)) == sorted([state, reason] for *_, state, reason in expected)
        colours = "['paused', 'finished'].map((state) => getComputedStyle([...document.querySelectorAll('td')].find("
        assert len(set(chromium.run(f"{colours}(cell) => cell.dataset.state === state)).color)"))) == 2
        assert chromium.run("byId('problem').textContent") == ""


def test_a_trial_that_was_paused_ends_as_a_run_that_was_not(swept: tuple[Path, Result], tmp_path: Path) -> None:
    project, _ = swept
    rows = rows_of(project)
    finished = next(row for row in rows if row["status"] == "finished")
    assert int(finished["attempts"]) == 3
    assert results_of(project / finished["run_dir"]) == train_plainly(finished, tmp_path)
    # One that the search has left goes on where the user likes.
    paused = next(row for row in rows if row["step"] == "6" and row["status"] == "paused")
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    result = train("fit", f'resume="{paused["run_dir"]}"', "loop.hard_stop=null", cwd=copy)
    assert result.code == 0, result.err
    assert results_of(copy / paused["run_dir"]) == train_plainly(paused, tmp_path)


def test_a_trial_that_was_trained_on_by_hand_goes_on_to_its_end_and_is_compared_at_no_rung_on_the_way(
    swept: tuple[Path, Result], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    shutil.copytree(swept[0], project)
    first, second, third = [row for row in rows_of(project) if row["status"] == "paused"]
    for row, stop in ((first, "null"), (second, "14st")):
        result = train("fit", f'resume="{row["run_dir"]}"', f"loop.hard_stop={stop}", cwd=project)
        assert result.code == 0, result.err
    before = records(sweep_of(project) / "search.jsonl")
    again = run_here(*COMMAND, "sweep.trials=4", cwd=project)
    assert again.code == 0, again.out + again.err
    assert [row["KEY"] for row in rows_of(project) if row["status"] == "paused"] == [third["KEY"]]
    made = records(sweep_of(project) / "search.jsonl")[len(before) :]
    for row, step in ((first, 20), (second, 14)):
        gone_on, measured = [each for each in made if each["trial"] == row["KEY"]]
        assert (gone_on["rung"], gone_on["why"]) == (2, f"it was trained to step {step} by hand")
        assert (measured["rung"], measured["step"]) == (2, 20)
        assert results_of(project / row["run_dir"]) == train_plainly(row, tmp_path)


def test_a_sweep_says_so_if_its_jobs_were_trained_by_other_source(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    words = ("fit", "-m", "mine", "loggers=jsonl", "report=false", "loop.max_duration=6", "loop.eval_interval=6")
    assert "the source differs" not in run_here(*words, "optimizer.lr=0.1,0.2", cwd=project).out
    file = project / "mine/parts.py"
    file.write_text(f"{file.read_text()}# Edited.\n")
    more = run_here(*words, "optimizer.lr=0.1,0.2,0.3", cwd=project)
    assert "compared although the source differs: mine/parts.py" in more.out, more.out + more.err


def test_the_same_command_again_trains_nothing_and_one_with_more_trials_adds_to_them(
    swept: tuple[Path, Result], tmp_path: Path
) -> None:
    project, first = swept
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    again = run_here(*COMMAND, "sweep.trials=4", cwd=copy)
    assert (again.code, again.out) == (0, first.out)
    record = sweep_of(copy) / "search.jsonl"
    before = record.read_bytes()
    assert before == (sweep_of(project) / "search.jsonl").read_bytes()
    more = run_here(*COMMAND, "sweep.trials=6", cwd=copy)
    assert more.code == 0, more.err
    assert record.read_bytes().startswith(before)
    keys = [row["KEY"] for row in rows_of(copy)]
    assert keys[:4] == [row["KEY"] for row in rows_of(project)]
    assert len(keys) == 6
    assert "the best 3 of 6 go on at 2st" in more.out


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(4, 19))])
def test_a_sweep_that_is_killed_goes_on_with_the_same_decisions_and_results(
    seed: int, swept: tuple[Path, Result], tmp_path: Path
) -> None:
    project, undisturbed = swept
    chance = random.Random(seed)
    for _ in range(3):
        with running(*COMMAND, "sweep.trials=4", cwd=tmp_path) as command:
            time.sleep(0.2 + 2.5 * chance.random())
            command.signal(signal.SIGKILL)
            command.end()
    result = train(*COMMAND, "sweep.trials=4", cwd=tmp_path)
    assert result.code == undisturbed.code, result.err
    files = [sweep_of(each) / "search.jsonl" for each in (project, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()
    finished = next(row["run_dir"] for row in rows_of(project) if row["status"] == "finished")
    assert results_of(project / finished) == results_of(tmp_path / finished)


def test_a_search_by_optuna_that_is_stopped_draws_the_same_trials(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    words = (*COMMAND[: -len(ASHA)], "sweep.search=optuna", "sweep.trials=3", "sweep.prune=median", "sweep.rungs=[2st]")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    result = train(*words, "sweep.seed=2", cwd=whole)
    assert result.code == 0, result.err
    with running(*words, "sweep.seed=2", cwd=parts) as command:
        command.wait_for(lambda: len(read_rows(sweep_of(parts) / "search.jsonl")) > 3, "a second trial")
        command.signal(signal.SIGTERM)
        assert command.end().code == 75
    assert train(*words, "sweep.seed=2", cwd=parts).code == 0
    files = [sweep_of(each) / "search.jsonl" for each in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [row["status"] for row in rows_of(whole)] == ["finished"] * 3
    assert "optimizer.lr" in run_here("plan", *words[1:], "sweep.seed=2", cwd=whole).out


def test_a_grid_is_pruned_too_and_a_trial_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    words = ("fit", "-m", *BASE, "optimizer.lr=1e-4,1e30,0.03", *ASHA[1:], "sweep.metric=val/accuracy")
    result = run_here(*words, cwd=tmp_path)
    assert result.code == 1
    assert "failed: optimizer.lr=1e30" in result.out
    assert {row["optimizer.lr"]: row["status"] for row in rows_of(tmp_path)} == {
        "0.0001": "paused", "1e30": "failed", "0.03": "finished"
    }  # fmt: skip
    # The largest accuracy is best, which is recorded as a loss.
    measured = [row for row in records(sweep_of(tmp_path) / "search.jsonl") if row.get("metric") == "val/accuracy"]
    assert all(-1 <= row["loss"] <= 0 for row in measured)


MISTAKES = {
    "optimizer.lr=interval(1,2)": "add sweep.search=random sweep.trials=20. For a grid, did you mean optimizer.lr=1,2?",
    "optimizer.lr=interval(1,2) sweep.search=random": "sweep.trials, the number of runs, is null",
    "optimizer.lr=1,2 sweep.search=random sweep.trials=3": "sweep.trials is 3, but there are at most 2",
    "optimizer.lr=interval(2,1) sweep.search=random sweep.trials=3": "Its ends are numbers, the first one less",
    "optimizer.lr=tag(log,interval(0,1)) sweep.search=random sweep.trials=3": "Its ends are numbers above 0",
    "optimizer.lr=tag(lag,interval(0,1)) sweep.search=random sweep.trials=3": "there is no tag lag",
    "optimizer.lr=interval(1,2) sweep.search=random sweep.trials=2 sweep.metric=val/xyz": "keep_best.mode=min or max",
    "optimizer.lr=1,2 sweep.seed=1,2": "sweep.seed is swept",
    "optimizer.lr=1,2 sweep.prune=asha --submit local": "Leave --submit out",
    "optimizer.lr=1,2 sweep.prune=asha sweep.rungs=[3ep,2ep]": "each longer than the one before",
    "optimizer.lr=1,2 name=a,b sweep.search=random sweep.trials=3": "Add name=NAME",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_found_before_anything_is_written(words: str, tmp_path: Path) -> None:
    result = train("fit", "-m", *BASE, *words.split(), cwd=tmp_path)
    assert result.code == 2, result.out + result.err
    assert MISTAKES[words] in result.err
    assert not list(tmp_path.iterdir())


def test_without_an_evaluation_before_the_first_rung_the_cure_is_named(tmp_path: Path) -> None:
    result = run_here(*COMMAND, "sweep.trials=2", "loop.eval_interval=5", cwd=tmp_path)
    assert result.code == 2
    assert "has no value of a validation loss at step 2" in result.err
    assert "loop.eval_interval to evaluate before the first of sweep.rungs" in result.err


def test_a_search_that_has_begun_is_not_decided_by_other_rules(swept: tuple[Path, Result]) -> None:
    project, _ = swept
    result = train(*COMMAND, "sweep.trials=4", "sweep.eta=4", cwd=project)
    assert result.code == 2
    assert "search.jsonl was made with sweep.eta=2, not 4" in result.err
    assert "name=OTHER" in result.err
    anew = train(*COMMAND, "sweep.trials=4", "resume=anew", cwd=project)
    assert anew.code == 2
    assert "name=OTHER" in anew.err


def test_it_is_an_addon() -> None:
    assert list_addons()["search"] == "shipped"
