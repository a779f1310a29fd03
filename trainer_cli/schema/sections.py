"""Every closed section of the config, in the order of the YAML, with what each key means.

The docstring under a field is its documentation everywhere (keys/config_keys.py). Sections are never null as a whole: a
part is off when its key field is null. A rule for one value is declared with its field (values/fields.py); rules
for several values are in a section's `__post_init__`, and raise `ConfigError` with the key path. The `checkpoint`
section is in schema/checkpoint_config.py.
"""

# No `from __future__ import annotations` here: it would turn the type of each field into a string, and
# values/, keys/config_keys.py and config/check.py read `Field.type` for sections (dataclasses) and
# choices (enumerations).
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any

from trainer_cli.errors import Code, ConfigError
from trainer_cli.layout import Naming
from trainer_cli.loads import LoadOptions, check_mapping, check_states
from trainer_cli.schema.checkpoint_config import CheckpointConfig, filled_folder
from trainer_cli.schema.field_checks import check_folder, check_patterns
from trainer_cli.steps import Duration, Unit
from trainer_cli.values import at_least, check_duration, check_fields, checked, duration, needs, unfit_value

# It has the functional form: names with a colon cannot be attributes. A machine has at most 16 GPUs.
Device = StrEnum(
    "Device",
    "auto cpu cuda mps cuda:0 cuda:1 cuda:2 cuda:3 cuda:4 cuda:5 cuda:6 cuda:7 cuda:8 cuda:9 cuda:10 cuda:11 cuda:12 "
    "cuda:13 cuda:14 cuda:15",
)


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ModelCall(StrEnum):
    batch = "batch"
    args = "args"
    kwargs = "kwargs"


class SourceOf(StrEnum):
    """Whose source a command imports the classes of a run from."""

    run = "run"
    project = "project"


class SchedulerInterval(StrEnum):
    """After what a scheduler makes its step."""

    step = "step"
    epoch = "epoch"
    evaluation = "evaluation"
    log = "log"
    """Each time that training metrics are logged; for a schedule that reads one of them."""


# It has the functional form: names with a hyphen cannot be attributes.
CompileMode = StrEnum(
    "CompileMode",
    {
        "default": "default",
        "reduce-overhead": "reduce-overhead",
        "max-autotune": "max-autotune",
        "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
    },
)


class ParallelStrategy(StrEnum):
    single = "single"
    ddp = "ddp"
    fsdp = "fsdp"


class ConsoleStyle(StrEnum):
    """How the progress is shown in a terminal."""

    auto = "auto"
    rich = "rich"
    plain = "plain"
    off = "off"


class LogLevel(StrEnum):
    """The least level of messages that is shown."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_microbatch(key: str, value: Any) -> None:
    is_count = _is_number(value) and value >= 1 and value % 1 == 0
    if value not in (None, "auto") and not is_count:
        raise unfit_value(key, value, "auto, a number of samples, or null", code=Code.wrong_value)


def _check_limit(key: str, value: Any) -> None:
    """Refuse a limit of batches that is neither a count nor a fraction."""
    is_limit = _is_number(value) and (0 < value <= 1 if isinstance(value, float) else value >= 1)
    if value is not None and not is_limit:
        allowed = "a number of batches (at least 1) or a fraction (above 0, at most 1.0)"
        raise unfit_value(key, value, allowed, code=Code.wrong_value)


def _check_loss_scale(key: str, value: Any) -> None:
    """Refuse a loss scale that is neither `dynamic` nor a finite number above 0."""
    # An infinite scale would make every gradient infinite.
    is_scale = _is_number(value) and math.isfinite(value) and value > 0
    if value != "dynamic" and not is_scale:
        raise ConfigError(f"{key} is {value!r}, but it must be dynamic or a number above 0", location=key)


def _check_freeze(key: str, patterns: Any) -> None:
    """Refuse what is not a list of patterns, or a mapping of patterns to durations."""
    if patterns is None:
        return
    if not isinstance(patterns, list | tuple | Mapping) or not all(isinstance(pattern, str) for pattern in patterns):
        hint = f"Write {key}=[{patterns}]." if isinstance(patterns, str) else ""
        raise unfit_value(key, patterns, "a list of patterns, or a mapping of patterns to durations", hint)
    check_patterns(key, [*patterns])
    if isinstance(patterns, Mapping):
        # A time is no such duration: after it, a resumed run would be at another step.
        units = tuple(unit for unit in Unit if unit is not Unit.SECOND)
        for pattern, value in patterns.items():
            check_duration(f"{key}.{pattern}", value, units=units)


def _check_writer(key: str, writer: Any) -> None:
    if writer is not None and not (isinstance(writer, Mapping) and "_target_" in writer):
        raise unfit_value(key, writer, "a node with `_target_`, or null")


def _check_eval_loaders(key: str, loaders: dict[str, Any]) -> None:
    """Refuse unknown or wrong settings of a validation loader."""
    allowed = "interval (a duration, or null), steps (a number, or null) and hook (a name)"
    for name, settings in loaders.items():
        where = f"{key}.{name}"
        if not isinstance(settings, Mapping) or not set(settings) <= {"interval", "steps", "hook"}:
            raise ConfigError(f"{where} is {settings!r}, but it may have {allowed}", location=where)
        check_duration(f"{where}.interval", settings.get("interval"))
        steps, hook = settings.get("steps"), settings.get("hook", "validate")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise unfit_value(f"{where}.steps", steps, "a number of batches", code=Code.wrong_value)
        if not (isinstance(hook, str) and hook.isidentifier()):
            raise unfit_value(f"{where}.hook", hook, "a name", code=Code.wrong_value)


def _check_name(key: str, value: str | None) -> None:
    """Refuse a name that is not a folder below runs/, that `train top` would not show, or that reads as a flag."""
    if value is None:
        return
    if not value.strip():
        raise ConfigError(f"{key} is empty", location=key, hint=f"Write {key}=NAME, or leave it out.")
    folders = value.split("/")
    if ".." in folders:
        fault = "it names what is below runs/"
    elif "" in folders:
        fault = "it may not begin or end with a slash, or have two in a row"
    elif any(folder.startswith(".") for folder in folders):
        fault = "a folder that begins with a dot is not shown as a run"
    elif value.startswith("-"):
        fault = "what begins with a hyphen is read as a flag by other programs"
    elif any(folder != folder.strip() for folder in folders):
        fault = "it may not begin or end with a space"
    elif not value.isprintable():
        fault = "it has a character that cannot be printed"
    else:
        return
    raise ConfigError(f"{key} is {value!r}, but {fault}", location=key, hint="Write NAME or GROUP/NAME.")


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """Length of the run, and intervals of evaluations and logs. Counts are absolute, from the start of the run."""

    max_duration: Any = duration("10ep", units=tuple(unit for unit in Unit if unit is not Unit.RUN), null=False)
    """Length of the whole run, and of learning-rate schedules."""
    min_duration: Any = duration()
    """Earliest end of the run by a callback such as EarlyStopping; earlier requests take effect then."""
    hard_stop: Any = duration()
    """Ends a part of the run here, without changing what schedules see. A later fit continues as if there had been no
    stop: records, evaluations and regular checkpoints are those of the whole run."""
    max_time: Any = duration(units=(Unit.SECOND,))
    """Time after which this process stops, with a checkpoint and exit code 75."""
    steps_per_epoch: int | None = at_least(1)
    """Optimizer steps of an epoch, for train loaders without a length."""
    grad_accum_steps: int = at_least(1, 1)
    """Batches whose gradients are accumulated into one optimizer step."""
    microbatch: Any = checked(_check_microbatch)
    """Largest number of samples to compute at once; the gradient is that of the whole batch. auto: whole batches,
    halved when memory runs out."""
    eval_interval: Any = duration("1ep")
    """How often to evaluate on the validation data; null: only at the end."""
    eval_steps: int | None = at_least(1)
    """Batches of each validation loader to use; null: all."""
    eval_at_start: bool = False
    """Evaluate once before the first step."""
    eval_sanity_steps: int | None = at_least(1)
    """Batches of each loader (at most eval_steps) to evaluate before the first step, as a check whose results are
    discarded; null: one batch if a metric is needed."""
    eval_loaders: dict[str, Any] = checked(_check_eval_loaders, {})
    """Validation loader -> its own `interval` and `steps` in place of eval_interval and eval_steps, and the base name
    of its hooks, `hook`."""
    log_interval: Any = duration(50)
    """How often training metrics are logged."""
    limit_train_batches: Any = checked(_check_limit)
    """Batches of each epoch to use: a number, or a fraction below one."""

    def __post_init__(self) -> None:
        check_fields(self, "loop")
        if self.microbatch == "auto" and self.grad_accum_steps != 1:
            raise ConfigError(
                "loop.microbatch is auto, and loop.grad_accum_steps is above 1",
                location="loop.microbatch",
                hint="Set loop.grad_accum_steps=1 and a larger data.batch_size: it is split as memory needs.",
            )


@dataclass(kw_only=True, slots=True)
class PrecisionConfig:
    """Number formats of forward and backward, and clipping of gradients."""

    dtype: Dtype = Dtype.fp32
    """fp32, or bf16 or fp16 autocast."""
    loss_scale: Any = checked(_check_loss_scale, "dynamic")
    """Factor of the loss before backward under fp16: dynamic (as large as fits), or a number."""
    min_loss_scale: float | None = at_least(1e-30)
    """A dynamic scale does not fall below this."""
    max_loss_scale: float | None = at_least(1e-30)
    """A dynamic scale does not rise above this."""
    init_scale: float | None = at_least(1e-30)
    """Initial value of a dynamic scale; null: 65536, or the bound that is nearest to it."""
    growth_interval: int | None = at_least(1)
    """Steps without an overflow after which a dynamic scale doubles; null: 2000."""
    clip_norm: float | None = at_least(1e-12)
    """Scale gradients down to this total norm."""
    clip_value: float | None = at_least(1e-12)
    """Cut each gradient element to plus or minus this value."""

    def __post_init__(self) -> None:
        check_fields(self, "precision")
        if self.loss_scale != "dynamic" and self.dtype != Dtype.fp16:
            raise ConfigError(
                f"precision.loss_scale is {self.loss_scale}, but precision.dtype is {self.dtype}, which needs none",
                location="precision.loss_scale",
                hint="Set precision.dtype=fp16, or leave loss_scale out.",
            )
        # These have no effect without a dynamic scale, and a value that has none is an error.
        for key in ("min_loss_scale", "max_loss_scale", "init_scale", "growth_interval"):
            if getattr(self, key) is not None and (self.loss_scale != "dynamic" or self.dtype != Dtype.fp16):
                raise ConfigError(
                    f"precision.{key} applies to a dynamic loss scale, and there is none",
                    location=f"precision.{key}",
                    hint="Set precision.dtype=fp16 and precision.loss_scale=dynamic.",
                )
        if None not in (low := self.min_loss_scale, high := self.max_loss_scale) and low > high:  # type: ignore[operator]
            raise ConfigError(
                f"precision.min_loss_scale ({low:g}) is above precision.max_loss_scale ({high:g})",
                location="precision.min_loss_scale",
            )
        if (initial := self.init_scale) is not None and not (low or initial) <= initial <= (high or initial):
            raise ConfigError(
                f"precision.init_scale ({initial:g}) is not between min_loss_scale and max_loss_scale",
                location="precision.init_scale",
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                "precision.clip_norm and precision.clip_value are both set",
                location="precision.clip_norm",
                hint="Set one of them to null.",
            )


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """torch.compile of the model's forward."""

    enabled: bool = False
    """true: compile at the first batch."""
    mode: CompileMode = needs(field(default=CompileMode["default"]), ("enabled", True))
    """default, reduce-overhead (CUDA graphs), max-autotune or max-autotune-no-cudagraphs."""
    dynamic: bool | None = needs(field(default=None), ("enabled", True))
    """true: one compilation for all shapes; false: one for each shape; null: one for all shapes after a second one was
    seen."""
    fullgraph: bool = needs(field(default=False), ("enabled", True))
    """true: what cannot be compiled is an error; false: it runs as plain Python."""
    backend: str = needs(field(default="inductor"), ("enabled", True))
    """Name of the compiler, as listed by torch.compiler.list_backends()."""

    def __post_init__(self) -> None:
        check_fields(self, "compile")


@dataclass(kw_only=True, slots=True)
class LoadConfig:
    """What to load from the checkpoint that `ckpt` names, and under which names."""

    states: list[str] = checked(check_states, ["model"])
    """fit: `[model]` for the weights alone, `[all]` to fork everything, or several of model, optimizer, schedulers,
    progress, callbacks, callbacks.NAME and rng."""
    strict: bool = True
    """false: load what both model and checkpoint have, and list the rest."""
    ignore_keys: list[str] = checked(check_patterns, [])
    """Parameter-name globs, or `re:` and a regular expression: these keep the values of the new model, such as a head
    of another size."""
    key_mapping: dict[str, str] = checked(check_mapping, {})
    """Glob of names in the checkpoint -> name in the model, such as `{model.*: *}`; `*` is what it matched."""
    average: bool = True
    """Load the average of EMA or SWA if evaluations of the checkpoint saw it (fit: with states [model]); false: the
    trained weights."""
    chunk_size: int | None = at_least(64 * 1024)
    """Bytes of each request in a download from an object store or a web server, of which 8 are made at a time; null:
    16777216 (16 MiB). Whatever is loaded, also at a resume."""
    progress: bool = True
    """false: show neither a progress bar nor the lines that report a download."""

    def __post_init__(self) -> None:
        check_fields(self, "load")

    def options(self, *, allow_pickle: bool = False) -> LoadOptions:
        """What to load from the checkpoint."""
        # The other keys say how to download.
        names = {option.name for option in fields(LoadOptions)}
        values = {key: value for key, value in asdict(self).items() if key in names}
        return LoadOptions(**values, allow_pickle=allow_pickle)


@dataclass(kw_only=True, slots=True)
class ValidateConfig:
    """What `train validate` does with its results."""

    folder: str | None = checked(partial(check_folder, instead="Write null for `validation/` in the run directory."))
    """Where results are written; null: `validation/` in the run directory."""
    watch: bool = False
    """true: evaluate each checkpoint as it is committed, until the run ends."""

    def __post_init__(self) -> None:
        check_fields(self, "validate")


@dataclass(kw_only=True, slots=True)
class PredictConfig:
    """What `train predict` writes."""

    folder: str | None = checked(partial(check_folder, instead="Write null for `predictions/` in the run directory."))
    """Where predictions are written, in a folder for each checkpoint; null: `predictions/` in the run directory."""
    loader: str | None = None
    """Whose samples: a validation loader, or `predict`; null: the part `predict` of the data, else all validation
    loaders."""
    outputs: list[str] = checked(check_patterns, [])
    """Globs of the names of outputs to write; empty: all that have a value for each sample."""
    writer: Any = checked(_check_writer)
    """What writes them: null (JSON lines), or a node with `_target_`."""

    def __post_init__(self) -> None:
        check_fields(self, "predict")


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """How many processes train the model."""

    strategy: ParallelStrategy = ParallelStrategy.single
    """single: one process on one device; ddp: every process holds the model, and gradients are averaged; fsdp: every
    process holds a part of each parameter, gradient and optimizer state."""
    processes_per_node: int | None = at_least(1)
    """Processes that `train fit` starts on this machine; null: this one, or those that torchrun or srun has started."""
    timeout: Any = duration("30m", units=(Unit.SECOND,), null=False)
    """How long processes wait for a missing one before all stop, with an error that names it; longer than a process
    needs for a step, an evaluation, or reading a checkpoint."""
    find_unused_parameters: bool = needs(field(default=False), ("strategy", ParallelStrategy.ddp))
    """ddp: allow parameters without a gradient in some steps, which costs time."""
    shard_size: int | None = needs(at_least(1), ("strategy", ParallelStrategy.fsdp))
    """fsdp: processes that share one copy of the parameters (hybrid sharding); null: all."""
    tensor_size: int = at_least(1, 1)
    """fsdp: number of consecutive processes that train on the same samples, and divide layers as the model's
    `tensor_parallel_plan` says (tensor parallelism)."""
    wrap: list[str] = needs(
        field(default_factory=list), ("strategy", ParallelStrategy.fsdp), ("activation_checkpointing", True)
    )
    """Class names of the modules that are sharded, or recomputed, as a unit; empty: those in a ModuleList, unless
    wrap_min_parameters is given."""
    wrap_min_parameters: int | None = needs(
        at_least(1), ("strategy", ParallelStrategy.fsdp), ("activation_checkpointing", True)
    )
    """Modules with at least this many parameters, without those of such modules inside them, are sharded as a unit,
    too."""
    mixed_precision: bool = False
    """fsdp: gather and compute parameters in the number format of `precision`; gradients are reduced in 32 bits."""
    cpu_offload: bool = needs(field(default=False), ("strategy", ParallelStrategy.fsdp))
    """fsdp: keep parameters, gradients and optimizer states on the host between steps."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block, and recompute the block in backward."""

    def __post_init__(self) -> None:
        check_fields(self, "parallel")
        if self.mixed_precision and self.strategy != ParallelStrategy.fsdp:
            raise ConfigError(
                f"parallel.mixed_precision is of fsdp, and parallel.strategy is {self.strategy}",
                location="parallel.mixed_precision",
                hint="Set parallel.strategy=fsdp, or parallel.mixed_precision=false; precision=bf16 works with both.",
            )

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return float(Duration.parse(self.timeout).value)


@dataclass(kw_only=True, slots=True)
class RestartsConfig:
    """Restart a run after a failure, from its newest checkpoint. Each attempt is a separate process."""

    max: int = at_least(0, 0)
    """Largest number of consecutive restarts without a newer checkpoint; 0: none."""
    backoff: Any = needs(duration("10s", units=(Unit.SECOND,)), ("max", True))
    """The pause before a restart; doubled for each failure without a newer checkpoint, up to ten minutes; null:
    none."""

    def __post_init__(self) -> None:
        check_fields(self, "restarts")


class SearchMethod(StrEnum):
    """What chooses the runs of a sweep."""

    grid = "grid"
    random = "random"
    optuna = "optuna"


class PruneRule(StrEnum):
    """By what rule trials of a sweep are paused."""

    none = "none"
    asha = "asha"
    median = "median"


def _check_rungs(key: str, rungs: list[str]) -> None:
    """Refuse what are not lengths of one unit, each longer than the one before; a number is one of steps."""
    durations = [Duration.read(key, int(rung) if rung.isdecimal() else rung) for rung in rungs]
    pairs = pairwise(durations)
    if any(one.unit is not other.unit or one.value >= other.value for one, other in pairs):
        raise unfit_value(key, rungs, "a list of durations of one unit, each longer than the one before")


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Which runs `train fit -m` makes, and how far each of them trains."""

    search: SearchMethod = SearchMethod.grid
    """grid (each combination of the values), random (draws from values and intervals) or optuna (the extra `optuna`:
    draws that follow from the results of the earlier ones)."""
    trials: int | None = needs(at_least(1), ("search", SearchMethod.random), ("search", SearchMethod.optuna))
    """Number of runs that are drawn; the same command with a larger one adds to them."""
    seed: int = needs(at_least(0, 0), ("search", SearchMethod.random), ("search", SearchMethod.optuna))
    """Seed of the draws, not of the runs."""
    metric: str | None = None
    """The metric that decides which run is best, such as val/accuracy; null: that of the runs."""
    prune: PruneRule = PruneRule.none
    """Which runs are paused at the rungs, by their best value so far: none, asha (all but the best 1/eta) or median
    (all but the better half, and three)."""
    eta: int = needs(at_least(2, 3), ("prune", PruneRule.asha))
    """One in so many runs goes on at each rung."""
    rungs: list[str] = needs(
        checked(_check_rungs, ["0.1dur", "0.3dur"]), ("prune", PruneRule.asha), ("prune", PruneRule.median)
    )
    """Lengths at which runs are compared; with an evaluation at or before the first."""

    def __post_init__(self) -> None:
        check_fields(self, "sweep")


class NotifyEvent(StrEnum):
    """What is told of a run."""

    end = "end"
    failure = "failure"
    killed = "killed"
    stall = "stall"
    best = "best"


def _check_events(key: str, events: list[str]) -> None:
    if unknown := set(events) - set(NotifyEvent):
        raise unfit_value(key, min(unknown), f"a list of {', '.join(NotifyEvent)}")


@dataclass(kw_only=True, slots=True)
class NotifyConfig:
    """Who is told what happens to a run, and when."""

    command: str | None = None
    """A command for the shell, which gets the message on stdin, and facts as JSON in TRAIN_FACTS; null: none."""
    url: str | None = None
    """URLs that Apprise sends to (the extra `notify`), such as ${oc.env:NOTIFY_URL}; null: none."""
    events: list[NotifyEvent] = needs(
        checked(_check_events, ["end", "failure", "killed", "stall"]), ("command", True), ("url", True)
    )
    """What is told: end, failure, killed (at the next start), stall, best (at most one in ten minutes)."""
    stall: Any = duration("10m", units=(Unit.SECOND,))
    """Time without a completed batch after which the stacks of all threads and ranks are written to the log; null:
    never."""

    def __post_init__(self) -> None:
        check_fields(self, "notify")


@dataclass(kw_only=True, slots=True)
class LoggingConfig:
    """What is printed, and how."""

    level: LogLevel = LogLevel.info
    """Messages from this level on: debug, info, warning or error."""
    rank_files: bool = False
    """With several processes: write the messages of each but the first to `train.rankN.log` in the run directory."""
    console: ConsoleStyle = ConsoleStyle.auto
    """auto (a live display on a terminal, plain lines elsewhere), rich, plain or off."""

    def __post_init__(self) -> None:
        check_fields(self, "logging")


SYSTEM = "system"
"""The callback that records the use of the machine."""


ANEW = "anew"
RESUME_WORDS = ("auto", "never", "must", ANEW)
"""What `resume` may be besides a run or a checkpoint."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """The whole config of a run."""

    name: str | None = checked(_check_name)
    """Name of the run; default: the last part of the experiment's path, else `default`."""
    run_dir: str = checked(partial(check_folder, instead="Write run_dir=NAME, or leave it out."), "runs/${name}")
    """Directory of all files of the run."""
    notes: str | None = None
    """What the run is for, in your words; `train serve` shows it."""
    tags: list[str] = field(default_factory=list)
    """Labels that `train serve` shows and searches."""
    report: bool = True
    """Write `report.html` into the run directory at the end."""
    seed: int = at_least(0, 0)
    """Seed of python, numpy, torch and the sample order."""
    deterministic: bool = False
    """Only deterministic kernels; an operation that has none is an error."""
    device: Device = Device["auto"]
    """auto, cpu, cuda, mps, or one GPU by its number among those that the process sees, such as cuda:1."""
    resume: str = "auto"
    """auto (the newest valid checkpoint, if there is one), never, must, anew (move the run to `.trash` beside it, and
    begin at step 0), a checkpoint of this run (its path, RUN@best or RUN@step500), or its directory."""
    resume_allow: list[str] = field(default_factory=list)
    """Keys, sections and globs of keys that may change on a resume beyond the usual ones. data: also samples that are
    not those of the checkpoint. source: `train validate` may take the model from another project, in which its file
    differs."""
    source: SourceOf = SourceOf.run
    """Of commands that open a run, where the project was edited since: run, the source that the run keeps; project, the
    project as it is now. Of sweeps and restarts: run, what was submitted; project, what each start finds."""
    ckpt: Any = None
    """fit: start a new run from this checkpoint. validate: which checkpoints (a glob, or a list of them)."""
    model: Any = None
    """The model: a node with `_target_`."""
    model_call: ModelCall = ModelCall.batch
    """How the model is called: batch, model(batch); args, model(*batch); kwargs, model(**batch)."""
    data: Any = None
    """The data: a node with `_target_`; its object has `train` and `val`."""
    optimizer: Any = None
    """The optimizer: a node with `_target_`, or a mapping of such nodes by name, each with the globs of its params."""
    scheduler: Any = None
    """The learning-rate schedule: null, a node with `_target_`, or a mapping of such nodes by name; `interval` in a
    node (step, epoch or evaluation) says when it steps, `metric` what ReduceLROnPlateau is given."""
    step: Any = None
    """Forward, backward and optimizer steps of a batch: null, or a node with `_target_`, a subclass of TrainStep."""
    param_groups: dict[str, Any] = field(default_factory=dict)
    """Parameter-name globs, or `re:` and a regular expression -> optimizer settings for these parameters; `lr_scale`
    multiplies the optimizer's learning rate."""
    freeze: Any = checked(_check_freeze)
    """Parameter-name globs, or `re:` and a regular expression: these are not trained. A mapping of them to durations,
    such as `{backbone.*: 3ep}`: not trained until these have passed; null: the whole run. Running statistics of
    matching norm layers are frozen, too."""
    eval_modules: list[str] = checked(check_patterns, [])
    """Module-name globs, or `re:` and a regular expression: these modules, with those inside them, stay in evaluation
    mode while the model is trained, so that their dropout is off and the statistics of their norms do not change."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    sparsity: Any = None
    """Which weights are held at zero: null, or a node with `_target_`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    callbacks: dict[str, Any] = field(default_factory=lambda: {SYSTEM: {"_target_": "trainer_cli.SystemMonitor"}})
    """name -> node with `_target_`; null switches one off. `system` is there by default."""
    loggers: dict[str, Any] = field(default_factory=dict)
    """name -> node with `_target_`; null switches one off."""
    trust: list[str] = field(default_factory=list)
    """Top-level packages whose components a recovered config may name. source: also the source that a run keeps which
    another user has made."""
    vars: dict[str, Any] = field(default_factory=dict)
    """Values of your own, for `${vars.NAME}` in other keys; nothing else reads them."""

    def __post_init__(self) -> None:
        check_fields(self)
        # They are checked here, because their own sections do not know the name of the run.
        for key, section in (("checkpoint", self.checkpoint), ("checkpoint.copy_to", self.checkpoint.copy_to)):
            section.folder = filled_folder(f"{key}.folder", section.folder, self.name)
        pattern, suffix = self.checkpoint.name, self.checkpoint.suffix
        if "{run_name" in pattern and (fault := Naming(pattern, suffix).why_unfit(self.name or "default")) is not None:
            raise ConfigError(fault, location="checkpoint.name")
