"""Which folder is a run and which holds its checkpoints, and the small files of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer_cli.bounds import read_yaml
from trainer_cli.catalog import Catalog, ForeignKind
from trainer_cli.errors import RunDirectoryError, UserError
from trainer_cli.files import as_path, is_url
from trainer_cli.layout import CONFIG_FILE, MANIFEST_FILE, in_runs
from trainer_cli.manifest import Manifest
from trainer_cli.patterns import did_you_mean
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.storage import open_storage
from trainer_cli.tensor_files import read_verified

_CONFIG_BYTES = 1_000_000


def is_run(path: Path) -> bool:
    """Whether a folder holds the config of a run, and is no checkpoint, which may hold one too."""
    return (path / CONFIG_FILE).is_file() and not is_checkpoint(path)


def open_run(path: Path) -> RunDir:
    """The directory of a run.

    Raises:
        UserError: the path is not a run.
    """
    directory = RunDir(path)
    if not directory.exists_as_run():
        raise UserError(f"{path} is not a run's directory", cure=advise_run(path))
    return directory


def advise_run(path: Path) -> str:
    """How to name the run that a path means which is not a run's directory."""
    name, at, _ = str(path).partition("@")
    for folder in [Path(name)] if at else path.parents[:3]:
        if RunDir(folder).exists_as_run():
            return f"Name the run itself: {folder}."
    if (found := in_runs(str(path))) is not None:
        return f"Did you mean '{found}'?"
    names = [run.parent.name for run in path.parent.glob(f"*/{CONFIG_FILE}")]
    return f"Name the folder that holds its {CONFIG_FILE}.{did_you_mean(path.name, names)}"


def id_of(run: Path | None) -> str | None:
    """The run id that the checkpoints of a run carry; None if it is unknown."""
    try:
        return None if run is None else RunDir(run).run_id
    except RunDirectoryError:
        return None


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints, as its config says; a folder that is no run is returned as it is."""
    if not is_run(run):
        return run
    config = run_config(run)
    section = config.get("checkpoint")
    configured = section.get("folder") if isinstance(section, dict) else None
    if isinstance(configured, str) and "${" in configured:
        try:
            configured = resolve_key(config, "checkpoint.folder")
        except ValueError as error:
            raise UserError(
                f"checkpoint.folder is unknown: {error}",
                where=str(run / CONFIG_FILE),
                cure="Name the folder of its checkpoints instead of the run.",
            ) from None
    if not isinstance(configured, str):
        return run / "checkpoints"
    return as_path(configured.replace("{run_name}", str(config.get("name") or "default")))


def resolve_key(config: Mapping[str, Any], key: str) -> str:
    """The value of a key that refers to other keys.

    Raises:
        ValueError: it cannot be resolved.
    """
    # Imported here: plain YAML answers for most configs, and OmegaConf takes 0.1 s to import.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.select(OmegaConf.create(dict(config)), key, throw_on_missing=True))
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def run_config(run: Path) -> dict[str, Any]:
    """The stored config of a run, unresolved; empty if it cannot be read."""
    try:
        with (run / CONFIG_FILE).open("rb") as file:
            # A bound: a config in a shared folder may come from anybody.
            return _parse_config(file.read(_CONFIG_BYTES))
    except OSError:
        return {}


# The end of a run asks for its config several times.
@lru_cache(maxsize=2)
def _parse_config(text: bytes | str) -> dict[str, Any]:
    """The values of a stored config, unresolved; empty if it is not a config. Callers do not change them."""
    try:
        config = read_yaml(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError:
        return {}
    return config if isinstance(config, dict) else {}


def run_holding(folder: Path) -> Path | None:
    """The run whose directory holds a folder of checkpoints; None without one, or if it saves in another folder."""
    run = folder / ".." if folder.name in ("", "..") else folder.parent
    return run if is_run(run) and os.path.realpath(checkpoints_of(run)) == os.path.realpath(folder) else None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest."""
    if is_url(path):
        return open_storage(path.parent).peek(path.name, MANIFEST_FILE) is not None
    return (path / MANIFEST_FILE).is_file()


def manifest_of(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it cannot be read, or another program saved the checkpoint."""
    return (
        None
        if ForeignKind.of(checkpoint) is not None
        else Catalog.of(checkpoint.parent).entry(checkpoint.name).manifest
    )


def read_small_file(checkpoint: Path, file: str, catalog: Catalog | None = None) -> bytes | None:
    """Read a small file of a checkpoint and verify its digest; None if the checkpoint has no such file.

    Args:
        catalog: that of its folder, which a run needs for a checkpoint that is not in the object store yet.
    """
    catalog = catalog or Catalog.of(checkpoint.parent)
    manifest = catalog.entry(checkpoint.name).manifest
    if manifest is None or file not in manifest.files:
        return None
    if is_url(checkpoint):
        # `reading` would download the other files too, which may be large.
        return catalog.read_small(checkpoint.name, file, manifest)
    with catalog.storage.reading(checkpoint.name) as folder:
        return read_verified(folder, manifest, file)


def config_of(checkpoint: Path, catalog: Catalog | None = None) -> tuple[Path | str, str]:
    """The config of a checkpoint, else of its run, as (source, text).

    The source is the file, or the text itself for a checkpoint in an object store. Both are empty without a config.

    Args:
        catalog: see `read_small_file`.
    """
    if ForeignKind.of(checkpoint) is not None:
        return "", ""
    if (content := read_small_file(checkpoint, CONFIG_FILE, catalog)) is not None:
        return content.decode() if is_url(checkpoint) else checkpoint / CONFIG_FILE, content.decode()
    run = RunDir(checkpoint.parent.parent)
    return (run.config_file, run.read_config()) if run.config_file.is_file() else ("", "")


def run_that_saved(checkpoint: Path) -> Path | None:
    """The directory of the run that saved a checkpoint; None if it is not found.

    It is the one around the folder of the checkpoint. If the run saves elsewhere, or the checkpoint was copied, it is
    the `run_dir` in the checkpoint's config, from the current folder, if the run there has the same id.
    """
    if ForeignKind.of(checkpoint) is not None:
        return None
    if not is_url(checkpoint) and is_run(above := checkpoint.parent.parent):
        return above
    manifest, (_, text) = manifest_of(checkpoint), config_of(checkpoint)
    config = _parse_config(text)
    try:
        run_dir = resolve_key(config, "run_dir") if "${" in str(config.get("run_dir")) else config.get("run_dir")
    except ValueError:
        return None
    if manifest is None or not isinstance(run_dir, str) or is_url(run_dir):
        return None
    run = Path(run_dir)
    return run if is_run(run) and id_of(run) == manifest.run_id else None
