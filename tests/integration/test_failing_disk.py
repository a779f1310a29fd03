"""A run whose file system fails or is full: one message that names what failed, and nothing that was committed is lost.

These file systems are real ones, in mount namespaces of their own, which only the superuser may make. One that refuses
calls is injected.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import LIMIT_S, ROOT, Result, command, environment, names, records
from printed import message

from trainer_cli import SyncCheckpointer
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.config.composing import compose
from trainer_cli.errors import RunDirectoryError
from trainer_cli.files.durable import warn_of_no_fsync
from trainer_cli.running.fitting import fit
from trainer_cli.storage.disk import Disk

RUN = (
    "fit", "experiment=digits_mlp", "model.hidden=[64]", "loop.max_duration=1000000", "loop.log_interval=5",
    "loop.eval_interval=null", "loop.eval_steps=1", "checkpoint.save_interval=20", "run_dir=disk/run",
)  # fmt: skip


def mounted(cwd: Path, what: str, *arguments: str) -> Result:
    """Run a command in `cwd` with a file system mounted on `cwd/disk`."""
    (cwd / "disk").mkdir(exist_ok=True)
    script = f'mount {what} disk && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *arguments],
        cwd=cwd, env=environment(), text=True, timeout=LIMIT_S, capture_output=True,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def ext4(tmp_path: Path) -> str:
    """What mounts an ext4 file system of its own."""
    with open(tmp_path / "image", "wb") as image:
        image.truncate(1 << 26)
    try:
        subprocess.run(["mkfs.ext4", "-qF", str(tmp_path / "image")], check=True)
        works = mounted(tmp_path, "-o loop image", "true").code == 0
    except FileNotFoundError:
        works = False
    if not works:
        pytest.skip("no ext4 file system can be mounted here")
    return "-o loop image"


def messages(result: Result) -> list[str]:
    """What was said on stderr that is no progress."""
    progress = (
        r"step=\d|committed|checkpoints are|(run|model|optimizer|data|device|evaluates|callbacks|saves)  |the power"
    )
    return [line for line in result.err.splitlines() if not re.match(progress, line)]


@pytest.mark.root
@pytest.mark.parametrize("save_async", ["true", pytest.param("false", marks=pytest.mark.campaign)])
def test_a_disk_that_fails_is_one_error_and_loses_nothing_that_was_committed(
    tmp_path: Path, ext4: str, save_async: str
) -> None:
    run = command(*RUN, f"checkpoint.save_async={save_async}")
    power_cut = [sys.executable, str(ROOT / "tests/support/power_cut.py"), "disk"]
    cut = mounted(tmp_path, ext4, *power_cut, *run)
    assert cut.code == 1, cut.err
    said = messages(cut)
    error = message(cut.err)
    assert "Input/output error" in error
    assert error.endswith("Check the disk and its file system.")
    said = [line for line in said if not line.startswith(("  --> ", "help: "))]
    assert all("Input/output error" in line for line in said), cut.err
    assert "are free" not in cut.err
    assert len(said) <= 4, cut.err
    committed = [int(step) for step in re.findall(r"^committed step (\d+)", cut.err, re.MULTILINE)]
    again = mounted(tmp_path, ext4, *command(*RUN, f"loop.max_duration={committed[-1] + 40}"))
    assert again.code == 0, again.err
    assert int(re.findall(r"^resuming at step (\d+)", again.err, re.MULTILINE)[0]) >= committed[-1]


@pytest.mark.root
def test_a_full_disk_is_foretold_and_reported_with_what_the_checkpoint_really_takes(tmp_path: Path) -> None:
    if mounted(tmp_path, "-t tmpfs none", "true").code != 0:
        pytest.skip("no file system can be mounted here")
    script = 'trap "ls -l disk/run/checkpoints/step20; tail -n 40 disk/run/train.log" EXIT; "$@"'
    rules = ("checkpoint.on_save_error=raise", "loggers=null", "checkpoint.save_interval=20")
    full = mounted(tmp_path, "-t tmpfs -o size=300k none", "sh", "-c", script, "sh", *command(*RUN, *rules))
    assert full.code == 75, full.err
    assert "Traceback" not in full.err
    assert "warning: the disk will be full before the run ends" in full.err
    reported = r"not started: it needs ([\d,]+) bytes and [\d,]+ for blocks and logs, ([\d,]+) bytes are free"
    needed, free = re.findall(reported, full.err)[0]
    # What was kept free for it.
    assert "the checkpoint was not started" in full.out
    assert names(tmp_path / "disk") == []
    sizes = [int(line.split()[4]) for line in full.out.splitlines() if line.startswith("-")]
    assert 0 <= sum(sizes) - int(needed.replace(",", "")) < 5_000, "all but the manifest"
    assert int(free.replace(",", "")) < 300 << 10


@pytest.mark.root
def test_a_disk_that_holds_no_two_checkpoints_is_refused_before_the_first_step(tmp_path: Path) -> None:
    if mounted(tmp_path, "-t tmpfs none", "true").code != 0:
        pytest.skip("no file system can be mounted here")
    full = mounted(tmp_path, "-t tmpfs -o size=140k none", *command(*RUN, "loggers=null"))
    assert full.code == 2, full.err
    assert re.match(r"the disk has no room for the first saves: it needs [\d,]+ bytes", message(full.err)), full.err
    assert "committed" not in full.err


@pytest.mark.root
def test_with_the_policy_warn_a_full_disk_ends_no_run_and_no_record_is_lost(tmp_path: Path) -> None:
    if mounted(tmp_path, "-t tmpfs none", "true").code != 0:
        pytest.skip("no file system can be mounted here")
    (tmp_path / "filling.py").write_text(
        "import os\n"
        "from trainer_cli import Callback\n\n\n"
        "class Fill(Callback):\n"
        '    """Fills the disk during some steps."""\n\n'
        "    def on_train_step_end(self, trainer, *results):\n"
        "        if trainer.progress.step == 25:\n"
        '            ballast = os.open("disk/ballast", os.O_CREAT | os.O_WRONLY)\n'
        "            try:\n"
        "                while os.write(ballast, bytes(256)):\n"
        "                    pass\n"
        "            except OSError:\n"
        "                os.close(ballast)\n"
        "        if trainer.progress.step == 45:\n"
        '            os.unlink("disk/ballast")\n'
    )
    rules = (
        "checkpoint.on_save_error=warn", "loggers={jsonl:{_target_: trainer_cli.JsonlLogger}}",
        "+callbacks.fill._target_=filling.Fill", "loop.max_duration=60", "loop.log_interval=1",
    )  # fmt: skip
    script = '"$@"; code=$?; cp disk/run/metrics.jsonl disk/run/train.log .; exit $code'
    full = mounted(tmp_path, "-t tmpfs -o size=2m none", "sh", "-c", script, "sh", *command(*RUN, *rules))
    assert full.code == 0, full.err
    assert "jsonl cannot be written: [Errno 28] No space left on device" in full.err
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == list(range(1, 61))
    assert "jsonl cannot be written" in (tmp_path / "train.log").read_text()


def test_a_folder_of_a_notebook_service_trains_and_resumes_as_a_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a mounted Google Drive does, each call takes long, and fsync, links and writes past the cache are refused."""
    run = ["experiment=digits_mlp", "name=mine", "loop.max_duration=6", "loop.log_interval=1", "loop.eval_interval=3"]
    saves = ["checkpoint.save_interval=2", "checkpoint.keep_best.metric=val/loss", "loggers=jsonl"]

    def last() -> dict[str, Any]:
        state: dict[str, Any] = SyncCheckpointer().load(Path("runs/mine/checkpoints/step6"))["model"]
        return state

    for place in ("disk", "drive"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "disk")
    assert fit(compose([*run, *saves])) == 0
    expected = last()
    monkeypatch.chdir(tmp_path / "drive")
    for name, number in (("fsync", errno.EINVAL), ("link", errno.ENOTSUP), ("symlink", errno.ENOTSUP)):
        monkeypatch.setattr(os, name, partial(_refuse, number))
    for name in ("pwrite", "rename", "replace", "mkdir"):
        monkeypatch.setattr(os, name, partial(_delayed, getattr(os, name)))
    monkeypatch.setattr(Disk, "bypass_cache", partial(_refuse, errno.EINVAL))
    warn_of_no_fsync.cache_clear()
    capsys.readouterr()
    assert fit(compose([*run, *saves, "loop.hard_stop=3"])) == 0
    assert capsys.readouterr().err.count("a file system in use refuses fsync (Invalid argument)") == 1
    assert fit(compose([*run, *saves])) == 0
    assert "resuming at step 3" in capsys.readouterr().err
    assert all(torch.equal(value, expected[name]) for name, value in last().items())
    assert {entry.problem for entry in Catalog.of(Path("runs/mine/checkpoints")).entries()} == {None}


def test_a_folder_without_locks_is_refused_for_a_run_and_takes_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, drive = fcntl.flock, tmp_path / "drive"

    def refusing(descriptor: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(drive)):
            _refuse(errno.ENOTSUP)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refusing)
    monkeypatch.chdir(tmp_path)
    run = ["experiment=digits_mlp", "loop.max_duration=4", "loop.eval_interval=null", "checkpoint.save_interval=1"]
    with pytest.raises(RunDirectoryError, match="drive/run cannot be locked: Operation not supported") as refused:
        fit(compose([*run, f"run_dir={drive}/run"]))
    assert str(refused.value.cure).startswith("Its filesystem has no file locks")
    assert fit(compose([*run, f"checkpoint.copy_to.folder={drive}/copies", "checkpoint.copy_to.every=2"])) == 0
    assert names(drive / "copies") == ["step2", "step4"]


def _refuse(number: int, *_: Any, **__: Any) -> None:
    raise OSError(number, os.strerror(number))


def _delayed(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    time.sleep(0.005)
    return call(*arguments, **named)
