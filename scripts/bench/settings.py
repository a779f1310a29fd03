"""What the command line says to every table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Size(StrEnum):
    """How much of each table is measured."""

    smoke = "smoke"
    """The smallest form that runs every row once: shows that a table can be measured, its figures say nothing."""
    quick = "quick"
    """Small models, few rounds, no peers."""
    whole = "whole"


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the tables, number of rounds, and the folder whose disk is measured."""

    size: Size
    rounds: int | None
    folder: str

    @property
    def small(self) -> bool:
        """Whether models and files are small, and peers are left out."""
        return self.size is not Size.whole

    @property
    def warm(self) -> int:
        """Rounds that are measured and not kept, where a table wants one."""
        return 0 if self.size is Size.smoke else 1

    def pick(self, *, smoke: T, quick: T, whole: T) -> T:
        """The value of this size."""
        return {Size.smoke: smoke, Size.quick: quick, Size.whole: whole}[self.size]

    def rounds_or(self, quick: int, whole: int) -> int:
        """The rounds asked for, or a table's own number."""
        return self.rounds or self.pick(smoke=1, quick=quick, whole=whole)

    @property
    def scratch(self) -> Path:
        return Path(self.folder)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Settings:
        plain = json.loads(text)
        return Settings(**{**plain, "size": Size(plain["size"])})
