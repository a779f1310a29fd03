"""Datasets named in a config one by one: `data` without a class of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Datasets:
    """What `data` makes of a dataset for training, and one, or a mapping of names to several, for validation."""

    def __init__(self, train: Any, val: Any | Mapping[str, Any] | None = None) -> None:
        self.train, self.val = train, val
