"""The jobs of a sweep by submitit: in its own processes, and through commands that act as Slurm's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faked import FAKE, FakePlan, attempts, fake, message, run_faked

from trainer_cli.addons.jobs import submit as module
from trainer_cli.addons.jobs.submit import CLUSTERS, Submitted, check_names, known_parameters, read_submission
from trainer_cli.addons.jobs.sweep import Sweep
from trainer_cli.commands.command_line import main
from trainer_cli.commands.complete import SUBMIT
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.runs.run_dir import write_json

submitit = pytest.importorskip("submitit")
SlurmInfoWatcher = pytest.importorskip("submitit.slurm.slurm").SlurmInfoWatcher

# The queue is a folder: a job is submitted by its script, and `queue.begin` runs those that wait.
SBATCH = """#!/bin/bash
[ -e refuse ] && { echo "sbatch: error: invalid partition specified: gpux" >&2; exit 1; }
id=$((11 + $(ls queue | wc -l)))
cp "$1" queue/$id
echo "Submitted batch job $id"
[ -e hold ] && exit
setsid ./begin $id >> queue.log 2>&1 < /dev/null &
"""
BEGIN = """#!/bin/bash
sleep 0.3
export SLURM_JOB_ID=$1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_NTASKS=1
bash queue/$1
echo "job $1 ended with $?" >> ended.log
"""
# The options of srun end where the interpreter begins.
SRUN = """#!/bin/bash
while [ "$1" != PYTHON ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> scontrol.log
setsid ./begin "$2" >> queue.log 2>&1 < /dev/null &
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
for job in $(ls queue); do echo "$job|$(cat state-$job 2>/dev/null || echo RUNNING)|n1"; done
"""


@pytest.fixture(autouse=True)
def _place(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(module, "_POLL_S", {"slurm": 0.05, "local": 0.05})


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that act as Slurm's; `hold` keeps jobs in the queue, `state-ID` is what sacct says of one."""
    # It remembers how jobs ended.
    monkeypatch.setattr(submitit.SlurmJob, "watcher", SlurmInfoWatcher(delay_s=0))
    Path("bin").mkdir()
    Path("queue").mkdir()
    srun = SRUN.replace("PYTHON", sys.executable)
    for name, text in {"sbatch": SBATCH, "srun": srun, "scontrol": SCONTROL, "sacct": SACCT}.items():
        script(Path("bin") / name, text)
    script(Path("begin"), BEGIN)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")


def script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def swept(*submit: str, **behaviour: str) -> ExitCode:
    """Run a sweep of such jobs, all at a time."""
    planned = fake(**behaviour)
    jobs = Submitted(read_submission(submit), Path("runs/x/sweep"))
    run_faked(jobs, planned)
    return ExitCode(Sweep(FakePlan(planned), jobs, len(planned), None).run())


def until(reached: Callable[[], bool]) -> None:
    """Wait for a state."""
    limit = time.monotonic() + 500
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.02)


def meanwhile(reached: Callable[[], bool], then: Callable[[], object]) -> None:
    """Do something once a state is reached, beside the sweep."""

    def run() -> None:
        until(reached)
        then()

    threading.Thread(target=run, daemon=True).start()


def test_local_jobs_end_as_child_processes_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("local", a="finish", b="fail", c="die") == ExitCode.FAILED
    assert message() == {"a": "finished", "b": "failed", "c": "killed"}
    assert "killed: c: signal 9" in capsys.readouterr().out
    assert len(list(Path("runs/x/sweep/submitit").glob("*_0_log.out"))) == 3
    assert swept("local", a="finish", b="finish", c="finish") == ExitCode.DONE
    assert (attempts("a"), attempts("b")) == (1, 2)


def test_a_signal_reaches_local_jobs_which_save() -> None:
    began = Path("runs/x/sweep/a/summary.json")
    meanwhile(began.exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert swept("local", a="wait") == ExitCode.STOPPED_EARLY
    assert message() == {"a": "stopped"}


def test_a_job_that_saved_is_queued_again_until_it_is_done(slurm: None) -> None:
    options = ("slurm", "partition=gpu", "nodes=2", "tasks_per_node=4", "gpus_per_node=4", "timeout_min=60")
    assert swept(*options, a="again", b="fail") == ExitCode.FAILED
    assert message() == {"a": "finished", "b": "failed"}
    assert attempts("a") == 2
    (first,) = (file for file in Path("queue").iterdir() if "--job-name=a\n" in file.read_text())
    assert Path("scontrol.log").read_text() == f"requeue {first.name}\n"
    # What Slurm itself shows of the jobs is how they ended.
    codes = {f"job {first.name} ended with 75", f"job {first.name} ended with 0", "ended with 1"}
    until(lambda: all(code in Path("ended.log").read_text() for code in codes))
    lines = set(first.read_text().splitlines())
    assert {
        "#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=60", "#SBATCH --signal=USR1@300", "#SBATCH --requeue", "#SBATCH --open-mode=append",
    } <= lines  # fmt: skip


def test_a_command_that_is_stopped_leaves_jobs_in_the_queue_and_the_next_one_does_not_submit_them_again(
    slurm: None, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("hold").touch()
    Path("state-11").write_text("PENDING")
    meanwhile(Path("runs/x/sweep/.jobs/b.job").exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert swept("slurm", a="finish", b="finish") == ExitCode.STOPPED_EARLY
    assert message() == {"a": "queued", "b": "queued"}
    assert "the jobs stay in the queue" in capfd.readouterr().err
    # a is cancelled by hand, and b begins while the same command waits again.
    Path("state-11").write_text("CANCELLED by 0")
    Path("hold").unlink()
    subprocess.run("setsid ./begin 12 >> queue.log 2>&1 &", shell=True, check=True)
    assert swept("slurm", a="finish", b="finish") == ExitCode.DONE
    assert message() == {"a": "finished", "b": "finished"}
    assert len(list(Path("queue").iterdir())) == 3, "b was submitted once"


@pytest.mark.parametrize("state", ["PREEMPTED", "UNKNOWN"])
def test_a_job_that_saved_and_is_not_queued_again_is_not_waited_for(slurm: None, state: str) -> None:
    Path("hold").touch()

    def save() -> None:
        write_json(Path("runs/x/sweep/.jobs/a.code"), {"id": "11", "code": 75})
        Path("state-11").write_text(state)

    meanwhile(Path("runs/x/sweep/.jobs/a.job").exists, save)
    assert swept("slurm", a="finish") == ExitCode.STOPPED_EARLY


def test_a_job_that_slurm_ended_is_reported_with_its_state(slurm: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hold").touch()
    Path("state-11").write_text("OUT_OF_MEMORY")
    assert swept("slurm", a="finish") == ExitCode.FAILED
    assert "failed: a: exit code 1: OUT_OF_MEMORY by slurm" in capsys.readouterr().out


def test_what_sbatch_refuses_is_reported_in_its_words(slurm: None) -> None:
    Path("refuse").touch()
    with pytest.raises(UserError, match="a could not be submitted: sbatch: error: invalid partition specified: gpux"):
        swept("slurm", a="finish")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "--submit", "slurm", "model=mlp", "seed=1,2"], "there is no sbatch on this machine"),
        (
            ["-m", "--submit", "slurm", "--submit", "tasks_per_node=8", "model=mlp", "seed=1,2"],
            "parallel.strategy is single",
        ),
        (
            ["-m", "--submit", "local", "--submit", "nodes=two", "model=mlp", "seed=1,2"],
            'Parameter "nodes" expected type',
        ),
        (
            ["-m", "--submit", "local", "--submit", "nodes=2", "model=mlp", "seed=1,2"],
            "LocalExecutor can use only one node",
        ),
        (["--submit", "slurm", "seed=1"], "--submit is for a sweep"),
    ],
)
def test_a_mistake_is_reported_before_a_job_is_submitted(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments]) == ExitCode.USER
    assert message in capsys.readouterr().err
    assert not list(Path().glob("runs/**/*.yaml"))


def test_the_parameters_that_a_shell_offers_are_known() -> None:
    given = {word.removesuffix("=") for word in SUBMIT} - set(CLUSTERS)
    check_names(read_submission(["slurm", *(f"{name}=400" for name in given - {"timeout_min"})]), known_parameters())


def test_without_submitit_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["fit", "-m", "--submit", "local", "model=mlp", "seed=1,2"]) == ExitCode.USER
    assert 'pip install "trainer-cli[submitit]"' in capsys.readouterr().err
    assert not Path("runs").exists()
