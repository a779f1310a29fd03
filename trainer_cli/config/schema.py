"""Every closed section of the config, in the order of the YAML, with what each key means.

The docstring under a field is its documentation everywhere (config/describe.py). Sections are never null as a
whole: a part is off when its key field is null. A rule for one value stands at its field, by `at_least` and
`duration`, for the check here and for editors (config/json_schema.py); checks of several values stand in a section's
`__post_init__`. They raise `ConfigError` with the key path.
"""

# No `from __future__ import annotations` here: OmegaConf reads the annotations as types.
import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Optional

from trainer_cli.checkpoint.naming import why_unfit
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.duration import Duration, Unit


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ParallelStrategy(StrEnum):
    single = "single"


class Removal(StrEnum):
    ephemeral_only = "ephemeral_only"
    all_non_permanent = "all_non_permanent"
    never = "never"


class Mode(StrEnum):
    min = "min"
    max = "max"


class Newer(StrEnum):
    refuse = "refuse"
    trash = "trash"


# `raise` cannot be written as an attribute.
OnSaveError = StrEnum("OnSaveError", {"raise": "raise", "warn": "warn"})


class DigestAlgorithm(StrEnum):
    xxh3_128 = "xxh3_128"
    sha256 = "sha256"


class ConsoleStyle(StrEnum):
    auto = "auto"
    rich = "rich"
    plain = "plain"
    off = "off"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def check_duration(key: str, value: Any, *, units: tuple[Unit, ...] = tuple(Unit)) -> Duration | None:
    """The duration that a key holds, or None where it is null."""
    if value is None:
        return None
    try:
        duration = Duration.parse(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", where=key) from None
    if duration.unit not in units:
        known = ", ".join(unit.name.lower() + "s" for unit in units)
        raise ConfigError(f"{key} is {value!r}, but it is counted in {known}", where=key)
    return duration


def check_at_least(key: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`, NaN or infinity; null passes."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key} is {value}, but it must be a finite number of at least {least:g}", where=key)


def check_folder(key: str, value: str | None, cure: str) -> None:
    """Refuse a folder that is empty (it would be the current one), not local, or left to a shell; null passes."""
    if value is None:
        return
    if not value.strip():
        raise ConfigError(f"{key} is empty", where=key, cure=cure)
    if value.startswith("~"):
        cure = "Write the whole path, or ${oc.env:HOME}."
        raise ConfigError(f"{key} is {value!r}, and no shell is here to read ~", where=key, cure=cure)
    if "://" in value:
        raise ConfigError(f"{key} is {value!r}, but it must be a local folder", where=key)


def at_least(least: float, default: Any = None) -> Any:
    """A field whose number is finite and not below `least`; null passes."""
    return field(default=default, metadata={"at_least": least})


def duration(default: Any = None, *, units: tuple[Unit, ...] = tuple(Unit), null: bool = True) -> Any:
    """A field that holds a duration in one of `units`, or null where that is allowed."""
    return field(default=default, metadata={"units": units, "null": null})


def check_fields(section: Any, path: str = "") -> None:
    """Hold the values of a section against the rules that its fields were declared with."""
    for one in fields(section):
        key, value = f"{path}.{one.name}".lstrip("."), getattr(section, one.name)
        if "at_least" in one.metadata:
            check_at_least(key, value, one.metadata["at_least"])
        if "units" in one.metadata:
            found = check_duration(key, value, units=one.metadata["units"])
            if found is None and not one.metadata["null"]:
                raise ConfigError(f"{key} is null, but it must be a duration", where=key)


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """How long to train, and what happens how often. Counts are absolute from the run's beginning."""

    max_duration: Any = duration("10ep", null=False)
    """The whole training, and what learning-rate schedules are stretched over."""
    hard_stop: Any = duration()
    """Ends the run earlier without changing what schedules see."""
    max_time: Any = duration(units=(Unit.SECOND,))
    """Stops this process after so much time, with a checkpoint and exit code 75."""
    steps_per_epoch: Optional[int] = at_least(1)
    """Optimizer steps of an epoch, for train loaders without a length."""
    grad_accum_steps: int = at_least(1, 1)
    """Batches whose gradients are accumulated into one optimizer step."""
    eval_interval: Any = duration("1ep")
    """How often to evaluate on the validation data; null: only at the end."""
    eval_steps: Optional[int] = at_least(1)
    """Batches of each validation loader to use; null: all."""
    eval_at_start: bool = False
    """Evaluate once before the first step."""
    log_interval: Any = duration(50)
    """How often training metrics are logged."""
    limit_train_batches: Any = None
    """Use only so many batches of each epoch: a number, or a fraction below one."""

    def __post_init__(self) -> None:
        check_fields(self, "loop")
        limit = self.limit_train_batches
        whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
        part = isinstance(limit, float) and 0 < limit <= 1
        if limit is not None and not whole and not part:
            raise ConfigError(
                f"loop.limit_train_batches is {limit!r}, but it is a number of batches (at least 1) or a fraction "
                "(above 0, at most 1.0)",
                where="loop.limit_train_batches",
            )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Number formats of forward and backward, and clipping of gradients."""

    dtype: Dtype = Dtype.fp32
    """fp32, or bf16 or fp16 autocast."""
    loss_scale: Any = "dynamic"
    """What the loss is multiplied by before backward under fp16: dynamic (as large as fits), or a number."""
    clip_norm: Optional[float] = at_least(1e-12)
    """Scale gradients down to this total norm."""
    clip_value: Optional[float] = at_least(1e-12)
    """Cut each gradient element to plus or minus this value."""

    def __post_init__(self) -> None:
        check_fields(self, "precision")
        scale = self.loss_scale
        fixed = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0
        if scale != "dynamic" and not fixed:
            raise ConfigError(
                f"precision.loss_scale is {scale!r}, but it is dynamic or a number above 0",
                where="precision.loss_scale",
            )
        if fixed and self.dtype != Dtype.fp16:
            raise ConfigError(
                f"precision.loss_scale is {scale}, but precision.dtype is {self.dtype}, which needs none",
                where="precision.loss_scale",
                cure="Set precision.dtype=fp16, or leave loss_scale out.",
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                "precision.clip_norm and precision.clip_value are both set",
                where="precision",
                cure="Set one of them to null.",
            )


@dataclass(kw_only=True, slots=True)
class KeepBestConfig:
    """Checkpoints that stay for a metric."""

    metric: Optional[str] = None
    """A metric of an evaluation, such as val/loss; null: none is kept for a metric."""
    mode: Mode = Mode.min
    """Whether small values are best (min) or large ones (max)."""
    count: int = at_least(1, 1)
    """How many of the best to keep; an evaluation that enters them saves."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint.keep_best")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, and what may go."""

    enabled: bool = True
    """false saves nothing, but still loads."""
    save_interval: Any = duration("1ep")
    """How often to save for good; null: never by interval."""
    ephemeral_save_interval: Any = duration()
    """How often to save for safety only; each is removed once a newer save is committed."""
    ephemeral_cooldown: Any = duration(units=(Unit.STEP,))
    """No ephemeral save within so many steps of any save."""
    fixed_steps: list[int] = field(default_factory=list)
    """Steps to save for good, and to keep whatever happens."""
    pre_train_checkpoint: Optional[bool] = None
    """Save before the first step; null: only when nothing was loaded."""
    save_final: bool = True
    """Save when the run ends."""
    save_on_stop: bool = True
    """Save when a signal or loop.max_time stops the run."""
    save_async: Optional[bool] = None
    """Write checkpoints behind the training (not those at its end); null: where more than one CPU is usable."""
    remove: Removal = Removal.ephemeral_only
    """What may be removed: ephemeral_only, all_non_permanent or never."""
    max_checkpoints: Optional[int] = at_least(1)
    """How many of the newest permanent checkpoints to keep; null: all."""
    keep_every: Any = duration()
    """Permanent checkpoints at multiples of this stay, whatever max_checkpoints says."""
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    newer: Newer = Newer.refuse
    """What becomes of newer checkpoints when resume= goes back to an older one: refuse (to go back) or trash (them)."""
    folder: Optional[str] = None
    """Where checkpoints are kept; null: `checkpoints/` in the run directory."""
    name: str = "step{step}"
    """How a checkpoint is called: {step} {epoch} {batch} {samples} {tokens} {run_name} {world_size}."""
    suffix: Optional[str] = None
    """Appended to each name, after a hyphen."""
    digest: DigestAlgorithm = DigestAlgorithm.xxh3_128
    """Digest of every file: xxh3_128 (at memory speed) or sha256."""
    on_save_error: OnSaveError = OnSaveError["raise"]
    """What a failed save does: raise (training ends), or warn (it goes on, up to max_save_errors; not at its end)."""
    max_save_errors: int = at_least(0, 3)
    """Failures in a row that are passed over with a warning before one ends the training."""

    def __post_init__(self) -> None:
        check_fields(self, "checkpoint")
        save = check_duration("checkpoint.save_interval", self.save_interval)
        often = check_duration("checkpoint.ephemeral_save_interval", self.ephemeral_save_interval)
        for step in self.fixed_steps:
            check_at_least("checkpoint.fixed_steps", step, 0)
        check_folder("checkpoint.folder", self.folder, "Write null for `checkpoints/` in the run directory.")
        if (fault := why_unfit(self.name, self.suffix)) is not None:
            raise ConfigError(fault, where="checkpoint.name")
        if save and often and save.unit is often.unit and often.value >= save.value:
            raise ConfigError(
                f"checkpoint.ephemeral_save_interval ({often}) must be shorter than checkpoint.save_interval ({save})",
                where="checkpoint.ephemeral_save_interval",
            )


@dataclass(kw_only=True, slots=True)
class LoadConfig:
    """What to take from a checkpoint given by `ckpt`."""

    states: list[str] = field(default_factory=lambda: ["model"])
    """`[model]` for the weights alone, `[all]` to fork everything."""

    def __post_init__(self) -> None:
        if self.states not in (["model"], ["all"]):
            raise ConfigError(f"load.states is {self.states}, but it must be [model] or [all]", where="load.states")


@dataclass(kw_only=True, slots=True)
class ValidateConfig:
    """What `train validate` does with its results."""

    folder: Optional[str] = None
    """Where results are written; null: `validation/` in the run directory."""

    def __post_init__(self) -> None:
        check_folder("validate.folder", self.folder, "Write null for `validation/` in the run directory.")


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How many processes train the model."""

    strategy: ParallelStrategy = ParallelStrategy.single
    """single: one process on one device."""


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """What is said, and how."""

    level: LogLevel = LogLevel.info
    """Messages from this level on: debug, info, warning or error."""
    console: ConsoleStyle = ConsoleStyle.auto
    """auto (a live display on a terminal, plain lines elsewhere), rich, plain or off."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The whole config of a run."""

    name: Optional[str] = None
    """Name of the run; default: the last part of the experiment's path, else `default`."""
    run_dir: str = "runs/${name}"
    """Where everything of the run is kept."""
    seed: int = at_least(0, 0)
    """Seed of python, numpy, torch and the sample order."""
    deterministic: bool = False
    """Only deterministic kernels; an operation that has none is an error."""
    device: Device = Device.auto
    """auto, cpu, cuda or mps."""
    resume: str = "auto"
    """auto (the newest valid checkpoint, if there is one), never, must, a checkpoint of this run, or its directory."""
    resume_allow: list[str] = field(default_factory=list)
    """Keys, sections and globs of keys that may change on a resume beyond the usual ones."""
    ckpt: Any = None
    """fit: start a new run from this checkpoint. validate: which checkpoints (a glob, or a list of them)."""
    model: Any = None
    """The model: a node with `_target_`."""
    data: Any = None
    """The data: a node with `_target_`; its object has `train` and `val`."""
    optimizer: Any = None
    """The optimizer: a node with `_target_`, or a mapping of such nodes by name, each with the globs of its params."""
    scheduler: Any = None
    """The learning-rate schedule: null, a node with `_target_`, or a mapping of such nodes by name, each stepped."""
    step: Any = None
    """Forward, backward and optimizer steps of a batch: null, or a node with `_target_`, a subclass of TrainStep."""
    param_groups: dict[str, Any] = field(default_factory=dict)
    """Parameter-name globs -> optimizer settings for these parameters."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """name -> node with `_target_`; null switches one off."""
    loggers: dict[str, Any] = field(default_factory=dict)
    """name -> node with `_target_`; null switches one off."""
    trust: list[str] = field(default_factory=list)
    """Top-level packages whose `_target_`s a recovered config may name."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name is not None and not self.name.strip():
            raise ConfigError("name is empty", where="name", cure="Write name=NAME, or leave it out.")
        check_folder("run_dir", self.run_dir, "Write run_dir=NAME, or leave it out.")
        if ".." in (self.name or "").split("/"):
            raise ConfigError(f"name is {self.name!r}, but it names what is below runs/", where="name")
