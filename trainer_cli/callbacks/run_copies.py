"""The copies of a run's checkpoints in a second folder, which an add-on makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer_cli.parts import AddOnPart

if TYPE_CHECKING:
    from trainer_cli.callbacks.retention import Retention
    from trainer_cli.catalog import Catalog
    from trainer_cli.checkpoint import CheckpointMetadata
    from trainer_cli.schema import CheckpointConfig, Newer
    from trainer_cli.storage import Storage


class RunCopies(Protocol):
    """A failure of a copy is kept until `raise_failure` or `finish`."""

    folder: Path
    storage: Storage
    on_failure: Callable[[], object]
    """Called from another thread after a failure."""

    @property
    def next_number(self) -> int: ...

    def reachable(self, saved: Catalog, run_id: str | None) -> list[Catalog]: ...

    def start(self, source_retention: Retention, step: int, newer: Newer) -> None: ...

    def waiting(self) -> list[str]: ...

    def on_committed(self, name: str, metadata: CheckpointMetadata) -> None: ...

    def on_amended(self, name: str) -> None: ...

    def raise_failure(self) -> None: ...

    def finish(self, source_retention: Retention) -> None: ...

    def abandon(self) -> None: ...

    def close(self, timeout_s: float) -> bool: ...


_OPEN: AddOnPart[Callable[..., RunCopies]] = AddOnPart("copies.open")


def open_copies(
    source: Storage, folder: Path, config: CheckpointConfig, *, run_id: str, attempt: int, cache: Path | None
) -> RunCopies | None:
    """The copies that a run makes of the checkpoints in `folder`, whose storage is `source`; None: it makes none.

    Args:
        cache: the local folder for copies that are in an object store; by default one in the user's cache.

    Raises:
        ConfigError: the folder of the copies is that of the checkpoints, or inside it.
        UserError: the add-on is missing.
    """
    if config.copy_to.folder is None:
        return None
    make = _OPEN.need("checkpoint.copy_to.folder")
    return make(source, folder, config, run_id=run_id, attempt=attempt, cache=cache)
