"""The callbacks of one trainer: those it was given, then the global ones, and last the one that saves."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import UserError
from trainer_cli.signatures import check_type, make_instance
from trainer_cli.trainer.hooks import Callback, CheckpointSaver, Hooks, global_callbacks
from trainer_cli.trainer.setup import add_by_class, name_values

if TYPE_CHECKING:
    from trainer_cli.trainer.train_step import TrainStep
    from trainer_cli.trainer.trainer import Trainer


@dataclass(slots=True)
class _Use:
    """The state in which a trainer was first given a callback or a step, and the callbacks of the trainer that was
    given it last.

    Both `used` and `owner` are weak references.
    """

    used: weakref.ref[Callback | TrainStep]
    state: dict[str, Any]
    owner: weakref.ref[CallbackSet]


_uses: dict[int, _Use] = {}
"""By identity: a callback that defines equality, such as a dataclass, has no hash."""


class CallbackSet:
    """The callbacks by name, their hooks, and the states that they were made with.

    A callback of an earlier trainer begins with the state in which that one was given it, as a new one would.

    Args:
        callbacks, sparsity, saver: as in `Trainer`.
        loop, components: what else the trainer is made of, which must have no hooks.

    Raises:
        UserError: two have the same name, or one is not of its kind.
    """

    def __init__(
        self,
        callbacks: Mapping[str, Callback] | Iterable[Callback],
        sparsity: Callback | Callable[[], Callback] | None,
        saver: CheckpointSaver | None,
        loop: Any,
        *components: object,
    ) -> None:
        self._configured: dict[str, Callback] = name_values("callbacks", callbacks, Callback)
        if sparsity is not None:
            if "sparsity" in self._configured:
                raise UserError("two callbacks are called 'sparsity'", cure="Give it once, as sparsity=.")
            mask = check_type("sparsity", make_instance(sparsity, Callback), Callback)
            self._configured = {"sparsity": mask, **self._configured}
        self._check_saver(saver)
        self._saver, self._evaluations = saver, loop.evaluations
        self._global = global_callbacks()
        self._bind()
        self.hooks.refuse_in(loop, loop.evaluations.validation, *components)

    def _check_saver(self, saver: CheckpointSaver | None) -> None:
        """Refuse a second callback that saves, and one that is not given as `checkpoint`."""
        if saver is not None:
            if "checkpoint" in self._configured:
                raise UserError("two callbacks are called 'checkpoint'", cure="Give it once, as checkpoint=.")
            check_type("checkpoint", check_type("checkpoint", saver, Callback), CheckpointSaver)
        for name, callback in self._configured.items():
            if isinstance(callback, CheckpointSaver):
                # The trainer resumes only what `checkpoint` has saved.
                raise UserError(
                    f"callbacks holds a {type(callback).__name__}, as {name!r}",
                    cure="One saves: give it as checkpoint=, or in YAML under the name callbacks.checkpoint.",
                )

    def _bind(self) -> None:
        """Name all callbacks in the order in which they are called, and bind their hooks."""
        self.callbacks = dict(self._configured)
        saver: Any = self._saver
        if saver is not None:
            # Before the global callbacks are named, so that none of them takes this name.
            self.callbacks["checkpoint"] = saver
        present = list(self.callbacks.values())
        add_by_class(self.callbacks, [callback for callback in self._global if callback not in present])
        if saver is not None:
            # Called last, so that it saves what the others have changed.
            self.callbacks["checkpoint"] = self.callbacks.pop("checkpoint")
        self.hooks = Hooks(self.callbacks, families={"validate", *self._evaluations.hooks()})

    def update(self) -> dict[str, Callback]:
        """Adopt global callbacks that were added or removed since the last call; returns the added ones by name."""
        before, self._global = self._global, global_callbacks()
        if self._global == before:
            return {}
        self._bind()
        added = [callback for callback in self._global if callback not in before]
        return {name: callback for name, callback in self.callbacks.items() if callback in added}

    def set_up(self, added: Mapping[str, Callback], trainer: Trainer) -> None:
        """Set up callbacks that `update` has returned."""
        for callback in added.values():
            callback.setup(trainer)
            callback.post_setup(trainer)
        self.keep_first_states(added)

    def keep_first_states(self, names: Iterable[str]) -> None:
        """Copy the states of callbacks that are set up. Callbacks have no reset: a fit from step 0 loads these."""
        for callback in map(self.callbacks.__getitem__, names):
            # A global callback is of all trainers, and counts on.
            if callback not in self._global or id(callback) not in _uses:
                self.keep_first_state(callback)

    def keep_first_state(self, stateful: Callback | TrainStep) -> None:
        """Copy the state of a callback or a step, or load the one in which an earlier trainer was given it.

        Raises:
            UserError: the state cannot be that of this trainer, or it could be saved but not loaded.
        """
        _check_state_methods(stateful)
        if (use := _uses.get(id(stateful))) is None:
            _note_use(stateful, self)
            return
        use.owner = weakref.ref(self)
        # Without a first state nothing can be loaded to undo the earlier training.
        cannot_reset = not use.state and bool(stateful.state_dict())
        if cannot_reset or (isinstance(stateful, Callback) and any(stateful.check_state(use.state))):
            raise UserError(
                f"this {type(stateful).__name__} was given to an earlier trainer, and its state does not fit this one",
                cure="Give each trainer one of its own.",
            )
        load_first_state(stateful)

    def load_first_states(self) -> None:
        """Load the states that the callbacks were made with."""
        for callback in self.callbacks.values():
            load_first_state(callback)

    def check_owned(self, step: TrainStep | None = None) -> None:
        """Raise UserError for a callback with state that a trainer made later was given as well.

        Args:
            step: is checked too; None: only the callbacks that change an evaluation are.
        """
        named: dict[str, Callback | TrainStep] = {
            f"callbacks.{name}": callback
            for name, callback in self._configured.items()
            if step is not None or callback.evaluates
        }
        if step is not None:
            named["step"] = step
        for name, stateful in named.items():
            use = _uses.get(id(stateful))
            if use is None or use.owner() is self:
                continue
            if use.state or stateful.state_dict():
                raise UserError(
                    f"{name}: this {type(stateful).__name__} was also given to a trainer that was made later, and its "
                    "state is that of one training",
                    cure="Give each trainer one of its own.",
                )


def _check_state_methods(stateful: Callback | TrainStep) -> None:
    """Check that what saves a state also loads it, and the reverse.

    Raises:
        UserError: naming the method that is missing.
    """
    kind = type(stateful)
    names = ("state_dict", "load_state_dict")
    base = next(parent for parent in reversed(kind.__mro__) if vars(parent).keys() >= set(names))
    missing = [name for name in names if getattr(kind, name) is getattr(base, name)]
    if len(missing) == 1:
        (present,) = set(names).difference(missing)
        raise UserError(
            f"{kind.__name__} has {present} and no {missing[0]}, so a resume would begin with another state",
            cure=f"Define {missing[0]} too, or neither.",
        )


def _note_use(stateful: Callback | TrainStep, owner: CallbackSet) -> None:
    """Record the first use of a callback or a step, until it no longer exists."""
    identity = id(stateful)

    def forget(_: weakref.ref[Callback | TrainStep]) -> None:
        _uses.pop(identity, None)

    _uses[identity] = _Use(weakref.ref(stateful, forget), copy.deepcopy(stateful.state_dict()), weakref.ref(owner))


def load_first_state(stateful: Callback | TrainStep) -> None:
    """Load the state in which a trainer was first given a callback or a step, if it has one."""
    use = _uses.get(id(stateful))
    if use is not None and use.state:
        stateful.load_state_dict(copy.deepcopy(use.state))
