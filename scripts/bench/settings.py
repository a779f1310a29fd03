"""What the command line says to every table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Small or whole sizes, how many rounds, and where files are written whose speed is measured."""

    quick: bool
    rounds: int | None
    folder: str

    def rounds_or(self, quick: int, whole: int) -> int:
        """The rounds asked for, or a table's own number."""
        return self.rounds or (quick if self.quick else whole)

    @property
    def scratch(self) -> Path:
        return Path(self.folder)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Settings:
        return Settings(**json.loads(text))
