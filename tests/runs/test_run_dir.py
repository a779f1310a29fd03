"""The run directory: created whole, locked by one process, with the end of each attempt."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from dying_disk import Died, die_at
from small_parts import note

from trainer_cli.environment import environment, git_facts, versions
from trainer_cli.errors import RunDirectoryError, UserError
from trainer_cli.files import durable as files
from trainer_cli.runs import run_dir
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.runs.run_lock import RunLock
from trainer_cli.steps.run_status import RunStatus

CONFIG = "name: x\ndata:\n  path: ${oc.env:SECRET_PATH}\n"
ROOT = Path(__file__).parents[2]


def created(path: Path) -> RunDir:
    run = RunDir(path)
    run.create(CONFIG, ["loop.max_duration=5"], {"host": "here", "python": "3.11"}).release()
    return run


def ended(step: int = 10, **changes: Any) -> Outcome:
    facts = {"status": RunStatus.finished, "reason": "done", "step": step, "wall_time_s": 2.0}
    return Outcome(**{**facts, **changes})


def tree(path: Path) -> dict[str, tuple[bytes, int]]:
    return {entry.name: (entry.read_bytes(), entry.stat().st_mtime_ns) for entry in path.rglob("*") if entry.is_file()}


@pytest.mark.parametrize("overrides", [["+experiment=digits", 'name="a b"', "ckpt=[a,b]", "note=ß: #1"], []])
def test_a_new_run_has_its_config_overrides_and_an_identity_of_its_own(overrides: list[str], tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "x")
    assert not run.exists_as_run()
    assert list(tmp_path.iterdir()) == []
    run.create(CONFIG, overrides, {"host": "here"}).release()
    assert run.exists_as_run()
    assert run.read_config() == CONFIG
    assert yaml.safe_load(run.overrides_file.read_text()) == overrides
    assert run.read_environment() == {"run_id": run.run_id, "host": "here"}
    assert run.attempts == []
    before = run.run_id
    run.write_config("name: y\n", ["name=y"])
    assert (run.read_config(), run.run_id) == ("name: y\n", before)
    assert created(tmp_path / "other").run_id != before


def test_a_value_keeps_its_place_when_its_own_config_is_composed_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    run.create(CONFIG, [], {}, places={"seed": "configs/mine.yaml:3", "name": "command line"}).release()
    own = dict.fromkeys(("seed", "device"), f"{run.config_file}:7")
    run.write_config("name: y\n", ["name=y"], {**own, "name": "other.yaml:1"})
    assert run.read_provenance() == {"seed": "configs/mine.yaml:3", "name": "other.yaml:1"}
    run.provenance_file.write_text("[")
    run.write_config("name: y\n", [], own)
    assert run.read_provenance() == own


@pytest.mark.parametrize("locked_before", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "checkpoints/step1/a"])
def test_a_directory_that_is_something_else_is_refused_and_left_alone(
    name: str, locked_before: bool, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    if locked_before:
        (tmp_path / ".lock").touch()
    before = tree(tmp_path)
    with pytest.raises(RunDirectoryError, match=name.partition("/")[0]):
        RunDir(tmp_path).create(CONFIG, [], {})
    assert tree(tmp_path) == before
    (tmp_path / ".lock").touch()
    RunDir(tmp_path).lock().release()


def test_of_two_creations_at_once_one_has_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, lock = RunDir(tmp_path / "x"), RunDir.lock

    def create_before(run: RunDir) -> RunLock:
        monkeypatch.setattr(RunDir, "lock", lock)
        first.create(CONFIG, [], {}).release()
        return lock(run)

    monkeypatch.setattr(RunDir, "lock", create_before)
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        RunDir(tmp_path / "x").create("name: y\n", [], {})
    assert first.read_config() == CONFIG


@pytest.mark.parametrize("exists", ["", "a", "a/b"])
def test_a_folder_that_cannot_be_made_leaves_none_above_it_that_was_not_there(exists: str, tmp_path: Path) -> None:
    (tmp_path / exists).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="File name too long"):
        RunDir.make_directory(tmp_path / "a/b/c" / ("x" * 256))
    assert sorted(tmp_path.rglob("*")) == before
    for _ in range(2):
        RunDir.make_directory(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


def test_a_new_run_is_durable_with_the_entry_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, usual = list[Path](), files.sync
    monkeypatch.setattr("trainer_cli.runs.run_dir.sync", lambda folder: (note(synced, folder), usual(folder)))
    created(tmp_path / "runs" / "x")
    assert synced == [tmp_path / "runs"]


@pytest.mark.parametrize("nth", range(1, 10))
def test_a_change_of_the_config_that_dies_anywhere_leaves_the_old_or_is_whole(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start compares with the config that is there."""
    run = created(tmp_path / "x")
    with monkeypatch.context() as patch:
        die_at(patch, nth, ("fsync", "replace"))
        with contextlib.suppress(Died):
            run.write_config("name: y\n", ["name=y"], {"name": "command line"})
    if run.read_config() != CONFIG:
        assert yaml.safe_load(run.overrides_file.read_text()) == ["name=y"]
        assert run.read_provenance() == {"name": "command line"}


def test_an_empty_folder_of_checkpoints_does_not_hinder_a_run(tmp_path: Path) -> None:
    """Another rank of a run, whose rank 0 was on another machine, may have left it."""
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    assert created(tmp_path / "x").exists_as_run()


def test_a_second_run_is_refused_and_files_that_are_no_part_of_a_run_do_not_hinder_the_first(tmp_path: Path) -> None:
    (tmp_path / "slurm-17.out").write_text("hello")
    run = created(tmp_path)
    before = tree(run.path)
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        run.create(CONFIG, [], {})
    assert tree(run.path) == before


@pytest.mark.parametrize("nth", range(1, 17))
def test_a_creation_that_dies_anywhere_leaves_no_run_or_a_whole_one(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "x")
    with monkeypatch.context() as patch:
        die_at(patch, nth, ("fsync", "replace", "pwrite"))
        with contextlib.suppress(Died):
            run.create(CONFIG, [], {}).release()
    if not run.exists_as_run():
        run.create(CONFIG, [], {}).release()
    assert run.read_config() == CONFIG
    assert run.run_id


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_move_to_the_trash_that_dies_anywhere_leaves_the_whole_run_in_one_place(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = created(tmp_path / "x")
    id, moved = run.run_id, RunDir(tmp_path / ".trash/x-1")
    with monkeypatch.context() as patch:
        die_at(patch, nth, ("mkdir", "fsync", "rename"))
        with contextlib.suppress(Died):
            run.move_to_trash()
    assert [place.run_id for place in (run, moved) if place.exists_as_run()] == [id]
    if run.exists_as_run():
        assert run.move_to_trash() == moved.path


def test_a_start_that_waited_for_the_lock_of_a_run_that_was_moved_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = created(tmp_path / "x")

    def wait_while_another_moves_it(descriptor: int) -> None:
        monkeypatch.undo()
        run.move_to_trash()
        created(run.path)

    monkeypatch.setattr(run_dir, "lock_file", wait_while_another_moves_it)
    with pytest.raises(RunDirectoryError, match="moved by another process"):
        run.lock()
    run.lock().release()


def test_an_interrupted_start_leaves_no_folder_that_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def interrupted(self: Path, *arguments: Any, **named: Any) -> None:
        if self.name == "c":
            raise KeyboardInterrupt
        make(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunDir.make_directory(tmp_path / "a/b/c")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made: .*run_dir="):
        RunDir(tmp_path / "file" / "x").create(CONFIG, [], {})


def test_a_new_run_is_locked_from_the_start_and_refused_with_its_holder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    lock = run.create(CONFIG, [], {})
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()} on ") as caught:
        RunDir(tmp_path / "x").lock()
    assert caught.value.exit_code == 4
    lock.release()
    lock.release()
    run.lock().release()


def test_a_lock_names_its_holder_alone(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.lock_file.write_text(f"process 123456789 on {'a' * 200}\n")
    with run.lock() as lock:
        lock.name_holder()
        assert run.lock_file.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_readers_hold_off_a_training_and_not_each_other(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    first, second = run.share(), RunDir(run.path).share()
    assert first is not None
    assert second is not None
    assert not run.is_locked()
    first.release()
    with pytest.raises(RunDirectoryError, match="is being replayed by another process"):
        run.lock()
    second.release()
    with run.lock():
        assert run.share() is None


def test_a_lock_and_a_look_at_it_change_nothing_in_the_directory(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.lock_file.unlink()
    before = tree(run.path)
    assert not run.is_locked()
    assert tree(run.path) == before
    run.lock_file.touch()
    before = tree(run.path)
    with run.lock():
        run.read_config()
        assert run.is_locked()
    assert not run.is_locked()
    assert tree(run.path) == before


@pytest.mark.parametrize("starts", ["again", "for the first time"])
def test_a_run_whose_lock_file_was_removed_lets_no_second_process_in(tmp_path: Path, starts: str) -> None:
    run = RunDir(tmp_path / "x")
    lock = run.create(CONFIG, [], {})
    if starts == "again":
        lock.release()
        lock = run.lock()
    with lock:
        run.lock_file.unlink()
        # Twice: the first attempt may make a new lock file.
        for _ in range(2):
            with pytest.raises(RunDirectoryError, match="in use by another process"):
                run.lock()
            assert run.is_locked()
            assert run.share() is None
    run.lock().release()


@pytest.mark.parametrize("mode", [0o444, 0o000])
def test_an_environment_that_cannot_be_written_leaves_the_lock_to_the_lock_file(tmp_path: Path, mode: int) -> None:
    run = created(tmp_path / "x")
    run.environment_file.chmod(mode)
    with run.lock(), pytest.raises(RunDirectoryError, match="in use"):
        run.lock()
    assert not run.is_locked()


def test_the_lock_of_a_killed_process_is_free_while_its_worker_still_runs(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    code = (
        "import os, sys, time\nfrom trainer_cli.runs.run_dir import RunDir\n"
        f"lock = RunDir({str(run.path)!r}).lock()\nlock.name_holder()\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(RunDirectoryError, match=f"process {holder.pid} "):
            run.lock()
        holder.kill()
        holder.wait(timeout=500)
        run.lock().release()
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.stdout.close()


def test_an_attempt_is_running_from_its_beginning_and_killed_without_a_recorded_end(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    now = {"host": "elsewhere", "python": "3.11", "time": "later"}
    assert run.begin_attempt(name="x", start_step=0, now=1e9, environment=now) == 1
    summary = run.read_summary()
    assert (summary["status"], summary["run_id"], summary["name"]) == ("running", run.run_id, "x")
    assert summary["attempts"][0]["started"] == "2001-09-09T01:46:40+00:00"
    assert summary["attempts"][0]["changed_environment"] == {"host": "elsewhere"}, "what differs from the first"
    assert run.begin_attempt(name="x", start_step=5, now=2e9, environment={}) == 2
    assert [attempt["status"] for attempt in run.attempts] == ["killed", "running"]


def test_the_summary_reports_how_it_ended_and_adds_up_the_attempts(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.begin_attempt(name="x", start_step=0, now=1e9, environment={})
    run.end_attempt(ended(5, status=RunStatus.stopped, reason="SIGTERM", wall_time_s=1.5), now=1e9 + 2)
    run.begin_attempt(name="x", start_step=5, now=2e9, environment={})
    kept = [{"name": "step10", "why": "the newest"}]
    best = {"val/loss": {"value": float("nan"), "step": 10}}
    run.end_attempt(ended(10, checkpoints=kept, best_metrics=best, throughput={"samples_per_s": float("inf")}), now=2e9)
    summary = json.loads(run.summary_file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (summary["status"], summary["reason"], summary["step"]) == ("finished", "done", 10)
    assert summary["wall_time_s"] == 3.5
    assert summary["checkpoints"] == kept
    assert summary["best_metrics"] == {"val/loss": {"value": "nan", "step": 10}}
    assert summary["throughput"] == {"samples_per_s": "inf"}
    assert [(attempt["status"], attempt["step"]) for attempt in summary["attempts"]] == [
        ("stopped", 5),
        ("finished", 10),
    ]
    assert list(summary)[-1] == "attempts"


def test_the_number_of_an_attempt_is_used_once_though_others_are_damaged(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.summary_file.write_text('{"attempts": [7, {"attempt": 2, "status": "stopped"}, null]}')
    assert run.begin_attempt(name="x", start_step=0, now=1e9, environment={}) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"attempts": 3}'])
def test_a_damaged_summary_does_not_hinder_a_run(content: bytes, tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.summary_file.write_bytes(content)
    assert run.begin_attempt(name="x", start_step=0, now=1e9, environment={}) == 1
    run.end_attempt(ended(), now=1e9)
    assert run.read_summary()["status"] == "finished"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"run_id": 7}', b"\xff"])
def test_a_run_without_readable_identity_or_config_is_refused(content: bytes, tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.environment_file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"environment\.json"):
        _ = run.run_id
    run.config_file.write_bytes(b"\xff\xfe")
    with pytest.raises(RunDirectoryError, match=r"config\.yaml cannot be read"):
        run.read_config()


def test_a_summary_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = created(tmp_path / "x")
    run.begin_attempt(name="x", start_step=0, now=1e9, environment={})
    before = run.summary_file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            run.end_attempt(ended(), now=1e9)
    assert run.summary_file.read_bytes() == before


def test_the_environment_names_versions_and_place_but_no_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-mine")
    facts = environment(tmp_path, ["train", "fit"], now=time.time())
    assert facts["argv"] == ["train", "fit"]
    assert facts["versions"]["hydra-core"]
    assert facts["git"] is None
    assert "a-secret-of-mine" not in json.dumps(facts)
    assert versions(["no-such-package-anywhere"]) == {"no-such-package-anywhere": None}


def test_git_facts_tell_the_commit_and_whether_tracked_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "--quiet")
    assert git_facts(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "--no-gpg-sign", "-m", "a")
    assert git_facts(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    facts = git_facts(tmp_path)
    assert facts is not None
    assert facts["dirty"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_facts(tmp_path) is None, "there is no git"


def test_reading_a_run_imports_no_torch() -> None:
    code = "import sys, trainer_cli.runs.run_dir; assert not {'torch', 'numpy', 'hydra'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_asks_whether_a_run_is_locked_does_not_keep_a_start_out(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    reader = os.open(run.lock_file, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    letting_go = threading.Timer(0.02, os.close, [reader])
    letting_go.start()
    run.lock().release()
    letting_go.join()


def test_the_length_of_the_training_is_in_the_summary_of_every_attempt(tmp_path: Path) -> None:
    run = created(tmp_path / "x")
    run.begin_attempt(name="x", start_step=0, now=1e9, environment={})
    run.record_total_steps(40)
    assert (run.read_summary()["total_steps"], run.read_summary()["status"]) == (40, "running")
    run.end_attempt(ended(), now=1e9)
    assert run.read_summary()["total_steps"] == 40
    run.begin_attempt(name="x", start_step=10, now=1e9, environment={})
    run.record_total_steps(None)
    assert (run.read_summary()["total_steps"], list(run.read_summary())[-1]) == (None, "attempts")


def test_the_records_of_a_run_hold_paths_that_are_not_utf8(tmp_path: Path) -> None:
    folder = os.fsdecode(b"/data/gr\xf6\xdfe")
    run = RunDir(tmp_path / "x")
    run.create(CONFIG, [], {"project_root": folder}).release()
    run.begin_attempt(name="x", start_step=0, now=1e9, environment={"argv": [f"{folder}/train"]})
    assert run.project_roots == [Path(folder)]
    assert run.attempts[0]["changed_environment"]["argv"] == [f"{folder}/train"]
    run.environment_file.read_bytes().decode()
