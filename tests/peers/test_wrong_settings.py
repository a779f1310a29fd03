"""Settings that are refused when the object is made, with their name: one table for all classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_cli import (
    SWA,
    CheckpointerCallback,
    ConfigError,
    EarlyStopping,
    LoadOptions,
    Precision,
    SaveCheckpointState,
    TrainingLoop,
    UserError,
    WarmupStableDecay,
)

BEST = {"metric": "val/score"}
VARIABLES = ("batch_in_epoch", "extra", "local_rank", "local_world_size", "node_rank", "rank", "total_wct")


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        *[(TrainingLoop, {"eval_interval": value}, "eval_interval") for value in (-1, 0, "0ep", 1.5, "x")],
        *[(TrainingLoop, {"eval_steps": value}, "eval_steps") for value in (0, 0.1)],
        (TrainingLoop, {"grad_accum_steps": 0}, "grad_accum_steps"),
        (TrainingLoop, {"steps_per_epoch": 0}, "steps_per_epoch"),
        (TrainingLoop, {"limit_train_batches": 0}, "at least 1"),
        *[(TrainingLoop, {"max_duration": value}, "max_duration") for value in (-1, -2, 0, 1.5, "0ep", "-100ep")],
        *[(CheckpointerCallback, {"save_interval": value}, "save_interval") for value in (-1, -3, 1.5, "-3ep", "3")],
        (CheckpointerCallback, {"save_interval": 0}, "more than zero"),
        (CheckpointerCallback, {"save_interval": "1iter"}, "save_interval.*not a duration"),
        *[
            (
                CheckpointerCallback,
                {"ephemeral_save_interval": value, "save_interval": limit},
                "ephemeral_save_interval",
            )
            for limit, values in ((250, (-1, 0, 250, 251)), ("1ep", ("1ep", "2ep")), ("1h", ("60min",)))
            for value in values
        ],
        *[(CheckpointerCallback, {"max_checkpoints": value}, "max_checkpoints") for value in ("2", -1, 0, 1.5)],
        (CheckpointerCallback, {"keep_best": {**BEST, "count": -3}}, "count"),
        (CheckpointerCallback, {"keep_best": {"count": 3}}, "metric"),
        (CheckpointerCallback, {"keep_best": {**BEST, "mode": "unknown"}}, "mode"),
        *[
            (CheckpointerCallback, {"name": name}, "name")
            for name in ("checkpoint.mdl", "checkpoint_{epoch}", "checkpoint_{stp}", Path("step{step}"))
        ],
        (CheckpointerCallback, {"name": "{val/loss}-{step}"}, "Metrics are not part of a name"),
        (CheckpointerCallback, {"name": "step{step}-{val_loss:.2f}"}, "val_loss"),
        (CheckpointerCallback, {"name": "test"}, "the same name"),
        *[
            (
                CheckpointerCallback,
                {"name": f"{{step}}-{{{name}}}"},
                rf"no \{{{name}\}}; there are \{{step\}}, \{{epoch",
            )
            for name in VARIABLES
        ],
        (CheckpointerCallback, {"folder": "memory://saved", "latest_link": True}, "can hold no link"),
        *[
            (CheckpointerCallback, {"format": "archive", "compression": name}, f"is '{name}'.*one of none, gz")
            for name in ("unknown_compressor", "lz4")
        ],
        (SaveCheckpointState, {"every": 0}, "every"),
        (SaveCheckpointState, {"states": []}, "states"),
        (SaveCheckpointState, {"states": ["nonsense"]}, "states"),
        (LoadOptions, {"states": ["nonsense"]}, "nonsense"),
        (LoadOptions, {"states": ["optimizer/0"]}, r"load\.states"),
        *[(SWA, {"start": value}, "start") for value in (-1, 1.5)],
        (EarlyStopping, {"mode": "unknown"}, "min or max"),
        (EarlyStopping, {"patience": 0}, "patience"),
        (EarlyStopping, {"patience": "0s"}, "more than zero"),
        *[(Precision, {"clip_norm": value}, "clip_norm") for value in ((1, 2), -1.0)],
        (Precision, {"clip_norm": 1.0, "clip_value": 1.0}, "both set"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(
    folder: Path, make: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("scheme", ["gcs", "sftp", "wandb"])
def test_an_unknown_store_is_refused(scheme: str) -> None:
    with pytest.raises(UserError, match="://"):
        CheckpointerCallback(f"{scheme}://foo/bar")


@pytest.mark.parametrize(
    ("warmup", "decay", "total_steps"), [(-1, 10, 100), (10, 0, 100), (100, 600, 500), (500, 501, 1000)]
)
def test_lengths_that_are_no_schedule_are_refused(warmup: int, decay: int, total_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(UserError, match="warmup"):
        WarmupStableDecay(optimizer, total_steps, warmup=warmup, decay=decay)
