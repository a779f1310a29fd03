"""Expand a command line with swept values into jobs, each with its overrides and the KEY that names it.

    optimizer.lr=0.1,0.01 model.width=range(8,17,8)    four jobs; the key written last varies fastest
    model.width=8,optimizer.lr=0.1                     the KEY of the first: what is swept, sorted by key

A KEY depends only on the job's swept values, so that the same values always have the same directory. It holds
lower-case letters, digits and `= - _ . ,` only. A KEY that cannot show the exact values ends in a digest of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)

from trainer_cli.config import override_error, parse_override, read_overrides, suggest_list
from trainer_cli.errors import ConfigError, raise_all
from trainer_cli.processes import text_of
from trainer_cli.search_parts import Numbers, Space
from trainer_cli.terminal import format_count

MOST_JOBS = 10_000
"""A sweep with more jobs is refused."""
LONGEST_KEY = 120
_DIGEST = re.compile(r"-[0-9a-f]{12}$")
_RUN_DIR = "run_dir"


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a sweep: its KEY, all of its overrides, and its swept values as text, in the order written."""

    key: str
    overrides: tuple[str, ...]
    swept: Mapping[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same as they are."""


@dataclass(frozen=True, slots=True)
class SweptLine:
    """A command line with several values, or an interval, for some keys."""

    arguments: Sequence[str]
    overrides: Sequence[Override | None]
    """For each argument its override if that is swept, else None."""
    space: Space
    """Swept key, without `+` -> what it may be, in the order written."""

    @property
    def size(self) -> float:
        """The number of combinations; infinite with an interval that is not of whole numbers."""
        return math.prod(map(_count, self.space.values()))

    def has(self, values: Mapping[str, Any]) -> bool:
        """Whether these are values of the swept keys."""
        return values.keys() == self.space.keys() and all(
            of.low <= values[key] <= of.high if isinstance(of, Numbers) else values[key] in of
            for key, of in self.space.items()
        )

    def make_first_job(self) -> Job:
        """The job with the first value of each key."""
        return self.make_job({key: of.low if isinstance(of, Numbers) else of[0] for key, of in self.space.items()})

    def list_grid(self) -> list[Job]:
        """The product of all values, in the order written.

        Raises:
            ConfigError: a key has an interval, or there are too many.
        """
        swept = [override for override in self.overrides if override is not None]
        raise_all(
            [
                override_error(
                    f"{override.input_line}: an interval has no end of values",
                    suggest_list(override.get_key_element(), interval),
                )
                for override in swept
                if isinstance(interval := override.value(), IntervalSweep)
            ]
        )
        # Counted before any job is made: the product may not fit into memory.
        count = int(self.size)
        if count > MOST_JOBS:
            raise override_error(f"this is a sweep of {format_count(count, 'job')}", f"At most {MOST_JOBS:,}.")
        # The last key varies fastest, as in Hydra's own sweeps.
        return [
            self.make_job(dict(zip(self.space, values, strict=True)))
            for values in itertools.product(*self.space.values())
        ]

    def make_job(self, values: Mapping[str, Any]) -> Job:
        """The job with these values of the swept keys; its other arguments are as on the command line."""
        overrides = [
            argument
            if override is None
            else f"{(key := override.get_key_element())}={text_of(values[key.lstrip('+')])}"
            for argument, override in zip(self.arguments, self.overrides, strict=True)
        ]
        return Job(key_of(values), tuple(overrides), {key: text_of(values[key]) for key in self.space}, values)


def read_swept(arguments: Sequence[str], options: Callable[[str], Sequence[str] | None]) -> SweptLine:
    """Parse a command line with swept values.

    `options` returns the option names of a group, or None if there is no such group.

    Raises:
        ConfigError: nothing is swept, or something cannot be; several mistakes together.
    """
    parsed = [_parsed(argument) for argument in arguments]
    swept = [override for override in parsed if override is not None]
    raise_all(list(_mistakes(arguments, swept)))
    # The others are parsed only to report all mistakes before any job starts.
    read_overrides([argument for argument, override in zip(arguments, parsed, strict=True) if override is None])
    if not swept:
        raise override_error(
            "-m, but nothing is swept",
            "Give a key several values, as in optimizer.lr=0.1,0.01 or seed=range(3), or leave -m out.",
        )
    space: dict[str, Sequence[Any] | Numbers] = {}
    mistakes: list[ConfigError] = []
    for override in swept:
        try:
            space[override.get_key_element().lstrip("+")] = _values(override, options)
        except ConfigError as error:
            mistakes.append(error)
    raise_all(mistakes)
    return SweptLine(arguments, parsed, space)


def _count(of: Sequence[Any] | Numbers) -> float:
    """How many values a key may have."""
    if not isinstance(of, Numbers):
        return len(of)
    return of.high - of.low + 1 if isinstance(of.low, int) else math.inf


def key_of(swept: Mapping[str, Any]) -> str:
    """The KEY of swept keys (without `+`) and their values: a safe name of one file, the same on every system."""
    # Sorted: the same job has the same directory, whatever the order on the command line.
    pairs = sorted((name, text_of(value)) for name, value in swept.items())
    slugs = [(re.sub(r"[^A-Za-z0-9_.-]", "-", name), re.sub(r"[^A-Za-z0-9_.-]", "-", text)) for name, text in pairs]
    readable = ",".join("=".join(slug) for slug in slugs).lower()
    exact = ",".join("=".join(pair) for pair in pairs)
    # Upper case gets a digest, since some file systems hold `A` and `a` for one name; and so does what only looks
    # as if it had one.
    if readable == exact and len(readable) <= LONGEST_KEY and not _DIGEST.search(readable):
        return readable
    # Of the exact pairs: different values may look the same once they are written as file names.
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:12]
    return f"{readable[: LONGEST_KEY - 13]}-{digest}"


def _parsed(argument: str) -> Override | None:
    """The override that an argument is, if it gives several values; else None."""
    key = argument.partition("=")[0].lstrip("+")
    if key == "ckpt":
        return None
    override = parse_override(argument)
    return override if override is not None and override.is_sweep_override() else None


def _mistakes(arguments: Sequence[str], swept: Sequence[Override]) -> Iterator[ConfigError]:
    """The mistakes in the arguments of a sweep that do not depend on the values."""
    keys = [argument.lstrip("+~").partition("=")[0] for argument in arguments]
    if _RUN_DIR in keys:
        yield override_error(
            "run_dir= and -m: each job of a sweep has a directory of its own, runs/NAME/sweep/KEY",
            "Leave run_dir= out; name=NAME chooses where.",
        )
    for argument, key in zip(arguments, keys, strict=True):
        if key.endswith("+") and _parsed(argument.replace("+=", "=", 1)) is not None:
            hint = f"Sweep whole lists: {key[:-1]}=[a],[a,b]."
            yield override_error(f"{argument}: what is added to a list is not swept", hint)
    for override in swept:
        key = override.get_key_element().lstrip("+~")
        if override.is_delete():
            yield override_error(f"{override.input_line}: a removal takes no values to sweep")
        elif key.startswith("sweep."):
            yield override_error(f"{key} is swept", "It says which runs there are: give it one value.")
        elif keys.count(key) > 1:
            hint = "Give all its values at once."
            yield override_error(f"{key} is swept, and given again", hint)


def _values(override: Override, options: Callable[[str], Sequence[str] | None]) -> Sequence[Any] | Numbers:
    """All values of a swept override, plain, or its interval; duplicates refused."""
    line, sweep = override.input_line, override.value()
    if isinstance(sweep, IntervalSweep):
        return _interval(sweep, line or "")
    if isinstance(sweep, Glob):
        values = _globbed(override, sweep, options(override.key_or_group))
    elif isinstance(sweep, RangeSweep):
        values = _range(sweep, line or "")
    else:
        assert isinstance(sweep, ChoiceSweep)
        # Without quotes: the KEY and the override write them anew where they are needed.
        values = [_plain(value) for value in sweep.list]
    if not values:
        raise override_error(f"{line} gives no value at all")
    texts = [text_of(value) for value in values]
    repeated = sorted({text for text in texts if texts.count(text) > 1})
    if repeated:
        raise override_error(f"{line} gives {', '.join(repeated)} twice", "Name each value once.")
    if getattr(sweep, "shuffle", False):
        # Seeded by the override, so that the same command gives the same order.
        random.Random(line).shuffle(values)
    return values


def _plain(value: Any) -> Any:
    """A parsed value without the quotes in it."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {_plain(key): _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _globbed(override: Override, glob: Glob, option_names: Sequence[str] | None) -> list[Any]:
    """The options of a group that fit; `*` does not cross a `/`."""
    line = override.input_line
    if option_names is None:
        raise override_error(
            f"{line}: glob() chooses among the options of a group, and {override.key_or_group} is none",
            "List the values: a,b,c.",
        )

    def matches_any(name: str, patterns: Sequence[Any]) -> bool:
        return any(
            fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in map(str, patterns)
        )

    matches = [name for name in option_names if matches_any(name, glob.include) and not matches_any(name, glob.exclude)]
    if not matches:
        raise override_error(f"{line} fits nothing", f"Available: {', '.join(option_names) or 'none'}.")
    return matches


def _range(sweep: RangeSweep, line: str) -> list[Any]:
    """The numbers of a range, counted as written: three steps of 0.1 are 0.3."""
    assert sweep.start is not None
    assert sweep.stop is not None
    ends = (sweep.start, sweep.stop, sweep.step)
    if not all(math.isfinite(end) for end in ends) or sweep.step == 0:
        raise override_error(f"{line} has no end", "range(START,STOP,STEP) leaves out STOP.")
    # In decimal: the float sum 0.1 + 0.2 would give 0.30000000000000004.
    start, stop, step = (Decimal(repr(end)) for end in ends)
    count = max(0, math.ceil((stop - start) / step))
    if count > MOST_JOBS:
        raise override_error(f"{line} gives {format_count(count, 'value')}", f"At most {MOST_JOBS:,}.")
    are_whole = all(isinstance(end, int) for end in ends)
    numbers = [start + index * step for index in range(count)]
    return [int(number) if are_whole else float(number) for number in numbers]


def _interval(sweep: IntervalSweep, line: str) -> Numbers:
    """An interval, which Hydra reads as one of floats: whole numbers are written `int(interval(1,8))`."""
    low, high, is_log = sweep.start, sweep.end, "log" in sweep.tags
    assert low is not None
    assert high is not None
    if not (math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not is_log)):
        above = " above 0" if is_log else ""
        raise override_error(f"{line} is no interval", f"Its ends are numbers{above}, the first one less.")
    if unknown := sweep.tags - {"log"}:
        raise override_error(f"{line}: there is no tag {min(unknown)} for intervals", "Write tag(log,interval(1,9)).")
    return Numbers(low, high, is_log)
