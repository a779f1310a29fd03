"""What is compared: experiments, runs, or overrides, composed to two configs."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer_cli.config import Composed, SearchPath, compose, diff, from_yaml, given_value, project_root
from trainer_cli.errors import UserError
from trainer_cli.layout import in_runs
from trainer_cli.origin import KeptSource, keep_project, other_source, read_source_of
from trainer_cli.patterns import did_you_mean
from trainer_cli.running import refuse_no_optimizer
from trainer_cli.runs import RunDir

_EXPERIMENT = "experiment"
_OWN_KEYS = ("seed", "run_dir", "resume")
"""Keys that the comparison sets."""
_NAMES = ("name", "run_dir", "seed")
"""Keys that change no training, or that are the same in each pair."""
_OF_BATCHES = ("data", "loop.grad_accum_steps")
"""Keys on which it depends which samples a step has."""


@dataclass(frozen=True, slots=True)
class Side:
    """A or B: what the user wrote, and its config."""

    letter: str
    text: str
    composed: Composed
    kept: Path | None = None
    """The kept source that its runs train with; None: the project as it is."""

    @property
    def digest(self) -> str:
        """The same for configs that train the same, apart from the seed."""
        values = {key: value for key, value in self.composed.raw.items() if key not in _NAMES}
        return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:12]

    @property
    def length(self) -> str:
        """How long its runs are."""
        loop = self.composed.config.loop
        return str(loop.max_duration if loop.hard_stop is None else loop.hard_stop)

    @property
    def processes(self) -> int:
        """The number of processes of each of its runs."""
        return self.composed.config.parallel.processes_per_node or 1

    def keep_submitted(self, folder: Path) -> Side:
        """The same side, whose runs train with the project as it is now, whatever is edited meanwhile."""
        kept = self.kept or keep_project(folder, self.composed.project_root, self.composed.config_dirs)
        return replace(self, kept=kept)

    def find_changes(self, source: Mapping[str, str]) -> Mapping[str, str]:
        """The files of a run's source that differ from what this side trains with."""
        kept = [] if self.kept is None else [KeptSource.files_in(self.kept)]
        # What git ignores is not kept: it is imported from the project.
        return other_source(source, *kept, self.composed.project_root)

    def freeze(self, folder: Path, seed: int) -> tuple[str, str]:
        """The name of its run with a seed, and the frozen config of that run in a folder."""
        key = f"{self.letter}-seed{seed}"
        return key, self.composed.with_values({"seed": seed, "run_dir": str(folder)}).freeze(key)


def read_sides(
    first: str, second: str, common: Sequence[str], *, budget: str | int | None, config_dir: Path | None
) -> tuple[Side, Side]:
    """Compose A and B. Nothing is written.

    Args:
        common: overrides of both.
        budget: the length of each training; None: as configured.

    Raises:
        UserError: a config is wrong, or cannot be compared.
    """
    read = [_Words.read(letter, text, config_dir) for letter, text in (("a", first), ("b", second))]
    has_common = given_value(common, _EXPERIMENT) is not None
    for words in read:
        if has_common and words.base is not None:
            raise UserError(
                f"{words.letter.upper()} is {words.base}, and an experiment of both is given, too",
                cure="Leave out one of them.",
            )
    bases = [words.base for words in read if words.base is not None]
    if not bases and not has_common:
        raise UserError(
            "no experiment is chosen: A and B are overrides alone",
            cure=f"Name it at the end: train compare {shlex.quote(first)} {shlex.quote(second)} -- digits_mlp.",
        )
    # Overrides alone change what the other side is.
    a, b = (words.compose(next(iter(bases), None), common, budget, config_dir) for words in read)
    return a, b


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of one side: what it begins with, and its overrides."""

    letter: str
    text: str
    base: str | Path | None
    """An experiment by its name, a run by its path; None: the side has overrides alone."""
    overrides: Sequence[str]

    @classmethod
    def read(cls, letter: str, text: str, config_dir: Path | None) -> _Words:
        """Read `digits_mlp`, `runs/digits`, `optimizer.lr=0.1 model.dropout=0`, or a name with overrides behind it.

        Raises:
            UserError: there is no such experiment or run.
        """
        text = text.removeprefix(f"{letter.upper()}=").strip()
        if RunDir(text).exists_as_run():
            return cls(letter, text, Path(text), ())
        words = shlex.split(text)
        # Runs of sweeps have an equals sign in their names, too.
        names = [word for word in words if not ("=" in word or word.startswith("~")) or RunDir(word).exists_as_run()]
        overrides = [word for word in words if word not in names]
        if len(names) > 1 or not words:
            cure = "Write one experiment or run, and overrides, each side in quotes: 'digits_mlp optimizer.lr=0.1'."
            raise UserError(f"{letter.upper()} is {text!r}", cure=cure)
        if not names:
            return cls(letter, text, None, overrides)
        experiments = SearchPath.of(config_dir, "config", None).options(_EXPERIMENT)
        paths = (names[0], in_runs(names[0]) or "")
        run = next((Path(path) for path in paths if RunDir(path).exists_as_run()), None)
        if names[0] not in experiments and run is None:
            raise UserError(
                f"{letter.upper()} is {names[0]!r}, which is no experiment and no run",
                cure=did_you_mean(names[0], experiments).strip() or f"Experiments: {', '.join(experiments) or 'none'}.",
            )
        return cls(letter, text, names[0] if names[0] in experiments else run, overrides)

    def compose(
        self, other: str | Path | None, common: Sequence[str], budget: str | int | None, config_dir: Path | None
    ) -> Side:
        """The side, on the base of the other one if it has none itself."""
        base, overrides = self.base if self.base is not None else other, [*common, *self.overrides]
        for key in _OWN_KEYS:
            if given_value(overrides, key) is not None:
                raise UserError(
                    f"{key}= and train compare, which trains seeds 1 to --seeds in a folder of its own",
                    cure=f"Leave {key}= out.",
                )
        source = None
        if isinstance(base, Path):
            run = RunDir(base)
            source = read_source_of(run, overrides, project_root(config_dir, Path.cwd()))
            stored = run.config_file.read_text("utf-8")
            # Its classes may no longer be in the project. The config is signed with the source, unless it was changed
            # since, as by a longer duration.
            trusted = source is not None and source.is_own and source.config == stored
            composed = from_yaml(run.config_file, overrides, config_dir=config_dir, trusted=trusted)
        else:
            experiment = [f"{_EXPERIMENT}={base}"] if base is not None else []
            composed = compose([*experiment, *overrides], config_dir=config_dir)
        composed.refuse_time("a comparison could not go on")
        # Two runs must not save in one folder, and trials are not copied.
        values: dict[str, Any] = {"checkpoint.folder": None, "checkpoint.copy_to.folder": None, "resume": "auto"}
        values |= {} if budget is None else {"loop.max_duration": budget}
        if isinstance(base, Path) and given_value(overrides, "loop.hard_stop") is None:
            # A sweep has paused the run there.
            values["loop.hard_stop"] = None
        composed = composed.with_values(values)
        refuse_no_optimizer(composed)
        return Side(self.letter, self.text, composed, None if source is None else source.folder)


def find_differences(a: Side, b: Side) -> Mapping[str, tuple[Any, Any]]:
    """Config key -> its values in A and in B, where they differ."""
    changes = diff(a.composed.raw, b.composed.raw)
    return {change.key: (change.old, change.new) for change in changes if change.key not in _NAMES}


def has_same_batches(differences: Mapping[str, object]) -> bool:
    """Whether the steps of both sides have the same samples, for one seed."""
    return not any(f"{key}.".startswith(f"{part}.") for key in differences for part in _OF_BATCHES)
