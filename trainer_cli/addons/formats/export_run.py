"""Export, archive, average and strip checkpoints, for `train ckpt`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_cli.addons.formats.export import (
    Average,
    ExportFormat,
    Weights,
    check_loadable,
    export,
    merged_lora,
    renamed,
)
from trainer_cli.addons.formats.whole_archive import write_archive
from trainer_cli.catalog import Catalog, ForeignKind
from trainer_cli.checkpoint import CheckpointMetadata, make_sync_checkpointer, read_evaluated_weights
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.files import is_url
from trainer_cli.layout import CONFIG_FILE, MODEL_CONFIG_FILE
from trainer_cli.loads import VERSIONS, LoadOptions
from trainer_cli.manifest import Manifest
from trainer_cli.parallel import ALONE
from trainer_cli.selection import StoredCheckpoint, run_holding
from trainer_cli.state import find_spectral_vectors, make_metadata
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

_SUFFIXES = {ExportFormat.huggingface: "", ExportFormat.safetensors: ".safetensors", ExportFormat.torch: ".pt"}


@dataclass(frozen=True, slots=True)
class Written:
    """The output of a command."""

    path: Path
    tensors: int
    size_bytes: int
    average: str | None = None
    """Name of the callback whose average was written; None: the trained weights."""


def export_one(
    path: Path,
    format: ExportFormat,
    output: Path | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int | None = None,
    ema: str | None = None,
    merge_lora: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    hf_config: Path | None = None,
    overwrite: bool = False,
) -> Written:
    """Export the weights of one checkpoint of this or another program.

    Args:
        ema: name of a callback whose average is exported; `none`: the trained weights; None: those that
            evaluations used.
        dtype, shard_bytes, overwrite: see `export`.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or has no such weights.
        UserError: the output exists, or an argument does not fit.
    """
    for flag, value in (("--hf-config", hf_config), ("--shard-size", shard_bytes)):
        if value is not None and format is not ExportFormat.huggingface:
            raise UserError(f"{flag} is for --format huggingface", cure=f"Leave {flag} out, or choose that format.")
    extra = _model_files(path, hf_config) if format is ExportFormat.huggingface else {}
    weights: Weights
    weights, callback, versions = read_evaluated_weights(path, ema)
    if merge_lora:
        weights = merged_lora(weights, str(path))
    new_names = LoadOptions(key_mapping=key_mapping or {}).renamed(weights)
    metadata = make_metadata({new: name for name, new in new_names.items()}, versions)
    weights = renamed(weights, key_mapping or {})
    if extra:
        check_loadable(weights, str(path))
    output = output or _beside(path, _SUFFIXES[format])
    size_bytes = export(
        weights,
        output,
        format,
        metadata=metadata,
        dtype=None if dtype is None else getattr(torch, dtype),
        shard_bytes=shard_bytes,
        extra=extra,
        overwrite=overwrite,
    )
    if format is ExportFormat.huggingface and not extra:
        log.warning("no config.json is written: --hf-config FILE adds that of the model")
    return Written(output, len(weights), size_bytes, callback)


def archive_one(path: Path, output: Path | None = None, *, overwrite: bool = False) -> Written:
    """Write one whole checkpoint as an archive.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
        UserError: another program saved the checkpoint, or the output exists or has another ending.
    """
    if (kind := ForeignKind.of(path)) is not None:
        raise UserError(f"{path} is a {kind}, and an archive is of a checkpoint of this program")
    output = output or _beside(path, ".tar")
    size_bytes = write_archive(path, output, overwrite=overwrite)
    return Written(output, len(Catalog.of(path.parent).storage.sizes(path.name)), size_bytes)


def _beside(path: Path, suffix: str) -> Path:
    """The default output of an export: in the folder `export` of the run, or beside the checkpoint."""
    # The current folder for a URL: an export is written to the local disk.
    folder = Path() if is_url(path) else run_holding(path.parent) or path.parent
    return folder / "export" / f"{path.name}{suffix}"


def average(
    paths: Sequence[Path], output: Path, shares: Sequence[float] | None = None, *, ema: str | None = None
) -> Written:
    """Average the weights of checkpoints, and save the mean as a checkpoint with the config of the newest.

    Args:
        paths: checkpoints, sorted by step.
        shares: weight of each in the mean; None: equal weights.
        ema: see `export_one`.

    Raises:
        CheckpointError: a checkpoint is damaged, or their weights differ in names, shapes or types.
        UserError: the output exists.
    """
    if len(paths) < 2:
        raise UserError(f"{paths[0]} is one checkpoint, and an average is of several")
    shares = list(shares or [1.0] * len(paths))
    if len(shares) != len(paths) or min(shares) < 0 or sum(shares) <= 0:
        raise UserError(
            f"--weights has {format_count(len(shares), 'number')} for {format_count(len(paths), 'checkpoint')}, or "
            "none above 0"
        )
    # One checkpoint in memory at a time.
    mean, callbacks = Average(), set()
    first_versions = None
    for path, share in zip(paths, shares, strict=True):
        weights, callback, versions = read_evaluated_weights(path, ema)
        # Other programs save no versions: those of the first checkpoint that has some count.
        first_versions = versions if first_versions is None else first_versions
        if versions not in (None, first_versions):
            raise CheckpointError("it was saved by other versions of the modules than those before", where=str(path))
        mean.add(weights, str(path), share)
        callbacks.add(callback)
    if len(callbacks) > 1:
        raise UserError(
            f"some of the checkpoints were evaluated as the average of a callback, and some as trained: {paths[-1]}",
            cure="Say which weights to take: --ema CALLBACK, or --ema none for the trained ones.",
        )
    if mean.differing:
        log.warning("whole numbers are those of %s: %s", paths[-1], ", ".join(sorted(mean.differing)[:5]))
    names = ", ".join(path.name for path in paths)
    weights = mean.result()
    return _save(
        {**weights, **find_spectral_vectors(weights)},
        first_versions,
        source=paths[-1],
        output=output,
        reason=f"average of {names}"[:500],
        callback=callbacks.pop(),
    )


def strip(path: Path, output: Path, *, ema: str | None = None) -> Written:
    """Save only the weights of a checkpoint, as another checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such weights.
        UserError: the output exists.
    """
    weights, callback, versions = read_evaluated_weights(path, ema)
    return _save(weights, versions, path, output, f"weights of {path}"[:500], callback)


def _model_files(path: Path, config_file: Path | None = None) -> dict[str, bytes]:
    """The `config.json` of a transformers model: `config_file`, else that of the checkpoint; empty without one."""
    if config_file is None and ForeignKind.of(path) is None:
        content = StoredCheckpoint(path).read(MODEL_CONFIG_FILE)
        return {} if content is None else {MODEL_CONFIG_FILE: content}
    file = config_file or path / MODEL_CONFIG_FILE
    if config_file is None and not file.is_file():
        return {}
    try:
        return {MODEL_CONFIG_FILE: file.read_bytes()}
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None


def _save(
    weights: Weights, versions: Mapping[str, int] | None, source: Path, output: Path, reason: str, callback: str | None
) -> Written:
    """Save weights as a checkpoint with the config and the progress of `source`.

    Args:
        versions: those of the modules, by path; None if unknown.
        callback: name of the callback whose average the weights are; None: they are the trained ones.
    """
    if output.exists():
        raise UserError(f"{output} exists", cure="Choose another --output.")
    manifest = StoredCheckpoint(source).manifest
    state: dict[str, Any] = {"model": dict(weights)}
    if versions is not None:
        state[VERSIONS] = dict(versions)
    if manifest is not None and manifest.progress:
        state["progress"] = dict(manifest.progress)
    metadata = _metadata(source, manifest, reason)
    # Alone: the command is one process, even where the variables of torchrun are set.
    make_sync_checkpointer(group=ALONE).save(state, output, metadata=metadata, overwrite=False)
    size_bytes = sum(file.stat().st_size for file in output.iterdir())
    return Written(output, len(weights), size_bytes, callback)


def _metadata(source: Path, manifest: Manifest | None, reason: str) -> CheckpointMetadata:
    """The metadata of a checkpoint made from `source`, which has no manifest if another program saved it."""
    if manifest is None:
        return CheckpointMetadata(reason=reason)
    try:
        _, text = StoredCheckpoint(source).read_config()
    except CheckpointError:
        text = ""
    return CheckpointMetadata(
        step=manifest.step,
        epoch=manifest.epoch,
        reason=reason,
        config_digest=manifest.config_digest,
        target_packages=manifest.target_packages,
        samples=manifest.samples,
        source=manifest.source,
        files={**_model_files(source), **({CONFIG_FILE: text.encode()} if text else {})},
    )
