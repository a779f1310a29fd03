"""Training and evaluation mode of a model's modules.

As in a plain loop, `train()` of the outermost module is called before the first step and after each evaluation. It
begins a stretch of training, which lasts until the next evaluation. What hooks change in a stretch lasts until its end,
also over a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from trainer_cli.patterns import check_pattern, matches, no_match_error
from trainer_cli.state import clean_name, unwrap

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)

KEY = "eval_modules"
_MOST_NAMED = 4


class ModuleModes:
    """The modes of a model's modules while it is trained.

    Args:
        patterns: globs of module names, or `re:` and a regular expression. These modules, with all modules inside them,
            stay in evaluation mode.

    Raises:
        ConfigError: a pattern matches no module.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        modules = {name: module for name, module in _named_modules(model) if name}
        for pattern in patterns:
            check_pattern(pattern, KEY)
            if not any(matches(name, pattern) for name in modules):
                raise no_match_error(pattern, list(modules), KEY, "module")
        self._evaluating = [
            module for name, module in modules.items() if any(matches(name, pattern) for pattern in patterns)
        ]
        self._named: set[str] = set()
        """Modules that were named in the log because `train()` had put them into training mode."""
        self._first: dict[nn.Module, bool] = {}
        """The modes at the beginning of the present stretch, after its first hooks."""
        self._names: dict[nn.Module, str] = {}
        """The name of each module, as of the beginning of the present stretch."""
        self._changes: dict[str, bool] = {}
        """Outside of a stretch: the modes that were changed in the last one, if it continues."""
        self._in_stretch = False
        self.continues = False
        """Whether the next step belongs to the present stretch, or to the one that a loaded checkpoint is of."""

    def keep_evaluating(self) -> None:
        """Put modules that match `eval_modules` into evaluation mode."""
        for module in self._evaluating:
            module.eval()

    @contextmanager
    def beginning(self, trainer: Trainer) -> Iterator[None]:
        """Begin a stretch: `train()` of the model, then the hooks in the block, then the changes of a stretch that
        continues.

        A line of the log names the modules that were in evaluation mode before, and are not after the hooks.
        """
        # Of a stretch that an error has ended, too.
        self._changes = self.state_dict()
        evaluating = [name for name, module in _named_modules(trainer.model) if not module.training]
        trainer.train_mode()
        yield
        self._names = {module: name for name, module in _named_modules(trainer.model)}
        self._first = {module: module.training for module in self._names}
        trained = {name for module, name in self._names.items() if self._first[module]}
        self._log_trained([name for name in evaluating if name in trained and name not in self._changes])
        if self.continues:
            # Hooks that a single process calls at the beginning of the stretch alone.
            trainer.trained.repeat()
        trainer.trained.forget()
        self.repeat_changes()

    def end(self, *, continues: bool) -> None:
        """End a stretch.

        Args:
            continues: no evaluation of the training is due here, so that the next step belongs to the same stretch.
        """
        self._changes = self.state_dict() if continues else {}
        self._in_stretch, self.continues = False, continues

    def repeat_changes(self) -> None:
        """Set the modes as at the beginning of the stretch, and make the changes that were loaded."""
        for module, name in self._names.items():
            module.training = self._changes.get(name, self._first[module])
        self._in_stretch = self.continues = True

    def state_dict(self) -> dict[str, bool]:
        """Module name -> whether it is in training mode, for the modes that were changed in the present stretch."""
        if not self._in_stretch:
            return self._changes
        return {name: module.training for module, name in self._names.items() if module.training != self._first[module]}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Load changes, which the beginning of the next stretch or `repeat_changes` makes."""
        self._changes, self._in_stretch = dict(state), False

    def _log_trained(self, names: Sequence[str]) -> None:
        """Name the outermost modules that `train()` has put from evaluation into training mode, each once."""
        outermost = [name for name in names if name not in self._named and not _is_inside(name, names)]
        self._named |= set(names)
        if not outermost:
            return
        shown = [name or "the model" for name in outermost[:_MOST_NAMED]]
        more = f" and {len(outermost) - len(shown)} more" if len(outermost) > len(shown) else ""
        log.info(
            "%s%s: put from evaluation into training mode by model.train(), which is called before the first step and "
            "after each evaluation. To keep modules in evaluation mode: %s=[%s], or override train() of the model",
            ", ".join(shown), more, KEY, ", ".join(name or "PATTERN" for name in outermost[:_MOST_NAMED]),
        )  # fmt: skip


def _named_modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return [(clean_name(name), module) for name, module in unwrap(model).named_modules()]


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    """Whether a module is inside another one of `outer`; all are inside the model, whose name is empty."""
    return any(not other or name.startswith(f"{other}.") for other in outer if other != name)
