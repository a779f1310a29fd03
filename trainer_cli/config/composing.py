"""Compose a checked config from files and overrides.

overrides ──► overrides.parse_overrides ──► check.find_wrong_overrides ──► file_merge.merge (files.ConfigFiles)
          ──► override_values.apply ──► check.validate ──► components.check_components ──► TrainConfig

Each stage continues after a mistake as far as it can, so that independent mistakes are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.components import SECTIONS, Trust, check_components, import_from, refuse_shadows
from trainer_cli.config import override_values
from trainer_cli.config.changes import Change, changed_env_values, hparams, line_of_digests, vars_in
from trainer_cli.config.check import find_wrong_choice, find_wrong_overrides, restore_texts, switches_off, validate
from trainer_cli.config.contradictions import check_processes, find_contradictions
from trainer_cli.config.file_merge import merge
from trainer_cli.config.files import ConfigFiles, find_choices, find_overruled, split_package
from trainer_cli.config.hydra_errors import translate_error
from trainer_cli.config.overrides import CommandLine, correct_choice, line_of, override_error, parse_overrides
from trainer_cli.config.resolvers import register_resolvers, substitute_now
from trainer_cli.config.search_path import (
    SearchPath,
    addon_folders,
    label,
    list_names,
    own_config_dirs,
    project_root,
    shipped_folder,
)
from trainer_cli.config.tree import COMMAND_LINE, DEFAULT, ConfigTree, Node, ValueOrigin, fill_defaults
from trainer_cli.config.yaml import read_file, read_text
from trainer_cli.errors import Code, ConfigError, TrainError, UserError, raise_all, show_values_in
from trainer_cli.gc_pause import gc_paused
from trainer_cli.keys import OF_ONE_COMMAND, KeyPath
from trainer_cli.patterns import did_you_mean
from trainer_cli.schema import ANEW, TrainConfig


class Composed(NamedTuple):
    """A checked config with its sources, and the targets that it may name."""

    config: TrainConfig
    overrides: list[str]
    project_root: Path
    config_dirs: list[Path]
    tree: ConfigTree
    trust: Trust
    time_dependent_keys: Sequence[str] = ()
    """Keys whose values contain the time of the command."""

    @property
    def raw(self) -> dict[str, Any]:
        """The plain values; interpolations stay as they are written."""
        values: dict[str, Any] = self.tree.root.plain()
        return values

    def where(self, key: str) -> str:
        """`file:line`, `command line` or `default` for a dotted key."""
        return self.tree.source(tuple(key.split(".")))

    def _where_with_overrides(self, key: str) -> str:
        """`where`; for a section that several overrides set, with these overrides."""
        node, source = self.tree.root.at(tuple(key.split("."))), self.where(key)
        origins = [] if node is None else [leaf.origin for path, leaf in node.walk() if path]
        overrides = dict.fromkeys(origin.words for origin in origins if origin.source == COMMAND_LINE)
        return f"{COMMAND_LINE}: {' '.join(overrides)}" if overrides and source == COMMAND_LINE else source

    def naming_again(self, text: str) -> str:
        """A text that advises to repeat the command: repeated with `resume=anew`, it would move the run away again."""
        if any(override.lstrip("+") == f"resume={ANEW}" for override in self.overrides):
            change = f"without resume={ANEW}"
        elif self.config.resume == ANEW:
            change = "with resume=auto"
        else:
            return text
        return re.sub(r"same command(?! with)( again)?", f"same command {change}", text)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Context manager that adds the source of its key to a UserError raised inside, and corrects what an error says
        of the same command."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, TrainError):
                key = error.where if isinstance(error, UserError) and error.source is None else None
                if key and self.tree.root.at((key.partition(".")[0],)):
                    error.source = self._where_with_overrides(key)
                error.cure = error.cure and self.naming_again(error.cure)
            if notes := getattr(error, "__notes__", None):
                notes[:] = map(self.naming_again, notes)
            raise

    @classmethod
    def thaw(
        cls,
        file: Path,
        overrides: Sequence[str],
        *,
        config_dir: Path | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Composed:
        """Read a config that `freeze` returned, and no other file.

        Args:
            overrides: those it was composed with.
            values: see `with_values`, which would check the config once more.
        """
        text, cwd = file.read_text("utf-8"), Path.cwd()
        root = project_root(config_dir, cwd)
        register_resolvers(own_config_dirs(config_dir, cwd), root)
        reading = read_text(text, label(file.resolve(), cwd), written=True)
        tree = ConfigTree(fill_defaults(reading.tree))
        _put(tree.root, values or {})
        config, mistakes = validate(tree)
        raise_all([*reading.mistakes, *mistakes])
        return cls(config, list(overrides), root, [], tree, Trust())

    def freeze(self, below: str) -> str:
        """The config as YAML for `thaw`, with the subdirectory `below` of its run directory as run directory."""
        values = self.raw
        return OmegaConf.to_yaml({**values, "run_dir": f"{values['run_dir'].rstrip('/')}/{below}"})

    def to_yaml(self) -> str:
        """The config as it is written to disk: unresolved, so that no secret of the environment is written."""
        return OmegaConf.to_yaml(self.raw)

    def to_stored(self, run_id: str) -> str:
        """The YAML that a run stores: with digests of values that resolvers return, salted by the run's id."""
        return self.to_yaml() + line_of_digests(self.raw, run_id)

    def changed_env_values(self, stored: str, run_id: str) -> list[Change]:
        """Values of resolvers that differ from their digests in a run's stored YAML, though their text is the same."""
        return changed_env_values(stored, self.raw, run_id)

    @property
    def hparams(self) -> dict[str, bool | int | float | str]:
        """The hyperparameters for loggers: dotted key -> value that differs from its default."""
        return hparams(self.raw)

    def with_values(self, values: Mapping[str, Any]) -> Composed:
        """This config with other values, by dotted key; interpolations of these keys get the new values too.

        Raises:
            ConfigError: the config is wrong with these values.
        """
        if not values:
            return self
        tree = replace(self.tree, root=self.tree.root.copy())
        _put(tree.root, values)
        config, mistakes = validate(tree)
        raise_all(mistakes)
        return self._replace(config=config, tree=tree)

    def refuse_time(self, why: str) -> None:
        """Refuse a value that contains the time of the command, with what would not work."""
        for key in self.time_dependent_keys:
            raise ConfigError(
                f"{key} holds ${{now:…}}, different at each start, so {why}",
                source=self.where(key),
                hint="Leave the time out: each run has a directory of its own.",
            )

    def refuse_shipped_default(self) -> None:
        """Refuse model and data that the shipped config alone chose.

        Raises:
            UserError: no experiment is chosen; it lists the project's, else the shipped ones and how to make a project.
        """
        shipped = shipped_folder("configs")
        choices = self.tree.choices.items()
        if shipped is None or any(path[0] == "experiment" and choice.label for path, choice in choices):
            return
        folder, shipped = Path.cwd().resolve(), shipped.resolve()
        shipped_dirs = [shipped, *addon_folders()]
        project = SearchPath([path for path in self.config_dirs if path not in shipped_dirs], folder, folder, "")
        if any(self._is_chosen_by_user(section, project.label(shipped)) for section in ("model", "data")):
            return
        if experiments := list(project.options("experiment")):
            raise UserError(
                "no experiment is chosen, and without one the model and data are the shipped ones, not this project's",
                where=f"{project.label(project.dirs[0])}/experiment",
                cure=f"Choose one: {list_names(experiments)}; or a model or data: model=NAME, data=NAME.",
            )
        names = list_names(list(project._replace(dirs=shipped_dirs).options("experiment")))
        raise UserError(
            "no experiment is chosen",
            cure=f"{project.advise_project_above()}Choose a shipped one: {names} (train fit digits); "
            "or make a project of your own: train new mine.",
        )

    def _is_chosen_by_user(self, section: str, shipped: str) -> bool:
        """Whether the command line or one of the user's files chooses, holds or sets the component of a section."""
        choice = self.tree.choices.get((section,))
        origins = [self.tree.exact((section, "_target_")).source]
        origins += [] if choice is None else [choice.origin.source, choice.label]
        return any(origin and origin != DEFAULT and not origin.startswith(f"{shipped}/") for origin in origins)

    def is_typed(self, change: Change) -> bool:
        """Whether the command line set the new value of a change, or a value of `vars` in it."""
        origins = [change.origin(self.tree), *(self.tree.exact(path) for path in vars_in(self.tree.root, change.path))]
        return any(
            origin is not None and origin.source == COMMAND_LINE and "experiment=" not in origin.words
            for origin in origins
        )

    def check_processes(self, world_size: int) -> None:
        """Check the config against the number of processes.

        Raises:
            ConfigError: the config cannot be trained by this number of processes.
        """
        with self.placing():
            check_processes(self.config, world_size)

    def check_targets(self, sections: Collection[str] = SECTIONS) -> None:
        """Import the targets of `sections` and check their arguments, before anything is built.

        Raises:
            ConfigError: naming all mistakes.
        """
        import_from(self.project_root)
        raise_all(list(_check_components(self.config, self.tree, self.trust, sections, imports=True)))


def _check_components(
    config: TrainConfig, tree: ConfigTree, trust: Trust, sections: Collection[str], *, imports: bool = False
) -> Iterator[ConfigError]:
    """The mistakes in components, each with its source."""
    for error in check_components(config, trust, sections, imports=imports):
        key = tuple((error.location or "").split("."))
        section, *argument = key
        error_with_source = error.at(tree.source(key))
        is_argument = error.code is Code.argument and len(argument) == 1 and argument[0] != "_target_"
        # The command line sets another `_target_`, and an argument that a file sets does not fit it.
        is_in_file = error_with_source.source != COMMAND_LINE
        if is_argument and is_in_file and tree.source((section, "_target_")) == COMMAND_LINE:
            target = getattr(config, section)["_target_"]
            error_with_source.cure = (
                f"To replace the whole {section}, write {section}=null '{section}={{_target_: {target}}}'."
            )
        yield error_with_source


def _open_search(config_dir: Path | None, config_name: str, cwd: Path | None) -> SearchPath:
    """The search path of a composition, whose resolvers are registered."""
    search = SearchPath.of(config_dir, config_name, cwd)
    register_resolvers(own_config_dirs(config_dir, search.cwd), search.root)
    return search


@gc_paused()
def compose(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
    sections: Collection[str] = SECTIONS,
) -> Composed:
    """Compose the primary config, its groups and the overrides, and check all of it.

    `missing_ok` accepts mandatory values (`???`) that are not given yet; `sections` are those whose components are
    checked. Nothing is imported for that: `Composed.check_targets` does it.

    Raises:
        ConfigError: what is wrong, where, and a hint; several mistakes together where they are independent.
    """
    search = _open_search(config_dir, config_name, cwd)
    return _compose(search, parse_overrides(overrides), overrides, missing_ok=missing_ok, sections=sections)


def _compose(
    search: SearchPath,
    command: CommandLine,
    overrides: Sequence[str],
    *,
    missing_ok: bool,
    sections: Collection[str],
) -> Composed:
    """`compose` with these folders and the parsed overrides."""
    if search.find(search.primary) is None:
        names = search.primaries()
        near = search.hint_on_experiment() or did_you_mean(search.primary, names).strip()
        hint = near or f"Available: {', '.join(names) or 'none'}."
        message = f"there is no {search.primary}.yaml in {search.listed()}"
        raise ConfigError(message, source="--config-name", code=Code.unknown_option, hint=hint)
    draft = _compose_draft(search, command)
    return _check_draft(draft, overrides, search, missing_ok=missing_ok, recovered=None, sections=sections)


@gc_paused()
def from_yaml(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trusted: bool = False,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
    sections: Collection[str] = SECTIONS,
) -> Composed:
    """A config from disk (a path, or the text itself), with overrides on top.

    `key=value` changes that value; `group=option` puts a freshly composed section in place of the recovered
    one; `experiment=` composes anew, and nothing of the recovered config stays. `resume`, `resume_allow` and
    `trust` are not recovered. `_target_`s are restricted (components/targets.py), and those of `sections` looked up;
    neither for a `trusted` file, such as that of a run that is only compared.
    """
    search = _open_search(config_dir, config_name, cwd)
    command = parse_overrides(overrides)
    # An experiment sets keys of every section: merged into recovered values, it would leave a mixture of two runs.
    if any(override.key_or_group == "experiment" for override in command.overrides):
        return _compose(search, command, overrides, missing_ok=missing_ok, sections=sections)
    tree, name, mistakes = _load(source, search.cwd)
    if swaps := [override for override in command.overrides if search.is_choice(override)]:
        fresh = _compose_draft(search, CommandLine(swaps))
        mistakes += fresh.mistakes
        for override in swaps:
            path = split_package(override.package or override.key_or_group)
            if not _replace_section(tree.root, fresh.tree.root, path):
                message = f"{line_of(override)} names no section of the recovered config"
                mistakes.append(override_error(message, "Write experiment=NAME to compose anew.", Code.unknown_option))
                continue
            tree.choices |= {key: choice for key, choice in fresh.tree.choices.items() if key == path}
    # The choices are applied; what is left sets values, in the sections that they chose too.
    values_command = replace(command, overrides=[override for override in command.overrides if override not in swaps])
    line = _check_line(search, values_command)
    draft = _apply_overrides(_Draft(tree, mistakes + line.mistakes, line.is_whole), line, search)
    # A run that is only compared may name classes that no longer exist.
    sections = () if trusted else sections
    recovered = None if trusted else name
    return _check_draft(draft, overrides, search, missing_ok=missing_ok, recovered=recovered, sections=sections)


def _put(root: Node, values: Mapping[str, Any]) -> None:
    """Replace values by dotted key; the line of each is that of the earlier one."""
    for key, value in values.items():
        path = tuple(key.split("."))
        before = root.at(path)
        assert before is not None
        root.put(path, Node.of(value, before.origin))


def _replace_section(recovered: Node, fresh: Node, path: KeyPath) -> bool:
    """Replace the recovered values at `path` by the freshly composed ones; False if either has no such section."""
    parent, node = recovered.at(path[:-1]), fresh.at(path)
    if parent is None or not parent.is_mapping or node is None:
        return False
    # A choice may swap a section of the config, but not add one that the schema lacks.
    if parent is recovered and path[-1] not in recovered.value:
        return False
    parent.value[path[-1]] = node
    return True


class _Draft(NamedTuple):
    """A composition before validation."""

    tree: ConfigTree
    mistakes: list[ConfigError]
    is_whole: bool
    """False if a file or a choice could not be read: then only what the command line says can be checked."""


def _check_draft(
    draft: _Draft,
    overrides: Sequence[str],
    search: SearchPath,
    *,
    missing_ok: bool,
    recovered: str | None,
    sections: Collection[str],
) -> Composed:
    """Validate the config and its targets, which are restricted if it was read from a file on disk, `recovered`.

    Raises:
        ConfigError: all mistakes together.
    """
    tree = draft.tree
    restore_texts(tree.root)
    # Before validation, which judges the value that `${now:…}` comes to.
    time_dependent_keys, time_mistakes = substitute_now(tree.root)
    config, mistakes = validate(tree, missing_ok=missing_ok)
    wrong_keys = [mistake.location or "" for mistake in mistakes]
    trust = Trust()
    if recovered is not None:
        refuse_shadows(search.root)  # A module that hides a library would make its targets seem untrusted.
        trust = Trust.recovered(search.root, config.trust, partial(_is_given, tree, recovered))
    for mistake in find_contradictions(config):
        mistakes.append(mistake.at(tree.source(tuple((mistake.location or "").split(".")))))
    for mistake in _check_components(config, tree, trust, sections):
        # A wrong value has been replaced by its default, of which arguments need no report.
        if not any(f"{mistake.location}.".startswith(f"{key}.") for key in wrong_keys):
            mistakes.append(mistake)
    reported_sources = {mistake.source for mistake in draft.mistakes} - {COMMAND_LINE}
    # If a file cannot be read, everything that it sets is missing: report only what the command line says wrong.
    if not draft.is_whole:
        mistakes = [error for error in mistakes if error.source == COMMAND_LINE and error.code is not Code.not_given]
    mistakes = [error for error in mistakes if error.source not in reported_sources]
    # A directory of this name holds the files of the run, and commands name it.
    show_values_in(config.name, config.run_dir)
    mistakes = [*draft.mistakes, *time_mistakes, *mistakes]
    for mistake in mistakes:
        mistake.cure = mistake.cure and override_values.keep_callbacks(mistake.cure, tree)
    raise_all(mistakes)
    return Composed(config, list(overrides), search.root, search.dirs, tree, trust, time_dependent_keys)


def _is_given(tree: ConfigTree, recovered: str, key: str) -> bool:
    """Whether the user gives a value of a config that was recovered from a file on disk."""
    # No closure: rank 0 sends the config, with its trust, to the other ranks.
    source = tree.exact(tuple(key.split("."))).source
    return source != DEFAULT and not source.startswith(f"{recovered}:")


def _load(source: str | Path, cwd: Path) -> tuple[ConfigTree, str, list[ConfigError]]:
    """The values of a recovered config over the schema's defaults, its name, and the mistakes in it."""
    name = label(source.resolve(), cwd) if isinstance(source, Path) else "the recovered config"
    if isinstance(source, Path):
        reading = read_file(source, name, written=True)
    else:
        reading = read_text(source, name, written=True)
    if not reading.broken:
        for key in ("defaults", "hydra"):
            if key in reading.tree.value:
                reading.add(f"{name} has a key {key!r}, which no written config has", name, "", breaks=True)
    if reading.broken:
        raise_all(reading.mistakes)
    kept = {str(key): node for key, node in reading.tree.value.items() if key not in OF_ONE_COMMAND}
    return ConfigTree(fill_defaults(Node(kept))), name, reading.mistakes


class _Line(NamedTuple):
    """The valid overrides of a command line, sorted, and the mistakes in others."""

    choices: list[Override]
    """Choices of groups."""
    values: CommandLine
    """What sets values."""
    mistakes: list[ConfigError]
    is_whole: bool
    """Whether every choice of a group could be read."""


def _check_line(search: SearchPath, line: CommandLine) -> _Line:
    """Sort the overrides of a command line, and replace misspelt options by the nearest that exist."""
    mistakes_by_line = list(find_wrong_overrides(search, line))
    mistakes = [*line.mistakes, *(mistake for _, mistake in mistakes_by_line)]
    refused_lines = {text for text, _ in mistakes_by_line}
    choices = [override for override in line.overrides if search.is_choice(override)]
    valid_choices = [override for override in choices if line_of(override) not in refused_lines]
    # A misspelt option is replaced by the nearest one, so that overrides of its keys are checked too.
    refused = [override for override in choices if override not in valid_choices]
    corrected = [correct_choice(override, list(search.options(override.key_or_group))) for override in refused]
    valid_choices += [
        override for override in corrected if override is not None and not any(find_wrong_choice(search, override))
    ]
    values = replace(
        line,
        overrides=[
            override
            for override in line.overrides
            if override not in choices and line_of(override) not in refused_lines
        ],
        appends=[append for append in line.appends if append.line not in refused_lines],
    )
    return _Line(valid_choices, values, mistakes, not line.mistakes and len(valid_choices) == len(choices))


def _compose_draft(search: SearchPath, command: CommandLine) -> _Draft:
    """Merge the files that the primary config and the overrides choose, and apply the overrides."""
    line = _check_line(search, command)
    files = ConfigFiles(search)
    try:
        root, listed = merge(search, line.choices, files)
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
        mistakes = [*line.mistakes, *files.mistakes]
        # A reason of Hydra's may be a consequence of a mistake that is reported already.
        if line.is_whole and not files.broken:
            mistakes.append(translate_error(error, search, command, files.read))
        raise_all(mistakes)
        raise
    tree = ConfigTree(root, find_choices(files, listed, line.choices))
    draft = _Draft(tree, [*line.mistakes, *files.mistakes], line.is_whole and not files.broken)
    experiments = [merged.name for merged in listed if merged.name.startswith("experiment/")]
    draft = _apply_overrides(draft, line, search, experiments)
    if draft.is_whole and experiments:
        overruled_choices = list(find_overruled(line.choices, listed, files, draft.tree))
        # Further mistakes in such a mixture of two components follow from this one.
        draft = draft._replace(mistakes=draft.mistakes + overruled_choices, is_whole=not overruled_choices)
    return draft


def _apply_overrides(draft: _Draft, line: _Line, search: SearchPath, experiments: Sequence[str] = ()) -> _Draft:
    """Apply the overrides, then fill in `ckpt`, `name` and the schema's defaults."""
    tree = draft.tree
    switches = {choice.key_or_group: line_of(choice) for choice in line.choices if switches_off(choice)}
    mistakes = override_values.apply(tree, line.values.overrides, search, switches)
    if line.values.ckpt_given:
        # Not by Hydra's grammar, to which a glob such as step[12]* is a list or no value at all.
        ckpt = line.values.ckpt
        tree.root.put(("ckpt",), Node.of(ckpt, ValueOrigin(COMMAND_LINE, f"ckpt={ckpt}")))
    name = tree.root.get("name") or Node(None)
    if name.value is None:
        default_name = experiments[-1].rpartition("/")[2].removesuffix(".yaml") if experiments else "default"
        tree.root.put(("name",), Node(default_name, name.origin, name.text))
    # This comes before the appends: they may extend a list that only the schema has.
    tree.root = fill_defaults(tree.root)
    for append in line.values.appends:
        if (mistake := override_values.append(tree.root, append)) is not None:
            mistakes.append(mistake)
    return draft._replace(mistakes=draft.mistakes + (mistakes if draft.is_whole else []))
