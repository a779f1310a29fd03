"""Check that what a user gives is of the kind that is expected."""

from __future__ import annotations

from typing import Any

from trainer_cli.errors import UserError

_EXAMPLES = {
    "LoadOptions": "LoadOptions(states=['model'])",
    "Logging": "Logging(console='off')",
    "Precision": "Precision('bf16')",
    "TrainingLoop": "TrainingLoop(max_duration='3ep')",
    "ValidationLoop": "ValidationLoop(eval_steps=10)",
}
"""Class of an argument -> how it is made, for messages."""


SUBCLASSED = ("Callback", "Logger", "TrainStep")
"""Public classes whose subclasses a user gives."""


def make_instance(source: Any, kind: type, *args: Any) -> Any:
    """An instance of a class, or what a function without an instance returns for these arguments."""
    return source if isinstance(source, kind) or not callable(source) else source(*args)


def check_type(slot: str, value: Any, kind: type, cure: str | None = None) -> Any:
    """Return the value, or raise UserError if it is not of this kind."""
    if not isinstance(value, kind):
        got = type(value).__name__
        if isinstance(value, type) and issubclass(value, kind):
            got, cure = f"the class {value.__name__}", f"Give an instance of it: {value.__name__}(…)."
        elif kind.__name__ in SUBCLASSED:
            cure = f"Subclass it: from trainer_cli import {kind.__name__}."
        elif cure is None and kind.__name__ in _EXAMPLES:
            cure = f"Give it as {_EXAMPLES[kind.__name__]}."
        raise UserError(f"{slot}: expected {kind.__name__}, got {got}", cure=cure)
    return value
