"""A sweep checks everything first, runs what is not finished, and ends with the right code: with jobs of no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from faked import FAKE, FakePlan, attempts, fake, message, run_faked

from trainer_cli.addons.jobs.run_jobs import job_file
from trainer_cli.addons.jobs.supervise import Children
from trainer_cli.addons.jobs.sweep import Sweep, exit_code, folder_of, plan_jobs
from trainer_cli.commands.command_line import main
from trainer_cli.errors import Code, ConfigError, ExitCode, RunDirectoryError
from trainer_cli.runs.run_dir import RunDir, write_json
from trainer_cli.steps.run_status import RunStatus


@pytest.fixture(autouse=True)
def _empty(empty_folder: Path) -> None:
    Path("fake.py").write_text(FAKE)


def swept(at_once: int = 1, **behaviour: str) -> ExitCode:
    """Run a sweep of such jobs."""
    planned = fake(**behaviour)

    def log_of(key: str) -> Path:
        return job_file(Path("runs/x/sweep"), key, "log")

    children = Children(log_of)
    run_faked(children, planned)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        return ExitCode(Sweep(FakePlan(planned), children, at_once, 7).run())
    finally:
        del os.environ["PYTHONPATH"]


def test_a_job_that_fails_does_not_hide_the_others_and_only_it_is_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert swept(a="finish", b="fail", c="die", d="mistake", e="finish") == ExitCode.FAILED
    assert message() == {"a": "finished", "b": "failed", "c": "killed", "d": "failed", "e": "finished"}
    assert "failed: d: exit code 2" in capsys.readouterr().out
    assert swept(a="mistake", b="finish", c="finish", d="finish", e="mistake") == ExitCode.DONE, "a and e are not begun"
    assert set(message().values()) == {"finished"}
    assert {name: attempts(name) for name in "abcde"} == {"a": 1, "b": 2, "c": 2, "d": 1, "e": 1}
    with RunDir("runs/x/sweep").lock(), pytest.raises(RunDirectoryError, match="in use"):
        swept(a="finish")


def test_a_signal_stops_the_running_ones_with_a_save_and_no_other_begins() -> None:
    assert swept(a="finish", b="signal", c="finish") == ExitCode.STOPPED_EARLY
    assert message() == {"a": "finished", "b": "stopped", "c": "not begun"}
    assert swept(a="finish", b="finish", c="finish") == ExitCode.DONE
    assert attempts("a") == 1


def test_a_signal_reaches_all_that_run_side_by_side() -> None:
    assert swept(2, a="signal", b="signal", c="finish") == ExitCode.STOPPED_EARLY
    assert message()["c"] == "not begun"
    assert "finished" not in message().values()


def test_a_second_ctrl_c_kills() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        swept(a="deaf", b="finish")
    kept = "kept: the checkpoints that the jobs saved, in runs/x/sweep"
    assert raised.value.__notes__[0] == kept
    assert message() == {"a": "killed", "b": "not begun"}


@pytest.mark.parametrize(("given", "threads"), [(None, 3), ("5", 5)])
def test_jobs_side_by_side_share_the_cores_unless_a_number_of_threads_is_given(
    given: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert swept(3, a="finish", b="finish") == ExitCode.DONE
    logs = [job_file(Path("runs/x/sweep"), key, "log").read_text() for key in "ab"]
    assert logs == [f"finish {threads}\n"] * 2


def test_a_job_that_is_tried_again_has_as_many_threads_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert swept(2, a="fail", b="finish", c="finish") == ExitCode.FAILED
    assert swept(2, a="finish", b="finish", c="finish") == ExitCode.DONE
    assert job_file(Path("runs/x/sweep"), "a", "log").read_text() == "fail 3\nfinish 3\n"


@pytest.mark.parametrize(
    ("codes", "facts", "expected"),
    [
        ([], {}, 0),
        ([0, 0], {}, 0),
        ([0, 1], {}, 1),
        ([0, 2], {}, 2),
        ([2, 2], {}, 2),
        ([2, 1], {}, 1),
        ([3], {}, 1),
        ([4], {}, 1),
        ([-9], {}, 1),
        ([0, 75], {}, 75),
        ([1, 75], {}, 1),
        ([0, 75], {"stopped": True}, 75),
        ([1, 75], {"stopped": True}, 75),
        ([0], {"stopped": True, "incomplete": True}, 75),
        ([0, 0], {"stopped": True}, 0),
        ([0, 1], {"stopped": True}, 1),
        ([130], {"stopped": True}, 75),
    ],
)
def test_the_code_of_the_sweep_is_made_of_those_of_its_jobs(
    codes: list[int], facts: Mapping[str, bool], expected: int
) -> None:
    assert exit_code(codes, **{"stopped": False, "incomplete": False, **facts}) == expected


@pytest.mark.parametrize(
    ("bases", "folder"),
    [
        (["runs/x"], "runs/x/sweep"),
        (["runs/x", "runs/x"], "runs/x/sweep"),
        (["runs/b", "runs/a", "runs/b"], "runs/a,b/sweep"),
        (["runs/x/1", "runs/x/2"], "runs/x/1,2/sweep"),
        (["/s/a/x", "/s/b/x"], "/s/a-x,b-x/sweep"),
    ],
)
def test_the_table_of_runs_of_several_names_has_one_place(bases: list[str], folder: str) -> None:
    assert folder_of([Path(base) for base in bases]) == Path(folder)


def test_many_names_make_no_name_that_is_too_long() -> None:
    folder = folder_of([Path(f"runs/{index:03}") for index in range(99)])
    assert len(folder.parent.name) <= 100
    assert folder != folder_of([Path(f"runs/{index:03}") for index in range(98)])


def test_each_job_has_the_directory_of_its_key_below_its_own_name() -> None:
    planned = plan_jobs(["experiment=digits,digits_mlp", "seed=1"])
    assert [str(one.run.path) for one in planned] == [
        "runs/digits/sweep/experiment=digits",
        "runs/digits_mlp/sweep/experiment=digits_mlp",
    ]
    assert "run_dir: runs/${name}/sweep/experiment=digits\n" in planned[0].frozen
    assert not Path("runs").exists()


def test_all_options_of_a_group_are_swept_by_a_glob() -> None:
    assert [one.job.key for one in plan_jobs(["model=mlp", "optimizer=glob(*,exclude=[s*,ada?])"])] == [
        "optimizer=adamw"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=1,2,3", "loop.eval_step=3"], ["error: there is no key 'loop.eval_step'"]),
        (["seed=1,x", "loop.grad_accum_steps=1,0"], ["seed=x", "seed=1 loop.grad_accum_steps=0"]),
        (["model=mlp,cnnn"], ["model=cnnn", "Did you mean 'model=cnn'?"]),
        (["seed=1,2", "run_dir=there"], ["run_dir="]),
        (["model=mlp", "seed=1,2", "resume=runs/x"], ["resume=runs/x is one run"]),
        (["seed=1"], ["nothing is swept"]),
        (["model=mlp", "logging.level=info,debug", "logging={level:error}"], ["give the same config"]),
        (["model=mlp", "seed=1,2", "name='x-${now:%H}'"], ["name holds ${now:…}, different at each", "Leave the time"]),
        (["--jobs", "0", "seed=1,2"], ["--jobs"]),
        (["--json", "seed=1,2"], ["--json is for one run", "train top --json"]),
    ],
)
def test_a_mistake_in_any_job_is_reported_before_anything_is_written(
    arguments: list[str], message: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "-m", *arguments]) == ExitCode.USER
    printed = capsys.readouterr().err
    for words in message:
        assert words in printed
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--jobs", "2", "seed=1"], "--jobs"), (["optimizer.lr=0.1,0.2"], "To run each: `train fit -m ")],
)
def test_what_only_a_sweep_can_have_is_refused_without_m(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments]) == ExitCode.USER
    assert message in capsys.readouterr().err


def test_a_config_that_changed_is_refused_before_any_job_begins_though_the_run_is_finished() -> None:
    (first, _) = plan_jobs(["model=mlp", "seed=1,2"])
    environment = {"run_id": "r"}
    first.run.create(first.frozen, [], environment).release()
    write_json(first.run.summary_file, {"status": RunStatus.finished})
    assert [one.done for one in plan_jobs(["model=mlp", "seed=1,2"])] == [True, False]
    assert [one.done for one in plan_jobs(["model=mlp", "seed=1,2", "loop.max_duration=99ep"])] == [False, False]
    with pytest.raises(ConfigError, match="seed=1: the config differs"):
        plan_jobs(["model=mlp", "seed=1,2", "optimizer.lr=0.5"])


def test_a_change_that_all_jobs_refuse_is_said_once_with_help_that_fits_a_sweep() -> None:
    for job in plan_jobs(["model=mlp", "seed=1,2"]):
        job.run.create(job.frozen, [], {"run_id": "r"}).release()
        write_json(job.run.summary_file, {"status": RunStatus.finished})
    with pytest.raises(ConfigError) as refused:
        plan_jobs(["model=mlp", "seed=1,2", "optimizer.lr=0.5"])
    error = refused.value
    assert error.code != Code.several
    assert "run_dir" not in error.what
    assert error.cure is not None
    assert "ckpt=" not in error.cure
    assert "resume_allow=[optimizer.lr]" in error.cure
    assert "name=OTHER" in error.cure


def test_a_mistake_of_some_jobs_keeps_its_help() -> None:
    (job, _) = plan_jobs(["model=mlp", "seed=1,2"])
    job.run.create(job.frozen, [], {"run_id": "r"}).release()
    write_json(job.run.summary_file, {"status": RunStatus.finished})
    with pytest.raises(ConfigError, match="seed=1: the config differs") as refused:
        plan_jobs(["model=mlp", "seed=1,2", "optimizer.lr=0.5"])
    assert "resume_allow=[optimizer.lr]" in str(refused.value.cure)
