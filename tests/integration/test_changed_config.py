"""Starting a run again with a changed config: refused with nothing touched, and every way out that is named works."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import SMALL, Result, fork_jobs, train
from printed import message

from trainer_cli.commands.command_line import main


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the digest of its bytes, and every folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


REFUSED = {
    "a value of the model": ["model.hidden=[64]"],
    "another optimizer": ["optimizer=sgd"],
    "a callback more": ["+callbacks.ema._target_=trainer_cli.EMA"],
    "a refused one among free ones": ["loop.max_duration=30", "seed=1", "checkpoint.max_checkpoints=1"],
    "one that was not allowed": ["seed=1", "model.dropout=0.5", "resume_allow=[seed]"],
}
"""Which keys are refused is the table of tests/config/test_resumable.py."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_change_leaves_the_run_byte_for_byte_as_it_was(base: Path, case: str) -> None:
    before = tree(base)
    done = train("fit", *SMALL, "name=base", *REFUSED[case], cwd=base)
    assert done.code == 2, done.err
    assert "error: the config differs from the one that runs/base was trained with" in done.err
    assert "  refused  " in done.err
    assert tree(base) == before


def test_another_value_of_an_environment_variable_is_a_change_too(tmp_path: Path) -> None:
    own = ("name=base", "model.dropout='${oc.decode:${oc.env:DROPOUT}}'")
    assert train("fit", *SMALL, *own, cwd=tmp_path, DROPOUT="0.25").code == 0
    assert "0.25" not in (tmp_path / "runs/base/config.yaml").read_text()
    before = tree(tmp_path)
    refused = train("fit", *SMALL, *own, "loop.max_duration=30", cwd=tmp_path, DROPOUT="0.5")
    assert refused.code == 2
    assert "refused" in refused.err
    assert "model.dropout" in refused.err
    assert "which has another value now" in refused.err
    assert tree(tmp_path) == before
    allowed = "resume_allow=[model.dropout]"
    for end, dropout, more in ((24, "0.25", ()), (27, "0.5", (allowed,)), (30, "0.5", ())):
        done = train("fit", *SMALL, *own, f"loop.max_duration={end}", *more, cwd=tmp_path, DROPOUT=dropout)
        assert done.code == 0, done.err
    assert train("fit", *SMALL, *own, "loop.max_duration=30", cwd=tmp_path, DROPOUT="0.25").code == 2


FREE = [
    "loop.max_duration=30", "loop.eval_interval=5", "loop.eval_steps=1", "loop.log_interval=3", "loggers=jsonl",
    "logging.console=plain", "checkpoint.save_interval=7", "checkpoint.max_checkpoints=2", "checkpoint.digest=sha256",
    "data.num_workers=1", "device=cpu", "load.states=[all]", "validate.folder=elsewhere",
]  # fmt: skip


def test_what_may_change_goes_on_at_once(place: Path) -> None:
    done = train("fit", *SMALL, "name=base", *FREE, cwd=place)
    assert done.code == 0, done.err
    assert "resuming at step 20" in done.err
    assert "finished at step 30" in done.out


def rates(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/lr"] for record in records if "train/lr" in record}


def test_a_rate_that_is_allowed_is_the_one_that_a_new_run_would_have(place: Path) -> None:
    longer = [*SMALL, "loop.max_duration=30", "optimizer.lr=0.5"]
    before = rates(place / "runs/base")
    done = train("fit", *longer, "name=base", "resume_allow=[optimizer.lr]", cwd=place)
    assert done.code == 0, done.err
    assert train("fit", *longer, "name=new", cwd=place).code == 0
    after, new = rates(place / "runs/base"), rates(place / "runs/new")
    assert {step: rate for step, rate in after.items() if step <= 20} == before
    assert {step: rate for step, rate in after.items() if step > 20} == {25: new[25], 30: new[30]}
    assert new[30] > 0


def test_a_change_that_is_allowed_but_cannot_go_on_leaves_the_config_as_it_was(place: Path) -> None:
    files = [place / "runs/base" / name for name in ("config.yaml", "overrides.yaml")]
    before = [file.read_text("utf-8") for file in files]
    larger = ["loop.max_duration=30", "model.hidden=[64]", "resume_allow=['model.*']"]
    done = train("fit", *SMALL, "name=base", *larger, cwd=place)
    assert done.code == 2, done.err
    assert "does not fit this run" in done.err
    assert [file.read_text("utf-8") for file in files] == before


def test_a_run_that_never_came_to_a_checkpoint_may_be_mended_freely(tmp_path: Path) -> None:
    stopping = ("callbacks=early_stopping", "callbacks.early_stopping.metric=")
    wrong = train(
        "fit",
        *SMALL,
        *stopping[:1],
        stopping[1] + "val/los",
        "callbacks.early_stopping.mode=min",
        "run_dir=run",
        cwd=tmp_path,
    )
    assert wrong.code == 2
    assert "Did you mean 'val/loss'?" in wrong.err
    assert (tmp_path / "run/config.yaml").exists()
    mended = train("fit", *SMALL, *stopping[:1], stopping[1] + "val/loss", "run_dir=run", cwd=tmp_path)
    assert mended.code == 0, mended.err
    assert "config changed: callbacks.early_stopping.metric: val/los -> val/loss" in mended.err


def test_another_name_and_the_weights_of_this_run_are_a_way_out(place: Path) -> None:
    refused: Result = train("fit", *SMALL, "name=base", "optimizer.lr=0.5", cwd=place)
    assert "name=OTHER" in refused.err
    assert "ckpt=runs/base@latest" in refused.err
    before = tree(place / "runs/base")
    run_id = json.loads((place / "runs/base/environment.json").read_text())["run_id"]
    done = train("fit", *SMALL, "name=other", "optimizer.lr=0.5", "ckpt=runs/base@latest", cwd=place)
    assert done.code == 0, done.err
    summary = json.loads((place / "runs/other/summary.json").read_text())
    assert summary["step"] == 20
    assert summary["attempts"][0]["forked_from"] == {"run_id": run_id, "step": 20, "shift": 20}
    assert tree(place / "runs/base") == before


Compared = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compared:
    """Exit code and output of `train config --diff` in a folder."""

    def compare(cwd: Path, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(cwd)
        return main(["config", "--diff", *arguments]), *capsys.readouterr()

    return compare


@pytest.mark.parametrize(
    "other", ["runs/base", "runs/base@latest", "runs/base/checkpoints/step10", "runs/base/config.yaml"]
)
@pytest.mark.parametrize("sweep", ["", "sweep/"], ids=["a run", "a job of a sweep"])
def test_a_config_is_compared_with_that_of_a_run_or_checkpoint(
    base: Path, tmp_path: Path, compared: Compared, other: str, sweep: str
) -> None:
    shutil.copytree(base / "runs/base", tmp_path / f"runs/{sweep}base")
    before = tree(tmp_path)
    changes = (*SMALL, "name=base", "optimizer.lr=0.5")
    code, out, err = compared(tmp_path, other.replace("runs/", f"runs/{sweep}"), *changes)
    assert code == 0, err
    old, _, *lines = out.splitlines()
    assert old.startswith(f"# from: runs/{sweep}base/")
    assert old.endswith("config.yaml")
    assert lines == ["optimizer.lr: 0.003 -> 0.5  # command line: optimizer.lr=0.5"]
    assert tree(tmp_path) == before


def test_a_checkpoint_that_is_not_there_or_whose_config_is_damaged_is_reported(place: Path, compared: Compared) -> None:
    code, out, err = compared(place, "runs/base@step11")
    assert (code, out) == (3, "")
    assert "there is none (--diff). runs/base/checkpoints holds step0, step10, step20." in message(err)
    with (place / "runs/base/checkpoints/step20/config.yaml").open("a") as file:
        file.write("seed: 9\n")
    code, out, err = compared(place, "runs/base/checkpoints/step20")
    assert (code, out) == (3, "")
    assert "config.yaml" in err


STOPPED_EARLY = {
    "EarlyStopping": (
        ["+callbacks.early._target_=trainer_cli.EarlyStopping", "+callbacks.early.metric=val/loss",
         "+callbacks.early.patience=1", "+callbacks.early.min_delta=100.0"],
        [["+callbacks.early.patience=9"], ["+callbacks.early.min_delta=0.0"],
         ["+callbacks.early.metric=val/accuracy", "+callbacks.early.min_delta=0.0"]],
    ),
    "ThresholdStopper": (
        ["+callbacks.early._target_=trainer_cli.ThresholdStopper", "+callbacks.early.metric=val/loss",
         "+callbacks.early.threshold=100.0"],
        [["+callbacks.early.threshold=0.0"], ["+callbacks.early.mode=max", "+callbacks.early.threshold=200.0"]],
    ),
    "EarlyExit": (
        ["+callbacks.early._target_=trainer_cli.EarlyExit",
         "+callbacks.early.conditions=[{_target_:ends.at_ten,_partial_:true}]"],
        [["~callbacks.early"]],
    ),
}  # fmt: skip
"""Callbacks that end a run before step 40, and changes with which they do not."""
_IN_CAMPAIGNS = pytest.mark.campaign
"""Of a summary of an earlier version it is read which callback ended the run, whatever has changed."""
ALLOWED = "resume_allow=[callbacks.early,callbacks.early.*]"


def changed(settings: list[str], change: list[str]) -> list[str]:
    if change[0].startswith("~"):
        return []
    keys = [argument.partition("=")[0] for argument in change]
    return [*(argument for argument in settings if argument.partition("=")[0] not in keys), *change]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each callback that it has ended."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "ends.py").write_text("def at_ten(trainer):\n    return trainer.progress.step >= 10\n")
    for name, (settings, _) in STOPPED_EARLY.items():
        done = train("fit", *SMALL, "loop.max_duration=40", f"name={name}", *settings, cwd=folder)
        assert done.code == 0, done.err
        assert json.loads((folder / "runs" / name / "summary.json").read_text())["ended_by"] == "early"
    return folder


@pytest.mark.parametrize(
    ("name", "change", "with_summary"),
    [
        pytest.param(name, change, with_summary, marks=() if with_summary or change is changes[0] else _IN_CAMPAIGNS)
        for with_summary in (True, False)
        for name, (_, changes) in STOPPED_EARLY.items()
        for change in changes
    ],
)
def test_a_run_that_a_callback_ended_goes_on_with_another_rule(
    stopped: Path, tmp_path: Path, name: str, change: list[str], with_summary: bool
) -> None:
    place = tmp_path / "place"
    shutil.copytree(stopped, place)
    summary = place / "runs" / name / "summary.json"
    if not with_summary:
        # As an earlier version wrote it.
        facts = json.loads(summary.read_text())
        del facts["ended_by"]
        summary.write_text(json.dumps(facts))
    step = json.loads(summary.read_text())["step"]
    assert step < 40
    longer = [*SMALL, "loop.max_duration=40", f"name={name}", *changed(STOPPED_EARLY[name][0], change), ALLOWED]
    planned = train("plan", *longer, cwd=place)
    assert (planned.code, "a fit would do nothing" in planned.out) == (0, False), planned.out
    done = train("fit", *longer, cwd=place)
    assert done.code == 0, done.err
    assert f"resuming at step {step}" in done.err
    assert "finished at step 40: max_duration" in done.out


@pytest.mark.parametrize("name", STOPPED_EARLY)
def test_a_run_that_a_callback_ended_stays_finished_and_names_it(stopped: Path, name: str) -> None:
    before = tree(stopped)
    for verb in ("fit", "plan"):
        again = train(verb, *SMALL, "loop.max_duration=40", f"name={name}", *STOPPED_EARLY[name][0], cwd=stopped)
        assert again.code == 0, again.err
        assert "callbacks.early has ended it" in again.out
    assert tree(stopped) == before


def test_a_sweep_starts_a_job_again_whose_callback_has_another_rule(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_jobs(monkeypatch)
    settings = STOPPED_EARLY["EarlyStopping"][0]
    sweep = ["fit", "-m", *SMALL, "loop.max_duration=40", "name=base", "seed=1,2"]
    summaries = [empty_folder / f"runs/base/sweep/seed={seed}/summary.json" for seed in (1, 2)]
    assert main([*sweep, *settings]) == 0
    assert all(json.loads(summary.read_text())["step"] < 40 for summary in summaries)
    assert main([*sweep, *changed(settings, ["+callbacks.early.patience=9"]), ALLOWED]) == 0
    assert [json.loads(summary.read_text())["step"] for summary in summaries] == [40, 40]
