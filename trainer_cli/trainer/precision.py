"""Mixed precision: autocast, loss scaling for fp16, and gradient clipping."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trainer_cli.schema import Dtype, PrecisionConfig
from trainer_cli.signatures import build_section, takes_fields_of
from trainer_cli.strategies import Strategy
from trainer_cli.torch_compat import dense_stand_in, overflow_flags

DYNAMIC = "dynamic"
_FIRST_SCALE = 65536.0
_GROWTH_INTERVAL = 2000


class LossScaler:
    """Torch's GradScaler with bounds, an optional fixed scale, and a count of skipped steps on the device.

    A step with NaN or infinite gradients changes neither parameters nor the state of the optimizer. It still counts as
    a step for schedules and intervals, so that these do not depend on overflows.
    """

    def __init__(
        self,
        device: torch.device,
        scale: str | float = DYNAMIC,
        min_scale: float | None = None,
        max_scale: float | None = None,
        init_scale: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        self._fixed = None if scale == DYNAMIC else float(scale)
        self._bounds = (min_scale, max_scale)
        default = min(max(_FIRST_SCALE, min_scale or 0.0), max_scale or math.inf)
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=self._fixed or init_scale or default,
            growth_interval=growth_interval or _GROWTH_INTERVAL,
        )
        self._one = torch.ones((), device=device)
        self._complex: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        """Optimizer -> its number of groups, and whether a parameter in them is complex."""
        # Torch's schedulers warn if all optimizer steps so far were skipped, as the first ones with fp16 often are.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        self._skipped = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale; record whether all are finite."""
        groups = optimizer.param_groups
        if self._complex.get(optimizer, (0, False))[0] != len(groups):
            complexes = any(parameter.is_complex() for group in groups for parameter in group["params"])
            self._complex[optimizer] = len(groups), complexes
        if not self._complex[optimizer][1]:
            self._scaler.unscale_(optimizer)
            return
        # Torch does not unscale complex gradients, so it is shown real views of them.
        optimizer.param_groups = [{"params": list(map(dense_stand_in, group["params"]))} for group in groups]
        try:
            self._scaler.unscale_(optimizer)
        finally:
            optimizer.param_groups = groups

    def overflows(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """One tensor for each device, above zero if gradients of the current step are not finite."""
        return overflow_flags(self._scaler, optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer unless its gradients overflowed. The host waits only if it is not fused."""
        for overflow in self.overflows(optimizer):
            self._skipped.add_(overflow.clamp(max=1.0))
        self._scaler.step(optimizer)

    def update(self) -> None:
        """Adapt a dynamic scale after all optimizers were stepped."""
        self._scaler.update(self._fixed)
        if self._bounds != (None, None):
            # GradScaler has no bounds. The scale is passed as a tensor, which needs no wait for the device.
            self._scaler.update(self._scaler.scale(self._one).clamp(*self._bounds))

    def metrics(self) -> dict[str, float]:
        """The scale and the number of skipped steps. Waits for the device."""
        return {"loss_scale": self._scaler.get_scale(), "skipped_steps": float(self._skipped)}

    def state_dict(self) -> dict[str, Any]:
        """The scale, the number of steps since it last changed, and the number of skipped steps."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "steps_held": state["_growth_tracker"], "skipped_steps": int(self._skipped)}

    def check_state(self, state: Any) -> list[str]:
        """A line for each key that a saved state lacks."""
        return [f"{key}: missing in the checkpoint" for key in self.state_dict() if key not in state]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. A fixed scale is a setting of the config, and is not loaded."""
        scale = state["scale"] if self._fixed is None else self._fixed
        self._scaler.load_state_dict(
            {**self._scaler.state_dict(), "scale": scale, "_growth_tracker": state["steps_held"]}
        )
        self._skipped.fill_(state["skipped_steps"])


@takes_fields_of(PrecisionConfig)
class Precision:
    """The number format of forward and backward, loss scaling for fp16, and clipping of the accumulated gradients.

    Args:
        dtype: `fp32`, `bf16` or `fp16`; None: the dtype of `config`, else `fp32`.
        config: the settings as a whole; or give fields of `PrecisionConfig` by their names, such as `clip_norm=1.0`.
    """

    def __init__(self, dtype: str | None = None, *, config: PrecisionConfig | None = None, **fields: Any) -> None:
        fields = fields if dtype is None else {"dtype": dtype, **fields}
        self.settings = settings = build_section(PrecisionConfig, type(self).__name__, config, fields)
        self.dtype, self.clip_norm, self.clip_value = settings.dtype, settings.clip_norm, settings.clip_value

    def scaler(self, device: torch.device) -> LossScaler | None:
        """The loss scaler for fp16; None for other formats."""
        if self.dtype is not Dtype.fp16:
            return None
        settings = self.settings
        return LossScaler(
            device,
            settings.loss_scale,
            settings.min_loss_scale,
            settings.max_loss_scale,
            settings.init_scale,
            settings.growth_interval,
        )

    def autocast(self, device: torch.device) -> AbstractContextManager[Any] | None:
        """A new autocast context; None for fp32."""
        # Always a new one: an object that is entered twice would leave autocast enabled.
        if self.dtype is Dtype.fp32:
            return None
        return torch.autocast(device.type, dtype=torch.float16 if self.dtype is Dtype.fp16 else torch.bfloat16)

    def clip(self, parameters: list[nn.Parameter], strategy: Strategy) -> Tensor | None:
        """Clip the gradients in place. Returns their norm before clipping, as a tensor on the device, if computed."""
        try:
            return self._clip(parameters, strategy)
        except NotImplementedError:
            # Torch clips neither sparse gradients nor complex ones by value. Their dense, real values are clipped.
            stand_ins = list(map(dense_stand_in, parameters))
            if all(map(operator.is_, stand_ins, parameters)):
                raise
            return self._clip(stand_ins, strategy)

    def _clip(self, parameters: Sequence[Tensor], strategy: Strategy) -> Tensor | None:
        """Clip by norm or by value, if that is set. Returns the norm before, if it was computed."""
        if self.clip_norm is not None:
            return strategy.clip_norm(parameters, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip_value)
        return None
