"""Find values that are not finite: a policy for losses and weights, and torch's anomaly detection of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError
from trainer_cli.state import are_finite
from trainer_cli.terminal import format_count
from trainer_cli.torch_compat import foreach_copy_
from trainer_cli.trainer import Callback, LossScaler, not_finite
from trainer_cli.values import check_choice, check_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop


class NotFinitePolicy(StrEnum):
    """What a loss, or weights, that are not finite cause."""

    stop = "raise"
    skip = "skip"
    roll_back = "roll_back"


class CheckFinite(Callback):
    """Looks at the losses of all steps, and at the weights, before every log, evaluation, save and end.

    The losses are summed up on the device, which is not waited for in between. So no step that is not finite is
    evaluated or saved.

    Args:
        policy: `raise` ends the training with a NotFiniteError. `skip` leaves a step out, on the device, whose loss or
            gradients are not finite: weights, optimizer and buffers stay as they were before it; it counts as a step,
            and logged means leave out a batch with a loss that is not finite. `roll_back` loads the newest checkpoint
            with finite weights, and continues with the data after the step at which this was noticed.
        max_times: how many steps may be skipped, or how often the training may go back, in the whole run; one more
            ends it with a NotFiniteError.

    With several processes a loss or gradient of any of them counts, and all do the same: `skip` then sums one number
    over them at each step.

    `skip` uses torch's GradScaler with a scale of 1, or the one of fp16 (whose overflows of finite losses are not
    counted). With an optimizer that is not fused, the scaler waits for the device at each step. If there are many
    optimizers, those are skipped that are stepped after a loss that is not finite, or have gradients that are not.
    """

    def __init__(self, policy: str = "raise", max_times: int = 3) -> None:
        check_choice("policy", policy, NotFinitePolicy)
        check_whole("max_times", max_times, 0)
        self.policy, self.max_times = NotFinitePolicy(policy), max_times
        self.rolls_back = self.policy is NotFinitePolicy.roll_back
        self.times = 0
        """Steps skipped, as of the last check, or times that the training went back."""
        self._going_back = False
        self._sum = torch.zeros(())
        """0, or NaN after a loss that was not finite."""
        self._skips = torch.zeros(())
        """1 if an optimizer is not stepped in this step."""
        self._skipped = torch.zeros(())
        """Number of steps skipped, on the device."""
        self._buffers: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Buffers of the model, and copies from before this step."""
        self._in_step = False
        """Whether a batch of the present step was seen, so that the buffers are copied."""
        self._scales_only_here = False
        """Whether losses are scaled for this callback alone, by 1: the precision needs no scale."""

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Prepare to skip steps: without a loss scale there is one of 1, whose flag skips a step on the device."""
        skips = self.policy is NotFinitePolicy.skip
        loop.leave_out_not_finite = skips
        self._scales_only_here = skips and not trainer.precision.scaler(trainer.device)
        if self._scales_only_here and trainer.scaler is None:
            # By a scale of 1: a fused optimizer skips a step on the device only for a scaler's flag.
            trainer.set_scaler(LossScaler(trainer.device, 1.0))

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Begin to count, on the device. Refuse to roll back to checkpoints that lack states."""
        self._sum, self._skips = (torch.zeros((), device=trainer.device) for _ in range(2))
        self._in_step = False
        saver = trainer.checkpoint if self.rolls_back else None
        if isinstance(saver, CheckpointerCallback) and saver.settings.leave_out:
            raise ConfigError(
                "policy is roll_back, and checkpoints lack states (checkpoint.leave_out)",
                location="policy",
                hint="Save all states, or choose policy=raise.",
            )
        if self.policy is NotFinitePolicy.skip:
            self._skipped = torch.full((), float(self.times), device=trainer.device)
            buffers = list(trainer.model.buffers())
            self._buffers = buffers, [buffer.clone() for buffer in buffers]

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Copy the buffers, such as statistics of norms: a skipped step must not change them."""
        # Once a step: the forward of each accumulated batch changes the statistics of norms.
        if not self._in_step and self._buffers[0]:
            foreach_copy_(self._buffers[1], self._buffers[0])
        self._in_step = True

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        """Make the sum NaN if the loss is not finite."""
        loss, weight = loss.detach().reshape(()), trainer.step.weight
        # A loss of weight 0 is ignored.
        if isinstance(weight, Tensor):
            loss = loss.masked_fill((weight == 0).to(loss.device, non_blocking=True), 0)
        elif weight == 0:
            return
        # 0 times NaN or infinity is NaN, and 0 times any other loss adds nothing.
        self._sum.add_(loss, alpha=0)

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """With the policy `skip`: have the scaler skip the optimizer's step if the loss or a gradient is not finite."""
        if self.policy is not NotFinitePolicy.skip or trainer.scaler is None:
            return
        # The scaler has examined the gradients, which may be finite although the loss is not.
        flags, skips = trainer.scaler.overflows(optimizer), torch.isnan(self._sum).float()
        if self._scales_only_here:
            # Under fp16 an overflow is no fault: the scale is lowered, and torch skips the step by itself.
            for flag in flags:
                skips = torch.maximum(skips, flag.to(skips.device))
        if (work := trainer.strategy.group.start_sum(skips)) is not None:
            work.wait()
        # A fused optimizer skips for a 1, and for no other number.
        skips.clamp_(max=1)
        for flag in flags:
            flag.copy_(torch.maximum(flag, skips.to(flag.device)))
        self._skips = torch.maximum(self._skips, skips)
        # Here, before another callback averages the buffers. On the device: the host must not wait for `skips`.
        restores = skips > 0
        for buffer, copy in zip(*self._buffers, strict=True):
            buffer.copy_(torch.where(restores, copy, buffer))

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a step, before a log, evaluation, save or end: act if losses or weights are not finite."""
        step = trainer.progress.step
        if not trainer.is_step_complete:
            return
        self._in_step = False
        if self.policy is NotFinitePolicy.skip:
            self._skipped += self._skips
            self._skips.zero_()
            self._sum.zero_()
        # Only where something is logged, evaluated or saved: reading the sum waits for the device.
        if step < trainer.loop.next_event and not trainer.requests.interrupt_requested:
            return
        if self.policy is NotFinitePolicy.skip:
            self.times = int(self._skipped)
            if self.times > self.max_times:
                skipped = format_count(self.times, "step")
                raise not_finite(trainer, f"the run skipped {skipped} up to step {step} for values that are not finite")
        if not are_finite(trainer.trained):
            self._sum.fill_(float("nan"))
        # A sum over all ranks, so that they raise or go back together.
        if bool(torch.isfinite(trainer.strategy.group.sum(self._sum.cpu()))):
            return
        if not self.rolls_back:
            raise not_finite(trainer, f"the loss or the weights are not finite at step {step}", batch)
        if self.times >= self.max_times:
            raise not_finite(
                trainer,
                f"the run went back {format_count(self.times, 'time')}, and is not finite at step {step}",
                batch,
            )
        self.times += 1
        self._going_back = True
        trainer.ask_to_roll_back()

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Begin to sum the loss anew: the training may have gone back."""
        self._going_back = False
        self._sum.zero_()

    def state_dict(self) -> dict[str, Any]:
        """How many steps were skipped, or how often the training went back."""
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over how many times a loss was not finite."""
        # The checkpoint that the training goes back to was saved before this time was counted.
        if not self._going_back:
            self.times = int(state["times"])


class AnomalyDetection(Callback):
    """Ends a fit with the traceback of the operation whose backward gives NaN, by `torch.autograd.set_detect_anomaly`.
    Steps take several times as long.
    """

    def on_enter_fit(self, trainer: Any, stack: ExitStack, *args: Any) -> None:
        stack.enter_context(torch.autograd.set_detect_anomaly(True))
