"""Names of checkpoints, and hidden names of folders that are being written or removed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from string import Formatter
from typing import NamedTuple

from trainer_cli.errors import UserError

MANIFEST_FILE = "manifest.json"
PINNED_FILE = "pinned"
CONFIG_FILE = "config.yaml"
MODEL_CONFIG_FILE = "config.json"
"""What from_pretrained of transformers needs beside the weights."""
REMOVED_PREFIX = ".removed."
"""Prefix of the manifest's name after the removal of its folder has begun."""
REPLACED_PREFIX = ".replaced."
"""Prefix of the name of a checkpoint that another one is about to replace, where names cannot be swapped."""
SUPERSEDED_PREFIX = ".superseded."
"""Prefix of a replaced manifest: readers that opened it before hold a lock on it."""

DEFAULT_PATTERN = "step{step}"
VARIABLES = ("step", "epoch", "batch", "samples", "tokens", "run_name", "world_size")
"""Variables that a pattern of names may have."""
RANK_VARIABLES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    "node_rank": ("GROUP_RANK", "SLURM_NODEID"),
}
"""Variables that a path to load may have, and the environment variables that give their values: torchrun's, Slurm's."""

_FIT = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,199}")
_STEP = re.compile(r"step(0|[1-9][0-9]{0,17})")
_STEP_WITHIN = re.compile(r"(?<![A-Za-z])step[-_]?([0-9]{1,18})(?![0-9])")
_DIGITS = re.compile(r"[0-9]+")
_UNFIT = r"/\\\x00-\x1f\x7f\ud800-\udfff"
_PLAIN = re.compile(rf"[^.{_UNFIT}][^{_UNFIT}]{{0,199}}")
_BACKUP = re.compile(r"(?:[.](?:bak|backup|old|orig|copy|save|saved|tmp|temp|part|partial)[0-9]*|~)$", re.IGNORECASE)
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HIDDEN = re.compile(r"\.(tmp|trash|aside)\.(.+)\.([A-Za-z0-9_-]{1,64})\.([0-9]+)(?:-([0-9]+))?")


class Hidden(StrEnum):
    """Why a folder has a hidden name."""

    tmp = "tmp"
    """Being written."""
    trash = "trash"
    """Being removed."""
    quarantined = "aside"
    """Partial or damaged. Never removed by this program."""


class HiddenName(NamedTuple):
    """The parts of a hidden name."""

    kind: Hidden
    name: str
    run_id: str
    attempt: int
    serial: int = 0

    def __str__(self) -> str:
        text = f".{self.kind}.{self.name}.{self.run_id}.{self.attempt}"
        return f"{text}-{self.serial}" if self.serial else text


class Naming(NamedTuple):
    """The pattern and suffix that name the checkpoints of a training."""

    pattern: str = DEFAULT_PATTERN
    suffix: str | None = None

    def name(self, counts: Mapping[str, object]) -> str:
        """The name at these counts. `counts` has a value for each of `VARIABLES` that the pattern names.

        Raises:
            ValueError: the name has characters that a shell, Hydra or a file system treats specially.
        """
        name = self.pattern.format(**counts) + ("" if self.suffix is None else f"-{self.suffix}")
        if not _FIT.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot be the name of a checkpoint: use letters, digits and any of _ - + . (not first)"
            )
        return name


def why_unfit(pattern: str, suffix: str | None) -> str | None:
    """What is wrong with a pattern and suffix of names, or None."""
    try:
        variables = [variable for _, variable, _, _ in Formatter().parse(pattern) if variable is not None]
        if unknown := [variable for variable in variables if variable not in VARIABLES]:
            raise KeyError(unknown[0])
        sample = Naming(pattern, suffix).name(dict.fromkeys(VARIABLES, 1))
    except KeyError as error:
        wrong = str(error.args[0])
        known = ", ".join(f"{{{name}}}" for name in VARIABLES)
        return (
            f"checkpoint.name is {pattern!r}, but there is no {{{wrong}}}; there are {known}. "
            "Metrics are no part of a name: `train ckpt ls` lists them"
        )
    except ValueError as error:
        return f"checkpoint.name is {pattern!r} with suffix {suffix!r}: {error}"
    if is_backup(sample):
        return f"checkpoint.name is {pattern!r} with suffix {suffix!r}: so end copies, which are no checkpoints"
    if len(sample) > 150:
        return f"checkpoint.name is {pattern!r}, which is too long"
    if not {"step", "samples", "tokens"}.intersection(variables) and not {"epoch", "batch"}.issubset(variables):
        return f"checkpoint.name is {pattern!r}, which may name two checkpoints alike; put {{step}} into it"
    return None


def parse_step(name: str) -> int | None:
    """The step in a name of the default pattern, or None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_within(name: str) -> int | None:
    """The step in a name of any pattern with `step` and a number: `step0010`, `digits-step_10-ema`. None without."""
    match = _STEP_WITHIN.search(name)
    return int(match[1]) if match else None


def numbers_within(name: str) -> list[int]:
    """The numbers in a name, by which `ep9` sorts before `ep10` and `ep010` beside it."""
    return [int(digits) for digits in _DIGITS.findall(name)]


def with_ranks(path: str, environment: Mapping[str, str]) -> str:
    """A path to load with `{rank}`, `{local_rank}` and `{node_rank}` replaced; 0 where the environment says nothing.

    Raises:
        UserError: the environment variable is not a number.
    """
    for variable, sources in RANK_VARIABLES.items():
        field = f"{{{variable}}}"
        if field not in path:
            continue
        source = next((one for one in sources if environment.get(one)), None)
        value = "0" if source is None else environment[source]
        if not (value.isascii() and value.isdecimal()):
            raise UserError(f"{source} is {value!r}, which is no number", where=f"{field} in {path}")
        path = path.replace(field, str(int(value)))
    return path


def parse_hidden(name: str) -> HiddenName | None:
    """The parts of a hidden name, or None for one that this program does not give."""
    match = _HIDDEN.fullmatch(name)
    if match is None:
        return None
    kind, plain, run_id, attempt, serial = match.groups()
    return HiddenName(Hidden(kind), plain, run_id, int(attempt), int(serial or 0))


def removed_marker(run_id: str) -> str:
    """The manifest's name after the removal of its folder has begun; `sweep` finishes an interrupted removal."""
    return f"{REMOVED_PREFIX}{run_id}"


def is_plain(name: str) -> bool:
    """True for a name without separator, leading dot or control character."""
    return _PLAIN.fullmatch(name) is not None


def is_backup(name: str) -> bool:
    """Whether a folder is called as a copy that a user made of a checkpoint: `step10.bak`, `step-100.backup`, `step3~`.

    It is no checkpoint of a run: nothing resumes from it, and no rule removes it.
    """
    return _BACKUP.search(name) is not None


def is_run_id(text: str) -> bool:
    """Whether a run id can be part of a folder's name."""
    return _RUN_ID.fullmatch(text) is not None
