"""The config that something on disk was trained with: a run directory, a checkpoint, or `RUN@latest`."""

from __future__ import annotations

from pathlib import Path

from trainer_cli.checkpoint.format.verified_file import read_verified
from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.naming import CONFIG_FILE
from trainer_cli.errors import CheckpointError, TrainError, UserError
from trainer_cli.run.rundir import RunDir
from trainer_cli.run.select import is_checkpoint, select_one


def config_file(name: str) -> Path | None:
    """The config of the run directory, checkpoint or file that is named; None where the name is of no such thing.

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


def is_on_disk(name: str) -> bool:
    """Whether `config_file` looks for it on the disk, though it has an `=`: a run of a sweep has one in its name."""
    return Path(name).is_file() or RunDir(name).config_file.is_file() or is_checkpoint(Path(name)) or _is_of_a_run(name)


def _is_of_a_run(name: str) -> bool:
    """Whether it reads as `RUN@latest`, and not as an override: a run of a sweep has `=` in its name, too."""
    run, at, which = name.rpartition("@")
    return bool(at) and "=" not in which and ("=" not in run or Path(run).is_dir())


def config_of(checkpoint: Path) -> tuple[Path | str, str]:
    """The file that says which experiment a checkpoint is of, and its text; both empty where there is none."""
    catalog = catalog_of(checkpoint.parent)
    manifest = catalog.entry(checkpoint.name).manifest
    if manifest is not None and CONFIG_FILE in manifest.files:
        with catalog.storage.reading(checkpoint.name) as folder:
            return checkpoint / CONFIG_FILE, read_verified(folder, manifest, CONFIG_FILE).decode()
    beside = RunDir(checkpoint.parent.parent)
    return (beside.config_file, beside.read_config()) if beside.config_file.is_file() else ("", "")
