"""SkipSamples passes over data, ScopedFlags sets flags of torch for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import StopAt, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.skip_samples import ScopedFlags, SkipSamples
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback

FLAG = "torch.backends.cudnn.benchmark"


def test_samples_are_skipped_once_and_the_training_is_as_long(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Batches(Callback):
        def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
            seen.append((trainer.progress.epoch, trainer.progress.batch))

    for more in ([StopAt(5)], []):
        made = trainer(
            callbacks=[SkipSamples(24), Batches(), *more],
            settings={"max_duration": "2ep"},
            checkpoint=CheckpointerCallback(tmp_path, save_interval=3),
        )
        made.fit(loader(20))
    assert seen == [(epoch, batch) for epoch in range(4) for batch in range(5)][6:16]
    assert made.progress.passed_over == 6


def test_samples_are_skipped_only_where_the_loader_counts_them() -> None:
    class Lines(torch.utils.data.IterableDataset[Any]):
        """No length, and no position."""

        def __iter__(self) -> Any:
            return iter(loader(4).iterate(0))

    with pytest.raises(UserError, match="counts samples"):
        trainer(callbacks=[SkipSamples(4)]).fit(torch.utils.data.DataLoader(Lines()))


def test_flags_are_set_while_their_part_lasts_and_restored_after_an_error() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool]] = []

        def on_train_step_start(self, *args: Any) -> None:
            self.seen.append(("train", torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))

        def on_validate_step_start(self, *args: Any) -> None:
            self.seen.append(("validate", torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
            raise RuntimeError("no more")

    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    assert before == (False, False)
    watch, flags = Watch(), ScopedFlags(fit={"torch.backends.cudnn.deterministic": True}, train={FLAG: True})
    made = trainer(callbacks=[flags, watch], settings={"max_duration": 2, "eval_interval": 1})
    with pytest.raises(RuntimeError, match="no more"):
        made.fit(loader(), loader(6, shuffle=False))
    assert watch.seen == [("train", True, True), ("validate", False, True)]
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before
    seen: list[bool] = []

    class Look(Callback):
        def on_validate_step_start(self, *args: Any) -> None:
            seen.append(torch.backends.cudnn.benchmark)

    trainer(callbacks=[ScopedFlags(validate={FLAG: True}), Look()]).validate(loader(4, shuffle=False))
    assert (seen, torch.backends.cudnn.benchmark) == ([True], False)
