"""A checkpoint at a path: its manifest, its small files, its config, and the run that saved it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trainer_cli.catalog import Catalog, ForeignKind
from trainer_cli.files import is_url
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.manifest import Manifest
from trainer_cli.runs import RunDir, read_text
from trainer_cli.tensor_files import read_verified


@dataclass(frozen=True)
class StoredCheckpoint:
    """What a checkpoint says about itself. Nothing is read until it is asked for."""

    path: Path
    catalog: Catalog | None = None
    """That of its folder, which a run needs for a checkpoint that is not in the object store yet."""

    @property
    def manifest(self) -> Manifest | None:
        """None if it cannot be read, or another program saved the checkpoint."""
        if ForeignKind.of(self.path) is not None:
            return None
        return self._catalog.entry(self.path.name).manifest

    def read(self, file: str) -> bytes | None:
        """Read a small file and verify its digest; None if the checkpoint has no such file."""
        catalog, name = self._catalog, self.path.name
        manifest = catalog.entry(name).manifest
        if manifest is None or file not in manifest.files:
            return None
        if is_url(self.path):
            # `reading` would download the other files too, which may be large.
            return catalog.read_small(name, file, manifest)
        with catalog.storage.reading(name) as folder:
            return read_verified(folder, manifest, file)

    def read_config(self) -> tuple[Path | str, str]:
        """Its config, else that of its run, as (source, text).

        The source is the file, or the text itself for a checkpoint in an object store. Both are empty without a config.
        """
        if ForeignKind.of(self.path) is not None:
            return "", ""
        if (content := self.read(CONFIG_FILE)) is not None:
            return content.decode() if is_url(self.path) else self.path / CONFIG_FILE, content.decode()
        run = RunDir(self.path.parent.parent)
        return (run.config_file, run.read_config()) if run.config_file.is_file() else ("", "")

    def find_run(self) -> Path | None:
        """The directory of the run that saved it; None if it is not found.

        It is the one around the folder of the checkpoint. If the run saves elsewhere, or the checkpoint was copied, it
        is the `run_dir` in the checkpoint's config, from the current folder, if the run there has the same id.
        """
        if ForeignKind.of(self.path) is not None:
            return None
        above = self.path.parent.parent
        if not is_url(self.path) and RunDir(above).is_run():
            return above
        manifest, (_, text) = self.manifest, self.read_config()
        try:
            run_dir = read_text(text, "run_dir")
        except ValueError:
            return None
        if manifest is None or run_dir is None or is_url(run_dir):
            return None
        run = RunDir(run_dir)
        return run.path if run.is_run() and run.known_id == manifest.run_id else None

    @property
    def _catalog(self) -> Catalog:
        return self.catalog or Catalog.of(self.path.parent)


def run_holding(folder: Path) -> Path | None:
    """The run whose directory holds a folder of checkpoints; None without one, or if it saves in another folder."""
    parent = folder / ".." if folder.name in ("", "..") else folder.parent
    run = RunDir(parent)
    saves_there = run.is_run() and os.path.realpath(run.stored_checkpoints()) == os.path.realpath(folder)
    return parent if saves_there else None
