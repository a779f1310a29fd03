"""Storages by the scheme of the place: a local disk, or an object store through fsspec."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.storage.base import Storage
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.core.url_path import as_path, is_url


def open_storage(place: Path | str, *, cache: Path | None = None, **identity: Any) -> Storage:
    """The storage of a folder of checkpoints.

    Args:
        cache: the local folder for copies of what is in an object store; by default one in the user's cache.
        identity: `run_id`, `attempt` and `later`, as in `LocalStorage`.

    Raises:
        UserError: there is no storage for this scheme, or it needs another package.
    """
    if not is_url(place):
        return LocalStorage(as_path(place), **identity)
    # fsspec is imported for object stores alone.
    from trainer_cli.checkpoint.storage.object_store import ObjectStorage

    return ObjectStorage(place, cache=cache, **identity)


def fetch(url: str, marks: Collection[str]) -> Path | None:
    """A local copy of a file in an object store, or of a folder that holds one of the files `marks`; None if there is
    none.

    Raises:
        UserError: there is no access, or no storage for this scheme.
        OSError: the store does not answer, or the disk is full.
    """
    from trainer_cli.checkpoint.storage.download import fetch as fetch_files

    return fetch_files(url, marks)
