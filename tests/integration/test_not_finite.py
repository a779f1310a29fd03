"""A training whose loss or weights are no longer finite ends with code 1, is never finished, and loses nothing."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from command import names, train
from printed import message

FIT = (
    "+experiment=digits_mlp", "device=cpu", "run_dir=run", "loop.max_duration=60", "loop.eval_interval=null",
    "checkpoint.save_interval=5", "checkpoint.max_checkpoints=2", "scheduler=null",
)  # fmt: skip
ALLOW = "resume_allow=[optimizer.lr]"


def manifests(run: Path) -> dict[str, dict[str, object]]:
    folder = run / "checkpoints"
    return {name: json.loads((folder / name / "manifest.json").read_text()) for name in names(folder)}


def test_a_loss_that_is_not_finite_is_a_warning_and_then_the_end(tmp_path: Path) -> None:
    assert train("fit", *FIT, "loop.hard_stop=12", "loop.log_interval=4", cwd=tmp_path).code == 0
    done = train("fit", *FIT, "loop.log_interval=4", "optimizer.lr=1e38", ALLOW, cwd=tmp_path)
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    warning = next(line for line in done.err.splitlines() if line.startswith("warning: the loss is not finite at step"))
    assert "The last finite checkpoint is run/checkpoints/step12." in warning
    error = message(done.err)
    assert re.search(r"the loss was first seen not finite at step \d+ \(it is looked at every 4 steps\), and", error)
    assert "The last finite checkpoint is run/checkpoints/step12. The same command resumes it" in error
    assert "which may be a sample ('resume_allow=[data]' where a key of data is changed for it), or a learning" in error
    assert (
        "`train bisect run 'train/loss is not finite'` finds the step and its samples, and `train replay run 13..16` "
        "computes these steps again. The last finite checkpoint"
    ) in error
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] <= 24, "the second log step after it"
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    found = manifests(tmp_path / "run")
    assert [name for name, one in found.items() if one["finite"]] == ["step5", "step10", "step12"], (
        "none was pushed out"
    )
    assert not any(one["finished"] for name, one in found.items() if not one["finite"])

    again = train("fit", *FIT, "loop.log_interval=4", "optimizer.lr=0.001", ALLOW, cwd=tmp_path)
    assert again.code == 0, again.err
    assert "resuming at step 12" in again.err
    assert "finished at step 60" in again.out


def test_a_loss_that_had_risen_is_named_by_the_error_and_by_a_resume(tmp_path: Path) -> None:
    often = ("loop.log_interval=2", "checkpoint.save_interval=2", "checkpoint.max_checkpoints=null")
    done = train("fit", *FIT, *often, "optimizer.lr=1000", cwd=tmp_path)
    assert done.code == 1
    assert "resume=anew" in message(done.err)
    assert re.search(r"But train/loss at step \d+ is \S+, above the \S+ at step 2, so", message(done.err))
    assert "The same command resumes it" not in done.err
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    summary = tmp_path / "other/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"reason": "KeyError: 'x'"}))
    other = train("fit", *FIT, *often, "run_dir=other", "optimizer.lr=0.001", ALLOW, cwd=tmp_path)
    assert "resuming at step" in other.err
    assert "may be ruined; resume=anew" not in other.err, "its failure says nothing about the weights"
    again = train("fit", *FIT, *often, "optimizer.lr=0.001", ALLOW, cwd=tmp_path)
    assert again.err.count("its weights may be ruined; resume=anew begins the run anew") == 1
    anew = train("fit", *FIT, *often, "optimizer.lr=0.001", "resume=anew", cwd=tmp_path)
    assert "ruined" not in anew.err


def test_weights_that_are_not_finite_at_the_end_finish_no_run(tmp_path: Path) -> None:
    done = train("fit", *FIT, "loop.log_interval=null", "optimizer.lr=1e38", cwd=tmp_path)
    assert done.code == 1, done.err
    assert message(done.err).startswith("the weights are not finite at the end of the run, step 60. ")
    assert "are not finite: step" in done.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert "step60" not in names(tmp_path / "run/checkpoints")
    late = ("resume=run/checkpoints/step55", "loop.hard_stop=55", "checkpoint.newer=trash")
    at_its_end = train("fit", *FIT, "loop.log_interval=null", "optimizer.lr=1e38", *late, cwd=tmp_path)
    assert at_its_end.code == 1, at_its_end.err
    assert not manifests(tmp_path / "run")["step55"]["finished"]


def test_every_removal_is_reported(tmp_path: Path) -> None:
    done = train("fit", *FIT, "loop.max_duration=20", "loop.log_interval=5", cwd=tmp_path)
    removed = [line.split()[1] for line in done.err.splitlines() if line.startswith("removed step")]
    committed = [f"step{line.split()[2]}" for line in done.err.splitlines() if line.startswith("committed step")]
    assert sorted(set(committed) - set(removed)) == sorted(names(tmp_path / "run/checkpoints"))
    assert len(removed) == 3
