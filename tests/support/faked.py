"""Jobs of a sweep that end as their configs say, without torch."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_cli.addons.jobs.submit import Submitted
from trainer_cli.addons.jobs.supervise import Children
from trainer_cli.addons.jobs.sweep import Planned, SweepPlan
from trainer_cli.addons.jobs.sweep_jobs import Job, SweptLine
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.schema import TrainConfig

FAKE = """
import json, os, signal, sys, time
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.runs.run_dir import Outcome, RunDir

run, what = RunDir(sys.argv[1]), sys.argv[2]
if what == "mistake":
    sys.exit(2)
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
if not run.exists_as_run():
    run.create("", [], {}).release()
run.begin_attempt(name="x", start_step=0, now=0.0, environment={})


def end(status, code):
    run.end_attempt(Outcome(status=status, reason=what, step=7, wall_time_s=1.0), now=1.0)
    sys.exit(code)


print(what, os.environ.get("OMP_NUM_THREADS"), flush=True)
if what == "finish":
    end(RunStatus.finished, 0)
if what == "fail":
    end(RunStatus.failed, 1)
if what == "early" or (what == "again" and len(run.attempts) == 1):
    end(RunStatus.stopped, 75)
if what == "again":
    end(RunStatus.finished, 0)
if what == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if what != "wait":
    os.kill(os.getppid(), signal.SIGINT if what == "deaf" else signal.SIGTERM)
while not signals:
    time.sleep(0.01)
if what == "deaf":
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
end(RunStatus.stopped, 75)
"""


def fake(**behaviour: str) -> list[tuple[Planned, str]]:
    """A job for each name that does what is said."""
    return [
        (Planned(Job(name, (), {"job": name}), RunDir(f"runs/x/sweep/{name}"), Path("runs/x"), "", False, "info"), what)
        for name, what in behaviour.items()
    ]


class FakePlan(SweepPlan):
    """The plan of a sweep of such jobs."""

    def __init__(self, planned: Sequence[tuple[Planned, str]]) -> None:
        self.planned = [job for job, _ in planned]
        self.settings, self.config_dir = TrainConfig().sweep, None
        # What is in the folder of a test is not kept.
        self.line = SweptLine(["source=project"], [], {})


def run_faked(children: Children | Submitted, planned: Sequence[tuple[Planned, str]]) -> None:
    """Have the children run the fake, in place of a training by a frozen config."""
    start, jobs = children.start, {job.key: (job, what) for job, what in planned}

    def start_fake(name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        job, what = jobs[name]
        assert Path(command[-1]).read_text() == job.frozen
        start(name, [sys.executable, "fake.py", str(job.run.path), what], env)

    children.start = start_fake  # type: ignore[method-assign]


def message() -> dict[str, str]:
    """Job -> status, as sweep.csv has it."""
    with open("runs/x/sweep/sweep.csv", encoding="utf-8") as file:
        return {line["job"]: line["status"] for line in csv.DictReader(file)}


def attempts(name: str) -> int:
    return len(RunDir(f"runs/x/sweep/{name}").attempts)
