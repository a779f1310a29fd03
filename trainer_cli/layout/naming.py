"""Names of the files and folders of a run, of checkpoints by step, and of classes in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import trainer_cli

MANIFEST_FILE = "manifest.json"
PINNED_FILE = "pinned"
CONFIG_FILE = "config.yaml"
MODEL_CONFIG_FILE = "config.json"
"""What from_pretrained of transformers needs beside the weights."""
STEP_MODULES = "train_step"
"""Name in a model, and in a checkpoint, of the modules and parameters that a training step holds."""

SWEEP_FOLDER = "sweep"
"""Folder in which each job of a sweep has its run directory, named by what is swept."""

VARIABLES = ("step", "epoch", "batch", "samples", "tokens", "run_name", "world_size")
"""Variables that a pattern of names may have."""
COPIES_CACHE = ".copies"
"""Folder in a run's own folder of checkpoints: the local copies of what `checkpoint.copy_to` has in an object store."""
# First no dot, which hides a folder, and no - or +, which commands take for an option.
_VALID_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
# At most 18 digits: the number fits into 64 bits.
_STEP = re.compile(r"step(0|[1-9][0-9]{0,17})")
_STEP_IN_NAME = re.compile(r"(?<![A-Za-z])step[-_]?([0-9]{1,18})(?![0-9])")
_DIGITS = re.compile(r"[0-9]+")
_REFUSED_CHARACTERS = r"/\\\x00-\x1f\x7f\ud800-\udfff"
_PLAIN_NAME = re.compile(rf"[^.{_REFUSED_CHARACTERS}][^{_REFUSED_CHARACTERS}]{{0,199}}")
# File systems allow 255 bytes, and a hidden name adds a run id of up to 64, an attempt and a serial.
_MAX_CHARACTERS = 150
_EPOCH_LENGTHS = (7, 100, 10**18)
"""Steps of an epoch for which patterns are tried."""
_MAX_STEPS = 10**15
_POWERS = [base**power for base in (2, 10) for power in range(4, 51) if base**power < _MAX_STEPS]
_STEPS = sorted({*range(24), *(power + more for power in _POWERS for more in (-1, 0, 1))})
"""Steps at which patterns are tried."""
# Without dots, which separate the parts of a hidden name.
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Naming(NamedTuple):
    """The pattern and suffix that name the checkpoints of a training."""

    pattern: str = "step{step}"
    suffix: str | None = None

    def name(self, counts: Mapping[str, object]) -> str:
        """The name at these counts. `counts` has a value for each of `VARIABLES` that the pattern names.

        Raises:
            ValueError: the name has characters that a shell, Hydra or a file system treats specially.
        """
        name = self.pattern.format(**counts) + ("" if self.suffix is None else f"-{self.suffix}")
        if not _VALID_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a checkpoint: use letters, digits and any of _ - + . "
                "(the last three not first)"
            )
        return name

    def why_unfit(self, run_name: str = "run") -> str | None:
        """What is wrong with the names for any run of this name, or None.

        The names of a run must be legal and all different, and sort by step where numbers in names are compared by
        value (`ls -v`). They are tried at steps up to 10**15, with three lengths of an epoch.
        """
        return _why_unfit(self, run_name)


# It is cached: every section that is made checks its pattern at hundreds of steps.
@lru_cache(maxsize=64)
def _why_unfit(naming: Naming, run_name: str) -> str | None:
    """See `Naming.why_unfit`."""
    pattern, suffix = naming
    setting = f"checkpoint.name is {pattern!r}" + ("" if suffix is None else f" with suffix {suffix!r}")
    try:
        variables = [variable for _, variable, _, _ in Formatter().parse(pattern) if variable is not None]
        if unknown := [variable for variable in variables if variable not in VARIABLES]:
            raise KeyError(unknown[0])
        counts_steps = {"step", "samples", "tokens"}.intersection(variables) or {"epoch", "batch"}.issubset(variables)
        if not counts_steps:
            return f"{setting}, which may give two checkpoints the same name; put {{step}} into it"
        for steps_per_epoch in _EPOCH_LENGTHS:
            if fault := _why_names_unfit(naming, run_name, steps_per_epoch):
                return f"{setting}, {fault}"
    except KeyError as error:
        unknown_name = str(error.args[0])
        names = ", ".join(f"{{{name}}}" for name in VARIABLES)
        return (
            f"{setting}, but there is no {{{unknown_name}}}; there are {names}. "
            "Metrics are not part of a name: `train ckpt ls` lists them"
        )
    # From str.format, for a format code that does not fit or a number too large for it.
    except (ValueError, OverflowError) as error:
        return f"{setting}: {error}"
    return None


def _why_names_unfit(naming: Naming, run_name: str, steps_per_epoch: int) -> str | None:
    """What is wrong with the names of the steps that are tried, in a run with epochs of this length; or None.

    Raises:
        ValueError: a name has characters that are not allowed.
    """
    before: tuple[int, str] | None = None
    # Neighbours of powers: where numbers gain a digit, a name without padding may sort before an earlier one.
    for step in _STEPS:
        epoch, batch = divmod(step, steps_per_epoch)
        counts = {"step": step, "epoch": epoch, "batch": batch, "samples": 32 * step, "tokens": 1024 * step}
        name = naming.name({**counts, "run_name": run_name, "world_size": 8})
        if len(name) > _MAX_CHARACTERS:
            return "which is too long"
        if before is not None:
            earlier_step, earlier_name = before
            if name == earlier_name:
                return f"which names steps {earlier_step:,} and {step:,} both {name}"
            if _sort_key(name) <= _sort_key(earlier_name):
                return f"which sorts step {step:,} ({name}) before step {earlier_step:,} ({earlier_name})"
        before = step, name
    return None


def _sort_key(name: str) -> list[tuple[int, str]]:
    """A key by which names sort as `ls -v` sorts them: numbers by value."""
    # Pairs, since an int cannot be compared with a str.
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"([0-9]+)", name)]


def parse_step(name: str) -> int | None:
    """The step in a name of the default pattern, or None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_within(name: str) -> int | None:
    """The step in a name of any pattern with `step` and a number: `step0010`, `digits-step_10-ema`. None without."""
    match = _STEP_IN_NAME.search(name)
    return int(match[1]) if match else None


def numbers_within(name: str) -> list[int]:
    """The numbers in a name, by which `ep9` sorts before `ep10` and `ep010` beside it."""
    return [int(digits) for digits in _DIGITS.findall(name)]


def is_plain(name: str) -> bool:
    """True for a name without separator, leading dot or control character."""
    return _PLAIN_NAME.fullmatch(name) is not None


def is_run_id(text: str) -> bool:
    """Whether a run id can be part of a folder's name."""
    return _RUN_ID.fullmatch(text) is not None


def class_name(value: object) -> str:
    """The name under which a checkpoint records the class of an object, and messages name it.

    A public class of this package is recorded under its public name, which no move of its file changes.
    """
    kind = type(value)
    # The module of a public class may change between versions; its public name does not.
    is_public = kind.__module__.startswith("trainer_cli.") and kind.__qualname__ in trainer_cli.__all__
    return f"{'trainer_cli' if is_public else kind.__module__}.{kind.__qualname__}"


def in_runs(named: str) -> str | None:
    """`runs/NAME` for the name of a run in that folder, also with a selector such as `@best`; `RUN@best` or
    `RUN@latest` for a file of weights that is not there, as other trainers have it in a run; None for other names.
    """
    path, missing = Path("runs", named), Path(named)
    # The last is the current folder, or the root.
    folders = [parent for parent in missing.parents[:-1] if Path(parent, CONFIG_FILE).is_file()]
    if folders and missing.suffix and not missing.exists():
        return f"{folders[-1]}@{'best' if 'best' in missing.name else 'latest'}"
    run = str(path).partition("@")[0]
    exists = path != Path(named) and Path(run, CONFIG_FILE).is_file()
    return str(path) if exists else None
