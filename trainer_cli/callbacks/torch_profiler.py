"""TorchProfiler: record what torch does in some steps, as a trace that a browser opens."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

log = logging.getLogger(__name__)


class TorchProfiler(Callback):
    """Writes `trace-step{N}.json` for each `active` steps that were recorded: open it at ui.perfetto.dev, or in
    chrome://tracing. N is the last of them. Of several processes each but rank 0 writes `trace-step{N}-rank{R}.json`.

    Args:
        wait, warmup, active: steps that are passed over, that are recorded and dropped, and that are recorded.
        repeat: how often; 0: to the end of the run.
        skip_first: steps of this process before all that.
        folder: where traces are written, relative to the run directory.
        record_shapes, profile_memory, with_stack: as in torch.profiler.profile; each makes recorded steps slower.
    """

    def __init__(
        self,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 0,
        folder: str = "profile",
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        counts = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "active"):
                raise ConfigError(f"{name} is {value!r}, but it is a number of steps", location=name)
        self._schedule = schedule(**counts)
        self._folder = Path(folder)
        self._more: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profile: Any = None

    def setup(self, trainer: Trainer) -> None:
        if len(trainer.get_callbacks(TorchProfiler)) > 1:
            # The process would end without a word.
            raise UserError(
                "there are two TorchProfilers, and torch records for one at a time",
                cure="Leave one out; its `repeat` and `skip_first` choose the steps.",
            )

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        folder = self._folder if trainer.run_dir is None else trainer.run_dir / self._folder
        group = trainer.strategy.group
        suffix = "" if group.is_main else f"-rank{group.rank}"

        def write(recorded: Any) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"trace-step{trainer.progress.step}{suffix}.json"
            recorded.export_chrome_trace(str(file))
            log.info("wrote %s: open it at ui.perfetto.dev", file)

        # torch 2.10 warns that events of earlier cycles are dropped: each cycle has a file of its own here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
        made = profile(activities=activities, schedule=self._schedule, on_trace_ready=write, **self._more)
        stack.callback(self._forget)
        self._profile = stack.enter_context(made)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_step_complete and self._profile is not None:
            self._profile.step()

    def _forget(self) -> None:
        self._profile = None
