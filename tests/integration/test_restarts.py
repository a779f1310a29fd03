"""`restarts.max`: a process that is killed and one that fails are followed by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import fork_jobs, train
from compare import metrics

from trainer_cli.commands.command_line import main

FAILS = '''
"""Kills its process after step 5, and raises after step 7, once each."""

import os
import signal

from trainer_cli import Callback


class Fails(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        step = trainer.progress.step
        if step in (5, 7) and not os.path.exists(f"failed{step}"):
            open(f"failed{step}", "w").close()
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk went away")
'''


OWN = (
    "experiment=digits_mlp", "loop.max_duration=9", "loop.log_interval=1", "loop.eval_interval=null",
    "checkpoint.save_interval=2", "checkpoint.save_async=false", "loggers=jsonl", "scheduler=null",
    "+callbacks.fails._target_=fails.Fails", "restarts.max=1", "restarts.backoff=null",
)  # fmt: skip


def test_a_run_goes_on_after_a_kill_and_an_error_as_if_nothing_had_been(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_jobs(monkeypatch)
    (empty_folder / "fails.py").write_text(FAILS)
    assert main(["fit", *OWN]) == 0
    run = empty_folder / "runs/digits_mlp"
    attempts = json.loads((run / "summary.json").read_text())["attempts"]
    assert [(one["status"], one["start_step"]) for one in attempts] == [("killed", 0), ("failed", 4), ("finished", 6)]
    assert "restarting in 0 s" in capsys.readouterr().err
    assert [record["step"] for record in metrics(run)] == list(range(1, 10))
    assert main(["fit", *OWN, "optimizer.lr=0.5"]) == 2
    wrong = capsys.readouterr().err
    assert "the config differs from the one that" in wrong
    assert "restarting" not in wrong, "it was found before a process was started"


def test_a_job_of_a_submitted_sweep_goes_on_too(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "failed7").touch()
    done = train("fit", "-m", "--submit", "local", "--jobs", "2", *OWN, "seed=1,2", cwd=tmp_path)
    assert done.code == 0, done.err
    sweep = tmp_path / "runs/digits_mlp/sweep"
    attempts = [json.loads((sweep / f"seed={seed}/summary.json").read_text())["attempts"] for seed in (1, 2)]
    assert sorted([one["status"] for one in own] for own in attempts) == [["finished"], ["killed", "finished"]]
    output = "".join(file.read_text() for file in sweep.glob("submitit/*_log.out"))
    assert output.count("restarting in 0 s") == 1
    assert "resuming at step 4" in output
