"""Sweeps of real runs in which no device ever has more jobs than it may: each job checks who else is alive there."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from command import fork_jobs, hold, running
from device_watch import environment_of, make_watched_project, read_notes

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow
SWEEP = ("fit", "-m", "experiment=mine", "device=cpu", "loggers=jsonl", "loop.max_duration=8")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    yield make_watched_project(tmp_path)
    # After a failed test nothing waits any longer: a run whose command was killed would do so for ever.
    for held in tmp_path.glob("hold-*"):
        held.unlink()


def seen(project: Path) -> tuple[dict[str, int], Mapping[str, list[str]]]:
    """Device -> the most jobs that it had at a time; job -> the devices that its processes had, in order."""
    most, processes = read_notes(project)
    return most, {job: [device for device, _ in notes] for job, notes in processes.items()}


def sweep(project: Path, patch: pytest.MonkeyPatch, *arguments: str, visible: str = "0,1") -> int:
    """Run a sweep in this process, its jobs in others, on a machine with these devices."""
    patch.chdir(project)
    patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    patch.setenv("XDG_CACHE_HOME", str(project / "cache"))
    fork_jobs(patch)
    return main([*SWEEP, *arguments])


def test_each_job_has_a_device_of_its_own_and_one_that_is_killed_frees_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "dies").touch()
    assert sweep(project, monkeypatch, "--devices", "all", "seed=range(5)") == 1, "one job was killed"
    most, devices = seen(project)
    assert most == {"0": 1, "1": 1}
    assert sorted(devices) == [f"seed={seed}" for seed in range(5)]
    assert {len(used) for used in devices.values()} == {1}
    assert {device for used in devices.values() for device in used} == {"0", "1"}
    told = re.findall(r"(seed=\d) started on device (\d)", capsys.readouterr().err)
    assert dict(told) == {job: used[0] for job, used in devices.items()}
    assert sweep(project, monkeypatch, "--devices", "all", "seed=range(5)") == 0
    assert seen(project)[0] == {"0": 1, "1": 1}


def test_restarts_of_a_job_keep_its_device(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "dies").touch()
    assert sweep(project, monkeypatch, "--devices", "0,1", "seed=1,2,3", "restarts.max=1", "restarts.backoff=1s") == 0
    most, devices = seen(project)
    assert most == {"0": 1, "1": 1}
    assert sorted(map(len, devices.values())) == [1, 1, 2], "one was restarted"
    assert all(len(set(used)) == 1 for used in devices.values())


def test_a_device_has_as_many_jobs_as_it_is_allowed(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(project, monkeypatch, "--jobs-per-device", "2", "--jobs", "9", "seed=range(4)", visible="GPU-x") == 0
    most, _ = seen(project)
    assert most["GPU-x"] <= 2
    told = capsys.readouterr().err
    assert "2 jobs at a time, not 9: 2 on each of the devices GPU-x; --jobs-per-device sets how many" in told


def test_a_job_of_two_processes_has_two_devices(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = ("parallel=ddp", "parallel.processes_per_node=2")
    assert sweep(project, monkeypatch, "--devices", "0,2,3", *two, "seed=1,2", visible="0,1,2,3") == 0
    most, devices = seen(project)
    assert most == {"0": 1, "2": 1}, "three devices are enough for one job"
    assert {job: sorted(used) for job, used in devices.items()} == {
        "seed=1": ["0", "0", "2", "2"], "seed=2": ["0", "0", "2", "2"],
    }  # fmt: skip


def test_jobs_on_the_cpu_are_given_devices_only_when_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(project, monkeypatch, "--jobs", "2", "seed=1,2") == 0
    assert seen(project)[1] == {"seed=1": ["0", "1"], "seed=2": ["0", "1"]}, "both see all devices"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("fit", "experiment=mine", "--devices", "1"),
            "--devices is for a sweep. Add -m; a single run takes device=cuda:1",
        ),
        (("fit", "experiment=mine", "--jobs-per-device", "1"), "--jobs-per-device is for a sweep. Add -m."),
        ((*SWEEP, "--devices", "7", "seed=1,2"), "there is no device '7'. There are: 0, 1."),
        ((*SWEEP, "--devices", "", "seed=1,2"), "there is no device ''. There are: 0, 1."),
        ((*SWEEP, "--jobs-per-device", "0", "seed=1,2"), "--jobs-per-device is 0, but it must be at least 1"),
        ((*SWEEP, "--submit", "local", "--devices", "1", "seed=1,2"), "--submit gpus_per_node=1"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_cure(
    arguments: tuple[str, ...], message: str, project: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main([*arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("\nhelp:", ".").split())
    assert not (project / "runs").exists()


@pytest.mark.parametrize(("name", "waits"), [("mine", "seed=2"), ("other", "seed=1")])
def test_a_killed_sweep_that_is_started_again_doubles_no_device(name: str, waits: str, project: Path) -> None:
    env, words = environment_of(project), (*SWEEP, "--devices", "0", "seed=1,2")
    held = hold(project, "train")
    with running(*words, cwd=project, **env) as killed:
        killed.reach("train")
        killed.signal(signal.SIGKILL)
        # The orphan cannot stop: it waits where it is held. A run that is in use is left for later.
        with running(*words, f"name={name}", cwd=project, **env) as again:
            assert again.process.stderr is not None
            assert any(f"{waits} waits: no device is free of 0" in str(line) for line in again.process.stderr)
            held.unlink()
            assert again.end().code == 0
    most, devices = seen(project)
    assert most == {"0": 1}
    assert {job: len(used) for job, used in devices.items()} == {"seed=1": 2, "seed=2": 1}


def test_two_sweeps_at_the_same_time_share_the_devices(project: Path) -> None:
    env = environment_of(project)
    with (
        running(*SWEEP, "--devices", "all", "seed=1,2,3", cwd=project, **env) as first,
        running(*SWEEP, "--devices", "all", "seed=4,5,6", "name=other", cwd=project, **env) as second,
    ):
        assert [first.end().code, second.end().code] == [0, 0]
    most, devices = seen(project)
    assert most == {"0": 1, "1": 1}
    assert len(devices) == 6
