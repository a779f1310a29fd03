"""Open a storage by its URL: a local disk, or an object store through fsspec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_cli.files import as_path, is_url
from trainer_cli.parts import AddOnPart
from trainer_cli.storage.base import Storage
from trainer_cli.storage.local import LocalStorage

_ANY: AddOnPart[Callable[..., Storage]] = AddOnPart("storage.*")
"""The part that is the storage of every scheme without one of its own."""


def open_storage(root: Path | str, *, cache: Path | None = None, **identity: Any) -> Storage:
    """The storage of a folder of checkpoints.

    Args:
        root: a path or a URL.
        cache: the local folder for copies of checkpoints in an object store; by default one in the user's cache.
        identity: `run_id`, `attempt` and `later`, as in `LocalStorage`.

    Raises:
        UserError: there is no storage for this scheme, or it needs another package or a missing add-on.
    """
    if not is_url(root):
        return LocalStorage(as_path(root), **identity)
    scheme = str(root).partition("://")[0]
    make = AddOnPart[Callable[..., Storage]](f"storage.{scheme}").find() or _ANY.need(str(root))
    return make(root, cache=cache, **identity)
