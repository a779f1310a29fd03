"""How downloads from object stores and web servers are made in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_cli.schema import LoadConfig


@dataclass(slots=True)
class DownloadSettings:
    """Settings of each later download.

    Args:
        part_bytes: size of the requests; None: chosen by the store.
        progress: whether the progress is reported.
    """

    part_bytes: int | None = None
    progress: bool = True

    def configure(self, config: LoadConfig) -> None:
        """Take the settings of a config."""
        self.part_bytes, self.progress = config.chunk_size, config.progress


DOWNLOADS = DownloadSettings()
"""Of this process: a store is opened in many places, each of which would have to pass them on."""
