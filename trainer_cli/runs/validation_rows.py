"""The results of `train validate` as rows: read from a folder, and ranked."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_cli.files import read_rows

_ROW_FACTS = ("checkpoint", "step", "loader", "average", "time")


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One checkpoint on one loader."""

    checkpoint: str
    """Its path, with `${oc.env:…}` in place of a value from the environment."""
    step: int
    loader: str
    metrics: dict[str, float]
    average: str | None = None
    """Name of the callback whose average of the weights was evaluated; None: the trained weights were."""

    @property
    def weights(self) -> str:
        """What was evaluated, for a table; empty for the trained weights."""
        return "" if self.average is None else f"average of {self.average}"

    @property
    def named_metrics(self) -> dict[str, float]:
        """The metrics with the loader in their names, as in `val/loss`."""
        return {f"{self.loader}/{key}": value for key, value in self.metrics.items()}

    @classmethod
    def read_all(cls, folder: Path) -> list[ValidationRow]:
        """Read the `validation.jsonl` of a folder: the newest row of each checkpoint and loader, by step.

        Lines that are no such row are left out.

        Raises:
            OSError: the file cannot be read.
        """
        rows: dict[tuple[str, str], ValidationRow] = {}
        for line in read_rows(folder / "validation.jsonl"):
            with suppress(ValueError, TypeError, KeyError, OverflowError):
                loader, checkpoint = str(line["loader"]), str(line["checkpoint"])
                values = {key.removeprefix(f"{loader}/"): value for key, value in line.items() if key not in _ROW_FACTS}
                metrics = {key: float(value) for key, value in values.items()}
                average = line.get("average")
                rows[checkpoint, loader] = cls(checkpoint, int(line["step"]), loader, metrics, average and str(average))
        return sorted(rows.values(), key=lambda row: row.step)
