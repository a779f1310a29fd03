"""Open a storage by its URL: a local disk, or an object store through fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_cli.files import as_path, is_url
from trainer_cli.storage.base import Storage
from trainer_cli.storage.local import LocalStorage


def open_storage(root: Path | str, *, cache: Path | None = None, **identity: Any) -> Storage:
    """The storage of a folder of checkpoints.

    Args:
        root: a path or a URL.
        cache: the local folder for copies of checkpoints in an object store; by default one in the user's cache.
        identity: `run_id`, `attempt` and `later`, as in `LocalStorage`.

    Raises:
        UserError: there is no storage for this scheme, or it needs another package.
    """
    if not is_url(root):
        return LocalStorage(as_path(root), **identity)
    # Imported here, because the transfer code is loaded for object stores alone.
    from trainer_cli.addons.stores import ObjectStorage

    return ObjectStorage(root, cache=cache, **identity)
