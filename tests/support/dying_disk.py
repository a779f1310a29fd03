"""A process that ends at one of its operations on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest


class Died(BaseException):
    """Stands for the end of the process: only the test catches it."""


def die_at(patch: pytest.MonkeyPatch, nth: int, names: Sequence[str]) -> None:
    """Let the n-th call of these functions of `os`, and every one after it, not happen."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count >= nth:
                raise Died
            return real(*arguments, **named)

        return call

    for name in names:
        patch.setattr(os, name, dying(getattr(os, name)))
