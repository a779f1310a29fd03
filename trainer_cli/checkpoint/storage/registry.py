"""Storages by the scheme of the place: `file`, which a plain path has too, is a local disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.storage.interfaces import Storage
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.errors import UserError

STORAGES: Mapping[str, Callable[..., Storage]] = {"file": LocalStorage}


def open_storage(place: Path | str, **identity: Any) -> Storage:
    """The storage of a folder of checkpoints.

    Args:
        identity: `run_id`, `attempt` and `later`, as in `LocalStorage`.

    Raises:
        UserError: the place has a scheme, such as `s3://`, for which there is no storage.
    """
    scheme, found, path = str(place).partition("://")
    if found and scheme not in STORAGES:
        raise UserError(f"there is no storage for {scheme}://; there is one for {', '.join(STORAGES)}://")
    return STORAGES[scheme](path, **identity) if found else STORAGES["file"](place, **identity)
