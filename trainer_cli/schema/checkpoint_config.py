"""The `checkpoint` section of the config: when to save, what may be removed, and how files are written."""

# No `from __future__ import annotations` here: it would turn the type of each field into a string, and
# values/, keys/config_keys.py and config/check.py read `Field.type` for sections (dataclasses) and
# choices (enumerations).
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any

from trainer_cli.errors import ConfigError
from trainer_cli.layout import Naming
from trainer_cli.loads import check_leave_out
from trainer_cli.metric_names import Mode, choose_mode
from trainer_cli.schema.field_checks import check_folder, check_length
from trainer_cli.steps import Duration, Unit
from trainer_cli.values import at_least, check_at_least, check_duration, check_fields, checked, duration, needs

_EPHEMERAL = "checkpoint.ephemeral_save_interval"
_AUTO = "auto"
"""Of `ephemeral_save_interval`: as often as `budget` allows."""


class Removal(StrEnum):
    """Which checkpoints `checkpoint.remove` lets go."""

    ephemeral_only = "ephemeral_only"
    all_without_rule = "all_without_rule"
    all_non_permanent = "all_without_rule"  # Its name in older configs.
    never = "never"


class Newer(StrEnum):
    """What is done with checkpoints that are newer than the one that `resume` names."""

    refuse = "refuse"
    trash = "trash"


# It has the functional form: `raise` is a keyword, and cannot be an attribute.
OnSaveError = StrEnum("OnSaveError", {"raise": "raise", "warn": "warn"})


class DigestAlgorithm(StrEnum):
    """By what the files of a checkpoint are verified."""

    xxh3_128 = "xxh3_128"
    sha256 = "sha256"


class CheckpointFormat(StrEnum):
    """How the files of a checkpoint hold its state."""

    tensors = "tensors"
    torch_file = "torch_file"
    archive = "archive"
    huggingface = "huggingface"

    @property
    def one_process(self) -> bool:
        """Whether it saves the state of one process only."""
        return self in (CheckpointFormat.torch_file, CheckpointFormat.huggingface)

    @property
    def has_tensor_files(self) -> bool:
        """Whether tensors are in files of safetensors, whose headers can be read alone."""
        return self in (CheckpointFormat.tensors, CheckpointFormat.huggingface)

    @property
    def holds_every_dtype(self) -> bool:
        """Whether it also holds tensors of types that safetensors lacks, such as complex128."""
        return self is CheckpointFormat.torch_file

    @classmethod
    def names_where(cls, suits: Callable[["CheckpointFormat"], bool]) -> str:
        """The formats that suit, for the advice in errors."""
        return " or ".join(format for format in cls if suits(format))

    @property
    def uncounted_bytes(self) -> str | None:
        """What makes its files larger than the announced size; None if that is exact before compression."""
        return "torch.save adds a little" if self is CheckpointFormat.torch_file else None


class Compression(StrEnum):
    """How the files of a checkpoint are compressed."""

    none = "none"
    gz = "gz"
    bz2 = "bz2"
    xz = "xz"
    lzma = "lzma"


def _check_steps(key: str, steps: list[int]) -> None:
    for step in steps:
        check_at_least(key, step, 0)


def _check_budget(key: str, budget: float) -> None:
    if not 0 < budget <= 1:
        raise ConfigError(f"{key} is {budget}, but it must be a share of the time, above 0 and at most 1", location=key)


def _check_ages(key: str, counts: dict[str, int]) -> None:
    for length, count in counts.items():
        check_duration(f"{key}.{length}", length, units=(Unit.SECOND,))
        check_at_least(f"{key}.{length}", count, 1)


def _check_pattern(key: str, pattern: str) -> None:
    if (fault := Naming(pattern).why_unfit()) is not None:
        raise ConfigError(fault, location=key)


def _check_suffix(key: str, suffix: str | None) -> None:
    if (fault := Naming(suffix=suffix).why_unfit()) is not None:
        raise ConfigError(fault, location=key)


@dataclass(kw_only=True, slots=True)
class KeepBestConfig:
    """Checkpoints that are kept for a metric."""

    metric: str | None = None
    """A metric of an evaluation, such as val/loss, or a training metric, such as train/loss: the mean over the steps
    since the previous log; null: none is kept for a metric."""
    mode: Mode = needs(field(default=Mode.auto), ("metric", True))
    """Whether small values are best (min) or large ones (max); auto: as usual for the metric's name: max for accuracy,
    f1 or bleu, min for loss, error or perplexity."""
    count: int = needs(at_least(1, 1), ("metric", True))
    """Number of best checkpoints to keep; an evaluation, or a log of the training metric, that is among them is
    saved."""

    def __post_init__(self) -> None:
        if not self.metric and self.mode == Mode.min:
            # The default of older configs, which hold all defaults.
            self.mode = Mode.auto
        check_fields(self, "checkpoint.keep_best")
        if self.metric:
            self.mode = choose_mode(self.metric, self.mode, "checkpoint.keep_best.mode")


@dataclass(kw_only=True, slots=True)
class CopyToConfig:
    """A second folder, into which some checkpoints are copied."""

    folder: str | None = checked(partial(check_folder, instead="Write null for no copies.", urls=True))
    """A folder or a URL, {run_name} filled in, in which no other run has saved; null: nothing is copied."""
    every: int = needs(at_least(1, 1), ("folder", True))
    """Copy each checkpoint whose number is a multiple of this, and the last one of each fit."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint.copy_to")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save checkpoints, and which ones to remove."""

    enabled: bool = True
    """false saves nothing, but still loads."""
    save_interval: Any = duration("1ep")
    """Interval of regular checkpoints; null: none."""
    ephemeral_save_interval: Any = duration(words=(_AUTO,))
    """Interval of ephemeral checkpoints, each removed when a newer checkpoint is committed; null: none. auto: after the
    previous save is written, as often as `budget` allows."""
    budget: float = needs(checked(_check_budget, 0.02), ("ephemeral_save_interval", _AUTO))
    """Largest share of the time for which automatic saves may block training."""
    ephemeral_cooldown: Any = needs(duration(units=(Unit.STEP,)), ("ephemeral_save_interval", True))
    """Steps after any save during which there is no ephemeral save."""
    fixed_steps: list[int] = checked(_check_steps, [])
    """Steps that are saved as regular checkpoints, which are never removed."""
    pre_train_checkpoint: bool | None = None
    """Save before the first step; null: only when nothing was loaded."""
    save_final: bool = True
    """Save when the run ends; at loop.hard_stop an ephemeral checkpoint."""
    save_on_stop: bool = True
    """Save when a signal or loop.max_time stops the run."""
    save_async: bool | None = None
    """Write checkpoints in the background (not those at the end); null: where more than one CPU is usable."""
    remove: Removal = Removal.ephemeral_only
    """Which checkpoints may be removed: ephemeral_only, all_without_rule (also regular ones that no rule names), or
    never."""
    max_checkpoints: int | None = at_least(1)
    """Number of newest regular checkpoints to keep; null: all. With `remove=all_without_rule` those of `save_interval`
    stay beside these."""
    keep_every: Any = duration()
    """Regular checkpoints at multiples of this are kept, also beyond max_checkpoints."""
    keep_by_age: dict[str, int] = needs(
        checked(_check_ages, {}), ("max_checkpoints", True), ("remove", Removal.all_without_rule)
    )
    """Regular checkpoints that are kept by age, too: {1h: 24, 1d: 7} keeps the newest of each of the last 24 hours
    and 7 days of training in which there is one."""
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    newer: Newer = Newer.refuse
    """What happens to newer checkpoints when resume= names an older one: refuse (to resume) or trash (them)."""
    folder: str | None = checked(
        partial(check_folder, instead="Write null for `checkpoints/` in the run directory.", urls=True)
    )
    """Where checkpoints are kept, {run_name} filled in: a folder in which no other run has saved, or a URL such as
    s3://bucket/run; null: `checkpoints/` in the run directory."""
    copy_to: CopyToConfig = field(default_factory=CopyToConfig)
    latest_link: bool = False
    """Keep a symbolic link `latest` to the newest checkpoint in a local folder, for other programs."""
    link_frozen: bool = True
    """Write parameters that are not trained, of 1 MiB and more, once: while their bytes stay as they are, their file in
    each checkpoint is a hard link to that in the one before."""
    leave_out: list[str] = checked(check_leave_out, [])
    """States to leave out of checkpoints: optimizer, schedulers, callbacks, callbacks.NAME, rng, and globs of these.
    The run cannot be resumed exactly."""
    name: str = checked(_check_pattern, "step{step}")
    """Pattern of the names of checkpoints: {step} {epoch} {batch} {samples} {tokens} {run_name} {world_size}."""
    suffix: str | None = checked(_check_suffix)
    """Appended to each name, after a hyphen."""
    format: CheckpointFormat = CheckpointFormat.tensors
    """The files of a checkpoint: tensors (safetensors), torch_file, archive (tar), or huggingface (its model for
    from_pretrained)."""
    compression: Compression = needs(field(default=Compression.none), ("format", CheckpointFormat.archive))
    """Of an archive: none, gz, bz2, xz or lzma. Compressing takes many times as long as writing."""
    digest: DigestAlgorithm = DigestAlgorithm.xxh3_128
    """Digest of every file: xxh3_128 (at memory speed) or sha256."""
    on_save_error: OnSaveError = OnSaveError["raise"]
    """Effect of a failed save: raise (training ends), or warn (it continues, up to max_save_errors; not at its end).
    The same for metrics that cannot be written."""
    max_save_errors: int = needs(at_least(0, 3), ("on_save_error", OnSaveError.warn))
    """Number of consecutive failures that only give a warning; one more ends the run."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        # Durations of different units are compared once the length of an epoch is known (policy/rules.py).
        save = check_duration("checkpoint.save_interval", self.save_interval)
        often = (
            None
            if self.is_automatic
            else check_duration("checkpoint.ephemeral_save_interval", self.ephemeral_save_interval)
        )
        if self.is_automatic and self.remove is Removal.never:
            raise ConfigError(
                "checkpoint.ephemeral_save_interval is auto, and checkpoint.remove=never would keep all of them",
                location="checkpoint.ephemeral_save_interval",
                hint="Set checkpoint.remove=ephemeral_only.",
            )
        # It is checked here: the link is made only after hours of training.
        if self.latest_link and "://" in (self.folder or ""):
            raise ConfigError(
                f"checkpoint.latest_link is true, and {self.folder} can hold no link",
                location="checkpoint.latest_link",
                hint="Set it to false.",
            )
        if (fault := Naming(self.name, self.suffix).why_unfit()) is not None:
            raise ConfigError(fault, location="checkpoint.name")
        if save and often and save.unit is often.unit and often.value >= save.value:
            raise self.too_rare(often, save)

    @property
    def is_automatic(self) -> bool:
        """Whether ephemeral checkpoints are saved as often as `budget` allows."""
        return self.ephemeral_save_interval == _AUTO  # type: ignore[no-any-return]

    @property
    def tolerates_errors(self) -> bool:
        """Whether a save that fails only gives a warning."""
        return self.on_save_error is OnSaveError["warn"]

    @staticmethod
    def too_rare(ephemeral: Duration, regular: Duration) -> ConfigError:
        """The error for ephemeral saves that are not more frequent than the regular ones."""
        return ConfigError(
            f"{_EPHEMERAL} ({ephemeral}) must be shorter than checkpoint.save_interval ({regular})",
            location=_EPHEMERAL,
            hint="Make it shorter, or set checkpoint.save_interval=null.",
        )

    def overridden_by(self, node: Mapping[str, Any] | None) -> "CheckpointConfig":
        """These settings with those in the config node of a subclass of CheckpointerCallback."""
        names = {field.name for field in fields(self)}
        return replace(self, **{key: value for key, value in (node or {}).items() if key in names})

    def describe_unlimited(self) -> str | None:
        """A warning if `max_checkpoints` does not limit what `save_interval` saves; else None."""
        if self.max_checkpoints is None or self.remove is Removal.ephemeral_only or not self.save_interval:
            return None
        return (
            f"checkpoint.max_checkpoints={self.max_checkpoints} removes none of checkpoint.save_interval, as "
            f"checkpoint.remove={self.remove} keeps all of these: checkpoint.remove=ephemeral_only keeps the newest "
            "alone"
        )


def filled_folder(key: str, folder: str | None, run_name: str | None) -> str | None:
    """A folder of checkpoints with `{run_name}` replaced by the name of the run; null stays.

    Raises:
        ConfigError: it has another variable, which only `checkpoint.name` may have, or a name is too long.
    """
    if folder is None:
        return None
    # No other variable: the folder must be the same for all checkpoints of a run.
    for variable in re.findall(r"\{(\w+)[^}]*\}", folder):
        if variable != "run_name":
            raise ConfigError(
                f"{key} is {folder!r}, but of variables it may have {{run_name}} alone",
                location=key,
                hint=f"Put {{{variable}}} into checkpoint.name.",
            )
    filled = folder.replace("{run_name}", run_name or "default")
    check_length(key, filled)
    return filled
