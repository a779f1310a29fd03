"""Some of an optimizer's parameter groups, for a schedule of these alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

TAG = "tag"
"""The key of a parameter group that schedules name it by."""


class TaggedGroups(Optimizer):
    """An optimizer's groups with one of these tags, as long as it has them; all else is the optimizer's own.

    Raises:
        ConfigError: no group has one of the tags.
    """

    _opt_called = True  # What torch's schedulers look for, to warn of a step before the optimizer's first.

    def __init__(self, optimizer: Optimizer, tags: Sequence[str], where: str = "scheduler") -> None:
        # Not Optimizer.__init__, which would make groups of its own.
        self._whole, self._tags = optimizer, list(tags)
        self.defaults = optimizer.defaults
        known = [str(group[TAG]) for group in optimizer.param_groups if TAG in group]
        for tag in tags:
            if tag not in known:
                cure = did_you_mean(tag, known).strip() or "Set `tag` in param_groups."
                raise ConfigError(f"no parameter group has the tag '{tag}'", location=f"{where}.groups", hint=cure)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for group in self._whole.param_groups if group.get(TAG) in self._tags]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._whole.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("step the whole optimizer")
