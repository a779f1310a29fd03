"""Warn of states that do not move, and of workers that read the same samples: both repeat samples in silence."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer_cli.layout import class_name

log = logging.getLogger(__name__)


STATE_STAYS = (
    "the state of %s is the same after two batches, so a resume inside an epoch repeats samples: "
    "its state_dict() must hold its position"
)
WORKERS_READ_THE_SAME = (
    "two workers of %s begin with the same batch, so that each seems to read all of its samples: divide them in its "
    "__iter__ by torch.utils.data.get_worker_info(), or use one worker (train docs data)"
)
"""Of the first batches of an iterable dataset, which come from one worker after another."""


class RepeatWatch:
    """Warn once if the first two values of an epoch are equal.

    Args:
        warning: the text, with `%s` for the class of `owner`.
        watches: whether values are needed.
    """

    def __init__(self, warning: str, owner: Any, *, watches: bool) -> None:
        self._warning, self._name = warning, class_name(owner)
        self._first: Any = None
        self.watches = watches
        """Whether more values are needed."""

    def begin(self) -> None:
        """Begin an epoch."""
        self._first = None

    def see(self, value: Any) -> None:
        """Compare the first and the second value of an epoch."""
        if not self.watches:
            return
        if self._first is None:
            try:
                self._first = copy.deepcopy(value)
            except Exception:
                # The checkpoint reports a state that cannot be saved.
                self.watches = False
            return
        self.watches = False
        if _are_equal(value, self._first):
            log.warning(self._warning, self._name)
        # It may be large, and a stream may have one epoch.
        self._first = None


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two values are certainly equal. False for those that cannot be compared."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_are_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    try:
        # Not `==` alone: for arrays and tensors its result has no truth value.
        return bool((np.asarray(first) == np.asarray(second)).all())
    except Exception:
        return False
