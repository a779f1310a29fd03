"""The counts of a training in every unit, after this step and after the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Progress:
    """Counts since the start of the run, over all attempts; saved in every checkpoint.

    `batch` and `epoch_samples` are what has been consumed of the current epoch; at an epoch's end the position is
    (epoch + 1, 0). The `last_*` fields are the counts one step earlier: whether a step has crossed a multiple of an
    interval is decided from one `Progress` alone.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    last_samples: int = 0
    last_tokens: int = 0
    last_seconds: float = 0.0
    last_epoch: int = 0
    evaluated_step: int = -1
    passed_over: int = 0
    """Number of steps that skipped data would have made."""
    epochs_differ: int = 0
    """1 if an epoch had another length than the first. Like `passed_over` it is saved only if not zero, as older
    versions refuse the name."""

    @classmethod
    def of(cls, counts: Mapping[str, int | float]) -> Progress | None:
        """The progress with these counts, or None if one is missing or unknown."""
        return None if _find_misfits(counts) else cls(**counts)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, int | float]:
        """The counts, by name."""
        # It is written by hand: asdict copies recursively, and this runs at every save.
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count or name not in _OPTIONAL}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Load saved counts.

        Raises:
            ValueError: a count is missing or unknown.
        """
        if wrong := _find_misfits(state):
            raise ValueError(f"progress in the checkpoint does not fit this version: {', '.join(wrong)}")
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, 0))


_OPTIONAL = ("passed_over", "epochs_differ")
_NAMES = frozenset(field.name for field in fields(Progress))


def _find_misfits(counts: Mapping[str, int | float]) -> list[str]:
    """The names of counts that are missing or unknown."""
    return sorted(_NAMES.symmetric_difference({*counts, *_OPTIONAL}))
