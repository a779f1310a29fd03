"""Two ranks: a NaN on one of them ends the training of both, and masks are the same on both, also after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ranks import HERE, on_ranks

pytestmark = pytest.mark.slow

JOB = [
    "experiment=digits_mlp", "parallel=ddp", "device=cpu", "data.batch_size=16", "loop.eval_interval=20",
    "loop.log_interval=10", "loggers.tensorboard=null", "logging.console=off", "checkpoint.save_interval=10",
]  # fmt: skip
SPARSE = [*JOB, "loop.max_duration=40", "sparsity=rigl", "sparsity.every=5", "+callbacks.sums._target_=fits.Sums"]
JOBS = [
    [
        *JOB, "run_dir=bad", "loop.max_duration=20", "+callbacks.finite._target_=trainer_cli.CheckFinite",
        "+callbacks.bad._target_=fits.BadBatch",
    ],
    [*SPARSE, "run_dir=whole"],
    [*SPARSE, "run_dir=parts", "loop.hard_stop=20"],
    [*SPARSE, "run_dir=parts"],
]  # fmt: skip


def test_a_nan_on_one_rank_ends_both_and_masks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    done = on_ranks(2, [HERE / "fits.py", json.dumps(JOBS)])
    assert [code for code, _ in done] == [0, 0]
    for _, out in done:
        ends = json.loads(re.findall(r"^ENDS (.*)$", out, re.MULTILINE)[0])
        assert "not finite at step 10" in ends[0]
        assert ends[1:] == ["0", "0", "0"]
    whole, part, resumed = re.findall(r"^SUMS (.*)$", done[0][1], re.MULTILINE)
    assert whole == resumed != part
    assert re.findall(r"^SUMS (.*)$", done[1][1], re.MULTILINE) == [whole, part, resumed]
