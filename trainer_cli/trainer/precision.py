"""Loss scaling for 16-bit floats: gradients too small for them are made larger on the way, and steps that overflow
are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DYNAMIC = "dynamic"
_FIRST_SCALE = 65536.0


class LossScaler:
    """Torch's GradScaler, with a fixed scale too, and a count of the steps left out, which stays on the device.

    A step whose gradients hold NaN or infinity changes no parameter and no state of the optimizer. It counts as a
    step all the same: schedules and intervals go on, so that no phase depends on what overflowed.
    """

    def __init__(self, device: torch.device, scale: str | float = DYNAMIC) -> None:
        self._fixed = None if scale == DYNAMIC else float(scale)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=self._fixed or _FIRST_SCALE)
        self._skipped = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that `backward` is called on."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as they would be without a scale; it is noted whether all are finite."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer unless the gradients overflowed; then move the scale, where it is dynamic.

        The host waits for the device only where the optimizer is not fused.
        """
        for found in self._scaler._found_inf_per_device(optimizer).values():
            self._skipped.add_(found.clamp(max=1.0))
        self._scaler.step(optimizer)
        self._scaler.update(self._fixed)

    def metrics(self) -> dict[str, float]:
        """The scale, and how many steps of the run were left out; waits for the device."""
        return {"loss_scale": self._scaler.get_scale(), "skipped_steps": float(self._skipped)}

    def state_dict(self) -> dict[str, Any]:
        """The scale, how long it has held, and the steps left out."""
        own = self._scaler.state_dict()
        return {"scale": own["scale"], "steps_held": own["_growth_tracker"], "skipped_steps": int(self._skipped)}

    def check_state(self, state: Any) -> list[str]:
        """What of a saved state does not fit."""
        return [f"{key}: missing in the checkpoint" for key in self.state_dict() if key not in state]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved scale; a fixed one is the config's."""
        own = self._scaler.state_dict()
        scale = state["scale"] if self._fixed is None else self._fixed
        self._scaler.load_state_dict({**own, "scale": scale, "_growth_tracker": state["steps_held"]})
        self._skipped.fill_(state["skipped_steps"])
