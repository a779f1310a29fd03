"""What of this project the tables need: its checkpointers and its callback."""

from __future__ import annotations

from typing import Any

import trainer_cli


def sync_checkpointer() -> Any:
    return trainer_cli.make_sync_checkpointer()


def async_checkpointer() -> Any:
    """Its `save(state, path)` gives two futures: staged, and written."""
    return trainer_cli.make_async_checkpointer()


def checkpoint_callback(folder: Any, *, asynchronous: bool, **settings: Any) -> Any:
    """A CheckpointerCallback whose saving is synchronous or not."""
    return trainer_cli.CheckpointerCallback(folder, save_async=asynchronous, **settings)
