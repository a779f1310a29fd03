"""Read the config of a run directory, a checkpoint, or `RUN@latest`."""

from __future__ import annotations

from pathlib import Path

from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.format.verified_file import read_verified
from trainer_cli.checkpoint.integrity import catalog_of, read_small
from trainer_cli.checkpoint.manifest import Manifest
from trainer_cli.checkpoint.naming import CONFIG_FILE
from trainer_cli.checkpoint.storage.url_path import is_url
from trainer_cli.errors import CheckpointError, TrainError, UserError
from trainer_cli.run.run_dir import RunDir
from trainer_cli.run.select import is_checkpoint, select_one


def config_file(name: str) -> Path | None:
    """The config of the run directory, checkpoint or file that is named; None if it names neither.

    Raises:
        CheckpointError: no such checkpoint, one that is damaged, or one that carries no config.
        UserError: a folder that is neither run nor checkpoint.
    """
    path = Path(name)
    if path.is_file():
        return path
    if RunDir(path).config_file.is_file() and not (path / "manifest.json").is_file():
        return RunDir(path).config_file
    if not path.is_dir() and not _is_of_a_run(name):
        return None
    if path.is_dir() and not is_checkpoint(path):
        cure = "Name a run directory, which holds a config.yaml, a checkpoint in one, or RUN@latest."
        raise UserError(f"{name} is neither a run directory nor a checkpoint", where="--diff", cure=cure)
    try:
        checkpoint = select_one(name)
        source, _ = config_of(checkpoint)
    except TrainError as error:
        error.where = "--diff"
        raise
    if not source:
        raise CheckpointError(f"{checkpoint} carries no {CONFIG_FILE}")
    return Path(source)


def manifest_of(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it cannot be read, or the checkpoint is of another program."""
    return None if kind_of(checkpoint) is not None else catalog_of(checkpoint.parent).entry(checkpoint.name).manifest


def small_file(checkpoint: Path, file: str) -> bytes | None:
    """A side file of a checkpoint of this program, its digest verified; None if there is none of that name."""
    catalog = catalog_of(checkpoint.parent)
    manifest = catalog.entry(checkpoint.name).manifest
    if manifest is None or file not in manifest.files:
        return None
    if is_url(checkpoint):
        # Without its other files, which may be large.
        return read_small(catalog.storage, checkpoint.name, file, manifest)
    with catalog.storage.reading(checkpoint.name) as folder:
        return read_verified(folder, manifest, file)


def is_on_disk(name: str) -> bool:
    """Whether a name with `=` is a path: the name of a sweep's run has one."""
    return Path(name).is_file() or RunDir(name).config_file.is_file() or is_checkpoint(Path(name)) or _is_of_a_run(name)


def _is_of_a_run(name: str) -> bool:
    """Whether a name is `RUN@latest`, and not an override: the name of a sweep's run has `=` too."""
    run, at, which = name.rpartition("@")
    return bool(at) and "=" not in which and ("=" not in run or Path(run).is_dir())


def config_of(checkpoint: Path) -> tuple[Path | str, str]:
    """The config file of a checkpoint, else of its run, and its text; the text twice for one in an object store, and
    both empty if there is none."""
    if kind_of(checkpoint) is not None:
        return "", ""
    if (content := small_file(checkpoint, CONFIG_FILE)) is not None:
        return content.decode() if is_url(checkpoint) else checkpoint / CONFIG_FILE, content.decode()
    beside = RunDir(checkpoint.parent.parent)
    return (beside.config_file, beside.read_config()) if beside.config_file.is_file() else ("", "")
