"""Callbacks that measure a training: throughput, durations of the parts of a step, memory, and traces of torch."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.memory import peak_resident_bytes
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop

_PARTS = ("data", "forward", "backward", "optimizer", "rest")
_MOST_MARKS = 10_000
"""Marks that are kept: without logs (`loop.log_interval: null`) a long run would have millions."""


class DurationProfiler(Callback):
    """Logs on log steps the mean seconds of a step since the last one, by part: `train/time/data` (waiting for the
    batch), `train/time/forward`, `train/time/backward`, `train/time/optimizer`, and `train/time/rest` (everything else,
    as callbacks and schedules); and the seconds since then of waiting for saves (`train/time/saving`), of loading a
    checkpoint (`train/time/loading`), and of evaluations, if there were any (`train/time/evaluation`).

    On CUDA the parts are measured by events in the stream, which are read on log steps; else by the clock.
    """

    measures_only = True

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []
        """What ended, and when."""
        self._sums = dict.fromkeys(_PARTS, 0.0)
        """Seconds since the last log, up to the first mark."""
        self._step = 0
        self._evaluation_s = 0.0
        self._pauses_s = {"saving": 0.0, "loading": 0.0}
        """Of the process until the last log."""
        self._on_cuda = False

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Begin to count steps."""
        self._on_cuda, self._step = trainer.device.type == "cuda", trainer.progress.step

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Forget all durations, which are of steps that the training makes again."""
        self._step = trainer.progress.step
        self._marks.clear()
        self._sums = dict.fromkeys(_PARTS, 0.0)

    def on_train_start(
        self, trainer: Trainer, model: nn.Module, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        self._mark("")

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        self._mark("data")

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if model.training:
            self._mark("rest")

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if model.training:
            self._mark("forward")

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._mark("rest")

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._mark("backward")

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._mark("rest")

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._mark("optimizer")

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._mark("rest")

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        """Measure the evaluation, until the stack is closed."""
        began = time.perf_counter()
        stack.callback(lambda: self._add_evaluation(time.perf_counter() - began))

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the mean durations of the steps since the last log."""
        steps, self._step = max(1, trainer.progress.step - self._step), trainer.progress.step
        self._sum_up()
        values = {f"train/time/{name}": spent / steps for name, spent in self._sums.items()}
        self._sums = dict.fromkeys(_PARTS, 0.0)
        if self._evaluation_s:
            values["train/time/evaluation"], self._evaluation_s = self._evaluation_s, 0.0
        spent = trainer.metric_logger.time.seconds()
        # Also where there were none, so that the records of a resumed run have the same names.
        for name, until_last_log in self._pauses_s.items():
            values[f"train/time/{name}"], self._pauses_s[name] = spent[name] - until_last_log, spent[name]
        trainer.log_metrics(values)
        self._marks.clear()
        self._mark("")

    def _add_evaluation(self, seconds: float) -> None:
        self._evaluation_s += seconds

    def _sum_up(self) -> None:
        """Add the time between the marks to the sums, and forget all marks but the last."""
        # The events before it are complete then, too.
        if self._on_cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, begin), (name, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                self._sums[name] += begin.elapsed_time(end) / 1000 if self._on_cuda else end - begin
        del self._marks[:-1]

    def _mark(self, ended: str) -> None:
        """Note that a part of the step ends now; an empty name: what came before is not counted."""
        if len(self._marks) >= _MOST_MARKS:
            self._sum_up()
        # The clock would show when kernels were launched; an event is recorded when the device comes to it.
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((ended, event))
        else:
            self._marks.append((ended, time.perf_counter()))


log = logging.getLogger(__name__)


class TorchProfiler(Callback):
    """Writes `trace-step{N}.json` for each `active` steps that were recorded: open it at ui.perfetto.dev, or in
    chrome://tracing. N is the last of them. With many processes, those other than rank 0 write
    `trace-step{N}-rank{R}.json`.

    Args:
        wait, warmup, active: numbers of steps that are skipped, recorded and dropped, and recorded.
        repeat: how often; 0: to the end of the run.
        skip_first: steps of this process before all that.
        folder: where traces are written, relative to the run directory.
        record_shapes, profile_memory, with_stack: as in torch.profiler.profile; each makes recorded steps slower.
    """

    measures_only = True
    writes = ("folder",)

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
            check_whole(name, value, 1 if name == "active" else 0)
        self._schedule = schedule(**counts)
        self.folder = Path(folder)
        self._more: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profile: Any = None

    def setup(self, trainer: Trainer) -> None:
        """Refuse a second one: the process would end without any message."""
        if len(trainer.get_callbacks(TorchProfiler)) > 1:
            # The process would end without any message.
            raise UserError(
                "there are two TorchProfilers, but torch records for only one at a time",
                cure="Leave one out; its `repeat` and `skip_first` choose the steps.",
            )

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Record until the fit ends; each cycle of steps is written into a file of its own."""
        folder = self.folder if trainer.run_dir is None else trainer.run_dir / self.folder
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
        recorder = profile(activities=activities, schedule=self._schedule, on_trace_ready=write, **self._more)
        # Entered before the profile, so left after it: its exit still calls `write`.
        stack.callback(self._forget)
        self._profile = stack.enter_context(recorder)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell the profiler that a step has ended."""
        if trainer.is_step_complete and self._profile is not None:
            self._profile.step()

    def _forget(self) -> None:
        self._profile = None


# Longer names before those that they contain.
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "A100": 312, "A800": 312, "L40S": 362,
    "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "A6000": 155, "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 3090": 71,
    "V100": 125, "T4": 65, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
"""Part of a device's name -> dense 16-bit TFLOP/s of its makers' data sheets; the first match counts."""


class Throughput(Callback):
    """Logs on log steps, of all processes together, over the time since the last one without evaluations and saves:
    `train/throughput/steps_per_s`, `train/throughput/tokens_per_s` if the model counts tokens, and with `flops` also
    `train/throughput/tflops_per_s` and `train/throughput/mfu`, the share of the chips' peak (model FLOPs utilization;
    Chowdhery et al., 2022, arXiv:2204.02311).

    Args:
        flops: count the operations of the first batch in this process, by torch's FlopCounterMode, forward and
            backward. Others are taken to have as many for each sample. Not for a compiled model.
        peak_tflops: of the device; None: from the table of this module, by the name of a CUDA device.
    """

    measures_only = True

    def __init__(self, flops: bool = False, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigError(f"peak_tflops is {peak_tflops}, but it must be above 0", location="peak_tflops")
        self.flops, self.peak_tflops = flops, peak_tflops
        self.flops_per_sample: float | None = None
        self._last = (0, 0, 0)
        """Steps, samples and tokens at the last log."""
        self._counter: FlopCounterMode | None = None

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Begin to count, and find the peak of the device."""
        self._count_from(trainer)
        if self.peak_tflops is None and trainer.device.type == "cuda":
            self.peak_tflops = peak_tflops(torch.cuda.get_device_name(trainer.device))

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        stack.callback(self._stop)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if self.flops and self.flops_per_sample is None and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._counter is not None:
            self.flops_per_sample = self._counter.get_total_flops() / max(1, trainer.step.batch_size)
            self._stop()
            log.info("%.4g floating-point operations a sample", self.flops_per_sample)

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        # The training goes back to it.
        self._count_from(trainer)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the rates since the last log."""
        progress, seconds = trainer.progress, max(trainer.metric_logger.rate_seconds, 1e-9)
        # At least a nanosecond: two logs may follow one another within the clock's resolution.
        now = progress.step, progress.samples, progress.tokens
        steps, samples, tokens = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        values = {"train/throughput/steps_per_s": steps / seconds}
        if tokens:
            values["train/throughput/tokens_per_s"] = tokens / seconds
        if self.flops_per_sample is not None:
            tflops = self.flops_per_sample * samples / seconds / 1e12
            values["train/throughput/tflops_per_s"] = tflops
            if self.peak_tflops is not None:
                values["train/throughput/mfu"] = tflops / self.peak_tflops / trainer.strategy.world_size
        trainer.log_metrics(values)

    def _count_from(self, trainer: Trainer) -> None:
        progress = trainer.progress
        self._last = progress.step, progress.samples, progress.tokens

    def _stop(self) -> None:
        """Stop to count operations."""
        # Also after an error in the step: a mode that stays active would count every later operation.
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def peak_tflops(device: str) -> float | None:
    """The dense 16-bit TFLOP/s of a device by its name, or None."""
    return next((float(peak) for name, peak in PEAK_TFLOPS.items() if name in device), None)


_GIB = 2**30


class MemoryMonitor(Callback):
    """Logs on log steps, in GiB: `train/memory/host_peak`, the most that this process has had; on CUDA also
    `train/memory/device_peak` and `train/memory/device_reserved`, the most since the last log, and of the allocator.
    """

    measures_only = True

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the peaks, and begin those of the device anew."""
        values = {"train/memory/host_peak": peak_resident_bytes() / _GIB}
        if trainer.device.type == "cuda":
            values["train/memory/device_peak"] = torch.cuda.max_memory_allocated(trainer.device) / _GIB
            values["train/memory/device_reserved"] = torch.cuda.max_memory_reserved(trainer.device) / _GIB
            # So that the next log has the peak since this one.
            torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.log_metrics(values)
