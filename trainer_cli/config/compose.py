"""From files and overrides to a checked config: Hydra composes, the errors are in our words.

overrides ──► overrides.parsed ──► Hydra ──► raw (plain, unresolved) ──► check.examined ──► TrainConfig
                                     ▲                                        ▲
     configs/*.yaml by reading.read_file, or a recovered config          schema, origins

Each stage goes on after a mistake as far as it can, so that independent ones are told together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import arguments, check, engine, locate
from trainer_cli.config.defaults_list import chosen
from trainer_cli.config.difference import ABSENT, Absent, Change, diff
from trainer_cli.config.engine import Files
from trainer_cli.config.experiments import COMPONENTS, overruled, own_nodes
from trainer_cli.config.garbage import uncollected
from trainer_cli.config.kinds import names_one_of
from trainer_cli.config.origins import Choice, Given, Origins, Source, label
from trainer_cli.config.overrides import COMMAND_LINE, CommandLine, KeyPath, add, line_of, parsed, raise_all
from trainer_cli.config.place import Place
from trainer_cli.config.reading import read_file, read_text
from trainer_cli.config.refusals import NOT_COMPOSED, SCHEMA, translated, wrong_overrides
from trainer_cli.config.schema import TrainConfig
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.targets import Trust, import_from
from trainer_cli.errors import ConfigError, UserError

__all__ = ["ABSENT", "Absent", "Change", "Composed", "compose", "diff", "from_yaml", "to_yaml"]

RECOVERED = "train_recovered"
OF_ONE_COMMAND = ("resume", "resume_allow", "trust")
"""Keys that count for the command that says them, and are not recovered from a config on disk."""
NO_LONGER = (("checkpoint", "writer"),)
"""Keys that an earlier version wrote into the config of a run, without effect on what it computes."""
RENAMED = {"trainer_cli.trainer.schedules.WarmupCosine": "trainer_cli.trainer.schedulers.WarmupCosine"}
"""Targets that an earlier version wrote, and what they are called now."""


class Composed(NamedTuple):
    """A config, what it was made of, and whose targets it may name."""

    config: TrainConfig
    raw: DictConfig
    overrides: list[str]
    project_root: Path
    config_dirs: list[Path]
    origins: Origins
    trust: Trust

    def where(self, key: str) -> str:
        """`file:line`, `command line` or `default` for a dotted key."""
        return self.origins.of(tuple(key.split(".")))

    @contextmanager
    def placing(self) -> Iterator[None]:
        """A user's mistake that a part of this config tells with its key is told with the key's place too."""
        try:
            yield
        except UserError as error:
            if error.where and ", " not in error.where and error.where.partition(".")[0] in self.raw:
                error.where = f"{error.where}, {self.where(error.where)}"
            raise

    def check_targets(self, sections: Collection[str] = arguments.SECTIONS) -> None:
        """Import the targets of `sections` and check their arguments, before anything is built.

        Raises:
            ConfigError: naming all mistakes.
        """
        import_from(self.project_root)
        raise_all(list(arguments.binding_mistakes(self.config, self.origins, self.trust, sections)))


@uncollected()
def compose(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
    sections: Collection[str] = arguments.SECTIONS,
) -> Composed:
    """Compose the primary config, its groups and the overrides, and check all of it.

    `missing_ok` lets mandatory values (`???`) stand, to be shown; `sections` are those whose components are checked.
    Nothing is imported for that: `Composed.check_targets` does it.

    Raises:
        ConfigError: what is wrong, where, and the cure; several mistakes together where they are independent.
    """
    place = Place.of(config_dir, config_name, cwd)
    if locate.find(place.dirs, place.primary) is None:
        names = locate.primaries(place.dirs)
        raise ConfigError(
            f"there is no {place.primary}.yaml in {place.listed()}",
            where="--config-name",
            cure=did_you_mean(place.primary, names).strip() or f"There are: {', '.join(names) or 'none'}.",
        )
    draft = _draft(place, parsed(overrides), place.primary)
    config = _checked(
        draft, missing_ok, lambda config: arguments.mistakes(config, draft.origins, [place.root], Trust(), sections)
    )
    return Composed(config, draft.raw, list(overrides), place.root, place.dirs, draft.origins, Trust())


@uncollected()
def from_yaml(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trusted: bool = False,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
    sections: Collection[str] = arguments.SECTIONS,
) -> Composed:
    """A config from disk (a path, or the text itself), with overrides on top.

    `key=value` changes that value; `group=option` puts a freshly composed section in place of the recovered
    one; `experiment=` composes anew, and nothing of the recovered config stays. `resume`, `resume_allow` and
    `trust` are not recovered. `_target_`s are restricted (config/targets.py), and those of `sections` looked up;
    neither where the file is `trusted`, as a run's own is that is only compared with.
    """
    place = Place.of(config_dir, config_name, cwd)
    line = parsed(overrides)
    if any(override.key_or_group == "experiment" for override in line.overrides):
        return compose(
            overrides,
            config_dir=config_dir,
            config_name=config_name,
            cwd=cwd,
            missing_ok=missing_ok,
            sections=sections,
        )
    recovered, found, mistakes = _load(source, place.cwd)
    swaps = [override for override in line.overrides if place.is_group(override)]
    sources = [found]
    choices: dict[KeyPath, Choice] = {}
    if swaps:
        fresh = _draft(place, CommandLine(swaps), place.primary)
        mistakes += fresh.mistakes
        for override in swaps:
            section = (override.package or override.key_or_group).replace("/", ".")
            if section not in recovered or section not in fresh.raw:
                cure = "Say experiment=NAME to compose anew."
                what = f"{line_of(override)} names no section of the recovered config"
                mistakes.append(ConfigError(what, where=COMMAND_LINE, cure=cure))
                continue
            recovered[section] = fresh.raw[section]
            path = tuple(section.split("."))
            sources[0] = sources[0]._replace(but=(*sources[0].but, section))
            sources += [source._replace(only=path) for source in fresh.origins.sources]
            choices |= {key: choice for key, choice in fresh.origins.choices.items() if key == path}
    ConfigStore.instance().store(RECOVERED, {"defaults": [SCHEMA, "_self_"], **check.contents(recovered)})
    values = replace(line, overrides=[override for override in line.overrides if override not in swaps])
    draft = _draft(place, values, RECOVERED, sources, choices)
    draft.mistakes[:0] = mistakes

    def trust(config: TrainConfig) -> Trust:
        return Trust() if trusted else Trust.recovered(place.root, config.trust)

    def looked_up(config: TrainConfig) -> Iterator[ConfigError]:
        asked = () if trusted else sections
        return arguments.mistakes(config, draft.origins, [place.root], trust(config), asked)

    config = _checked(draft, missing_ok, looked_up)
    return Composed(config, draft.raw, list(overrides), place.root, place.dirs, draft.origins, trust(config))


def to_yaml(composed: Composed) -> str:
    """The config as it is written to disk: unresolved, so that `${oc.env:…}` tells no secret."""
    return OmegaConf.to_yaml(composed.raw)


def _load(source: str | Path, cwd: Path) -> tuple[DictConfig, Source, list[ConfigError]]:
    """The recovered values over the schema's defaults, without what belongs to one command only; and mistakes."""
    name = label(source.resolve(), cwd) if isinstance(source, Path) else "the recovered config"
    if isinstance(source, Path):
        reading = read_file(source, name, written=True)
    else:
        reading = read_text(source, name, written=True)
    values = reading.values
    if not reading.broken:
        for key in ("defaults", "hydra"):
            if key in values:
                reading.add(f"{name} has a key {key!r}, which no written config has", name, "", breaks=True)
    if reading.broken:
        raise_all(reading.mistakes)
    for section, key in NO_LONGER:
        if isinstance(values.get(section), dict):
            values[section].pop(key, None)
    _rename_targets(values.get("scheduler"))
    recovered = check.completed(values)
    for key in OF_ONE_COMMAND:
        recovered[key] = check.plain()[key]
    return recovered, Source(name, reading.node, but=OF_ONE_COMMAND), reading.mistakes


def _rename_targets(value: Any) -> None:
    """Give every node in a value the present name of its target."""
    if isinstance(value, dict):
        if isinstance(target := value.get("_target_"), str):
            value["_target_"] = RENAMED.get(target, target)
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        _rename_targets(inner)


class _Draft(NamedTuple):
    """A composition that is still to be checked. Where it is not `whole`, only the command line can be judged."""

    raw: DictConfig
    origins: Origins
    mistakes: list[ConfigError]
    whole: bool


def _checked(draft: _Draft, missing_ok: bool, looked_up: Callable[[TrainConfig], Iterable[ConfigError]]) -> TrainConfig:
    """The config, where there is no mistake in it, nor in its targets; all of them together otherwise."""
    config, found, put_back = check.examined(draft.raw, draft.origins, missing_ok=missing_ok)
    if config is not None:
        if config.resume_allow:
            from trainer_cli.config import allowed  # Most configs need no look at every key.

            found += allowed.mistakes(config.resume_allow, draft.origins)
        found += [one for one in looked_up(config) if not names_one_of(put_back, f"{one.what} {one.where}")]
    told = {mistake.where for mistake in draft.mistakes} - {COMMAND_LINE}
    mistakes = [one for one in found if one.where not in told and (draft.whole or COMMAND_LINE in (one.where or ""))]
    raise_all([*draft.mistakes, *mistakes])
    assert config is not None
    return config


def _draft(
    place: Place,
    line: CommandLine,
    primary: str,
    sources: Sequence[Source] = (),
    choices: Mapping[KeyPath, Choice] | None = None,
) -> _Draft:
    """Hydra's composition, completed by the schema's defaults, `ckpt` and `name`; where all came from; mistakes."""
    wrong = list(wrong_overrides(place, line))
    mistakes = [*line.mistakes, *(mistake for _, mistake in wrong)]
    refused = {text for text, _ in wrong}
    overrides = [override for override in line.overrides if line_of(override) not in refused]
    whole = not line.mistakes and not any(place.is_group(o) for o in line.overrides if line_of(o) in refused)
    files = Files(place)
    try:
        made = engine.run(place, primary, overrides, files)
    except (HydraException, OmegaConfBaseException, *NOT_COMPOSED) as error:
        mistakes += files.mistakes
        raise_all(mistakes if files.broken or not whole else [*mistakes, translated(error, place, line, files.read)])
        raise
    mistakes += files.mistakes
    whole = whole and not files.broken
    if whole:
        mistakes += made.mistakes
    values = check.contents(made.config)
    given = [Given.of(override) for override in overrides if not place.is_group(override)]
    experiments = [path for one in made.listed.defaults if (path := one.config_path or "").startswith("experiment/")]
    documents = [files[file].values or {} for path in experiments if (file := locate.find(place.dirs, path))]
    groups = [override for override in overrides if place.is_group(override)]
    chosen_here = [override.key_or_group for override in groups]
    off = [override.key_or_group for override in groups if override.is_delete() or override.value() is None]
    values = own_nodes(values, documents, [one.path for one in given], chosen_here)
    # What an experiment sets in a component that the command line switches off is switched off with it.
    values |= {group: None for group in off if group in COMPONENTS}
    if line.ckpt_given:
        values["ckpt"] = line.ckpt
        given.append(Given(("ckpt",), f"ckpt={line.ckpt}", line.ckpt))
    if values.get("name") is None:
        values["name"] = experiments[-1].rsplit("/")[-1] if experiments else "default"
    raw = check.completed(values)
    if line.appends:
        full = check.contents(raw)
        for append in line.appends:
            if append.line not in refused:
                problem = add(full, append)
                mistakes += [problem] if problem is not None and whole else []
                given.append(Given(append.path, append.line, append.values, added=True))
        raw = check.completed(full)
    listed = chosen(place, made.listed, overrides, lambda file: files[file].node)
    merged = engine.sources(place, made.listed.defaults, files)
    origins = Origins([*sources, *merged], given, {**(choices or {}), **listed})
    if whole and experiments:
        named = {one.path for one in given}
        lost = list(overruled(groups, place.dirs, files.__getitem__, values, named, origins))
        # What else is wrong with such a mixture is no mistake of its own.
        mistakes, whole = mistakes + lost, not lost
    return _Draft(raw, origins, mistakes, whole)
