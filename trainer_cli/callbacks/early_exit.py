"""EarlyExit: finish the run when a function says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

Condition = Callable[["Trainer"], object]


class EarlyExit(Callback):
    """Calls functions after each optimizer step, with the trainer; the first that returns something true finishes the
    run. A string is the reason that is logged and saved. The run stays finished when started again, unless
    `max_duration` is larger.

    Args:
        conditions: the first functions; in a config, nodes with `_partial_: true`. `register` adds others.
    """

    def __init__(self, conditions: Iterable[Condition] = ()) -> None:
        self._conditions: OrderedDict[int, Condition] = OrderedDict()
        for condition in conditions:
            self.register(condition)

    def register(self, condition: Condition) -> RemovableHandle:
        """Add a function; the handle's `remove` takes it away.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(condition):
            raise ConfigError(
                f"{condition!r} is no function of the trainer",
                location="conditions",
                hint="In a config, write {_target_: …, _partial_: true}.",
            )
        handle = RemovableHandle(self._conditions)
        self._conditions[handle.id] = condition
        return handle

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.is_step_complete:
            return
        for condition in list(self._conditions.values()):
            if answer := condition(trainer):
                name = getattr(condition, "__name__", type(condition).__name__)
                trainer.stop(answer if isinstance(answer, str) else f"{name} asked for it", by=self)
                return
