"""From files and overrides to a checked config: Hydra composes, the errors are in our words.

overrides ──► overrides.read ──► Hydra ──► raw (plain, unresolved) ──► check.to_config ──► TrainConfig
                                   ▲                                        ▲
          configs/*.yaml, or a recovered config                      schema, origins
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import check, engine, locate
from trainer_cli.config.difference import ABSENT, Absent, Change, diff
from trainer_cli.config.nodes import COMPONENTS, own_nodes
from trainer_cli.config.origins import Origins, Source, label
from trainer_cli.config.overrides import COMMAND_LINE, CommandLine, line_of, path_of, raise_all, read
from trainer_cli.config.place import Place, bad_yaml
from trainer_cli.config.refusals import SCHEMA, culprit, no_value, translated, wrong_overrides
from trainer_cli.config.schema import TrainConfig
from trainer_cli.config.suggest import did_you_mean
from trainer_cli.config.targets import Trust
from trainer_cli.errors import ConfigError, UserError

__all__ = ["ABSENT", "Absent", "Change", "Composed", "compose", "diff", "from_yaml", "to_yaml"]

RECOVERED = "train_recovered"
OF_ONE_COMMAND = ("resume", "resume_allow", "trust")
"""Keys that count for the command that says them, and are not recovered from a config on disk."""


@dataclass(frozen=True, slots=True)
class Composed:
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
            if error.where and error.where.partition(".")[0] in self.raw:
                error.where = f"{error.where}, {self.where(error.where)}"
            raise


def compose(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
) -> Composed:
    """Compose the primary config, its groups and the overrides, and check all of it.

    `missing_ok` lets mandatory values (`???`) stand, to be shown.

    Raises:
        ConfigError: what is wrong, where, and the cure; several mistakes together where they are independent.
    """
    place = Place.of(config_dir, config_name, cwd)
    if locate.find(place.dirs, place.primary) is None:
        names = sorted({path.stem for folder in place.dirs for path in folder.glob("*.yaml")})
        raise ConfigError(
            f"there is no {place.primary}.yaml in {place.listed()}",
            where="--config-name",
            cure=did_you_mean(place.primary, names).strip() or f"There are: {', '.join(names) or 'none'}.",
        )
    line = read(overrides)
    raw, origins = _draft(place, line, place.primary)
    config = check.to_config(raw, origins, missing_ok=missing_ok)
    return Composed(config, raw, list(overrides), place.root, place.dirs, origins, Trust())


def from_yaml(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trusted: bool = False,
    config_dir: Path | None = None,
    config_name: str = "config",
    cwd: Path | None = None,
    missing_ok: bool = False,
) -> Composed:
    """A config from disk (a path, or the text itself), with overrides on top.

    `key=value` changes that value; `group=option` puts a freshly composed section in place of the recovered
    one; `experiment=` composes anew, and nothing of the recovered config stays. `resume`, `resume_allow` and
    `trust` are not recovered. Unless `trusted`, `_target_`s are restricted (config/targets.py).
    """
    place = Place.of(config_dir, config_name, cwd)
    line = read(overrides)
    if any(override.key_or_group == "experiment" for override in line.overrides):
        return compose(overrides, config_dir=config_dir, config_name=config_name, cwd=cwd, missing_ok=missing_ok)
    recovered, found = _load(source, place.cwd)
    swaps = [override for override in line.overrides if place.is_group(override)]
    values = [override for override in line.overrides if override not in swaps]
    sources = [found]
    if swaps:
        fresh, fresh_origins = _draft(place, CommandLine(swaps), place.primary)
        for override in swaps:
            section = (override.package or override.key_or_group).replace("/", ".")
            if section not in recovered or section not in fresh:
                raise ConfigError(
                    f"{line_of(override)} names no section of the recovered config",
                    where=COMMAND_LINE,
                    cure="Say experiment=NAME to compose anew.",
                )
            recovered[section] = fresh[section]
            path = tuple(section.split("."))
            sources += [Source(s.label, s.text, s.package, path) for s in fresh_origins.sources]
    ConfigStore.instance().store(RECOVERED, {"defaults": [SCHEMA, "_self_"], **check.contents(recovered)})
    raw, origins = _draft(place, CommandLine(values, line.ckpt, line.ckpt_given), RECOVERED, sources)
    config = check.to_config(raw, origins, missing_ok=missing_ok)
    trust = Trust() if trusted else Trust.recovered(place.root, config.trust)
    return Composed(config, raw, list(overrides), place.root, place.dirs, origins, trust)


def to_yaml(composed: Composed) -> str:
    """The config as it is written to disk: unresolved, so that `${oc.env:…}` tells no secret."""
    return OmegaConf.to_yaml(composed.raw)


def _load(source: str | Path, cwd: Path) -> tuple[DictConfig, Source]:
    """The recovered values over the schema's defaults, without what belongs to one command only."""
    name = label(source.resolve(), cwd) if isinstance(source, Path) else "the recovered config"
    try:
        text = source.read_text("utf-8") if isinstance(source, Path) else source
        config = OmegaConf.create(text)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise bad_yaml(error, cwd, name) from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{name} is no mapping of keys to values")
    for key in ("defaults", "hydra"):
        if key in config:
            raise ConfigError(f"{name} has a key {key!r}, which no written config has")
    recovered = check.completed(config)
    for key in OF_ONE_COMMAND:
        recovered[key] = check.plain()[key]
    return recovered, Source(name, text)


def _draft(place: Place, line: CommandLine, primary: str, sources: Sequence[Source] = ()) -> tuple[DictConfig, Origins]:
    """Hydra's composition, completed by the schema's defaults, `ckpt` and `name`; and where all came from."""
    raise_all(list(wrong_overrides(place, line)))
    pending, refused = list(line.overrides), []
    while True:
        try:
            composed, defaults = engine.run(place, primary, pending)
            break
        except HydraException as error:
            blamed = culprit(error, pending)
            if blamed is None:
                raise translated(error, place, line) from error
            refused.append(blamed)
            pending.remove(blamed)
        except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
            raise bad_yaml(error, place.cwd, "a YAML file") from error
    raise_all([no_value(override, composed, primary) for override in refused])
    values = check.contents(composed)
    given = [path_of(override) for override in line.overrides if not place.is_group(override)]
    experiments = [path for one in defaults if (path := one.config_path or "").startswith("experiment/")]
    texts = [file.read_text("utf-8") for path in experiments if (file := locate.find(place.dirs, path))]
    groups = [override for override in line.overrides if place.is_group(override)]
    chosen = [override.key_or_group for override in groups]
    off = [override.key_or_group for override in groups if override.is_delete() or override.value() is None]
    values = own_nodes(values, texts, given, chosen)
    # What an experiment sets in a component that the command line switches off is switched off with it.
    values |= {group: None for group in off if group in COMPONENTS}
    if line.ckpt_given:
        values["ckpt"] = line.ckpt
        given.append(("ckpt",))
    if values.get("name") is None:
        values["name"] = experiments[-1].rsplit("/")[-1] if experiments else "default"
    return check.completed(values), Origins([*sources, *engine.sources(place, defaults)], given)
