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
    """An object that is given whole, or the result of a function that makes it from these arguments.

    An instance of `kind` may itself be callable, and is not called.
    """
    is_function = callable(source) and not isinstance(source, kind)
    return source(*args) if is_function else source


def check_type(slot: str, value: Any, kind: type, cure: str | None = None) -> Any:
    """Return the value of an argument or setting, called `slot` in the message, if it is an instance of `kind`.

    Raises:
        UserError: it is not; `cure` says what to do, unless the message can say it better.
    """
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
