"""`train compare` on real trainings whose answer is known, and after kills, edits and mistakes."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command import Result, make_project, records, running, train, trained, weights
from device_watch import make_watched_project, read_notes
from here import train_here

from trainer_cli.parts import list_addons

pytestmark = pytest.mark.slow

SHORT = ("--budget", "30steps", "--", "digits_mlp", "model.hidden=[16]", "loop.eval_interval=15", "loggers=jsonl")
TINY = ("loggers=jsonl", "loop.max_duration=6", "loop.eval_interval=6")
CLEAR = ("compare", "optimizer.lr=0.02", "optimizer.lr=1e-6")


HALVED = "self.hidden = torch.nn.Linear(2, width)\n        self.hidden.weight.data /= 2"


def compare(*words: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and what `--json` prints."""
    result = train_here(words[0], "--json", *words[1:], cwd=cwd)
    try:
        return result.code, json.loads(result.out)
    except ValueError:
        raise AssertionError(result.out + result.err) from None


def folder_of(project: Path) -> Path:
    """The folder of the only comparison."""
    [folder] = (project / "runs/compare").iterdir()
    return folder


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A finished comparison, whose answer is that a learning rate of almost nothing is worse."""
    project = tmp_path_factory.mktemp("clear")
    return project, train_here(*CLEAR, *SHORT, cwd=project)


def test_a_learning_rate_of_almost_nothing_is_worse_and_the_page_says_by_how_much(clear: tuple[Path, Result]) -> None:
    project, result = clear
    assert result.code == 1, result.err
    assert "optimizer.lr: 0.02 -> 1e-06" in result.out
    assert "B is worse than A: mean difference -" in result.out
    assert "A varies by ±" in result.out
    assert "seed 1: A " in result.err
    assert "inf" not in result.err
    pairs = records(folder_of(project) / "pairs.jsonl")
    assert [pair["seed"] for pair in pairs] == [*range(1, len(pairs) + 1)]
    assert 4 <= len(pairs) < 10
    runs = sorted(path.name for path in folder_of(project).glob("*-seed*"))
    assert runs == sorted(f"{side}-seed{pair['seed']}" for pair in pairs for side in "ab")


def test_the_runs_are_those_of_a_plain_fit_with_the_seed(clear: tuple[Path, Result]) -> None:
    project, _ = clear
    alone = train(
        "fit", *SHORT[3:], "optimizer.lr=0.02", "seed=2", "loop.max_duration=30", "run_dir=runs/alone", cwd=project
    )
    assert alone.code == 0, alone.err
    compared = folder_of(project) / "a-seed2"
    files = [run / "checkpoints/step30/rank0.safetensors" for run in (compared, project / "runs/alone")]
    assert files[0].read_bytes() == files[1].read_bytes()
    values = [row["val/loss"] for row in records(project / "runs/alone/metrics.jsonl") if "val/loss" in row]
    assert min(values) == records(folder_of(project) / "pairs.jsonl")[1]["a"]


def test_the_same_command_again_trains_nothing_and_says_the_same(clear: tuple[Path, Result]) -> None:
    project, first = clear
    again = train(*CLEAR, *SHORT, cwd=project)
    assert (again.code, again.out) == (first.code, first.out)
    # Nor when the runs are gone: the pairs are recorded.
    copy = project.parent / "moved"
    shutil.copytree(project, copy)
    for run in folder_of(copy).glob("*-seed*"):
        shutil.rmtree(run)
    assert train(*CLEAR, *SHORT, cwd=copy).out == first.out
    assert not list(folder_of(copy).glob("*-seed*"))


def test_json_has_every_pair_with_the_interval_after_it(clear: tuple[Path, Result]) -> None:
    project, _ = clear
    code, report = compare(*CLEAR, *SHORT, cwd=project)
    assert (code, report["verdict"], report["exit_code"], report["error"]) == (1, "worse", 1, None)
    assert report["differs"] == {"optimizer.lr": {"a": 0.02, "b": 1e-06}}
    assert report["same_batches"] is True
    assert (report["metric"], report["mode"], report["a"]) == ("val/loss", "min", "optimizer.lr=0.02")
    assert report["high"] < 0
    assert report["pairs"][0]["low"] is None
    last = report["pairs"][-1]
    assert (last["mean"], last["low"], last["high"]) == (report["mean"], report["low"], report["high"])
    for pair in report["pairs"]:
        assert pair["difference"] == pair["a"] - pair["b"]
    assert report["noise"] > 0
    assert report["sentence"] in train_here(*CLEAR, *SHORT, cwd=project).out
    assert json.loads((folder_of(project) / "verdict.json").read_text()) == report


def test_another_comparison_takes_the_runs_that_have_the_same_config(clear: tuple[Path, Result]) -> None:
    project, _ = clear
    copy = project.parent / "other"
    shutil.copytree(project, copy)
    before = folder_of(copy)
    swapped = (CLEAR[0], CLEAR[2], CLEAR[1])
    code, report = compare(*swapped, *SHORT, cwd=copy)
    assert (code, report["verdict"]) == (0, "better")
    assert report["folder"] != str(before.relative_to(copy))
    assert all(Path(pair["a_run"]).parent.name == before.name for pair in report["pairs"])
    assert not list((copy / report["folder"]).glob("*-seed*"))
    if "view" in list_addons():
        shown = train_here("report", "--json", report["folder"], cwd=copy)
        assert json.loads(shown.out)["runs"] == 2 * len(report["pairs"]), shown.err
        assert report["sentence"] in (copy / "report.html").read_text()


def test_the_same_config_is_not_decided_and_with_a_margin_no_difference(tmp_path: Path) -> None:
    words = ("compare", "digits_mlp", "digits_mlp", "--budget", "6steps", "--seeds", "8")
    overrides = ("--", "model.hidden=[8]", "loop.eval_interval=6", "loggers=jsonl")
    code, report = compare(*words, *overrides, cwd=tmp_path)
    assert (code, report["verdict"], report["differs"]) == (3, "not_decided", {})
    assert {pair["difference"] for pair in report["pairs"]} == {0}
    code, report = compare(*words, "--margin", "0.001", *overrides, cwd=tmp_path)
    assert (code, report["verdict"]) == (2, "no_difference")


def test_a_run_is_compared_with_changes_of_it_and_by_another_metric(tmp_path: Path) -> None:
    assert train("fit", *SHORT[3:], "loop.max_duration=6", "loop.eval_interval=6", cwd=tmp_path).code == 0
    words = ("compare", "runs/digits_mlp", "data.batch_size=512", "--seeds", "1", "--metric", "val/accuracy")
    code, report = compare(*words, cwd=tmp_path)
    assert (code, report["verdict"], report["same_batches"]) == (3, "not_decided", False)
    assert (report["metric"], report["mode"], report["length"]) == ("val/accuracy", "max", "6")
    assert report["pairs"][0]["difference"] == report["pairs"][0]["b"] - report["pairs"][0]["a"]


def test_pairs_are_those_of_the_metric_that_the_command_asks_for(clear: tuple[Path, Result], tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(clear[0], project)
    first = json.loads((folder_of(project) / "verdict.json").read_text())
    for flags in (("--metric", "val/accuracy"), ("--metric", "val/accuracy", "--mode", "min"), ("--mode", "max"), ()):
        code, report = compare(*CLEAR, *flags, *SHORT, cwd=project)
        asked = dict(zip(flags[::2], flags[1::2], strict=True))
        metric = asked.get("--metric", "val/loss")
        mode = asked.get("--mode", "max" if metric == "val/accuracy" else "min")
        assert (report["metric"], report["mode"]) == (metric, mode)
        for pair in report["pairs"]:
            for side in "ab":
                values = [
                    row[metric] for row in records(project / pair[f"{side}_run"] / "metrics.jsonl") if metric in row
                ]
                assert pair[side] == (min if mode == "min" else max)(values)
    assert (code, report) == (clear[1].code, first)


def test_a_name_that_has_other_configs_is_refused_and_keeps_its_pairs(
    clear: tuple[Path, Result], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    shutil.copytree(clear[0], project)
    name = ("--name", folder_of(project).name)
    before = {file: file.read_bytes() for file in folder_of(project).rglob("*") if file.is_file()}
    longer = ("--budget", "45steps", *SHORT[2:])
    for words in ((*CLEAR, *name, *longer), ("compare", "optimizer.lr=0.02", "optimizer.lr=0.03", *name, *SHORT)):
        result = train_here(*words, cwd=project)
        assert result.code == 66
        assert f"{folder_of(project).relative_to(project)} compares other configs" in result.err
        assert "help: Take another --name." in result.err
    assert {file: file.read_bytes() for file in folder_of(project).rglob("*") if file.is_file()} == before


def test_a_name_is_free_as_long_as_no_run_of_it_has_begun(tmp_path: Path) -> None:
    words = ("compare", "digits_mlp", "optimizer.lr=1", "--name", "mine", "--seeds", "1")
    assert train_here(*words, "--budget", "5s", cwd=tmp_path).code == 66
    assert train_here(*words, "--budget", "6steps", "--", "loop.eval_interval=6", cwd=tmp_path).code == 3


def test_a_paused_run_of_a_sweep_is_compared_at_its_whole_length(tmp_path: Path) -> None:
    sweep = ("fit", "-m", "digits_mlp", "model.hidden=[8]", "loggers=jsonl", "sweep.prune=asha", "sweep.rungs=[6]")
    words = ("loop.max_duration=12", "loop.eval_interval=6", "optimizer.lr=1e-5,1e-3,1e-2")
    assert train(*sweep, *words, cwd=tmp_path).code == 0
    runs = {name: f"runs/digits_mlp/sweep/optimizer.lr={name}" for name in ("1e-05", "0.01")}
    code, report = compare("compare", *runs.values(), "--seeds", "1", cwd=tmp_path)
    assert (code, report["differs"]) == (3, {"optimizer.lr": {"a": 1e-05, "b": 0.01}})
    # With the runs of other comparisons, not within the sweep.
    assert Path(report["folder"]).parent == Path("runs/compare")
    for side in "ab":
        summary = json.loads((tmp_path / report["pairs"][0][f"{side}_run"] / "summary.json").read_text())
        assert summary["step"] == 12
    # Its name has an equals sign, as an override has.
    code, report = compare(
        "compare", f"{runs['0.01']} model.hidden=[4]", "model.hidden=[6]", "--seeds", "1", cwd=tmp_path
    )
    assert (code, report["differs"]) == (3, {"model.hidden": {"a": [4], "b": [6]}})


def test_lengths_that_differ_are_both_named(tmp_path: Path) -> None:
    common = ("--seeds", "1", "--", "digits_mlp", "model.hidden=[8]", "loop.eval_interval=3", "loggers=jsonl")
    for a, b in (("loop.max_duration=6", "loop.max_duration=9"), ("loop.max_duration=6", "loop.hard_stop=9")):
        code, report = compare("compare", a, b, *common, cwd=tmp_path)
        assert (code, report["length"]) == (3, "6 and 9")


def test_several_runs_at_a_time_give_the_same_records(clear: tuple[Path, Result], tmp_path: Path) -> None:
    project, alone = clear
    result = train_here(*CLEAR, "--jobs", "4", *SHORT, cwd=tmp_path)
    assert (result.code, result.out) == (alone.code, alone.out), result.err
    files = [folder_of(each) / "pairs.jsonl" for each in (project, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_edited_model_is_trained_again_and_an_unedited_one_is_not(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    words = ("compare", "mine", "model.width=4", "--seeds", "1", "--budget", "6steps", "--", "loggers=jsonl")
    first = train(*words, "loop.eval_interval=6", cwd=project)
    assert first.code == 3, first.err
    file = folder_of(project) / "pairs.jsonl"
    [before] = records(file)
    assert "mine/parts.py" in before["a_source"]
    parts = project / "mine/parts.py"
    parts.write_text(parts.read_text().replace("self.hidden = torch.nn.Linear(2, width)", f"""{HALVED}"""))
    again = train(*words, "loop.eval_interval=6", cwd=project)
    assert again.code == 3, again.err
    assert "mine/parts.py has changed" in again.err
    [after] = records(file)
    assert after["a"] != before["a"]
    assert after["a_source"] != before["a_source"]
    # The earlier runs are kept.
    assert sorted(path.name for path in (folder_of(project) / ".trash").iterdir()) == ["a-seed1-1", "b-seed1-1"]
    assert train(*words, "loop.eval_interval=6", cwd=project).out == again.out
    assert records(file) == [after]


def test_an_edit_while_a_comparison_trains_changes_none_of_its_runs(tmp_path: Path) -> None:
    flags, overrides = ("--seeds", "2", "--budget", "6steps"), ("loggers=jsonl", "loop.eval_interval=6")
    words = ("compare", "mine", "model.width=4", *flags, "--", *overrides)
    for name in ("edited", "unedited"):
        (tmp_path / name).mkdir()
    project, unedited = (make_project(tmp_path / name) for name in ("edited", "unedited"))
    undisturbed = train(*words, cwd=unedited)
    assert undisturbed.code == 3, undisturbed.err
    with running(*words, cwd=project) as command:
        command.wait_for(lambda: bool(list(project.glob("runs/compare/*/a-seed1/summary.json"))), "a run")
        parts = project / "mine/parts.py"
        parts.write_text(parts.read_text().replace("self.hidden = torch.nn.Linear(2, width)", f"""{HALVED}"""))
        result = command.end()
    assert (result.code, result.out) == (3, undisturbed.out), result.err
    assert records(folder_of(project) / "pairs.jsonl") == records(folder_of(unedited) / "pairs.jsonl")
    # The next command takes the project as it is then.
    assert "mine/parts.py has changed" in train(*words, cwd=project).err


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose model was edited after `runs/mine` was trained, and fits of seed 1 before and after the edit."""
    project = make_project(tmp_path_factory.mktemp("edited"))
    trained("mine", *TINY, cwd=project)
    trained("mine", *TINY, "seed=1", "name=before", cwd=project)
    parts = project / "mine/parts.py"
    parts.write_text(parts.read_text().replace("self.hidden = torch.nn.Linear(2, width)", HALVED))
    trained("mine", *TINY, "seed=1", "name=after", cwd=project)
    return project


def test_a_run_is_trained_by_the_source_that_it_keeps_and_an_experiment_by_that_of_the_project(edited: Path) -> None:
    words = ("compare", "--json", "runs/mine", "mine", "--seeds", "1", "--name", "first", "--", *TINY)
    result = train_here(*words, cwd=edited)
    assert result.code == 3, result.err
    report = json.loads(result.out)
    assert report["source_differs"] == ["mine/parts.py"]
    assert report["differs"] == {}
    for run, alone in (("a_run", "before"), ("b_run", "after")):
        trial = edited / report["pairs"][0][run]
        assert weights(trial / "checkpoints/step6") == weights(edited / "runs" / alone / "checkpoints/step6")
    assert json.loads(train_here(*words, cwd=edited).out)["pairs"] == report["pairs"]
    # The best so far, by its source alone: what B was is A now, and is not trained again.
    parts = edited / "mine/parts.py"
    source = parts.read_text()
    parts.write_text(source.replace("/= 2", "/= 3"))
    best = report["pairs"][0]["b_run"]
    result = train_here("compare", "--json", best, "mine", "--seeds", "1", "--name", "second", "--", *TINY, cwd=edited)
    parts.write_text(source)
    assert json.loads(result.out)["pairs"][0]["a_run"] == best, result.err
    # Changes of the run are trained by its source, too.
    result = train_here("compare", "--json", "runs/mine", "model.width=4", "--seeds", "1", "--", *TINY, cwd=edited)
    assert json.loads(result.out)["source_differs"] == [], result.err
    assert "mine/parts.py: the source differs" in train_here(*words[:1], *words[2:], cwd=edited).out


def test_the_source_of_the_project_is_taken_if_asked_for(edited: Path) -> None:
    words = ("compare", "--json", "runs/mine source=project", "mine", "--seeds", "1", "--name", "third", "--", *TINY)
    report = json.loads(train_here(*words, cwd=edited).out)
    assert report["source_differs"] == []
    assert {pair["difference"] for pair in report["pairs"]} == {0}


def test_a_run_that_was_made_longer_is_compared_at_its_new_length(edited: Path) -> None:
    trained("mine", *TINY, "name=long", cwd=edited)
    trained("mine", *TINY, "name=long", "loop.max_duration=8", cwd=edited)
    words = ("compare", "--json", "runs/long", "model.width=4", "--seeds", "1", "--name", "long")
    report = json.loads(train_here(*words, cwd=edited).out)
    assert report["length"] == "8"
    assert report["source_differs"] == []


def test_a_run_whose_classes_are_no_longer_in_the_project_is_compared(edited: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(edited, copy)
    (copy / "mine").rename(copy / "yours")
    words = ("compare", "--json", "runs/mine", "model.width=3", "--seeds", "1", "--name", "moved")
    result = train_here(*words, cwd=copy)
    assert result.code == 3, result.err


def test_a_kept_source_that_was_changed_is_not_run(edited: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(edited, copy)
    [facts] = copy.glob("runs/mine/source/*/source.json")
    facts.write_text(facts.read_text().replace('"mac": "', '"mac": "0'))
    result = train("compare", "runs/mine", "mine", "--seeds", "1", "--name", "mac", "--", *TINY, cwd=copy)
    assert result.code == 66
    assert "is not signed by this user's key" in result.err
    assert not (copy / "runs/compare/mac").exists()
    [kept] = copy.glob("runs/mine/source/*/files/mine/parts.py")
    kept.write_text(kept.read_text() + "#")
    assert train("compare", "runs/mine", "mine", "--", *TINY, cwd=copy).code == 67


def test_each_run_has_a_device_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for two devices; each run notes what it sees."""
    project = make_watched_project(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("compare", "mine", "model.width=4", "--devices", "all", "--seeds", "2")
    result = train_here(*words, "--", *TINY, "device=cpu", cwd=project)
    assert result.code in (0, 1, 3), result.err
    most, runs = read_notes(project)
    assert most == {"0": 1, "1": 1}
    assert sorted(runs) == ["a-seed1", "a-seed2", "b-seed1", "b-seed2"]
    assert all(len(used) == 1 for used in runs.values())


def test_a_comparison_that_is_killed_goes_on_with_the_same_records_and_verdict(
    clear: tuple[Path, Result], tmp_path: Path
) -> None:
    project, undisturbed = clear
    chance = random.Random(5)
    for _ in range(3):
        with running(*CLEAR, *SHORT, cwd=tmp_path) as command:
            time.sleep(0.2 + 3 * chance.random())
            command.signal(signal.SIGKILL)
            command.end()
    result = train(*CLEAR, *SHORT, cwd=tmp_path)
    assert (result.code, result.out) == (undisturbed.code, undisturbed.out), result.err
    files = [folder_of(each) / "pairs.jsonl" for each in (project, tmp_path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    flags = ("--budget", "100000steps", "--json", "--", "loggers=jsonl")
    with running("compare", "digits_mlp", "optimizer.lr=0.1", *flags, cwd=tmp_path) as command:
        command.wait_for(lambda: bool(list(tmp_path.glob("runs/compare/*/a-seed1/metrics.jsonl"))), "a run")
        command.signal(signal.SIGTERM)
        result = command.end()
    assert result.code == 75, result.err
    report = json.loads(result.out)
    assert (report["exit_code"], report["stopped"]) == (75, True)
    assert report["sentence"] == "no answer yet, after 0 pairs; next: the same command goes on."
    [run] = tmp_path.glob("runs/compare/*/a-seed1")
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"


def test_a_run_that_fails_is_an_error_with_a_code_of_its_own(tmp_path: Path) -> None:
    words = ("compare", "digits_mlp", "optimizer.lr=1e30", "--budget", "30steps", "--", "loggers=jsonl")
    code, report = compare(*words, cwd=tmp_path)
    assert code == 65
    assert report["exit_code"] == 65
    assert report["error"].startswith("b-seed1 failed: ")
    assert "`train bisect " in report["error"]
    assert "..." not in report["error"]
    assert ".jobs/b-seed1.log. The same command goes on." in report["error"]


def test_a_mistake_that_a_run_finds_is_a_mistake_of_the_command(tmp_path: Path) -> None:
    result = train_here("compare", "digits_mlp", "optimizer.lr=1", "--budget", "5s", cwd=tmp_path)
    assert result.code == 66
    assert "error: a-seed1 failed: the schedule needs the number of steps" in result.err
    found = re.search(r"help: (\S+/\.jobs/a-seed1\.log) says what to do\.", result.err)
    assert found is not None
    assert "help: Give loop.max_duration in steps" in Path(tmp_path, found[1]).read_text()


MISTAKES = {
    "digits_mpl optimizer.lr=1": "A is 'digits_mpl', which is no experiment and no run",
    "optimizer.lr=1 optimizer.lr=2": "no experiment is chosen",
    "digits_mlp optimizer.lrr=1": "optimizer.lrr",
    "digits_mlp seed=3": "seed= and train compare",
    "digits_mlp model.hidden=[8] --budget 5potatoes": "--budget",
    "digits_mlp model.hidden=[8] --seeds 0": "--seeds must be at least 1",
    "digits_mlp model.hidden=[8] --jobs 0": "--jobs is 0, but it must be at least 1",
    "digits_mlp model.hidden=[8] --jobs-per-device 0": "--jobs-per-device is 0, but it must be at least 1",
    "digits_mlp model.hidden=[8] --margin -1": "--margin",
    "digits_mlp model.hidden=[8] --mode most": "--mode",
    "digits_mlp model.hidden=[8] --budgit 5": "--budget",
    "digits_mlp": "train compare needs",
    "digits_mlp digits -- digits": "an experiment of both is given, too",
    "digits_mlp optimizer.lr=1 --name ../other": "--name is '../other'",
    "digits_mlp optimizer.lr=1 --name a/b": "--name is 'a/b'",
    "digits_mlp optimizer.lr=1 --name .hidden": "--name is '.hidden'",
    "'digits_mlp digits' optimizer.lr=1": "Write one experiment or run",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_has_an_exit_code_that_is_no_verdict_and_writes_nothing(words: str, tmp_path: Path) -> None:
    result = train("compare", *shlex.split(words), cwd=tmp_path)
    assert result.code == 66, result.out + result.err
    assert MISTAKES[words] in result.err
    assert not list(tmp_path.iterdir())


def test_a_metric_that_nothing_measures_is_refused_before_the_first_step(tmp_path: Path) -> None:
    words = ("compare", "digits_mlp", "optimizer.lr=1", "--metric", "val/acuracy", "--mode", "max")
    result = train_here(*words, cwd=tmp_path)
    assert result.code == 66, result.err
    assert "--metric is 'val/acuracy', which no validation loader or callback reports" in result.err
    assert "Did you mean 'val/accuracy'?" in result.err
    assert not list(tmp_path.glob("runs/compare/*/b-seed1"))
    assert not list(tmp_path.glob("runs/compare/*/a-seed1/metrics.jsonl"))
    result = train_here("compare", "digits_mlp", "optimizer.lr=1", "--metric", "val/odd", cwd=tmp_path)
    assert result.code == 66, result.err
    assert "--metric val/odd: its name does not say what is better" in result.err
    assert "help: Add --mode min or --mode max." in result.err


def test_a_run_whose_metric_is_never_finite_has_failed(clear: tuple[Path, Result], tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(clear[0], project)
    file = folder_of(project) / "b-seed2/metrics.jsonl"
    file.write_text(re.sub(r'"val/accuracy": [^,}]+', '"val/accuracy": NaN', file.read_text()))
    code, report = compare(*CLEAR, "--metric", "val/accuracy", *SHORT, cwd=project)
    assert (code, report["exit_code"]) == (65, 65)
    assert report["error"].startswith(f"{file.parent.relative_to(project)} has no finite value of val/accuracy")


def test_a_metric_that_nothing_measures_is_named_with_those_that_are(clear: tuple[Path, Result]) -> None:
    project, _ = clear
    result = train(*CLEAR, "--metric", "val/acuracy", "--mode", "max", *SHORT, cwd=project)
    assert result.code == 66
    assert "has no value of val/acuracy" in result.err
    assert "val/accuracy" in result.err


def test_it_is_an_addon() -> None:
    assert list_addons()["compare"] == "shipped"
