"""A folder that is used without the rights of the superuser, who reads everything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder of an unprivileged user, whom this process is meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)
