"""Whether the steps that a resume makes again have the values that an earlier attempt has logged for them.

A service such as W&B cannot remove records. If a resume is exact, those that it has of repeated steps are equal,
and are not sent again. Where in doubt the answer is no: the records are then sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.config import Composed
from trainer_cli.files import read_last_row
from trainer_cli.keys import WITHOUT_EFFECT
from trainer_cli.origin import other_source
from trainer_cli.running.start import Start

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

_COMPUTED_BY = ("versions", "device", "device_name", "threads", "processes")
"""Facts of the environment on which the last bits of results depend."""


def find_differing_end(
    composed: Composed, start: Start, trainer: Trainer, train_loader: Any, environment: Mapping[str, Any]
) -> int | None:
    """The last step that was logged before this attempt, if the steps up to it may get other values now; else None.

    Call it before the attempt is added to the summary, and before records are removed.
    """
    last_step = read_last_row(start.run.metrics_file).get("step")
    if not start.run.attempts or last_step is None:
        return None
    return None if _repeats_exactly(composed, start, trainer, train_loader, environment) else int(last_step)


def repeats_steps(attempts: Iterable[Mapping[str, Any]], start_step: int) -> bool:
    """Whether the steps after `start_step` have the same records as in all earlier attempts.

    Args:
        attempts: all, with the present one.
    """
    return all((attempt.get("differs_until") or 0) <= start_step for attempt in attempts)


def _repeats_exactly(
    composed: Composed, start: Start, trainer: Trainer, train_loader: Any, environment: Mapping[str, Any]
) -> bool:
    """Whether the steps that are made again give the same values, bit for bit, as far as is known."""
    from trainer_cli.data import Loader, SharedLoader

    before = start.run.environment_of(int(start.run.attempts[-1].get("attempt") or 1))
    loader = train_loader.loader if isinstance(train_loader, SharedLoader) else train_loader
    manifest = None if start.entry is None else start.entry.manifest
    return (
        all(change.path[0] in WITHOUT_EFFECT for change in start.changes)
        and all(before.get(key) == environment.get(key) for key in _COMPUTED_BY)
        # Without a checkpoint it is unknown whether the code has changed.
        and manifest is not None
        and not other_source(manifest.source, composed.project_root)
        and (trainer.device.type == "cpu" or composed.config.deterministic)
        # The position of another loader may not be exact.
        and isinstance(loader, Loader)
    )
