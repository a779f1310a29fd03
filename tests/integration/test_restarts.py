"""`restarts.max` by the real command: a process that is killed and one that fails are followed by others."""

from __future__ import annotations

import json
from pathlib import Path

from command import train
from compare import metrics

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


def test_a_run_goes_on_after_a_kill_and_an_error_as_if_nothing_had_been(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    own = (
        "experiment=digits_mlp", "loop.max_duration=9", "loop.log_interval=1", "loop.eval_interval=null",
        "checkpoint.save_interval=2", "checkpoint.save_async=false", "loggers=jsonl", "scheduler=null",
    )  # fmt: skip
    restarting = train(
        "fit", *own, "+callbacks.fails._target_=fails.Fails", "restarts.max=1", "restarts.backoff=null", cwd=tmp_path
    )
    assert restarting.code == 0, restarting.err
    run = tmp_path / "runs/digits_mlp"
    attempts = json.loads((run / "summary.json").read_text())["attempts"]
    assert [(one["status"], one["start_step"]) for one in attempts] == [("killed", 0), ("failed", 4), ("finished", 6)]
    assert "restarting in 0 s" in restarting.err
    assert [record["step"] for record in metrics(run)] == list(range(1, 10))
    wrong = train("fit", *own, "restarts.max=1", "optimizer.lr=0.5", cwd=tmp_path)
    assert wrong.code == 2
    assert "not restarted: the config or the command is wrong" in wrong.err
