"""CheckFinite: what happens when a loss or the weights become NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.checkpoint.model_state import is_finite
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.finite import not_finite
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import LossScaler
from trainer_cli.trainer.torch_compat import foreach_copy_

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop


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
            and its batches are in no logged mean. `roll_back` goes back to the newest checkpoint with finite weights,
            and continues with the data after the step at which this was noticed.
        max_times: how many steps may be skipped, or how often the training may go back, in the whole run; one more
            ends it with a NotFiniteError.

    With several processes the policy is `raise`; the loss of any of them counts.

    `skip` uses torch's GradScaler with a scale of 1, or the one of fp16 (whose overflows of finite losses are not
    counted). With an optimizer that is not fused, the scaler waits for the device at each step.
    """

    def __init__(self, policy: str = "raise", max_times: int = 3) -> None:
        if policy not in set(NotFinitePolicy):
            raise ConfigError(f"policy is {policy!r}, but it is raise, skip or roll_back", location="policy")
        if isinstance(max_times, bool) or not isinstance(max_times, int) or max_times < 0:
            raise ConfigError(f"max_times is {max_times!r}, but it is a number of times", location="max_times")
        self.policy, self.max_times = NotFinitePolicy(policy), max_times
        self.times = 0
        """Steps skipped, as of the last check, or times that the training went back."""
        self._going_back = False
        self._sum = torch.zeros(())
        """0, or NaN after a loss that was not finite."""
        self._skipped = torch.zeros(())
        self._smallest: dict[int, nn.Parameter] = {}
        """By optimizer: its parameter with the fewest elements."""
        self._buffers: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Buffers of the model, and copies from before this step."""
        self._in_step = False
        self._last_step = 0
        self._scales_only_here = False

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        if trainer.strategy.world_size > 1 and self.policy is not NotFinitePolicy.stop:
            # One rank alone may see the NaN, and the others would go on.
            raise UserError(
                f"CheckFinite's policy is {self.policy}, which is for one process; there are "
                f"{trainer.strategy.world_size}",
                cure="Use policy=raise: the same command resumes at the newest checkpoint.",
            )
        skips = self.policy is NotFinitePolicy.skip
        if self.policy is not NotFinitePolicy.stop and trainer.strategy.world_size > 1:
            raise ConfigError(f"CheckFinite with policy={self.policy} works in one process only", location="policy")
        loop.leave_out_not_finite = skips
        self._scales_only_here = skips and not trainer.precision.scaler(trainer.device)
        if self._scales_only_here and trainer.scaler is None:
            trainer.scaler = LossScaler(trainer.device, 1.0)

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        self._sum = torch.zeros((), device=trainer.device)
        self._in_step, self._last_step = False, trainer.progress.step
        if self.policy is not NotFinitePolicy.skip:
            return
        self._skipped = torch.full((), float(self.times), device=trainer.device)
        for optimizer in trainer.optimizers.values():
            own = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
            if own:
                self._smallest[id(optimizer)] = min(own, key=Tensor.numel)
        buffers = list(trainer.model.buffers())
        self._buffers = buffers, [one.clone() for one in buffers]

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if not self._in_step and self._buffers[0]:
            foreach_copy_(self._buffers[1], self._buffers[0])
        self._in_step = True

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._sum.add_(loss.detach().reshape(()), alpha=0)

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        if self.policy is NotFinitePolicy.skip:
            # The scaler looks at gradients, and those of a loss that is not finite may be finite.
            for parameter in self._smallest.values():
                if parameter.grad is not None:
                    parameter.grad.add_(self._sum)

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        if self.policy is not NotFinitePolicy.skip or optimizer is not next(reversed(trainer.optimizers.values())):
            return
        skipped = torch.isnan(self._sum)
        if self._scales_only_here and trainer.scaler is not None:
            for one in trainer.optimizers.values():
                for flag in trainer.scaler.overflows(one):
                    skipped = skipped | (flag > 0)
        self._skipped += skipped
        for buffer, before in zip(*self._buffers, strict=True):
            buffer.copy_(torch.where(skipped, before, buffer))
        self._sum.zero_()
        self._in_step = False

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.progress.step
        if step == self._last_step:  # The step is not complete.
            return
        self._last_step = step
        if step < trainer.loop.next_event and not trainer.interrupt_requested:
            return
        if self.policy is NotFinitePolicy.skip:
            self.times = int(self._skipped)
            if self.times > self.max_times:
                raise not_finite(trainer, f"{self.times} steps up to step {step} were not finite, and were skipped")
        if not is_finite(model):
            self._sum.fill_(float("nan"))
        if bool(torch.isfinite(trainer.strategy.group.sum(self._sum.cpu()))):
            return
        if self.policy is not NotFinitePolicy.roll_back:
            raise not_finite(trainer, f"the loss or the weights are not finite at step {step}")
        if self.times >= self.max_times:
            raise not_finite(trainer, f"the training went back {self.times} times, and is not finite at step {step}")
        self.times += 1
        self._going_back = True
        trainer.ask_to_roll_back()

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        self._going_back, self._last_step = False, trainer.progress.step
        self._sum.zero_()

    def state_dict(self) -> dict[str, Any]:
        """How many steps were skipped, or how often the training went back."""
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._going_back:
            self.times = int(state["times"])
