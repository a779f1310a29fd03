"""What of this project the tables need: its checkpointers and the fields of its config, as far as they are there."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import trainer_cli
from timing import Skipped


def sync_checkpointer() -> Any:
    return trainer_cli.make_sync_checkpointer()


def async_checkpointer(writer: str) -> Any:
    """Its `save(state, path)` gives two futures: staged, and written."""
    make = getattr(trainer_cli, "make_async_checkpointer", None)
    if make is None:
        raise Skipped("this version has no asynchronous checkpointer")
    if "writer" in inspect.signature(make).parameters:
        return make(writer=writer)
    if writer != "thread":
        raise Skipped("this version writes in a thread alone")
    return make()


def has_async() -> bool:
    return hasattr(trainer_cli, "make_async_checkpointer")


def checkpoint_callback(folder: Any, *, asynchronous: bool, **settings: Any) -> Any:
    """A CheckpointerCallback whose saving is synchronous or not."""
    from trainer_cli.config.schema import CheckpointConfig

    known = {one.name for one in fields(CheckpointConfig)}
    if asynchronous and "save_async" not in known:
        raise Skipped("this version has no checkpoint.save_async")
    if "save_async" in known:
        settings["save_async"] = asynchronous
    return trainer_cli.CheckpointerCallback(folder, **settings)
