"""Which parameters are trained: `requires_grad`, as the model was built and as hooks and steps have changed it.

A checkpoint holds what differs from the build and from `freeze`, so that a resume trains the same parameters. A step
may set `requires_grad` several times, as that of a GAN does: whether a parameter is trained at all is therefore not
read from its value at one moment.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import nn

from trainer_cli.loads import LoadOptions
from trainer_cli.optim.freezing import Freezing
from trainer_cli.state import Fitting, clean_name, name_parameters


class TrainedParameters:
    """The changes of `requires_grad` since the trainer was made.

    Args:
        freezing: decides which parameters are frozen, unless a hook or a step has changed that.
    """

    def __init__(self, model: nn.Module, freezing: Freezing) -> None:
        self._model, self._freezing = model, freezing
        self._first_frozen = frozenset(name for name, parameter in self._named() if not parameter.requires_grad)
        self._pending: dict[str, bool] = {}
        """Loaded changes of parameters that `freeze` freezes for a part of the run, until `repeat` makes them."""
        self._kept: dict[str, bool] | None = None
        """See `keep`; None: nothing is kept."""
        self._is_known = True
        """False after a checkpoint without this state, until the first step."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        """The parameters that are trained now, or were when the trainer was made.

        These alone must be finite: others may be infinite for good, as a mask or the start of a running minimum.
        """
        for name, parameter in self._named():
            if parameter.requires_grad or name not in self._first_frozen:
                yield parameter

    def frozen(self) -> list[nn.Parameter]:
        """The parameters that are not trained now."""
        return [parameter for _, parameter in self._named() if not parameter.requires_grad]

    def state_dict(self) -> dict[str, bool]:
        """Name -> `requires_grad`, where it is neither as built nor as `freeze` has set it."""
        frozen, undecided = self._first_frozen | self._freezing.frozen, self._freezing.undecided
        return self._pending | {
            name: parameter.requires_grad
            for name, parameter in self._named()
            if parameter.requires_grad != (name not in frozen) and name not in undecided
        }

    def fit(self, state: Mapping[str, Any], options: LoadOptions) -> Fitting:
        """Compare a saved state, whose names are mapped by `options`, and return what makes its changes."""
        names = {name for name, _ in self._named()}
        changes = {clean_name(new, names): state[name] for name, new in options.renamed(state).items()}
        rows = [f"{name}: is {value!r}" for name, value in changes.items() if not isinstance(value, bool)]
        return Fitting(rows, lambda: self.load_state_dict(changes))

    def load_state_dict(self, changes: Mapping[str, bool] | None) -> None:
        """Set `requires_grad` as built, and make these changes; None: they are not known, and nothing is set."""
        self._is_known = changes is not None
        self._pending = {}
        if changes is None:
            return
        self._freezing.release()
        scheduled = self._freezing.scheduled
        self._pending = {name: value for name, value in changes.items() if name in scheduled}
        self._set(changes, excluded=scheduled)

    def keep(self) -> None:
        """Keep the present changes for `repeat`: hooks at the start of a process may make other ones."""
        self._kept = self.state_dict() if self._is_known else None

    def repeat(self) -> None:
        """Set `requires_grad` as it was when `keep` was called, and by `freeze` as it is now."""
        if self._kept is not None:
            self._pending = {}
            self._set(self._kept)

    def forget(self) -> None:
        """Forget what `keep` has kept: all later changes belong to the training."""
        self._kept, self._is_known = None, True

    def _set(self, changes: Mapping[str, bool], excluded: Container[str] = ()) -> None:
        """Set `requires_grad` by these changes, and otherwise as built and by `freeze`; leave the excluded names."""
        frozen = self._first_frozen | self._freezing.frozen
        for name, parameter in self._named():
            is_trained = changes.get(name, name not in frozen)
            if parameter.requires_grad != is_trained and name not in excluded:
                parameter.requires_grad_(is_trained)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The clean name of each parameter, and the parameter."""
        return ((name, parameter) for parameter, name in name_parameters(self._model).items())
