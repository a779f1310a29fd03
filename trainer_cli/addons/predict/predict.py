"""`train predict`: write a model's outputs for every sample of a dataset.

    expand `ckpt=`, and hold the checkpoints against removal
    for each: its config from the checkpoint, data, model with its weights
        for each loader: the parts that are missing, in order; then one file of all parts

Several processes (torchrun, srun) each write a part of the samples. They exchange nothing: the last one that ends joins
the parts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.addons.predict.prediction_files import PredictionFile
from trainer_cli.addons.predict.prediction_writers import PredictionWriter
from trainer_cli.components import EVALUATED
from trainer_cli.config import Composed, compose, from_yaml, given_value
from trainer_cli.errors import CheckpointError, ConfigError, ExitCode, UserError, without_secrets
from trainer_cli.files import is_url
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.messages import to_console
from trainer_cli.origin import EvaluatedOrigin, naming_project, of_source, use_source_of
from trainer_cli.patterns import check_name
from trainer_cli.ranks import Ranks
from trainer_cli.running import import_torch, run_or_place
from trainer_cli.selection import Holds, StoredCheckpoint, provide_steps
from trainer_cli.storage import DOWNLOADS
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.loads import LoadOptions
    from trainer_cli.running import Builder, Data
    from trainer_cli.schema import TrainConfig
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_PART_SAMPLES = 1024
"""Samples in a part, or one batch if that is larger: at most these are predicted again after a kill."""
_DATASET = "predict"
"""The loader of a dataset for predictions alone."""
_KEYS = ("seed", "model", "model_call", "data", "step", "precision", "callbacks")
"""Sections of the config that change predictions."""
_OF_LOADING = ("num_workers", "persistent_workers", "worker_timeout")


def predict(
    overrides: Sequence[str],
    ranks: Ranks,
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    allow_pickle: bool = False,
    replays: bool = False,
) -> int:
    """Write the predictions of each checkpoint that `ckpt=` names, and return the exit code.

    Args:
        ranks: which of how many processes this is.
        allow_pickle: checkpoints of other programs may run any code when they are loaded.
        replays: whether a step that `RUN@stepN` names is computed if no checkpoint of it is there.
    """
    # The other overrides may name keys that only the configs of the checkpoints have.
    keys = ("ckpt=", "load.", "logging.", "predict.")
    settings: dict[str, Any] = {"config_dir": config_dir, "config_name": config_name}
    chosen = [override for override in overrides if override.lstrip("+").startswith(keys)]
    command = compose(chosen, **settings, missing_ok=True, sections=()).config
    to_console(command.logging.level)
    DOWNLOADS.configure(command.load)
    if command.ckpt is None:
        example = given_value(overrides, "experiment") or "digits"
        raise UserError(
            "predict needs ckpt=, whose weights to use", cure=f"For example: train predict ckpt=runs/{example}@best."
        )
    patterns = [command.ckpt] if isinstance(command.ckpt, str) else command.ckpt
    provide_steps(patterns, replays=replays, overrides=of_source(overrides), config_dir=config_dir)
    settings["sections"] = EVALUATED
    other_overrides = [override for override in overrides if not override.lstrip("+").startswith("ckpt=")]
    with Holds() as holds:
        selection, removed = holds.select(patterns)
        for path, problem in {**selection.skipped, **dict.fromkeys(removed, "it was removed")}.items():
            log.warning("skipped %s: %s", path, problem)
        for path, problem in selection.damaged.items():
            log.error("%s: %s", path, problem)
        folders = _folders(selection.paths)
        for path in selection.paths[-1:]:
            # The newest: a process imports a project from one source.
            use_source_of(path, other_overrides, config_dir)
        for path in selection.paths:
            with naming_project(StoredCheckpoint(path).find_run(), config_dir):
                experiment = _Experiment(path, other_overrides, settings, command, allow_pickle=allow_pickle)
                experiment.predict(folders[path], ranks)
    return ExitCode.NO_CHECKPOINT if selection.damaged else ExitCode.DONE


class _Folders(NamedTuple):
    """Where the predictions of a checkpoint are written."""

    default: Path
    below: Path
    """Relative to `predict.folder`, if that is set."""


def _folders(paths: Sequence[Path]) -> dict[Path, _Folders]:
    """The folders of each checkpoint. Below `predict.folder` each run has a folder of its own, if there are several."""
    runs = {path: run_or_place(path) for path in paths}
    places = {run.absolute() for run in runs.values() if run is not None}
    common = os.path.commonpath(places) if len(places) > 1 else None
    folders = {}
    for path, run in runs.items():
        if run is None:
            digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
            folders[path] = _Folders(Path("runs") / f"predictions-{digest}" / path.stem, Path(path.stem))
        else:
            below = Path(path.name) if common is None else run.absolute().relative_to(common) / path.name
            folders[path] = _Folders(run / "predictions" / path.name, below)
    return folders


class _Experiment:
    """A checkpoint with its config, and the overrides of the command."""

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        settings: Mapping[str, Any],
        command: TrainConfig,
        *,
        allow_pickle: bool,
    ) -> None:
        source, _ = StoredCheckpoint(path).read_config()
        if not source and not any(override.lstrip("+").startswith("experiment=") for override in overrides):
            cure = f"Name its experiment: train predict NAME ckpt={path}."
            raise CheckpointError(f"{path} holds no {CONFIG_FILE}", cure=cure)
        self.path = path
        self.composed: Composed = from_yaml(source, overrides, **settings)
        # `load` of a recovered config is for the checkpoint that its run started from, not for its own.
        load = command.load if source else self.composed.config.load
        self.load: LoadOptions = load.options(allow_pickle=allow_pickle)

    def predict(self, folders: _Folders, ranks: Ranks) -> None:
        """Write the predictions for every loader."""
        import_torch()
        import torch

        from trainer_cli.running import Builder, own_folder
        from trainer_cli.trainer import Predictor

        config = self.composed.config
        self.composed.check_targets(EVALUATED)
        # Without the data, which may be another.
        origin = EvaluatedOrigin(self.composed, {})
        origin.compare(self.path)
        if ranks.world_size > 1 and torch.cuda.is_available():
            torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
        with self.composed.placing():
            builder = Builder(config, self.composed.trust)
            writer = _make_writer(builder)
            data = builder.data(predicts=True)
            loaders = _choose_loaders(data, config.predict.loader)
            root = own_folder("predict.folder", config.predict.folder, self.composed.trust, run_or_place(self.path))
            folder = folders.default if root is None else Path(root) / folders.below
            files = {name: self._file(folder, name, loader, writer, origin) for name, loader in loaders.items()}
            if all(not file.missing(ranks.rank, ranks.world_size) for file in files.values()):
                _finish(files)
                return
            trainer = builder.evaluator(data)
            with Predictor.evaluating(trainer, loaders, self.path, self.load):
                for name, loader in loaders.items():
                    _write_missing(trainer, loader, files[name], config.predict.outputs, ranks)
            _finish(files)

    def _file(
        self, folder: Path, name: str, loader: Any, writer: PredictionWriter, origin: EvaluatedOrigin
    ) -> PredictionFile:
        """The file for the predictions on a loader, with the facts that they depend on."""
        parts = _count_parts(loader)
        values = self.composed.raw
        config = {key: values.get(key) for key in _KEYS}
        if isinstance(config["data"], Mapping):
            config["data"] = {key: value for key, value in config["data"].items() if key not in _OF_LOADING}
        facts = {
            "checkpoint": _identify(self.path),
            "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
            "predict.outputs": list(self.composed.config.predict.outputs),
            "predict.writer": (values.get("predict") or {}).get("writer"),
            "samples": getattr(loader, "length", None),
            "parts": parts,
        }
        if self.load.ignore_keys or self.load.key_mapping:
            facts["load"] = [list(self.load.ignore_keys), dict(self.load.key_mapping)]
        if not self.load.average:
            facts["load.average"] = False
        if source := origin.digest_differing():
            facts["source"] = source
        return PredictionFile(folder, name, writer, count=parts, facts=facts)


def _identify(path: Path) -> Any:
    """What tells a checkpoint from any other; of a file or folder of another program also sizes and times of change."""
    if (manifest := StoredCheckpoint(path).manifest) is not None:
        return [manifest.run_id, manifest.step, manifest.config_digest]
    name = without_secrets(str(path))
    if is_url(path):
        return name
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return [name, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]


def _make_writer(builder: Builder) -> PredictionWriter:
    """The writer that `predict.writer` names; by default that of JSON lines."""
    node = builder.config.predict.writer
    if node is None:
        return PredictionWriter()
    writer = builder.make(node, "predict.writer")
    if not isinstance(writer, PredictionWriter):
        raise ConfigError(
            f"predict.writer is a {type(writer).__name__}, but it must be a subclass of PredictionWriter",
            location="predict.writer",
        )
    return writer


def _choose_loaders(data: Data, name: str | None) -> dict[str, Any]:
    """The loader `name`; None: that of the part `predict` of the data object, else all validation loaders."""
    loaders = data.val
    if name is None and _DATASET in loaders:
        name = _DATASET
    if not loaders:
        raise ConfigError("the data has neither a part `predict` nor a validation part (val)", location="data")
    if name is None:
        return loaders
    check_name("loader", name, loaders, "predict.loader")
    return {name: loaders[name]}


def _batches_per_part(loader: Any) -> int | None:
    """Batches in a part; None if the loader cannot be entered at any sample: all batches are one part."""
    from trainer_cli.data import length_of

    size = getattr(loader, "samples_per_batch", None)
    return None if size is None or length_of(loader) is None else max(1, -(-_PART_SAMPLES // size))


def _count_parts(loader: Any) -> int:
    """The number of parts of all predictions on a loader."""
    per_part = _batches_per_part(loader)
    return 1 if per_part is None else -(-len(loader) // per_part)


def _write_missing(trainer: Trainer, loader: Any, file: PredictionFile, patterns: Sequence[str], ranks: Ranks) -> None:
    """Write the missing parts of this process, each stretch of consecutive ones with one pass of the loader."""
    per_part, size = _batches_per_part(loader), getattr(loader, "samples_per_batch", None) or 0
    missing = file.missing(ranks.rank, ranks.world_size)
    while missing:
        first = missing[0]
        # A killed process leaves no gap, but another number of processes does.
        stretch = [number for index, number in enumerate(missing) if number == first + index]
        missing = missing[len(stretch) :]
        batch = first * (per_part or 0)
        sample = batch * size
        with closing(loader.iterate(0, batch=batch, samples=sample)) as batches:
            rows = _Rows(trainer, loader, patterns, sample)
            for number in stretch:
                file.write(number, rows.of(islice(batches, per_part)))
                log.info("%s: %s", file.path, format_count(rows.sample, "sample"))


class _Rows:
    """The rows of consecutive samples, from a first one on."""

    def __init__(self, trainer: Trainer, loader: Any, patterns: Sequence[str], sample: int) -> None:
        from trainer_cli.trainer import Predictor

        self.sample = sample
        """The number of the next sample."""
        self._predictor = Predictor(trainer, loader, patterns)

    def of(self, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
        """The rows of some batches, in order."""
        for batch in batches:
            for row in self._predictor.rows(batch):
                yield {"sample": self.sample, **row}
                self.sample += 1


def _finish(files: Mapping[str, PredictionFile]) -> None:
    """Join the parts of each file, unless other processes have still to write some."""
    for file in files.values():
        if file.is_done:
            log.info("%s is complete already", file.path)
        elif file.finish():
            log.info("wrote %s", file.path)
        else:
            log.info("%s: other processes have not written all parts yet", file.path)
